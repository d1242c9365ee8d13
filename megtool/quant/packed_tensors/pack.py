"""Feeds that turn weights into codes and scales."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import CalibrationError, FormatError
from megtool.number_formats.amax import amax as amax_of
from megtool.number_formats.decode import CODES, SCALE, SCALE_2
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import PackedPart
from megtool.number_formats.scales import RULES
from megtool.number_formats.small_floats import E2M1, E4M3, single
from megtool.plan.work_units import UNIT_BYTES
from megtool.process.threads import run_jobs
from megtool.quant.packed_tensors.modelopt_tensors import compute_global_scale
from megtool.quant.qparams import WeightQParams
from megtool.quant.recipes.formats import packing_of
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import RegionReader, TargetRegion, count_region_bytes
from megtool.transport.constant_feed import digest_facts, to_bits
from megtool.transport.encoded_chunks import SourceFiles
from megtool.transport.shard_locator import ShardLocator
from megtool.transport.strided import Array, Buffers
from megtool.transport.tile import COMPUTED_BYTES, Index

_LARGEST = {"int8": 127.0, "int4rows": 7.0, "fp8": 448.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightToPack:
    """A canonical weight `[out, in]` to be packed, with its quantization parameters."""

    placement: Placement
    shape: tuple[int, int]
    dtype: DType
    qparams: WeightQParams

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The placements it is read from."""
        return (self.placement,)

    @property
    def period(self) -> int:
        """The number of rows that must be read together."""
        return 1

    @contextmanager
    def open_rows(self, reader: RegionReader) -> Iterator[Callable[[int, int], Array]]:
        """A function that reads a range of elements into memory that the next call may reuse."""
        with reader.open(self.placement, self.dtype) as run:
            yield run.read

    @property
    def row_bytes(self) -> int:
        """Bytes per row of the source."""
        return self.shape[1] * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFeed:
    """Rows `first:end` of a weight, as codes and scales.

    They start at row `first + row_offset` of the stored module, which has several weights if a
    family fuses them: `tensors` by role, for codes and for scales that are not a single number.
    `amax` is that of the whole module, if the format needs it.
    """

    weight: WeightToPack
    first: int
    end: int
    row_offset: int
    tensors: tuple[tuple[str, GlobalTensor], ...]
    amax: float
    digest: bytes

    @property
    def reads(self) -> tuple[Placement, ...]:
        return self.weight.reads

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """The rows of codes and scales in the stored module."""
        parts = self._parts
        out = []
        for role, tensor in self.tensors:
            lo, hi = self._window(parts[role])
            part_offset = self.row_offset // _rows_per(parts[role])
            out.append(
                TargetRegion(
                    stored=tensor.name,
                    lo=(lo[0] + part_offset, *lo[1:]),
                    hi=(hi[0] + part_offset, *hi[1:]),
                )
            )
        return tuple(out)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        kinds = [t.dtype.itemsize for _, t in self.tensors]
        return sum(count_region_bytes(r, n) for r, n in zip(self.writes, kinds, strict=True))

    @property
    def identity(self) -> bytes:
        """A digest of the quantization parameters and the rows."""
        return digest_facts(self.digest, self.first, self.end, self.amax, self.weight.dtype.name)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        weight, parts = self.weight, self._parts
        number = {role: i for i, (role, _) in enumerate(self.tensors)}
        kinds = {role: t.dtype for role, t in self.tensors}
        scales = {
            role: np.empty([b - a for a, b in zip(*self._window(parts[role]), strict=True)], k.view)
            for role, k in kinds.items()
            if role != CODES
        }
        rows = rows_of(weight, reader.tile_bytes)
        known_scales = KnownScales(weight, parts, self.amax)
        with weight.open_rows(reader) as read:
            for begin in range(self.first, self.end, rows):
                stop = min(begin + rows, self.end)
                try:
                    encoded = self._encode_rows(read, known_scales, begin, stop, reader.tile_bytes)
                except FormatError as e:
                    raise FormatError(
                        e.message,
                        file=e.file,
                        tensor=weight.placement.canonical or weight.placement.stored,
                        hint=e.hint,
                        error_id=e.error_id,
                    ) from e
                offset = begin - self.first
                codes = to_bits(encoded[CODES], kinds[CODES])
                yield number[CODES], (offset // _rows_per(parts[CODES]), 0), codes
                for role, all_rows in scales.items():
                    num_rows = offset // _rows_per(parts[role])
                    all_rows[num_rows : num_rows + len(encoded[role])] = encoded[role].view(
                        all_rows.dtype
                    )
        for role, all_rows in scales.items():
            yield number[role], (0,) * all_rows.ndim, to_bits(all_rows, kinds[role])

    def _encode_rows(
        self,
        read: Callable[[int, int], Array],
        scales: KnownScales,
        begin: int,
        stop: int,
        tile_bytes: int,
    ) -> dict[str, NDArray[Any]]:
        """Full rows, encoded at once or, if there are too many columns, some columns at a time."""
        weight, width = self.weight, self.weight.shape[1]
        if weight.qparams.codes is not None:
            return scales.cut_codes(begin, stop)
        values = read(begin * width, stop * width).reshape(stop - begin, width)
        step = _columns_of(weight, stop - begin, tile_bytes)
        if step >= width:
            return scales.encode_box(values, (begin, 0), (stop, width), reuses_memory=True)
        outputs: dict[str, list[NDArray[Any]]] = defaultdict(list)
        for column in range(0, width, step):
            column_end = min(column + step, width)
            codes = scales.encode_box(
                values[:, column:column_end], (begin, column), (stop, column_end)
            )
            for role, array in codes.items():
                outputs[role].append(array)
        columns_axis = {p.role: _columns_axis(p) for p in scales.parts}
        return {
            r: np.concatenate(a, axis=columns_axis[r])
            for r, a in outputs.items()
            if columns_axis[r] >= 0
        }

    @property
    def _parts(self) -> dict[str, PackedPart]:
        form = self.weight.qparams.format
        return {p.role: p for p in layout(packing_of(form), self.weight.shape)}

    def _window(self, part: PackedPart) -> tuple[Index, Index]:
        return part.window((self.first, 0), (self.end, self.weight.shape[1]))


class KnownScales:
    """Encodes boxes of one weight with the scales that are known before it is read; `parts` are the
    packing's parts."""

    def __init__(self, weight: WeightToPack, parts: dict[str, PackedPart], amax: float) -> None:
        qparams = weight.qparams
        self.parts = tuple(parts.values())
        self._qparams, self._dtype = qparams, weight.dtype.name
        self._packing = packing_of(qparams.format)
        self._scales = list_known_scales(qparams, parts, amax)
        self._smoothing_scale = qparams.weight_factors
        if self._smoothing_scale is not None:
            self._smoothing_scale = self._smoothing_scale.astype(np.float32)
        self._room: NDArray[Any] | None = None

    def encode_box(
        self, values: Array, lo: Index, hi: Index, *, reuses_memory: bool = False
    ) -> dict[str, NDArray[Any]]:
        """Encode a box. With `reuses_memory` its codes reuse the memory of the last such box, which
        saves allocations."""
        dtype = self._dtype
        if self._smoothing_scale is not None:
            values = single(values, dtype) * self._smoothing_scale[lo[1] : hi[1]]
            dtype = "float32"
        return self._encode(values, dtype, lo, hi, reuses_memory=reuses_memory)

    def encode_values(self, values: Array, lo: Index, hi: Index) -> dict[str, NDArray[Any]]:
        """Encode a box of float32 numbers that are smoothed already."""
        return self._encode(values, "float32", lo, hi)

    def _encode(
        self, values: Array, dtype: str, lo: Index, hi: Index, *, reuses_memory: bool = False
    ) -> dict[str, NDArray[Any]]:
        if SCALE in self._scales and self._qparams.amax is not None:  # no other check for NaN
            part = PackedPart(role=SCALE, dtype="float32", shape=(), spans=())
            if not np.isfinite(amax_of(values, dtype, part, lo, hi)).all():
                raise FormatError(
                    "elements are NaN or Inf",
                    hint="they cannot be quantized",
                    error_id="nan-weights",
                )
        windows = {r: self._cut(r, lo, hi) for r in self._scales}
        twice = self._qparams.format.round_twice
        parts = encode(
            self._packing,
            self.parts,
            values,
            dtype,
            lo,
            hi,
            scales=windows,
            twice=twice,
            room=self._room if reuses_memory else None,
        )
        if reuses_memory:
            self._room = parts[CODES]
        return parts

    def cut_codes(self, begin: int, stop: int) -> dict[str, NDArray[Any]]:
        """The codes and scales of rows whose codes calibration chose."""
        qparams = self._qparams
        if qparams.codes is None or SCALE not in self._scales:
            raise CalibrationError("calibration chose codes but no amax", tensor=qparams.module)
        lo, hi = (begin, 0), (stop, qparams.codes.shape[1])
        bits = np.ascontiguousarray(qparams.codes[begin:stop]).view(np.uint8)
        name = self._packing.partition(":")[0]
        if name == "int4rows":
            low, high = bits[0::2] & np.uint8(15), np.left_shift(bits[1::2], 4)
            bits = low | high
        elif name in ("mxfp4", "nvfp4"):
            low, high = bits[:, 0::2] & np.uint8(15), np.left_shift(bits[:, 1::2], 4)
            bits = low | high
        return {CODES: bits, **{r: self._cut(r, lo, hi) for r in self._scales}}

    def _cut(self, role: str, lo: Index, hi: Index) -> NDArray[Any]:
        part = next(p for p in self.parts if p.role == role)
        first, end = part.window(lo, hi)
        index = tuple(slice(a, b) for a, b in zip(first, end, strict=True))
        return self._scales[role][index] if index else self._scales[role]


def list_known_scales(
    qparams: WeightQParams, parts: dict[str, PackedPart], amax: float
) -> dict[str, NDArray[Any]]:
    """The scales known before a weight is read, as they are stored, by role.

    `amax` is that of the entire weight. Other scales are computed from the weight, box by box.

    Raises:
        CalibrationError: the calibrated `amax` does not have the shape of the scales, or is NaN,
            Inf or negative.
    """
    name = packing_of(qparams.format).partition(":")[0]
    rules, scale = RULES["modelopt"], parts[SCALE]
    out: dict[str, NDArray[Any]] = {}
    if SCALE_2 in parts:
        out[SCALE_2] = compute_global_scale(qparams.format.algo, amax)
    weight_amax = qparams.amax
    if weight_amax is None and not scale.shape:
        weight_amax = np.asarray(amax, np.float32)
    if weight_amax is None:
        return out
    if (
        weight_amax.size != math.prod(scale.shape)
        or not (np.isfinite(weight_amax) & (weight_amax >= 0)).all()
    ):
        raise CalibrationError(
            f"its amax of shape {list(weight_amax.shape)} does not fit scales of shape "
            f"{list(scale.shape)}, "
            "or is no magnitude",
            tensor=qparams.module,
        )
    scale_amax = np.ascontiguousarray(weight_amax, np.float32).reshape(scale.shape)
    if name == "nvfp4":
        out[SCALE] = rules.block(scale_amax, np.asarray(out[SCALE_2], np.float32))
    elif name.startswith("mx"):
        out[SCALE] = rules.exponent(scale_amax, E4M3 if name == "mxfp8" else E2M1)
    else:
        out[SCALE] = np.asarray(rules.scale(scale_amax, _LARGEST[name], "float32"), np.float32)
    return out


def make_pack_feeds(
    weight: WeightToPack,
    tensors: Sequence[tuple[str, GlobalTensor]],
    *,
    row_offset: int,
    amax: float,
) -> list[PackFeed]:
    """Make the feeds of one weight, each of about a unit of work; see `PackFeed`."""
    qparams = weight.qparams
    form = (qparams.format.algo, qparams.format.group_size, qparams.format.round_twice)
    digest = digest_facts(*form, qparams.weight_factors, qparams.amax, qparams.codes)
    grain = math.lcm(grain_of(weight), weight.period)
    rows = max(grain, UNIT_BYTES // weight.row_bytes // grain * grain)
    return [
        PackFeed(
            weight=weight,
            first=first,
            end=min(first + rows, weight.shape[0]),
            row_offset=row_offset,
            tensors=tuple(tensors),
            amax=amax,
            digest=digest,
        )
        for first in range(0, weight.shape[0], rows)
    ]


def grain_of(weight: WeightToPack) -> int:
    """The number of rows that must be packed together."""
    parts = layout(packing_of(weight.qparams.format), weight.shape)
    return math.lcm(*(_rows_per(p) for p in parts))


def rows_of(weight: WeightToPack, tile_bytes: int) -> int:
    """The number of rows read at once: about a tile, in multiples of rows packed together."""
    grain = math.lcm(grain_of(weight), weight.period)
    return max(grain, tile_bytes // weight.row_bytes // grain * grain)


def _columns_of(weight: WeightToPack, rows: int, tile_bytes: int) -> int:
    """The number of columns encoded at once: all, unless blocks of many rows would be too large."""
    grain, width = grain_of(weight), weight.shape[1]
    if grain <= 2 or rows * weight.row_bytes <= tile_bytes:
        return width
    return max(grain, tile_bytes // (rows * weight.dtype.itemsize) // grain * grain)


def _rows_per(part: PackedPart) -> int:
    """Rows of the weight per row of a part."""
    return next((s.per for s in part.spans if s.dim == 0), 1)


def _columns_axis(part: PackedPart) -> int:
    return next((axis for axis, s in enumerate(part.spans) if s.dim == 1), -1)


def compute_dtype(dtype: DType) -> DType:
    """The dtype in which a stored weight is computed: its own if it can be encoded."""
    encoded = dtype.name in ("float32", "bfloat16", "float16")
    return dtype if encoded else named_dtype("float32")


SCAN_BYTES = 32 << 20
"""Bytes of a weight per job when scanning for the amax."""


def find_amaxes(
    catalogue: Catalogue,
    weights: Sequence[WeightToPack],
    files: Files,
    *,
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> list[float]:
    """Find the amax of each weight after smoothing, with the memory of a few tiles.

    Raises:
        FormatError: a weight has NaN or Inf.
        SourceChangedError: a source file changed meanwhile.
    """
    part = PackedPart(role=SCALE, dtype="float32", shape=(), spans=())
    jobs: list[tuple[int, int, int]] = []
    for number, weight in enumerate(weights):
        rows = max(1, SCAN_BYTES // weight.row_bytes)
        out = weight.shape[0]
        jobs += [(number, a, min(a + rows, out)) for a in range(0, out, rows)]
    amaxes = [0.0] * len(weights)
    lock, local = threading.Lock(), threading.local()
    locator = ShardLocator(catalogue)
    with SourceFiles(files, [catalogue]) as readers:

        def work(job: tuple[int, int, int]) -> None:
            number, first, end = job
            weight, width = weights[number], weights[number].shape[1]
            if not hasattr(local, "reader"):
                local.reader = RegionReader(
                    locator, files, readers, Buffers(), tile_bytes=COMPUTED_BYTES
                )
            smoothing_scale = weight.qparams.weight_factors
            rows = max(1, COMPUTED_BYTES // weight.row_bytes)
            with local.reader.open(weight.placement, weight.dtype) as run:
                for a in range(first, end, rows):
                    b = min(a + rows, end)
                    values, kind = run.read(a * width, b * width), weight.dtype.name
                    if smoothing_scale is not None:
                        values = single(values, kind).reshape(-1, width) * smoothing_scale.astype(
                            "<f4"
                        )
                        kind = "float32"
                    flat = values.reshape(-1)
                    block_amax = float(amax_of(flat, kind, part, (0,), (flat.size,)))
                    if not np.isfinite(block_amax):
                        raise FormatError(
                            "elements are NaN or Inf",
                            file=catalogue.root,
                            tensor=weight.placement.canonical,
                            hint="they cannot be quantized; `megtool inspect SRC --stats` "
                            "counts them",
                            error_id="nan-weights",
                        )
                    with lock:
                        amaxes[number] = max(amaxes[number], block_amax)
            if progress is not None:
                with lock:
                    progress((end - first) * weight.row_bytes)

        run_jobs(jobs, work, threads=threads)
    catalogue.check_unchanged()
    return amaxes


TRANSPOSABLE_ALGOS = ("FP8",)
"""Formats with one-byte codes and one scale per tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedFeed:
    """A feed that fills columns of a stored tensor with the rows of a weight.

    All weights of GPT-2 are stored as `[in, out]`. vLLM and SGLang transpose every weight of such a
    family while they load it, including codes but not scales (`load_weights` of their
    models/gpt2.py), so only one scale per tensor can be stored.
    """

    feed: PackFeed

    @property
    def reads(self) -> tuple[Placement, ...]:
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
        for number, index, tile in self.feed.generate(reader):
            yield number, index[::-1], np.ascontiguousarray(tile.T)
