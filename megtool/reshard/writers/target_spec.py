"""The target of a reshard as it is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megtool.convert.dialects import TargetView
from megtool.megatron_state.extra_states.amax_report import AmaxReport
from megtool.options.layout import ParallelConfig
from megtool.plan.copies import DroppedItem, Fill
from megtool.staging.stage import Stage
from megtool.tensors.catalogue import Destination
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedState:
    """What a `torch_dist` checkpoint holds beside the model.

    These are small `tensors` that the plan's feeds fill, `objects` (trees, or bytes of whole
    items), and `small_files` of the iteration's folder.
    """

    tensors: Sequence[GlobalTensor] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    small_files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Target:
    """A planned destination, and its relation to the canonical tensors.

    A tensor that the destination has several times has more names in `side.placements`; `copies`
    maps each to the canonical name. `moved` and `derived` name objects and parts of the common
    state that are written unchanged, or rewritten. `replicated` names tensors that nothing but
    `--replicate` says are whole in every rank file. `optimizer_format` is the format of optimizer
    state, None where its names stay, and `added` what is stored beside the model.
    `finish(stage, threads)` is called when all bytes are staged. `amax` reports FP8's delayed
    scaling state, if there is any.
    """

    format: str
    dialect: str
    parallel: ParallelConfig | None
    side: TargetView
    destination: Destination
    fills: list[Fill]
    optimizer_format: str | None = None
    added: AddedState = field(default_factory=AddedState)
    copies: dict[str, str] = field(default_factory=dict)
    dropped: list[DroppedItem] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    replicated: list[str] = field(default_factory=list)
    is_file: bool = False
    sidecar_folder: str = ""
    finish: Callable[[Stage, int], None] | None = None
    amax: AmaxReport | None = None

    def account(
        self, moved: Iterable[str], derived: Iterable[str], dropped: Iterable[DroppedItem]
    ) -> None:
        """Record what becomes of objects, or of parts of the common state."""
        self.moved += moved
        self.derived += derived
        self.dropped += dropped

    def add_copies(self, names: Mapping[str, Sequence[str]]) -> None:
        """Write each stored tensor under all its `names`, of which the first is its own.

        Tensors without an entry stay as they are.
        """
        placements = dict(self.side.placements)
        for canonical, p in self.side.placements.items():
            for k, name in enumerate(names.get(p.stored, ())[1:], 1):
                alias = f"{canonical}#{k}"
                placements[alias] = replace(p, stored=name)
                self.copies[alias] = canonical
        self.side = replace(self.side, placements=placements)
        self.fills += [
            replace(f, stored=name) for f in self.fills for name in names.get(f.stored, ())[1:]
        ]


def make_fill(placement: Placement, value: float) -> Fill:
    """The box of a stored tensor that a placement fills with padding."""
    lo = placement.base
    hi = tuple(b + n for b, n in zip(placement.base, placement.shape, strict=True))
    return Fill(stored=placement.stored, lo=lo, hi=hi, value=value)
