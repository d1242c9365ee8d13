"""The target of a reshard as it is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megtool.convert.dialects import TargetView
from megtool.megatron_state.extra_states.amax_report import AmaxReport
from megtool.megatron_state.optimizer.box_runs import TensorPart
from megtool.options.layout import ParallelConfig
from megtool.plan.copies import DroppedItem, Fill
from megtool.staging.stage import Stage
from megtool.tensors.box import Boxes
from megtool.tensors.catalogue import Destination
from megtool.tensors.placement import Placement, narrow, pieces, refine
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
    maps each to the canonical name; those that are a part of it have a placement in the source,
    `parts`. `moved` and `derived` name objects and parts of the common
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
    parts: dict[str, Placement] = field(default_factory=dict)
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

    def add_parts(
        self, parts: Mapping[str, Sequence[TensorPart]], source: Callable[[str], Placement]
    ) -> None:
        """Write parts of stored tensors once more, as the tensors that `parts` name.

        `source` is the placement from which a canonical tensor is read.
        """
        placements = dict(self.side.placements)
        for canonical, whole in self.side.placements.items():
            listed = parts.get(whole.stored, ()) if canonical not in self.copies else ()
            if not listed or 0 in whole.shape:
                continue
            read, written = refine(source(canonical), whole)
            boxes = Boxes.of([(list(p.lo), list(p.hi)) for p in listed], len(listed[0].lo))
            rows, views = pieces(written, boxes)
            for k, (row, lo, hi) in enumerate(
                zip(rows.tolist(), views.lo.tolist(), views.hi.tolist(), strict=True)
            ):
                alias, part = f"{canonical}#part{k}", listed[row]
                view = narrow(written, lo, hi)
                base = tuple(b - x for b, x in zip(view.base, part.lo, strict=True))
                placements[alias] = replace(view, canonical=alias, stored=part.name, base=base)
                self.copies[alias] = canonical
                self.parts[alias] = narrow(read, lo, hi)
        self.side = replace(self.side, placements=placements)
        self.fills += [
            fill
            for f in self.fills
            for part in parts.get(f.stored, ())
            if (fill := _fill_of_part(f, part)) is not None
        ]


def _fill_of_part(fill: Fill, part: TensorPart) -> Fill | None:
    """What a fill is in a part of its tensor; None where they have nothing in common."""
    lo = [max(a, b) - b for a, b in zip(fill.lo, part.lo, strict=True)]
    hi = [min(a, b) - c for a, b, c in zip(fill.hi, part.hi, part.lo, strict=True)]
    if any(x >= y for x, y in zip(lo, hi, strict=True)):
        return None
    return replace(fill, stored=part.name, lo=tuple(lo), hi=tuple(hi))


def make_fill(placement: Placement, value: float) -> Fill:
    """The box of a stored tensor that a placement fills with padding."""
    lo = placement.base
    hi = tuple(b + n for b, n in zip(placement.base, placement.shape, strict=True))
    return Fill(stored=placement.stored, lo=lo, hi=hi, value=value)
