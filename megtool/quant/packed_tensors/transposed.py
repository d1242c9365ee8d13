"""Codes of weights that are stored as `[in, out]`, as all of GPT-2's are.

vLLM and SGLang transpose every weight of such a family while they load it, including codes but not
scales (`load_weights` of their models/gpt2.py). So only one scale per tensor can be stored.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import numpy as np

from megtool.checkpoint.computed_tensors import RegionReader, TargetRegion
from megtool.checkpoint.transport.strided import Array
from megtool.checkpoint.transport.tile import Index
from megtool.quant.packed_tensors.pack import PackFeed
from megtool.reshard.constant_feed import digest_facts
from megtool.tensors.placement import Placement

TRANSPOSABLE_ALGOS = ("FP8",)
"""Formats with one-byte codes and one scale per tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedFeed:
    """A feed that fills columns of a stored tensor with the rows of a weight."""

    feed: PackFeed

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The weight."""
        return self.feed.reads

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """The columns that its rows become."""
        return tuple(replace(r, lo=r.lo[::-1], hi=r.hi[::-1]) for r in self.feed.writes)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes."""
        return self.feed.num_bytes

    @property
    def identity(self) -> bytes:
        """A digest of the rows."""
        return digest_facts("turned", self.feed.identity)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        """See `TensorFeed`."""
        for number, index, tile in self.feed.generate(reader):
            yield number, index[::-1], np.ascontiguousarray(tile.T)
