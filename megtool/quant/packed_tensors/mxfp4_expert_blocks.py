"""Blocks: MXFP4 of all experts of a layer in one tensor, as gpt-oss has it.

`NAME_blocks` `[experts, rows, columns / 32, 16]` holds two codes a byte, the low four bits first,
and `NAME_scales` `[experts, rows, columns / 32]` powers of two.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from megtool.checkpoint.computed_tensors import Region, Taking, region_bytes
from megtool.checkpoint.transport.strided import Array
from megtool.checkpoint.transport.tile import Index
from megtool.dtypes import dtype as named_dtype
from megtool.number_formats.decode import CODES, SCALE
from megtool.number_formats.layout import MX_BLOCK, check_divides
from megtool.quant.packed_tensors.pack import Packed, Weight, feeds_of
from megtool.quant.recipes.modules import BLOCKS
from megtool.reshard.constant_feed import hash_of
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

SCALES = "_scales"
_BYTES = MX_BLOCK // 2


def blocks_of(name: str, shape: tuple[int, int, int]) -> tuple[GlobalTensor, GlobalTensor]:
    """The two tensors of experts `[experts, rows, columns]`; `name` ends in `BLOCKS`.

    Raises:
        UsageError: blocks do not divide the columns.
    """
    experts, rows, columns = shape
    check_divides(columns, MX_BLOCK, "columns")
    byte, groups = named_dtype("uint8"), columns // MX_BLOCK
    return (
        GlobalTensor(name=name, shape=(experts, rows, groups, _BYTES), dtype=byte),
        GlobalTensor(
            name=name.removesuffix(BLOCKS) + SCALES, shape=(experts, rows, groups), dtype=byte
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfExpert:
    """What fills rows of one expert: `feed` as for a tensor of its own, put into `tensors`."""

    feed: Packed
    expert: int
    tensors: tuple[GlobalTensor, GlobalTensor]

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The weight."""
        return self.feed.reads

    @property
    def writes(self) -> tuple[Region, ...]:
        """Its rows of codes and of scales."""
        e, out = self.expert, []
        for t, own in zip(self.tensors, self.feed.writes, strict=True):
            rest = t.shape[2:]
            zeros = (0,) * len(rest)
            out.append(
                Region(stored=t.name, lo=(e, own.lo[0], *zeros), hi=(e + 1, own.hi[0], *rest))
            )
        return tuple(out)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(region_bytes(r, 1) for r in self.writes)

    @property
    def facts(self) -> bytes:
        """Those of the rows, and whose they are."""
        return hash_of(self.feed.facts, self.expert)

    def make(self, taking: Taking) -> Generator[tuple[int, Index, Array], None, None]:
        """See `Feed`."""
        for number, at, found in self.feed.make(taking):
            rest = self.tensors[number].shape[2:]
            yield number, (0, at[0], *(0 for _ in rest)), found.reshape(1, len(found), *rest)


def expert_feeds(
    weight: Weight, tensors: tuple[GlobalTensor, GlobalTensor], *, expert: int, at: int
) -> list[OfExpert]:
    """The feeds of a weight of one expert, whose rows begin at row `at`."""
    codes, scales = tensors
    rows, width = codes.shape[1], weight.shape[1]
    own = [
        (CODES, GlobalTensor(name=codes.name, shape=(rows, width // 2), dtype=codes.dtype)),
        (SCALE, GlobalTensor(name=scales.name, shape=scales.shape[1:], dtype=scales.dtype)),
    ]
    return [
        OfExpert(feed=f, expert=expert, tensors=tensors)
        for f in feeds_of(weight, own, at=at, amax=0.0)
    ]
