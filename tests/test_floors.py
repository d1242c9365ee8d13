"""Imports go down: a file imports its own folder and lower floors, never a neighbor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = (
    {"errors", "dtypes", "log", "config_checks"},
    {"config"},
    {"tensors", "packing", "parallel", "kernels"},
    {"model", "optim", "convert", "checkpoint", "data"},
    {"inference"},
    {"quant"},
    {"train", "export"},
    {"commands"},
    {"cli_options", "cli_run"},
    {"cli_model", "cli_recipe", "cli_export", "cli_lint", "cli_amax"},
    {"cli_quantize", "cli_finetune"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The single files of floor 0 lie in one folder, and may import each other.
FOLDERS = set(FLOOR_OF) - FLOORS[0]


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


def faults(package: Path) -> list[str]:
    """What the files of `package`, a folder called megtool, import against the rules."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        room = parts[0]
        where = path.relative_to(package.parent)
        if room not in FLOOR_OF and room != "__init__":
            found.append(f"{where}: room {room!r} has no floor")
            continue
        for line, name in imported(ast.parse(path.read_text())):
            top, _, rest = name.partition(".")
            target = rest.split(".")[0]
            if not top:
                found.append(f"{where}:{line}: relative import {name!r}")
            elif top != "megtool" or target in ("__version__", room):
                continue
            elif target not in FLOOR_OF:
                found.append(f"{where}:{line}: {name!r} is no room of the house")
            elif room == "__init__":
                found.append(f"{where}:{line}: the package itself imports {name!r}")
            elif FLOOR_OF[target] > FLOOR_OF[room]:
                found.append(f"{where}:{line}: {room} imports {name!r} from above")
            elif FLOOR_OF[target] == FLOOR_OF[room] and {room, target} & FOLDERS:
                found.append(f"{where}:{line}: {room} imports its neighbor {name!r}")
    return found


def test_every_import_goes_down(checkout: Path) -> None:
    assert faults(checkout / "megtool") == []


@pytest.mark.parametrize(
    ("file", "code", "fault"),
    [
        ("tensors/box.py", "from megtool.checkpoint.plan import Plan", "from above"),
        ("tensors/box.py", "def f():\n    import megtool.cli.app", "from above"),
        ("convert/family.py", "from megtool.checkpoint import plan", "neighbor"),
        ("tensors/box.py", "from megtool import packing", "neighbor"),
        ("tensors/box.py", "from . import relation", "relative"),
        ("tools/box.py", "", "has no floor"),
        ("tensors/box.py", "import megtool.tools", "no room"),
        ("__init__.py", "import megtool.errors", "the package itself"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, code: str, fault: str) -> None:
    path = tmp_path / "megtool" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    found = faults(tmp_path / "megtool")
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("checkpoint/formats/gguf.py", "from megtool.checkpoint.catalogue import Catalogue"),
        ("checkpoint/plan.py", "import numpy\nfrom megtool.tensors.box import Boxes"),
        ("dtypes.py", "from megtool.errors import FormatError"),
        ("cli.py", "from megtool import __version__"),
    ],
)
def test_a_right_import_passes(tmp_path: Path, file: str, code: str) -> None:
    path = tmp_path / "megtool" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert faults(tmp_path / "megtool") == []
