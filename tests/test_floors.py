"""Imports go down: a file imports its own room and lower floors, never a neighbor."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

FLOORS = (
    {
        *("child_process", "config", "console", "dtypes", "errors", "gc_pause", "model_checks"),
        *("model_config", "model_layers", "options"),
        *("pages", "reports"),
        "checkpoint/storage",
    },
    {"tensors", "number_formats", "kernels"},
    {"checkpoint", "parallel"},
    {"convert", "model", "optim", "data"},
    {"adapters"},
    {"reshard"},
    {"access", "audit"},
    {"inference"},
    {"quant"},
    {"lint"},
    {"quant/verification"},
    {"quant/pipeline"},
    {"export", "machine", "train"},
    {"commands"},
    {"dcp", "megatron", "torch_checkpointing", "transformers"},
    {"cli"},
    {"__main__"},
)
"""The rooms of the house from the ground up. A file imports its own room and lower floors only; the
rooms of the lowest floor may import each other; `checkpoint/storage` is one of them, because
options are locations. `quant/verification` and `quant/pipeline` are rooms
of their own: they use `lint`, which uses the rest of `quant`."""

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FOLDERS = set(FLOOR_OF) - FLOORS[0]


def room_of(parts: Sequence[str]) -> str:
    """The room of a module by the parts of its name, without `megtool`."""
    inner = "/".join(parts[:2])
    return inner if inner in FLOOR_OF else parts[0]


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every import of `tree` as (line, dotted name); relative ones begin with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module == "megtool":
                yield from ((node.lineno, f"megtool.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def find_faults(package: Path) -> list[str]:
    """What the files of `package`, a folder called megtool, import against the rules."""
    faults = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        room = room_of(parts)
        where = path.relative_to(package.parent)
        if room not in FLOOR_OF and room != "__init__":
            faults.append(f"{where}: room {room!r} has no floor")
            continue
        for line, name in imported(ast.parse(path.read_text())):
            top, _, path_in_package = name.partition(".")
            target = room_of(path_in_package.split("."))
            if not top:
                faults.append(f"{where}:{line}: relative import {name!r}")
            elif top != "megtool" or target in ("__version__", room):
                continue
            elif target not in FLOOR_OF:
                faults.append(f"{where}:{line}: {name!r} is no room of the house")
            elif room == "__init__":
                faults.append(f"{where}:{line}: the package itself imports {name!r}")
            elif FLOOR_OF[target] > FLOOR_OF[room]:
                faults.append(f"{where}:{line}: {room} imports {name!r} from above")
            elif FLOOR_OF[target] == FLOOR_OF[room] and {room, target} & FOLDERS:
                faults.append(f"{where}:{line}: {room} imports its neighbor {name!r}")
    return faults


def test_every_import_goes_down(checkout: Path) -> None:
    assert find_faults(checkout / "megtool") == []


@pytest.mark.parametrize(
    ("file", "code", "fault"),
    [
        ("tensors/box.py", "from megtool.plan.copies import Plan", "from above"),
        ("tensors/box.py", "def f():\n    import megtool.cli.app", "from above"),
        ("convert/family.py", "from megtool.model.stacks import lora", "neighbor"),
        ("tensors/box.py", "from megtool import number_formats", "neighbor"),
        ("tensors/box.py", "from . import placement", "relative"),
        ("config.py", "from megtool.tensors import box", "from above"),
        ("options/field.py", "from megtool.commands import verbs", "from above"),
        ("quant/resolve.py", "from megtool.lint import rules", "from above"),
        ("train/loop.py", "from megtool.export import report", "neighbor"),
        ("commands/verify.py", "from megtool.cli import app", "from above"),
        ("tools/box.py", "", "has no floor"),
        ("tensors/box.py", "import megtool.tools", "no room"),
        ("__init__.py", "import megtool.errors", "the package itself"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, code: str, fault: str) -> None:
    path = tmp_path / "megtool" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    faults = find_faults(tmp_path / "megtool")
    assert len(faults) == 1
    assert fault in faults[0]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("formats/gguf/reader.py", "from megtool.tensors.catalogue import Catalogue"),
        ("plan/copies.py", "import numpy\nfrom megtool.tensors.box import Boxes"),
        ("dtypes.py", "from megtool.errors import FormatError"),
        ("config.py", "from megtool.options.field import option"),
        ("lint/rules.py", "from megtool.quant.resolve import resolve_recipe"),
        ("cli/app.py", "from megtool import __version__"),
    ],
)
def test_a_right_import_passes(tmp_path: Path, file: str, code: str) -> None:
    path = tmp_path / "megtool" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert find_faults(tmp_path / "megtool") == []
