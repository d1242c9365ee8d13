"""Imports go down, from room to room and inside every room, and never in a circle.

The docstring of a folder's `__init__` ends with the order of what the folder contains, "from the
top down": folders, and files by name; "the files here" are all others. Semicolons separate floors.
A module may import from its own entry of the order and from lower floors, and not from neighbors
on its floor. Imports inside functions and for type checking count like all others.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "megtool"
MAX_MODULES, MAX_DEPTH = 25, 3
ORDER = re.compile(r"from the top down: (.+)\.\Z", re.IGNORECASE | re.DOTALL)
REST = "the files here"

Sources = Mapping[str, str]
"""The text of each file by its dotted name; that of `a/__init__.py` is called `a.__init__`."""
Place = tuple[tuple[int, str], ...]
"""Where a module is: floor and name of its room, then of its entry in the room, and so on."""


def read_sources(checkout: Path) -> Sources:
    """Return all modules of the package and of the folder beside it."""
    paths = [p for folder in (PACKAGE, "converters") for p in (checkout / folder).rglob("*.py")]
    parts = {path: path.relative_to(checkout).with_suffix("").parts for path in sorted(paths)}
    return {
        ".".join(names if names[0] == PACKAGE else (PACKAGE, *names)): path.read_text()
        for path, names in parts.items()
    }


class House:
    """The modules of a package, the folders that they are in, and the floor of each."""

    def __init__(self, sources: Sources) -> None:
        trees = {name: ast.parse(text) for name, text in sources.items()}
        self.docstrings = {name: ast.get_docstring(tree) or "" for name, tree in trees.items()}
        self.modules = {name.removesuffix(".__init__"): name for name in sources}
        self.contents: dict[str, set[str]] = {}
        """What each folder contains: names of folders, and of files with their suffix."""
        for name in sources:
            folder, _, file = name.rpartition(".")
            self.contents.setdefault(folder, set()).add(f"{file}.py")
            while folder != PACKAGE:
                folder, _, inner = folder.rpartition(".")
                self.contents.setdefault(folder, set()).add(inner)
        self.orders = {folder: self._read_order(folder) for folder in self.contents}
        self.imports = {m: [*self._find_imports(trees[n])] for m, n in self.modules.items()}

    def _read_order(self, folder: str) -> dict[str, int]:
        """Return the floor of each entry of a folder, counted from the top."""
        order = ORDER.search(self.docstrings.get(f"{folder}.__init__", ""))
        floors = " ".join(order[1].split()).split("; ") if order else [REST]
        return {name: n for n, floor in enumerate(floors) for name in floor.split(", ")}

    def place(self, module: str) -> Place:
        """Return the place of a module.

        Raises:
            KeyError: the order of a folder does not name it.
        """
        out: list[tuple[int, str]] = []
        folder, *parts = self.modules[module].split(".")
        for part in parts:
            order = self.orders[folder]
            entry = part if part in self.contents[folder] else f"{part}.py"
            entry = entry if entry in order or entry == part else REST
            out.append((order[entry], entry))
            folder = f"{folder}.{part}"
        return tuple(out)

    def _find_imports(self, tree: ast.AST) -> Iterator[tuple[int, str]]:
        """Yield line and dotted name of what a module imports of the package, or relatively."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                full = [f"{base}.{alias.name}" for alias in node.names]
                names = sorted({name if name in self.modules else base for name in full})
            else:
                continue
            for name in names:
                if name.startswith((".", f"{PACKAGE}.")) or name == PACKAGE:
                    yield node.lineno, name


def find_faults(house: House) -> Iterator[str]:
    """Yield every import that does not go down, and every folder without a right order."""
    for folder, order in house.orders.items():
        loose = {f for f in house.contents[folder] if f.endswith(".py")} - {"__init__.py", *order}
        named = house.contents[folder] - loose - {"__init__.py"}
        if folder == PACKAGE and loose:
            yield f"{folder}: no order names {', '.join(sorted(loose))}"
        elif sorted(order) != sorted(named | ({REST} if loose or REST in order else set())):
            yield f"{folder}: the order is {[*order]}, and the folder contains {sorted(named)}"
    for module in house.modules:
        for line, name in house.imports[module]:
            fault = check_import(house, module, name)
            if fault is not None:
                yield f"{module}:{line}: {fault}"


