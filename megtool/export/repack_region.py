"""Rows of a slice of a quantized weight, repacked into the tensors of another form."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype as dtype_of
from megtool.errors import FormatError
from megtool.export.quantized_module import QuantizedModule
from megtool.export.scale_expansion import (
    WeightSlice,
    expand_scales,
    find_scale_error,
    part_index,
    span_size,
)
from megtool.export.small_tensors import reciprocal
from megtool.number_formats.decode import CODES, DIVISOR, SCALE, SCALE_2, decode
from megtool.number_formats.element_codes import neutral, stored
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import Style
from megtool.number_formats.packed_parts import PackedPart, trimmed
from megtool.number_formats.scales import RULES
from megtool.number_formats.small_floats import single
from megtool.quant.packed_tensors.modelopt_tensors import stored_type
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import RegionReader, TargetRegion, count_region_bytes
from megtool.transport.constant_feed import digest_facts, round_to_dtype, to_bits
from megtool.transport.strided import Array
from megtool.transport.tile import Index

GivenScales = tuple[tuple[str, NDArray[np.float32]], ...]
Pair = tuple[int, int]

_SECONDS = {SCALE_2: DIVISOR, DIVISOR: SCALE_2}
_E2M1_MAX = 6.0


def find_source_part(module: QuantizedModule, role: str) -> tuple[PackedPart, str] | None:
    """The part that a target's part is made of."""
    part = module.part(role)
    return module.part(_SECONDS[role]) if part is None and role in _SECONDS else part


def encode_scales(
    values: NDArray[np.float32], part: PackedPart, tensor: GlobalTensor
) -> NDArray[Any]:
    """Float32 numbers as a tensor of scales holds them, in the part's shape."""
    out = round_to_dtype(np.array(values), tensor.dtype)
    if not np.array_equal(single(out, tensor.dtype.name), values, equal_nan=True):
        raise FormatError(
            f"{tensor.dtype.name} does not hold its {part.role} exactly",
            tensor=tensor.name,
            hint="store it in float32",
        )
    return out.reshape(part.shape if values.size == math.prod(part.shape) else values.shape)


def place_whole_part(name: str, part: PackedPart) -> Placement:
    """All of a stored tensor."""
    return Placement.identity(name, part.shape)


