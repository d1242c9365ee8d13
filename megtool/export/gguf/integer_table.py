"""Integers of a GGUF file, which has 32 bits for each: the experts of every token."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from megtool.errors import FormatError
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import RegionReader
from megtool.transport.constant_feed import WholeTensorFeed, digest_facts, to_bits
from megtool.transport.strided import Array
from megtool.transport.tile import Index

_LARGEST = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerFeed(WholeTensorFeed):
    """A matrix of integers at `placement` in the source as `tensor`, of int32.

    Raises:
        FormatError: a number is negative, or larger than 32 bits hold; when it is generated.
    """

    placement: Placement
    tensor: GlobalTensor

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The matrix."""
        return (self.placement,)

    @property
    def identity(self) -> bytes:
        """The type."""
        return digest_facts(self.tensor.dtype.name)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        rows, width = self.tensor.shape
        step = max(1, reader.tile_bytes // (8 * width))
        with reader.open_stored(self.placement) as run:
            for first in range(0, rows, step):
                end = min(first + step, rows)
                values = run.read(first * width, end * width)
                signed = values.view(f"<i{values.itemsize}").reshape(-1, width)
                if numel(signed.shape) and not 0 <= signed.min() <= signed.max() <= _LARGEST:
                    raise FormatError(
                        f"numbers from {signed.min()} to {signed.max()} are no indices",
                        tensor=self.placement.canonical,
                        hint="`megtool verify` compares the source with another copy",
                    )
                yield 0, (first, 0), to_bits(signed.astype("<i4"), self.tensor.dtype)
