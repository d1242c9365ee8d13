"""The `rotation` of a recipe: orthogonal matrices that are multiplied into weights before rounding.

R1 rotates the hidden state between layers, R2 the values of every head (names as in SpinQuant,
https://arxiv.org/abs/2405.16406). Both leave what the model computes as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.digests.crc32c import SIDECAR
from megtool.errors import FormatError
from megtool.quant.recipes.located_yaml import Node
from megtool.quant.recipes.modules import suggest
from megtool.quant.recipes.rules import RecipeProblems

HADAMARD, RANDOM_HADAMARD, RANDOM = "hadamard", "random-hadamard", "random-matrix"
ROTATIONS = (HADAMARD, RANDOM_HADAMARD, RANDOM)
"""The kinds of matrices, as compressed-tensors calls them."""

_KEYS = ("r1", "r2", "block_size", "seed")
_ONLINE = ("r3", "r4")
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationMatrices:
    """The kinds of R1 and R2 (empty: none), the block of R1 (0: the hidden size) and the seed."""

    r1: str = ""
    r2: str = ""
    block_size: int = 0
    seed: int = 0
    line: int = 0

    @classmethod
    def of_record(cls, record: Mapping[str, Any], folder: Path) -> RotationMatrices:
        """The settings that `megtool.json` of a folder has.

        Raises:
            FormatError: they are none.
        """
        settings = record.get("settings")
        problems = RecipeProblems(str(folder))
        if isinstance(settings, dict):
            values = {str(k): Node(value=v, line=0) for k, v in settings.items()}
            read = read_rotation(Node(value=values, line=0), problems)
            if read is not None and not problems.problems:
                return read
        raise FormatError(
            f"the record of its rotation cannot be used: {settings!r:.80}",
            file=folder / SIDECAR,
            hint="compare without the record, or with what it was made of",
            error_id="damaged-digests",
        )

    def describe(self) -> str:
        """The rotations in words."""
        blocks = f" in blocks of {self.block_size}" if self.block_size else ""
        parts = [f"R1 {self.r1}{blocks}"] if self.r1 else []
        parts += [f"R2 {self.r2}"] if self.r2 else []
        seed = f", seed {self.seed}" if "random" in self.r1 + self.r2 else ""
        return ", ".join(parts) + seed

    def to_json(self) -> dict[str, str | int]:
        """The settings as a recipe has them."""
        values = {name: getattr(self, name) for name in _KEYS}
        return {name: value for name, value in values.items() if value or name == "seed"}


def read_rotation(node: Node | None, problems: RecipeProblems) -> RotationMatrices | None:
    """Read the `rotation` of a recipe; problems are added to `problems`."""
    if node is None:
        return None
    if not isinstance(node.value, dict):
        problems.add(node.line, f"rotation is {node.plain()!r}", "a mapping, such as r1: hadamard")
        return None
    for key, value in node.value.items():
        line = (node.keys or {}).get(key, value.line)
        if key in _ONLINE:
            hint = "r1 and r2 are in the weights; r3 and r4 would have to run in the engine"
            problems.add(line, f"{key} is an online rotation", hint)
        elif key not in _KEYS:
            problems.add(line, f"unknown key {key!r} of a rotation", suggest(key, _KEYS))
    kinds = {}
    for key in _KEYS[:2]:
        kind = node.get(key)
        if kind is not None and kind.text not in ROTATIONS:
            hint = suggest(kind.text, ROTATIONS)
            problems.add(kind.line, f"{key} is {kind.plain()!r}", hint)
        elif kind is not None:
            kinds[key] = kind.text
    if not any(node.get(key) for key in (*_KEYS[:2], *_ONLINE)):
        problems.add(node.line, "a rotation needs r1 or r2", "one of " + ", ".join(ROTATIONS))
    block_size = _read_int(node, "block_size", 2, problems)
    if block_size and node.get("r1") is None:
        problems.add(node.line, "block_size is that of r1, and there is none", "r1: hadamard")
    return RotationMatrices(
        **kinds,
        block_size=block_size,
        seed=_read_int(node, "seed", 0, problems),
        line=node.line,
    )


def _read_int(node: Node, key: str, least: int, problems: RecipeProblems) -> int:
    entry = node.get(key)
    if entry is None:
        return 0
    value = entry.value
    if type(value) is not int or not least <= value <= _MAX_SEED:
        problems.add(
            entry.line, f"{key} is {entry.plain()!r}", f"a whole number from {least} to {_MAX_SEED}"
        )
        return 0
    return value
