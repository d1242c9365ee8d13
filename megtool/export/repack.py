"""Repack codes and scales of quantized weights into the tensors of another form.

If source and target have the same number format, bits are moved and nothing is computed. Elements
are decoded and encoded again only if they get a new scale (one shared by modules that engines fuse)
that differs from their own.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.export.repack_region import (
    PartReader,
    RepackedRows,
    encode_scales,
    find_source_part,
    place_whole_part,
)
from megtool.export.scale_expansion import (
    WeightSlice,
    check_codes,
    check_scales,
    expand_scales,
    part_index,
    span_size,
)
from megtool.export.small_tensors import reciprocal
from megtool.number_formats.decode import CODES, DIVISOR, SCALE, SCALE_2, ZEROS
from megtool.number_formats.element_codes import numbers
from megtool.number_formats.packed_parts import PackedPart
from megtool.number_formats.small_floats import single
from megtool.plan.work_units import UNIT_BYTES
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import RegionReader, TensorFeed
from megtool.transport.constant_feed import ConstantFeed, WholeTensorFeed, digest_facts, to_bits
from megtool.transport.strided import Array
from megtool.transport.tile import Index

__all__ = ["WeightSlice", "plan_repack"]

TargetParts = Sequence[tuple[PackedPart, GlobalTensor]]

_DECODE = "export it with --to hf, which decodes it"


def plan_repack(
    slices: Sequence[WeightSlice],
    packing: str,
    parts: TargetParts,
    *,
    scales: Mapping[str, NDArray[Any]] | None = None,
    moves_codes: bool = True,
) -> list[TensorFeed]:
    """Feeds that fill the tensors of one target weight in `packing` with boxes of source weights.

    `held` are the target's parts, codes first, of which this fills all (roles as in
    `packing.decode`: codes, scale, scale_2 or divisor, columns, zeros). Codes are moved byte for
    byte, and scales keep their values, unless `scales` gives new ones by role (float32, of the
    part's shape, or single): where these differ, elements are decoded and encoded again. A second
    scale becomes a divisor, or the other way round, by its reciprocal in float32. Without
    `moves_codes` the plan copies codes, which lie alike in both, and feeds fill the rest.

    Feeds read the catalogue of a `QuantizedModules` by stored names: plan them with
    `PlanSource(catalogue=raw, placements={name: whole tensor})`.

    Raises:
        UsageError: boxes cut bytes, words, groups or blocks of either side.
        FormatError: another number format, no room for zero points, or a part that a source lacks.
            While feeds run: scales that are to be one differ, or do not fit their new type.
    """
    given_scales = tuple(
        (role, np.ascontiguousarray(np.asarray(value, np.float32)))
        for role, value in sorted((scales or {}).items())
    )
    given = dict(given_scales)
    shape = max(s.end[0] for s in slices), max(s.end[1] for s in slices)
    for box in slices:
        _check_slice(box, packing, parts, shape, given)
    in_rows = tuple(
        (p, t) for p, t in parts if span_size(p, 0) and (moves_codes or p.role != CODES)
    )
    single = [(p, t) for p, t in parts if not span_size(p, 0)]
    out: list[TensorFeed] = []
    values = [(t, _given_scale(given[p.role], p, t)) for p, t in single if p.role in given]
    if values:
        out.append(ConstantFeed(values=tuple(values)))
    for part, tensor in single:
        if part.role not in given:
            out.append(RepackedPart(slices=tuple(slices), part=part, tensor=tensor))
    if not in_rows:
        return out
    grain = math.lcm(*(span_size(p, 0) for p, _ in in_rows))
    for box in slices:
        rows, columns = box.shape
        step = max(grain, UNIT_BYTES // max(columns, 1) // grain * grain)
        out += [
            RepackedRows(
                box=box,
                packing=packing,
                parts=in_rows,
                singles=tuple(p for p, _ in single),
                given_scales=given_scales,
                first=first,
                end=min(first + step, rows),
                grain=grain,
                shape=shape,
            )
            for first in range(0, rows, step)
        ]
    return out


def _check_slice(
    box: WeightSlice,
    packing: str,
    parts: TargetParts,
    shape: tuple[int, int],
    given: Mapping[str, NDArray[np.float32]],
) -> None:
    """A box of a source can become a box of the target."""
    module, codes = box.module, parts[0][0]
    have = module.parts[0][0]
    has_same_numbers = numbers(module.packing) == numbers(packing)
    if not has_same_numbers or (have.dtype != codes.dtype and numbers(packing) == "fp8"):
        raise FormatError(
            f"{module.name} is stored as {module.packing} of {have.dtype}, and is to be {packing} "
            f"of {codes.dtype}: that is to quantize it again",
            tensor=module.parts[0][1],
            hint=_DECODE,
        )
    roles = {p.role for p, _ in parts}
    zeros = module.part(ZEROS)
    if zeros is not None and (ZEROS not in roles or SCALE in given):
        raise FormatError(
            f"{module.name} has zero points (it is quantized asymmetrically), and {packing} of "
            "this form has none",
            tensor=zeros[1],
            hint=_DECODE,
        )
    check_codes(box, codes, shape)
    for part, tensor in parts[1:]:
        if part.role in given:
            if part.dtype.startswith("float8"):
                raise FormatError(f"a {part.role} of {part.dtype} is not given", tensor=tensor.name)
            continue
        source = find_source_part(module, part.role)
        if source is None:
            raise FormatError(
                f"{module.name} has no {part.role}, which {tensor.name} is to hold",
                tensor=module.parts[0][1],
                hint=_DECODE,
            )
        if part.dtype.startswith("float8") and source[0].dtype != part.dtype:
            raise FormatError(
                f"{source[0].dtype} scales of {module.name} are to be {part.dtype}: that is to "
                "quantize it again",
                tensor=source[1],
                hint=_DECODE,
            )
        if part.role not in (SCALE_2, DIVISOR):
            check_scales(box, source[0], part, shape)


def _given_scale(
    value: NDArray[np.float32], part: PackedPart, tensor: GlobalTensor
) -> NDArray[Any]:
    """A given scale as it is stored."""
    if value.size not in (1, math.prod(part.shape)):
        raise FormatError(
            f"there are {value.size} values for a {part.role} of {list(part.shape)}",
            tensor=tensor.name,
        )
    return encode_scales(np.broadcast_to(value.reshape(-1), (math.prod(part.shape),)), part, tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackedPart(WholeTensorFeed):
    """A part of a target weight without rows of its own: a single scale, or one a column.

    All boxes that share an element of it have the same value there.
    """

    slices: tuple[WeightSlice, ...]
    part: PackedPart
    tensor: GlobalTensor

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The same part of every source."""
        return tuple(dict.fromkeys(place_whole_part(n, p) for p, n in self._sources))

    @property
    def identity(self) -> bytes:
        """The boxes."""
        return digest_facts("once", [(s.lo, s.offset, s.shape) for s in self.slices], self._sources)

    @property
    def _sources(self) -> list[tuple[PackedPart, str]]:
        parts = [find_source_part(s.module, self.part.role) for s in self.slices]
        return [f for f in parts if f is not None]

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        out = np.zeros(self.part.shape, np.float32)
        is_filled = np.zeros(self.part.shape, bool)
        for box, (source, name) in zip(self.slices, self._sources, strict=True):
            hi = (box.rows[1], box.columns[1])
            with PartReader(reader, name, source, box.lo, hi) as part:
                window = part.read_rows(box.lo, hi)
            bits = expand_scales(window, source, box.lo, self.part, box.offset, box.shape)
            values = single(bits, source.dtype)
            if source.role != self.part.role:
                values = reciprocal(values)
            index = part_index(self.part, box.offset, box.end)
            old = is_filled[index]
            if (out[index][old] != values[old]).any():
                raise FormatError(
                    f"has another {source.role} than what it is to be stored with as "
                    f"{self.tensor.name}",
                    tensor=name,
                    hint="give them one (exporters do, for engines that ask for it), or "
                    "export with --to hf",
                )
            out[index], is_filled[index] = values, True
        yield (
            0,
            (0,) * out.ndim,
            to_bits(encode_scales(out, self.part, self.tensor), self.tensor.dtype),
        )
