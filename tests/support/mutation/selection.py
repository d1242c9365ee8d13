"""Tests that should notice a fault in a file: those that mirror it, then those that import it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

_IMPORT = re.compile(r"^ *(?:from (\S+) import (\([^)]*\)|[^\n]*)|import (\S+))", re.M)
_NAME = re.compile(r"\w+")


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a file."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class TestSelection:
    """Which files of `root` import which, and the tests that reach one."""

    __test__ = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self._importers: dict[str, set[Path]] = defaultdict(set)
        for folder in ("megtool", "tests"):
            for path in sorted((root / folder).rglob("*.py")):
                for name in _imports(path):
                    self._importers[name].add(path)

    def find(self, path: Path, most: int) -> list[Path]:
        """Return at most so many files of tests, the closest first."""
        if path.is_relative_to(self.root / "converters"):
            rooms = ("tests/converters", "tests/formats")
            every = [p for room in rooms for p in sorted((self.root / room).rglob("test_*.py"))]
            return sorted(every, key=lambda p: p.stem != "test_missing_keys")[:most]
        found = dict.fromkeys(self._mirrors(path))
        reached = {path}
        near = [path]
        for _ in range(4):  # importers of importers see a fault still, if less surely
            near = [p for one in near for p in sorted(self._importers_of(one)) if p not in reached]
            near.sort(key=lambda p: -_shared_parts(p, path))
            reached.update(near)
            found |= dict.fromkeys(p for p in near if p.name.startswith("test_"))
            near = [p for p in near if not p.name.startswith("test_")]
            for one in near:
                if one.is_relative_to(self.root / "megtool"):
                    found |= dict.fromkeys(self._mirrors(one))
            if len(found) >= most:
                break
        return list(found)[:most]

    def _mirrors(self, path: Path) -> list[Path]:
        folder = self.root / "tests" / path.parent.relative_to(self.root / "megtool")
        stem = path.parent.name if path.stem == "__init__" else path.stem
        exact = [folder / f"test_{stem}.py"]
        return [p for p in (*exact, *sorted(folder.glob(f"test_{stem}_*.py"))) if p.exists()]

    def _importers_of(self, path: Path) -> set[Path]:
        return self._importers[module_name(path, self.root)]


def _imports(path: Path) -> set[str]:
    """Return the modules that a file imports, and `module.name` for each imported name."""
    out: set[str] = set()
    for module, names, plain in _IMPORT.findall(path.read_text()):
        out |= {plain} if plain else {module, *(f"{module}.{n}" for n in _NAME.findall(names))}
    return out


def _shared_parts(first: Path, second: Path) -> int:
    """Return how many parts of their paths below the two roots are the same."""
    return len({*first.parts} & {*second.parts})
