"""What an audit keeps of a save: sums and digests of its tensors, and its training state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megtool.audit.element_sums import ElementSums, Floats

_NUMBER = re.compile(r"([0-9]+)")

WEIGHT, MAIN, FIRST_MOMENT, SECOND_MOMENT = "", "main", "exp_avg", "exp_avg_sq"
"""States of a tensor: the weight itself, its master, and Adam's moments."""


@dataclass(slots=True, kw_only=True)
class TensorFacts:
    """One tensor of a save, or one layer or expert of a tensor that holds several.

    `digest` combines the checksums of its shards with their boxes, None if some were not read.
    `shards` are the checksums by file: `(file, box) -> checksum`. `num_rows` and `dead_rows` count
    rows, the latter those that are all zeros; None where no shard has whole rows.
    """

    name: str
    state: str
    dtype: str
    num_elements: int
    sums: ElementSums
    digest: int | None = None
    shards: dict[tuple[str, str], int] = field(default_factory=dict)
    num_rows: int | None = None
    dead_rows: int | None = None

    @property
    def key(self) -> str:
        """The name with the state."""
        return f"{self.state}:{self.name}" if self.state else self.name


@dataclass(slots=True, kw_only=True)
class PairFacts:
    """What comparing the tensors of one name, element by element, has shown.

    `unequal_masters` of `compared_masters` master weights, rounded, are not the weight. Of
    `compared_moments` elements, `large_first_moments` have a first moment that no gradients can
    have led to, given the second.
    """

    compared_masters: int = 0
    unequal_masters: int = 0
    compared_moments: int = 0
    large_first_moments: int = 0

    def merge(self, facts: PairFacts) -> None:
        """Add what was counted of other elements."""
        self.compared_masters += facts.compared_masters
        self.unequal_masters += facts.unequal_masters
        self.compared_moments += facts.compared_moments
        self.large_first_moments += facts.large_first_moments


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """The state of training beside tensors, as far as a save has it.

    `iteration` is the one that the files name. `scheduler_steps` are the scheduler's, in samples or
    steps; `optimizer_step` the largest of the param groups, `learning_rate` the largest of theirs.
    `rng` digests random state by object, `has_dropout` says that training uses it.
    `loss_scale` is that of fp16 training.
    """

    iteration: int | None = None
    consumed_samples: int | None = None
    scheduler_steps: int | None = None
    optimizer_step: float | None = None
    learning_rate: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    loss_scale: float | None = None
    rng: Mapping[str, int] = field(default_factory=dict)
    has_dropout: bool = False
    is_low_precision: bool = False


@dataclass(slots=True, kw_only=True)
class SaveFacts:
    """One save of a run, without its tensors' elements.

    `catalogue` are dtypes and shapes of stored tensors by name; `problems` are what opening and
    reading met: id of the rule, tensor or file, and text; `unknown_kind` is one that means only
    that no format recognizes it. `read_bytes` of `total_bytes` were read.
    """

    step: int
    path: str
    format: str = ""
    layout: Mapping[str, int] = field(default_factory=dict)
    stored: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    tensors: dict[str, TensorFacts] = field(default_factory=dict)
    pairs: dict[str, PairFacts] = field(default_factory=dict)
    training: TrainingFacts = field(default_factory=TrainingFacts)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    read_bytes: int = 0
    total_bytes: int = 0
    is_open: bool = False
    unknown_kind: tuple[str, str, str] | None = None

    def sort(self) -> None:
        """Put tensors into the order of their names and layers: threads end in any order."""
        self.tensors = dict(sorted(self.tensors.items(), key=lambda item: natural_key(item[0])))
        self.pairs = dict(sorted(self.pairs.items(), key=lambda item: natural_key(item[0])))

    def weights(self) -> dict[str, TensorFacts]:
        """The model's weights by name."""
        return {t.name: t for t in self.tensors.values() if t.state == WEIGHT}

    def of_state(self, state: str) -> dict[str, TensorFacts]:
        """The tensors of an optimizer state by the weight's name."""
        return {t.name: t for t in self.tensors.values() if t.state == state}

    def states(self) -> set[str]:
        """The optimizer states that it has."""
        return {t.state for t in self.tensors.values()} - {WEIGHT}

    def to_json(self) -> dict[str, Any]:
        """What a report says of it."""
        return {
            "step": self.step,
            "path": self.path,
            "format": self.format,
            "layout": dict(self.layout),
            "tensors": len(self.tensors),
            "read_bytes": self.read_bytes,
            "total_bytes": self.total_bytes,
            "training": {
                n: getattr(self.training, n)
                for n in TrainingFacts.__dataclass_fields__
                if n not in ("rng", "is_low_precision", "has_dropout")
            },
        }


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts names with their numbers as numbers."""
    parts = _NUMBER.split(name)
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in parts]


def sketch_distance(a: Floats, b: Floats) -> float | None:
    """The estimated norm of the difference of two tensors by their sketches; None without."""
    if a.shape != b.shape or not a.size:
        return None
    difference = a - b
    return math.sqrt(float((difference * difference).sum()))
