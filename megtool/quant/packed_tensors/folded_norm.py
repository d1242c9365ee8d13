"""Feeds that divide norms by smoothing scales."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from megtool.checkpoint.computed_tensors import RegionReader, TargetRegion
from megtool.checkpoint.transport.strided import Array
from megtool.checkpoint.transport.tile import Index
from megtool.errors import CalibrationError
from megtool.number_formats.small_floats import single
from megtool.quant.qparams import Floats
from megtool.reshard.constant_feed import digest_facts, round_to_dtype, to_bits, whole_region
from megtool.tensors.box import numel
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedNorm:
    """A norm's weight (or bias) divided by factors in float32 and rounded once.

    Zero-centered weights w represent 1 + w.
    """

    placement: Placement
    tensor: GlobalTensor
    factors: Floats
    zero_centered: bool

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The norm in the source."""
        return (self.placement,)

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """The whole tensor."""
        return (whole_region(self.tensor),)

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return self.tensor.num_bytes

    @property
    def identity(self) -> bytes:
        """A digest of the factors."""
        return digest_facts(self.factors, self.zero_centered, self.tensor.dtype.name)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        """See `TensorFeed`."""
        # Read in the stored dtype: a source of another dtype gives the same bytes as its cast.
        with reader.open(self.placement, self.tensor.dtype) as run:
            stored = run.read(0, numel(self.placement.shape))
            values = single(stored, self.tensor.dtype.name)
        unit_offset = np.float32(self.zero_centered)
        out = ((values + unit_offset) / self.factors.astype(np.float32) - unit_offset).astype(
            np.float32
        )
        if not np.isfinite(out).all():
            raise CalibrationError(
                "dividing the norm by its smoothing scales gives NaN or Inf",
                tensor=self.tensor.name,
            )
        yield 0, (0,), to_bits(round_to_dtype(out, self.tensor.dtype), self.tensor.dtype)
