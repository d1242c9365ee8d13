"""The tensors of one rank, and where each part of them is in the source.

A rank's tensor is made of boxes of Megatron's per-layer tensors (`ranks`), and these of canonical
tensors, which lie somewhere in the source. What a box holds of a canonical tensor is a box of the
view that both sides share, and that is again a tensor with a placement on either side. So a rank
is loaded by the plan that copies any checkpoint, as if its own tensors were one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megtool.convert.canonical_view import CanonicalView, Padding, TargetView
from megtool.convert.megatron.rank_parameters import Box, Parameter, RankPlace
from megtool.dtypes import DType
from megtool.errors import MappingError
from megtool.tensors.box import Boxes
from megtool.tensors.placement import Placement, narrow, pieces, refine
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """A rank's pipeline stage, tensor rank, expert rank and expert tensor rank."""

    stage: int = 0
    tp: int = 0
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """One tensor of a rank: `boxes` of the whole model's tensor `key`, each at its index in
    `offsets`.

    A mixture's experts, of which each is a parameter of its own, lie one after the other on the
    first axis. `name` is what the rank calls it: `key`, also for the last stage's copy of a tied
    embedding.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    offsets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalView:
    """A rank's tensors and their canonical sources.

    `source` and `target` say of every part where it lies in the source and in `tensors`; a part is
    called `CANONICAL#NUMBER`. With `fills` they cover every element of `tensors` once.
    """

    tensors: list[GlobalTensor] = field(default_factory=list)
    source: dict[str, Placement] = field(default_factory=dict)
    target: dict[str, Placement] = field(default_factory=dict)
    fills: list[Padding] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTarget:
    """The tensors of a target by name, with the canonical tensors and the padding inside each."""

    tensors: Mapping[str, GlobalTensor]
    parts: Mapping[str, Sequence[Placement]]
    padding: Mapping[str, Sequence[Padding]]

    @classmethod
    def of(cls, target: TargetView) -> IndexedTarget:
        """Index a target."""
        parts: dict[str, list[Placement]] = defaultdict(list)
        for p in target.placements.values():
            parts[p.stored].append(p)
        padding: dict[str, list[Padding]] = defaultdict(list)
        for fill in target.fills:
            padding[fill.placement.stored].append(fill)
        tensors = {t.name: t for t in target.tensors}
        return cls(tensors=tensors, parts=parts, padding=padding)


def whole_tensor(tensor: GlobalTensor) -> LocalTensor:
    """A tensor of the whole model, as the only rank has it."""
    start = (0,) * len(tensor.shape)
    return LocalTensor(
        name=tensor.name,
        key=tensor.name,
        shape=tensor.shape,
        boxes=((start, tensor.shape),),
        offsets=(start,),
    )


def cut_local(local: LocalTensor, lo: Sequence[int], hi: Sequence[int], name: str) -> LocalTensor:
    """The box `lo:hi` of a rank's tensor as a tensor called `name`."""
    if hi == local.shape and not any(lo):
        return replace(local, name=name)
    boxes, offsets = [], []
    for (a, b), offset in zip(local.boxes, local.offsets, strict=True):
        first = [max(x, o) for x, o in zip(lo, offset, strict=True)]
        end = [min(y, o + q - p) for y, o, p, q in zip(hi, offset, a, b, strict=True)]
        if all(x < y for x, y in zip(first, end, strict=True)):
            start = [p - o for p, o in zip(a, offset, strict=True)]
            boxes.append(
                (
                    tuple(s + x for s, x in zip(start, first, strict=True)),
                    tuple(s + y for s, y in zip(start, end, strict=True)),
                )
            )
            offsets.append(tuple(x - y for x, y in zip(first, lo, strict=True)))
    shape = tuple(y - x for x, y in zip(lo, hi, strict=True))
    return LocalTensor(
        name=name, key=local.key, shape=shape, boxes=tuple(boxes), offsets=tuple(offsets)
    )


def local_tensors(
    ranks: Mapping[RankPlace, Sequence[Parameter]], seat: RankCoordinates, *, num_chunks: int = 1
) -> dict[str, LocalTensor]:
    """The tensors of one rank by name, selected from `rank_parameters`.

    Layers keep the numbers they have in the whole model, on all of the stage's virtual chunks.
    """
    members: dict[str, list[Parameter]] = defaultdict(list)
    for chunk in range(num_chunks):
        dense = ranks.get(RankPlace(seat.stage, chunk, 0, seat.tp), ())
        experts = ranks.get(RankPlace(seat.stage, chunk, seat.ep, seat.etp), ())
        for p in dense:
            if not (p.is_expert or p.key in members):  # a copy for another chunk is the same tensor
                members[p.key].append(p)
        for p in experts:
            if p.is_expert:
                members[p.key].append(p)
    return {name: _joined(name, parts) for name, parts in members.items()}


