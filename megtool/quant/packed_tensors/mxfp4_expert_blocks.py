"""MXFP4 weights of all experts of a layer in one tensor, as gpt-oss stores them.

`NAME_blocks` `[experts, rows, columns / 32, 16]` has two codes per byte, the low four bits first,
and `NAME_scales` `[experts, rows, columns / 32]` has exponents.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from megtool.dtypes import dtype as named_dtype
from megtool.number_formats.decode import CODES, SCALE
from megtool.number_formats.layout import MX_BLOCK, check_divides
from megtool.quant.packed_tensors.pack import PackFeed, WeightToPack, make_pack_feeds
from megtool.quant.recipes.modules import BLOCKS
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import RegionReader, TargetRegion, count_region_bytes
from megtool.transport.constant_feed import digest_facts
from megtool.transport.strided import Array
from megtool.transport.tile import Index

SCALES = "_scales"
_BYTES = MX_BLOCK // 2


def list_block_tensors(name: str, shape: tuple[int, int, int]) -> tuple[GlobalTensor, GlobalTensor]:
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
class ExpertFeed:
    """A feed that fills the rows of one expert in the stacked `tensors`."""

    feed: PackFeed
    expert: int
    tensors: tuple[GlobalTensor, GlobalTensor]

    @property
    def reads(self) -> tuple[Placement, ...]:
        return self.feed.reads

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """The expert's rows of codes and scales."""
        e, out = self.expert, []
        for t, region in zip(self.tensors, self.feed.writes, strict=True):
            tail = t.shape[2:]
            zeros = (0,) * len(tail)
            out.append(
                TargetRegion(
                    stored=t.name, lo=(e, region.lo[0], *zeros), hi=(e + 1, region.hi[0], *tail)
                )
            )
        return tuple(out)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(count_region_bytes(r, 1) for r in self.writes)

    @property
    def identity(self) -> bytes:
        """A digest of the rows and the expert."""
        return digest_facts(self.feed.identity, self.expert)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        for number, index, tile in self.feed.generate(reader):
            tail = self.tensors[number].shape[2:]
            yield number, (0, index[0], *(0 for _ in tail)), tile.reshape(1, len(tile), *tail)


def make_expert_feeds(
    weight: WeightToPack, tensors: tuple[GlobalTensor, GlobalTensor], *, expert: int, first: int
) -> list[ExpertFeed]:
    """Make the feeds of the weight of one expert."""
    codes, scales = tensors
    rows, width = codes.shape[1], weight.shape[1]
    tensors_of_expert = [
        (CODES, GlobalTensor(name=codes.name, shape=(rows, width // 2), dtype=codes.dtype)),
        (SCALE, GlobalTensor(name=scales.name, shape=scales.shape[1:], dtype=scales.dtype)),
    ]
    return [
        ExpertFeed(feed=f, expert=expert, tensors=tensors)
        for f in make_pack_feeds(weight, tensors_of_expert, row_offset=first, amax=0.0)
    ]
