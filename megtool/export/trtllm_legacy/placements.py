"""Placements of boxes of the source's tensors in the tensors of ranks.

A canonical tensor goes to several ranks, cut or whole, and in a plan a tensor goes to one place:
so each box is a tensor of its own here, named after what it is cut of. A box that several ranks
hold is read under one name and placed under others too.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.export.trtllm_legacy.ranks import RankBox
from megtool.number_formats.small_floats import single
from megtool.plan.copies import Fill
from megtool.tensors.box import Boxes, numel
from megtool.tensors.placement import Placement, narrow, pieces, refine
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import cast
from megtool.transport.computed_tensors import RegionReader, TargetRegion
from megtool.transport.constant_feed import digest_facts
from megtool.transport.strided import Array
from megtool.transport.tile import Index


@dataclass(slots=True, kw_only=True)
class BoxPlacements:
    """What a plan is built of: `source` and `target` placements, `copies` and `fills`.

    `held` are where canonical tensors lie in the source, `shapes` how large they are.
    """

    stored: Mapping[str, Placement]
    shapes: Mapping[str, tuple[int, ...]]
    source: dict[str, Placement] = field(default_factory=dict)
    target: dict[str, Placement] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    fills: list[Fill] = field(default_factory=list)

    def add(self, tensor: GlobalTensor, boxes: Sequence[RankBox], *, padding: float = 0.0) -> None:
        """Fill a tensor with boxes; rows below the last one are `rest`."""
        for box in boxes:
            self._add_box(tensor.name, box)
        last = max((b.offset[0] + b.hi[0] - b.lo[0] for b in boxes), default=0)
        if tensor.shape and last < tensor.shape[0]:
            lo = (last, *[0] * (len(tensor.shape) - 1))
            self.fills.append(Fill(stored=tensor.name, lo=lo, hi=tensor.shape, value=padding))

    def _add_box(self, stored: str, box: RankBox) -> None:
        stored_placement = self.stored[box.canonical]
        view = Placement.identity(box.canonical, self.shapes[box.canonical])
        source, view = refine(stored_placement, view)
        lo, hi = (np.array([x], np.int64) for x in (box.lo, box.hi))
        _, views = pieces(view, Boxes(lo, hi))
        offset = tuple(a - b for a, b in zip(box.offset, box.lo, strict=True))
        for first, end in zip(views.lo.tolist(), views.hi.tolist(), strict=True):
            name = f"{box.canonical}{list(first)}:{list(end)}"
            part = narrow(view, first, end)
            base = tuple(a + b for a, b in zip(part.base, offset, strict=True))
            alias = name
            if name in self.source:
                alias = f"{name} in {stored}"
                self.copies[alias] = name
            else:
                self.source[name] = _named(narrow(source, first, end), name)
            self.target[alias] = Placement(
                canonical=alias,
                stored=stored,
                shape=part.shape,
                dims=part.dims,
                mults=part.mults,
                base=base,
            )

    def add_whole(self, stored: str, shape: tuple[int, ...]) -> Placement:
        """A stored tensor that feeds read; all of it."""
        if stored not in self.source:
            self.source[stored] = Placement.identity(stored, shape)
        return self.source[stored]


def _named(p: Placement, name: str) -> Placement:
    return Placement(
        canonical=name, stored=p.stored, shape=p.shape, dims=p.dims, mults=p.mults, base=p.base
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNormPlusOne:
    """Gammas stored around zero as engines multiply by them: one added, in float32, rounded once.

    `dtype` is the type in which they are taken: their own. All ranks of a stage hold the same.
    """

    placement: Placement
    dtype: DType
    tensors: tuple[GlobalTensor, ...]

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The gammas."""
        return (self.placement,)

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """All of every rank's tensor."""
        return tuple(
            TargetRegion(stored=t.name, lo=(0,) * len(t.shape), hi=t.shape) for t in self.tensors
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(t.num_bytes for t in self.tensors)

    @property
    def identity(self) -> bytes:
        """The type they are taken in, and the one they are rounded to."""
        return digest_facts("1 + w", self.dtype.name, self.tensors[0].dtype.name)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        dtype = self.tensors[0].dtype
        with reader.open(self.placement, self.dtype) as run:
            values = single(run.read(0, numel(self.placement.shape)), self.dtype.name)
        out = np.empty(values.shape, f"<u{dtype.itemsize}")
        sums = np.asarray(values + np.float32(1), np.float32)
        if lost := cast(sums, named_dtype("float32"), out, dtype):
            reader.overflowed[self.placement.stored] += lost
        for number in range(len(self.tensors)):
            yield number, (0,), out