def _joined(name: str, members: Sequence[Parameter]) -> LocalTensor:
    first = members[0]
    boxes = tuple(box for p in members for box in p.boxes)
    ndim = len(first.shape)
    if not first.is_expert:
        starts = _stacked(first.boxes, 0)
        return LocalTensor(
            name=name, key=first.key, shape=first.local_shape, boxes=boxes, offsets=tuple(starts)
        )
    offsets: list[tuple[int, ...]] = []
    for number, p in enumerate(members):
        inner = _stacked([(lo[1:], hi[1:]) for lo, hi in p.boxes], 0)
        offsets += [(number, *index) for index in inner]
    if ndim != len(first.local_shape) + 1:
        raise MappingError(
            "experts one by one make no tensor of a rank",
            tensor=first.key,
            hint="write them stacked, with an axis of experts",
        )
    shape = (len(members), *first.local_shape)
    return LocalTensor(name=name, key=first.key, shape=shape, boxes=boxes, offsets=tuple(offsets))


def _stacked(boxes: Iterable[Box], dim: int) -> list[tuple[int, ...]]:
    """The offsets of boxes that are contiguous along a dimension."""
    out, start = [], 0
    for lo, hi in boxes:
        out.append(tuple(start if d == dim else 0 for d in range(len(lo))))
        start += hi[dim] - lo[dim] if lo else 0
    return out


def local_side(
    tensors: Iterable[LocalTensor],
    source: CanonicalView,
    target: TargetView | IndexedTarget,
    *,
    dtypes: Mapping[str, DType] | None = None,
) -> LocalView:
    """The canonical sources of the given tensors of a rank.

    `target` is what `write_side` made of `source`, whole (under Megatron's names, one key per
    layer); index it for many calls. `dtypes` says by name what elements become; without it they are
    what `target` says.

    Raises:
        MappingError: the two sides cut a tensor in ways that do not nest.
    """
    index = IndexedTarget.of(target) if isinstance(target, TargetView) else target
    out = LocalView()
    numbers: dict[str, int] = defaultdict(int)
    for local in tensors:
        kind = dtypes[local.name] if dtypes else index.tensors[local.key].dtype
        out.tensors.append(GlobalTensor(name=local.name, shape=local.shape, dtype=kind))
        for p in index.parts.get(local.key, ()):
            if 0 in p.shape:
                continue
            stored, to = refine(source.placements[p.canonical], p)
            for row, lo, hi in _views_in(local, to):
                name = f"{p.canonical}#{numbers[p.canonical]}"
                numbers[p.canonical] += 1
                out.source[name] = replace(narrow(stored, lo, hi), canonical=name)
                out.target[name] = _moved(narrow(to, lo, hi), local, row, name)
        for fill in index.padding.get(local.key, ()):
            for row, lo, hi in _views_in(local, fill.placement):
                moved = _moved(narrow(fill.placement, lo, hi), local, row, fill.placement.canonical)
                out.fills.append(Padding(placement=moved, value=fill.value))
    return out


def _views_in(
    local: LocalTensor, p: Placement
) -> Iterable[tuple[int, Sequence[int], Sequence[int]]]:
    """The parts of a placement's view inside a rank's boxes, each with the number of its box."""
    lo, hi = local.boxes[0] if len(local.boxes) == 1 else ((), ())
    if 0 not in p.shape and lo == p.base and hi == _end(p):  # most tensors, without arrays
        return [(0, (0,) * len(p.shape), p.shape)]
    rows, views = pieces(p, Boxes.of(local.boxes, len(local.shape)))
    return zip(rows.tolist(), views.lo.tolist(), views.hi.tolist(), strict=True)


def _end(p: Placement) -> tuple[int, ...]:
    """The end of the box of the stored tensor that a placement spans."""
    end = [b + 1 for b in p.base]
    for n, d, m in zip(p.shape, p.dims, p.mults, strict=True):
        end[d] += (n - 1) * m
    return tuple(end)


def _moved(p: Placement, local: LocalTensor, row: int, name: str) -> Placement:
    """A placement in a box of the full tensor, translated to the rank's tensor."""
    lo, offset = local.boxes[row][0], local.offsets[row]
    base = tuple(b - x + y for b, x, y in zip(p.base, lo, offset, strict=True))
    return replace(p, canonical=name, stored=local.name, base=base)
