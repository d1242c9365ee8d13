"""Weights as ModelOpt stores them before fake quantization: smoothed, and on the chosen codes."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.errors import CalibrationError
from megtool.number_formats.decode import SCALE, SCALE_2, decode
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout
from megtool.number_formats.small_floats import single
from megtool.quant.modelopt.module_amax import FusedRows
from megtool.quant.packed_tensors.pack import (
    KnownScales,
    WeightToPack,
    rows_of,
)
from megtool.quant.recipes.formats import packing_of
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import RegionReader, TargetRegion, count_region_bytes
from megtool.transport.constant_feed import digest_facts, round_to_dtype, to_bits
from megtool.transport.strided import Array
from megtool.transport.tile import Index


@dataclass(frozen=True, slots=True, kw_only=True)
class GridWeightFeed:
    """The weight `[out, in]` of a module, multiplied by its smoothing scale, in the stored dtype.

    Every element has the code that the product in float32 has, or the one that calibration chose:
    where rounding to the dtype crosses a border between codes, the next number on the other side is
    taken, and for chosen codes the value of the code. So the codes can be computed again.
    """

    weight: WeightToPack
    tensor: GlobalTensor
    rows: FusedRows
    amax: float

    @property
    def reads(self) -> tuple[Placement, ...]:
        return self.weight.reads

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """The runs of its rows in the stored tensor."""
        lead = (0,) * (len(self.tensor.shape) - 2)
        width = self.weight.shape[1]
        return tuple(
            TargetRegion(
                stored=self.tensor.name, lo=(*lead, first, 0), hi=(*lead, first + count, width)
            )
            for _, first, count in self._runs()
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight."""
        return sum(count_region_bytes(r, self.tensor.dtype.itemsize) for r in self.writes)

    @property
    def identity(self) -> bytes:
        """A digest of the quantization parameters."""
        q = self.weight.qparams
        facts = (q.format.algo, q.format.group_size, self.amax, self.tensor.dtype.name)
        return digest_facts("grid", *facts, q.weight_factors, q.amax, q.codes)

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Each run: its first row in the weight, its first row in the module, and its length."""
        for number, begin in enumerate(range(0, self.weight.shape[0], self.rows.run)):
            count = min(self.rows.run, self.weight.shape[0] - begin)
            yield begin, self.rows.first + number * self.rows.period, count

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        weight, width = self.weight, self.weight.shape[1]
        parts = {p.role: p for p in layout(packing_of(weight.qparams.format), weight.shape)}
        scales = KnownScales(weight, parts, self.amax)
        rows = rows_of(weight, reader.tile_bytes)
        with weight.open_rows(reader) as read:
            for begin in range(0, weight.shape[0], rows):
                stop = min(begin + rows, weight.shape[0])
                values = single(read(begin * width, stop * width), weight.dtype.name)
                tile = self._on_grid(values.reshape(stop - begin, width), scales, begin, stop)
                yield from self._cut(tile, begin, stop)

    def _cut(
        self, tile: NDArray[Any], begin: int, stop: int
    ) -> Generator[tuple[int, Index, Array], None, None]:
        run = self.rows.run
        for number in range(begin // run, -(-stop // run)):
            first, end = max(begin, number * run), min(stop, (number + 1) * run)
            part = tile[first - begin : end - begin]
            yield number, (first - number * run, 0), to_bits(part, self.tensor.dtype)

    def _on_grid(
        self, values: NDArray[np.float32], scales: KnownScales, begin: int, stop: int
    ) -> NDArray[Any]:
        """Rows in the stored dtype whose codes are those of `values`, or the chosen ones."""
        q, dtype = self.weight.qparams, self.tensor.dtype
        lo, hi = (begin, 0), (stop, values.shape[1])
        packing, parts = packing_of(q.format), scales.parts
        if q.weight_factors is not None:
            values = values * q.weight_factors.astype(np.float32)
        if q.codes is not None:
            windows = scales.cut_codes(begin, stop)
        else:
            windows = scales.encode_values(values, lo, hi)
        grid = decode(packing, parts, windows, lo, hi)
        known = {r: w for r, w in windows.items() if r in (SCALE, SCALE_2)}

        def misses(bits: NDArray[Any]) -> NDArray[np.bool_]:
            again = encode(
                packing, parts, single(bits, dtype.name), "float32", lo, hi, scales=known
            )
            return np.asarray(decode(packing, parts, again, lo, hi) != grid)

        out = round_to_dtype(np.ascontiguousarray(grid if q.codes is not None else values), dtype)
        wrong = misses(out)
        if q.codes is None and wrong.any():
            out = np.where(wrong, _across(out, values, dtype), out)
            wrong = misses(out)
            if wrong.any():
                rounded = round_to_dtype(np.ascontiguousarray(grid), dtype)
                out = np.where(wrong, rounded, out)
                wrong = misses(out)
        if wrong.any():
            raise CalibrationError(
                f"{int(wrong.sum()):,} of its numbers cannot be stored in {dtype.name} so that "
                f"they keep their {q.format.algo} codes",
                tensor=q.module,
                hint="--to hf writes the codes themselves",
            )
        return out


def _across(bits: NDArray[Any], values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """The neighbors of rounded numbers on the other side of what was rounded."""
    rounded = single(bits, dtype.name)
    if dtype.name != "bfloat16":
        toward = np.where(rounded > values, -np.inf, np.inf).astype(bits.dtype)
        return np.asarray(np.nextafter(bits, toward))
    shrinks = np.abs(rounded) > np.abs(values)
    step = np.where(shrinks, -1, 1).astype(np.int32)
    moved = (bits.astype(np.int32) + step).astype(np.uint16)
    tiny = np.where(values < 0, 0x8001, 1).astype(np.uint16)
    return np.asarray(np.where(rounded == 0, tiny, moved).astype(bits.dtype))