def check_import(house: House, module: str, name: str) -> str | None:
    """Return what is wrong with one import, or None."""
    if name.startswith("."):
        return f"relative import {name!r}"
    if name == PACKAGE:
        return None if module != PACKAGE else "the package imports itself"
    if name not in house.modules:
        return f"{name!r} is no module of the house"
    if module == PACKAGE:
        return f"the package itself imports {name!r}"
    try:
        places = zip(house.place(module), house.place(name), strict=False)
    except KeyError as error:
        return f"no order names {error}"
    source, target = next((pair for pair in places if pair[0] != pair[1]), ((0, ""), (1, "")))
    if source[0] > target[0]:
        return f"imports {name!r} from above"
    return f"imports its neighbor {name!r}" if source[0] == target[0] else None


def find_circles(house: House) -> list[list[str]]:
    """Return the groups of modules that import each other, however long the way round is."""
    arrows = {
        module: {name for _, name in house.imports[module] if name in house.modules} - {module}
        for module in house.modules
    }
    # A module on no circle is one that only such modules import, or that imports only such.
    left = set(arrows)
    while left:
        targets = {name for module in left for name in arrows[module]}
        ends = {module for module in left if not arrows[module] & left or module not in targets}
        if not ends:
            break
        left -= ends
    circles = []
    while left:
        group = _reach(arrows, start := min(left), left)
        circles.append(sorted(m for m in group if start in _reach(arrows, m, left)) or [start])
        left -= set(circles[-1])
    return [circle for circle in circles if len(circle) > 1]


def _reach(arrows: Mapping[str, set[str]], start: str, among: set[str]) -> set[str]:
    reached: set[str] = set()
    front = {start}
    while front:
        front = {name for module in front for name in arrows[module]} & among - reached
        reached |= front
    return reached


def find_crowds(house: House) -> list[str]:
    """Return the folders of the package with too many modules, or too deep below it."""
    folders = Counter(
        name.rpartition(".")[0]
        for name in house.modules.values()
        if not name.endswith(".__init__") and not name.startswith(f"{PACKAGE}.converters.")
    )
    crowds = [f"{folder}: {n} modules" for folder, n in folders.items() if n > MAX_MODULES]
    return [*crowds, *(f"{f}: too deep" for f in house.contents if f.count(".") > MAX_DEPTH)]


@pytest.fixture(scope="module")
def sources(checkout: Path) -> Sources:
    return read_sources(checkout)


@pytest.fixture(scope="module")
def house(sources: Sources) -> House:
    return House(sources)


def test_every_import_goes_down(house: House) -> None:
    assert list(find_faults(house)) == []


def test_no_modules_import_each_other(house: House) -> None:
    assert find_circles(house) == []


def test_no_folder_is_crowded_or_deep(house: House) -> None:
    assert find_crowds(house) == []


def test_architecture_shows_the_rooms_in_their_order(checkout: Path, house: House) -> None:
    page = (checkout / "docs" / "development" / "architecture.md").read_text()
    rows = re.findall(r"^\| `megtool/(\w+)/` \| (.+) \|$", page, re.MULTILINE)
    rooms = [room for room in house.orders[PACKAGE] if not room.endswith(".py")]
    assert rows == [(room, _summary(house, room)) for room in rooms if room != "converters"]


def _summary(house: House, room: str) -> str:
    return house.docstrings[f"{PACKAGE}.{room}.__init__"].partition("\n")[0]


@pytest.fixture(scope="module")
def empty_house(sources: Sources) -> Sources:
    """The house with the orders of its folders, and nothing in its modules."""
    trees = {name: ast.parse(text) for name, text in sources.items() if name.endswith("__init__")}
    return {name: repr(ast.get_docstring(trees[name])) if name in trees else "" for name in sources}