class PartReader:
    """What the box `lo:hi` of a source needs of a part, read by rows. Use in `with`."""

    def __init__(
        self, reader: RegionReader, name: str, part: PackedPart, lo: Index, hi: Index
    ) -> None:
        self._part = part
        self._first, end = part.window(lo, hi)
        self._shape = tuple(b - a for a, b in zip(self._first, end, strict=True))
        placement = Placement(
            canonical=name,
            stored=name,
            shape=self._shape,
            dims=tuple(range(len(self._shape))),
            mults=(1,) * len(self._shape),
            base=self._first,
        )
        self._run = reader.open_stored(placement)

    def read_rows(self, lo: Index, hi: Index) -> NDArray[Any]:
        """What a box of some of the rows needs, as bits, in memory of its own."""
        shape, start = self._shape, 0
        if span_size(self._part, 0):  # rows come first in every part that has them
            first, end = self._part.window(lo, hi)
            start = first[0] - self._first[0]
            shape = (end[0] - first[0], *shape[1:])
        line = math.prod(shape[1:])
        bits = self._run.read(start * line, start * line + math.prod(shape)).copy()
        return bits.view(dtype_of(self._part.dtype).view).reshape(shape)

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.__exit__()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackedRows:
    """Rows `first:end` of a box: codes, and the scales that go with rows.

    `singles` are the target's parts that others fill, `known` the scales given anew; `grain` rows
    cannot be packed apart.
    """

    box: WeightSlice
    packing: str
    parts: tuple[tuple[PackedPart, GlobalTensor], ...]
    singles: tuple[PackedPart, ...]
    given_scales: GivenScales
    first: int
    end: int
    grain: int
    shape: tuple[int, int]

    @property
    def reads(self) -> tuple[Placement, ...]:
        """Codes and scales of the source."""
        roles = self._roles
        return tuple(place_whole_part(n, p) for p, n in self.box.module.parts if p.role in roles)

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """The same rows of each part."""
        begin, end = self._target(self.first, self.end)
        return tuple(
            TargetRegion(stored=t.name, lo=lo, hi=hi)
            for p, t in self.parts
            for lo, hi in [p.window(begin, end)]
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        kinds = [t.dtype.itemsize for _, t in self.parts]
        return sum(count_region_bytes(r, n) for r, n in zip(self.writes, kinds, strict=True))

    @property
    def identity(self) -> bytes:
        """The box, both packings, and what is given."""
        box = self.box
        parts = [p for p, _ in self.parts], self.singles, box.module.parts
        return digest_facts(
            *(self.packing, box.module.packing, box.rows, box.columns, box.offset),
            *(self.first, self.end, parts, [t.dtype.name for _, t in self.parts]),
            *(x for pair in self.given_scales for x in pair),
        )

    @property
    def _roles(self) -> frozenset[str]:
        """The parts of the source that are read."""
        out = {p.role for p, _ in self.parts}
        if self.given_scales:
            out |= set(scale_roles(self.box.module.packing))
        return frozenset(out)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        width = max(self.box.shape[1] * (4 if self.given_scales else 1), 1)
        rows = max(self.grain, reader.tile_bytes // width // self.grain * self.grain)
        start = [r.lo for r in self.writes]
        lo, hi = self._source(self.first, self.end)
        with ExitStack() as stack:
            windows = {
                p.role: stack.enter_context(PartReader(reader, n, p, lo, hi))
                for p, n in self.box.module.parts
                if p.role in self._roles
            }
            for first in range(self.first, self.end, rows):
                end = min(first + rows, self.end)
                begin, stop = self._target(first, end)
                arrays = self._repack_rows(windows, first, end)
                for number, (part, tensor) in enumerate(self.parts):
                    low = part.window(begin, stop)[0]
                    index = tuple(a - b for a, b in zip(low, start[number], strict=True))
                    yield number, index, to_bits(arrays[number], tensor.dtype)

    def _repack_rows(
        self, parts: Mapping[str, PartReader], first: int, end: int
    ) -> list[NDArray[Any]]:
        """The windows of all parts for some rows."""
        lo, hi = self._source(first, end)
        windows = {role: part.read_rows(lo, hi) for role, part in parts.items()}
        new = self._new_scales(windows, first, end) if self.given_scales else {}
        if new:
            return self._encode_again(windows, new, first, end)
        out = []
        for part, tensor in self.parts:
            if part.role == CODES:
                out.append(self._codes(windows[CODES], part, lo, hi))
            else:
                out.append(self._scale(windows, part, tensor, first, end))
        return out

    def _codes(self, window: NDArray[Any], part: PackedPart, lo: Index, hi: Index) -> NDArray[Any]:
        """Codes in their new places."""
        packing, have = self.box.module.packing, self.box.module.parts[0][0]
        whole_units = all(
            a % span_size(have, d) == 0
            and (b % span_size(have, d) == 0 or b == self.box.module.shape[d])
            for d, (a, b) in enumerate(zip(lo, hi, strict=True))
        )
        if whole_units and packing.partition(":")[0] == self.packing.partition(":")[0]:
            return window
        return stored(trimmed(neutral(window, have, packing), have, lo, hi), self.packing, part)

    def _scale(
        self,
        windows: Mapping[str, NDArray[Any]],
        part: PackedPart,
        tensor: GlobalTensor,
        first: int,
        end: int,
    ) -> NDArray[Any]:
        """Scales in their new places, in the type of their new tensor."""
        have = next(p for p, _ in self.box.module.parts if p.role == part.role)
        begin, stop = self._target(first, end)
        lo, _ = self._source(first, end)
        size = stop[0] - begin[0], stop[1] - begin[1]
        bits = expand_scales(windows[part.role], have, lo, part, begin, size)
        if stored_type(have.dtype) == stored_type(tensor.dtype.name):
            return bits
        return encode_scales(single(bits, have.dtype), part, tensor).reshape(bits.shape)

    def _new_scales(
        self, windows: Mapping[str, NDArray[Any]], first: int, end: int
    ) -> dict[str, NDArray[np.float32]]:
        """Windows of given scales by which elements are divided; nothing where they are the old
        ones."""
        begin, stop = self._target(first, end)
        lo, _ = self._source(first, end)
        size = stop[0] - begin[0], stop[1] - begin[1]
        given, roles = dict(self.given_scales), scale_roles(self.packing)
        out: dict[str, NDArray[np.float32]] = {}
        differs = False
        for part in [*(p for p, _ in self.parts), *self.singles]:
            if part.role not in roles or part.role not in given:
                continue
            value = np.broadcast_to(given[part.role].reshape(-1), (math.prod(part.shape),))
            box = value.reshape(part.shape)[part_index(part, begin, stop)]
            out[part.role] = np.array(box)
            have = find_source_part(self.box.module, part.role)
            if have is None or find_scale_error(self.box, have[0], part, self.shape) is not None:
                differs = True
                continue
            old = single(windows[have[0].role], have[0].dtype)
            if have[0].role != part.role:
                old = reciprocal(old)
            old = expand_scales(old, have[0], lo, part, begin, size)
            differs |= not np.array_equal(old, out[part.role])
        return out if differs else {}

    def _encode_again(
        self,
        windows: Mapping[str, NDArray[Any]],
        new: Mapping[str, NDArray[np.float32]],
        first: int,
        end: int,
    ) -> list[NDArray[Any]]:
        """The windows of all parts, of elements that are decoded, for scales that are new."""
        module, roles = self.box.module, {CODES, *scale_roles(self.packing)}
        begin, stop = self._target(first, end)
        lo, hi = self._source(first, end)
        size = stop[0] - begin[0], stop[1] - begin[1]
        have = [p for p, _ in module.parts if p.role in roles]
        values = np.ascontiguousarray(decode(module.packing, have, windows, lo, hi))
        parts = [p for p in [*(p for p, _ in self.parts), *self.singles] if p.role in roles]
        scales = {
            p.role: round_to_dtype(new[p.role], dtype_of(p.dtype)) for p in parts if p.role in new
        }
        style: Style = "modelopt" if DIVISOR not in scales else "compressed-tensors"
        for part in parts:
            if part.role == CODES or part.role in scales:
                continue
            source = find_source_part(module, part.role)
            if source is None:
                continue
            old = single(windows[source[0].role], source[0].dtype)
            if part.role != SCALE:
                old = old if source[0].role == part.role else reciprocal(old)
                scales[part.role] = expand_scales(old, source[0], lo, part, begin, size)
                continue
            # The second scale is new: the first is what brings their product closest to what it was
            for role, divides in ((SCALE_2, False), (DIVISOR, True)):
                if role in windows:
                    second = windows[role].reshape(()).astype(np.float32)
                    old = old / second if divides else old * second
            top = expand_scales(old, source[0], lo, part, begin, size) * np.float32(_E2M1_MAX)
            second = new[SCALE_2 if SCALE_2 in new else DIVISOR].reshape(())
            scales[part.role] = RULES[style].block(top, second)
        encoded = encode(
            self.packing, parts, values, "float32", begin, stop, scales=scales, style=style
        )
        return [np.asarray(encoded[p.role]) for p, _ in self.parts]

    def _target(self, first: int, end: int) -> tuple[Pair, Pair]:
        """Rows of the box, in the target's weight."""
        box = self.box
        return (box.offset[0] + first, box.offset[1]), (box.offset[0] + end, box.end[1])

    def _source(self, first: int, end: int) -> tuple[Pair, Pair]:
        """Rows of the box, in the source's weight."""
        box = self.box
        return (box.rows[0] + first, box.columns[0]), (box.rows[0] + end, box.columns[1])


def scale_roles(packing: str) -> tuple[str, ...]:
    """Roles of scales that elements of a packing are divided by."""
    return (SCALE, SCALE_2, DIVISOR) if packing.startswith("nvfp4") else (SCALE,)
