"""The amaxes of a Megatron module's weight, whose rows are those of several canonical weights."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.number_formats.amax import amax as amax_of
from megtool.number_formats.decode import SCALE
from megtool.number_formats.packed_parts import PackedPart, PartSpan
from megtool.number_formats.small_floats import single
from megtool.quant.packed_tensors.pack import WeightToPack
from megtool.quant.qparams import Floats
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import RegionReader
from megtool.transport.constant_feed import WholeTensorFeed, digest_facts, to_bits
from megtool.transport.strided import Array
from megtool.transport.tile import Index


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRows:
    """The rows of a weight in a module's: `run` of them from `first`, the next from
    `first + period`, and so on."""

    first: int
    run: int
    period: int

    def of(self, begin: int, end: int) -> NDArray[np.int64]:
        """Where the rows `begin:end` are."""
        rows = np.arange(begin, end, dtype=np.int64)
        return self.first + rows // self.run * self.period + rows % self.run


@dataclass(frozen=True, slots=True, kw_only=True)
class AmaxRows:
    """A weight, its rows in the module's, and its amaxes if they are not those of the weight."""

    weight: WeightToPack
    rows: FusedRows
    amax: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleAmaxFeed(WholeTensorFeed):
    """Amaxes `[rows / row_block, columns / column_block]` of a module's weight.

    The tensor has that shape, or `[1]` if there is one. Given amaxes have blocks of rows that lie
    in one weight.
    """

    tensor: GlobalTensor
    parts: tuple[AmaxRows, ...]
    shape: tuple[int, int]
    row_block: int
    column_block: int

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The weights whose amaxes are not given."""
        return tuple(p for part in self.parts if part.amax is None for p in part.weight.reads)

    @property
    def identity(self) -> bytes:
        """A digest of rows, blocks, and what is given."""
        facts = [
            fact
            for p in self.parts
            for fact in (p.rows.first, p.rows.run, p.rows.period, p.amax, p.weight.dtype.name)
        ]
        scales = [p.weight.qparams.weight_factors for p in self.parts]
        return digest_facts("amax", self.row_block, self.column_block, *facts, *scales)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        out = np.zeros(self.shape, np.float32)
        for part in self.parts:
            if part.amax is not None:
                given = part.amax.reshape(-1, self.shape[1])
                rows = part.rows.of(0, part.weight.shape[0])[:: self.row_block]
                out[rows // self.row_block] = given
            else:
                self._read(reader, part, out)
        values = out.reshape(self.tensor.shape)
        yield 0, (0,) * len(self.tensor.shape), to_bits(values, self.tensor.dtype)

    def _read(self, reader: RegionReader, part: AmaxRows, out: Floats) -> None:
        weight, width = part.weight, part.weight.shape[1]
        spans = (PartSpan(0), PartSpan(1, self.column_block))
        scale = PackedPart(
            role=SCALE, dtype="float32", shape=(weight.shape[0], out.shape[1]), spans=spans
        )
        columns = weight.qparams.weight_factors
        step = max(1, reader.tile_bytes // weight.row_bytes)
        with weight.open_rows(reader) as read:
            for a in range(0, weight.shape[0], step):
                b = min(a + step, weight.shape[0])
                values, kind = read(a * width, b * width), weight.dtype.name
                if columns is not None:
                    values = single(values, kind).reshape(-1, width) * columns.astype(np.float32)
                    kind = "float32"
                box = values.reshape(b - a, width)
                maxima = amax_of(box, kind, scale, (a, 0), (b, width))
                if not np.isfinite(maxima).all():
                    raise FormatError(
                        "elements are NaN or Inf",
                        tensor=weight.placement.canonical,
                        hint="they cannot be quantized",
                        error_id="nan-weights",
                    )
                np.maximum.at(out, part.rows.of(a, b) // self.row_block, maxima)