@pytest.mark.parametrize(
    ("module", "code", "fault"),
    [
        ("tensors.box", "from megtool.plan.copies import ReshardPlan", "from above"),
        ("tensors.box", "def f():\n    import megtool.cli.app", "from above"),
        ("tensors.box", "if False:\n    from megtool.plan import copies", "from above"),
        ("convert.families.family", "from megtool.model.stacks import lora", "neighbor"),
        ("options.layout", "from megtool.tensors import box", "from above"),
        ("options.field", "from megtool.commands import verbs", "from above"),
        ("quant.resolve", "from megtool.lint import rules", "from above"),
        ("export.report", "from megtool.commands import reshard", "from above"),
        ("commands.verify", "from megtool.cli import app", "from above"),
        ("dtypes", "from megtool.storage.files import Files", "from above"),
        ("convert.dialects", "from megtool.converters import llama", "from above"),
        ("model.layers.norm", "from megtool.model.stacks import decoder", "from above"),
        ("model.batch", "from megtool.model.cache.kv_cache import KVCache", "from above"),
        ("model.cache.paged", "from megtool.model.masks import masks_of", "from above"),
        ("commands.reports.lint", "import megtool.commands.lint", "from above"),
        ("tensors.box", "from megtool import kernels", "neighbor"),
        ("train.loop", "from megtool.export import report", "neighbor"),
        ("formats.zarr.reader", "import megtool.formats.gguf.reader", "neighbor"),
        ("tensors.box", "from . import placement", "relative"),
        ("tensors.box", "import megtool.tools", "no module"),
        ("tools.box", "", "order"),
        ("tools", "", "no order names tools.py"),
        ("model.tools.box", "", "order"),
        ("quant.qparams.extra", "", "order"),
        ("__init__", "import megtool.errors", "the package itself"),
    ],
)
def test_a_wrong_import_is_found(empty_house: Sources, module: str, code: str, fault: str) -> None:
    name = f"{PACKAGE}.{module}"
    text = f"{empty_house.get(name, '')}\n{code}"
    faults = list(find_faults(House({**empty_house, name: text})))
    assert len(faults) == 1
    assert fault in faults[0]


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("formats.gguf.reader", "from megtool.tensors.catalogue import Catalogue"),
        ("plan.copies", "import numpy\nfrom megtool.tensors.box import Boxes"),
        ("dtypes", "from megtool.errors import FormatError"),
        ("options.layout", "from megtool.options.field import option"),
        ("lint.rules", "from megtool.quant.resolve import resolve_recipe"),
        ("cli.app", "from megtool import __version__"),
        ("converters.llama", "from megtool.convert import Family"),
        ("model.stacks.decoder", "from megtool.model.layers.norm import NormLayer"),
        ("model.stacks.decoder", "from megtool.model.stacks.mtp import MtpLayer"),
        ("model.masks", "from megtool.model.batch import Batch"),
        ("commands.lint", "import megtool.commands.reports.lint"),
    ],
)
def test_a_right_import_passes(empty_house: Sources, module: str, code: str) -> None:
    name = f"{PACKAGE}.{module}"
    assert name in empty_house
    assert list(find_faults(House({**empty_house, name: code}))) == []


def test_circles_are_found(empty_house: Sources) -> None:
    texts = {
        "megtool.tensors.box": "from megtool.tensors.placement import Placement",
        "megtool.tensors.placement": "def f():\n    from megtool.tensors import sharded",
        "megtool.tensors.sharded": "import megtool.tensors.box",
        "megtool.cli.app": "import megtool.tensors.box",
        "megtool.optim.muon": "from megtool.optim import config, segments",
        "megtool.optim.config": "from megtool.optim.muon import Muon\nimport megtool.tensors.box",
    }
    assert find_circles(House({**empty_house, **texts})) == [
        ["megtool.optim.config", "megtool.optim.muon"],
        ["megtool.tensors.box", "megtool.tensors.placement", "megtool.tensors.sharded"],
    ]
    assert find_circles(House({**empty_house, **dict([*texts.items()][3:5])})) == []


def test_crowds_are_found(empty_house: Sources) -> None:
    files = {f"{PACKAGE}.access.file_{n}": "" for n in range(MAX_MODULES)}
    deep = {f"{PACKAGE}.access.a.b.c.d": ""}
    crowds = find_crowds(House({**empty_house, **files, **deep}))
    assert len(crowds) == 2
    assert "access: " in crowds[0]
    assert crowds[1] == f"{PACKAGE}.access.a.b.c: too deep"
