"""NVFP4 weights of a quantized folder as blocks of a GGUF file: the same codes and scales.

llama.cpp has a block of 64 columns with a scale for each 16, and no room in it for the scale of the
whole weight: that is a tensor of its own, NAME.scale, of one number or one for each expert, by
which the product with the weight is multiplied (`_nvfp4_pack` of llama.cpp's conversion/base.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype
from megtool.errors import FormatError
from megtool.export.gguf.block_encoder import GrainFeed, find_grain_order
from megtool.export.small_tensors import reciprocal
from megtool.formats.safetensors.reader import whole_shards
from megtool.lint.scale_sanity import LARGEST_SCALE
from megtool.number_formats.decode import CODES, COLUMNS, DIVISOR, LOW_RANK, SCALE, SCALE_2
from megtool.number_formats.gguf import block, pack_nvfp4
from megtool.number_formats.packed_parts import WHOLE, PackedPart
from megtool.number_formats.small_floats import single
from megtool.plan.copies import PlanSource
from megtool.plan.work_units import UNIT_BYTES
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue, Extents
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import RegionReader
from megtool.transport.constant_feed import digest_facts
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.strided import Array
from megtool.transport.tile import Index

NVFP4 = "NVFP4"
"""GGUF's name of the type."""

_PACKING = "nvfp4:16"


def _split(catalogue: Catalogue, weights: Collection[str], roles: Collection[str]) -> Catalogue:
    """The catalogue with parts of packed weights, by names of `_part_name`, in their place."""
    rows = [i for i, t in enumerate(catalogue.tensors) if t.name not in weights]
    parts = [
        (GlobalTensor(name=_part_name(n, p.part.role), shape=p.part.shape, dtype=kind), p)
        for n in weights
        for p in catalogue.packed[n]
        for kind in [dtype(p.part.dtype)]
        if p.part.role in roles
    ]
    tensors = [*(catalogue.tensors[i] for i in rows), *(t for t, _ in parts)]
    e, file = catalogue.extents, np.array([p.file for _, p in parts], np.int32)
    return replace(
        catalogue,
        tensors=tensors,
        shards=whole_shards(tensors, np.concatenate([catalogue.shards.owner[rows], file])),
        extents=Extents(
            file=np.concatenate([e.file[rows], file]),
            offset=np.concatenate([e.offset[rows], [p.offset for _, p in parts]]).astype(np.int64),
            length=np.concatenate([e.length[rows], [t.num_bytes for t, _ in parts]]).astype(
                np.int64
            ),
        ),
        packed={n: p for n, p in catalogue.packed.items() if n not in weights},
        _index={},
    )


def _part_name(weight: str, role: str) -> str:
    return f"{weight}:{role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedWeight:
    """A weight of a GGUF file that is NVFP4 in the source.

    `scales` are those of the whole, float32 `[1]` or `[experts]`; `pieces` says by canonical name
    where codes and their scales lie, in the catalogue that `open_parts` makes.
    """

    scales: NDArray[np.float32]
    pieces: Mapping[str, tuple[Placement, Placement]]


def open_parts(
    catalogue: Catalogue, source: Mapping[str, Placement], carried: Iterable[CarriedWeight]
) -> PlanSource:
    """A source in which codes and scales of carried weights are tensors, in the weights' place."""
    names = {n for w in carried for n in w.pieces}
    weights = {source[n].stored: None for n in names}
    split = _split(catalogue, weights, (CODES, SCALE))
    parts = (_part_name(w, role) for w in weights for role in (CODES, SCALE))
    placements = {n: p for n, p in source.items() if n not in names}
    placements |= {n: Placement.identity(n, split[n].shape) for n in parts}
    return PlanSource(catalogue=split, placements=placements)


def find_carried(
    catalogue: Catalogue,
    source: Mapping[str, Placement],
    written: Mapping[str, Placement],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, CarriedWeight]:
    """The weights of a file whose codes and scales can be taken as they are, by their names.

    They are those of which all is NVFP4 in `catalogue`, by whole rows of whole blocks, and what is
    not of different experts has one scale. `source` and `written` place canonical tensors in the
    source and in tensors of `shapes`.

    Raises:
        FormatError: a scale is NaN, infinite, negative or larger than any weight.
    """
    by_tensor: dict[str, list[str]] = defaultdict(list)
    for name, to in written.items():
        by_tensor[to.stored].append(name)
    weights = {t.name: None for t in catalogue.tensors if t.packing == _PACKING}
    out: dict[str, CarriedWeight] = {}
    with CheckpointReader(_split(catalogue, weights, (SCALE_2, DIVISOR)), Files()) as reader:
        for tensor, names in by_tensor.items():
            shape = shapes[tensor]
            if not tensor.endswith(".weight") or shape[-1] % block(NVFP4)[0]:
                continue
            pieces = {n: _place_parts(catalogue, source[n]) for n in names}
            placed = {n: p for n, p in pieces.items() if p is not None}
            if len(placed) < len(names):
                continue
            scales = np.full(shape[0] if len(shape) > 2 else 1, np.nan, np.float32)
            if all(_add_scales(scales, catalogue, reader, source[n], written[n]) for n in names):
                out[tensor] = CarriedWeight(scales=scales, pieces=placed)
    return _without_shared(out, source)


def _without_shared(
    carried: dict[str, CarriedWeight], source: Mapping[str, Placement]
) -> dict[str, CarriedWeight]:
    """Those whose stored weights nothing else needs decoded."""
    while True:
        names = {n for w in carried.values() for n in w.pieces}
        decoded = {p.stored for n, p in source.items() if n not in names}
        own = {
            t: w
            for t, w in carried.items()
            if not any(source[n].stored in decoded for n in w.pieces)
        }
        if len(own) == len(carried):
            return own
        carried = own


def _place_parts(catalogue: Catalogue, p: Placement) -> tuple[Placement, Placement] | None:
    """Where the codes and the scales of a weight lie, if it is of whole rows of NVFP4."""
    stored = catalogue[p.stored]
    if stored.packing != _PACKING:
        return None
    parts = {f.part.role: f.part for f in catalogue.packed[p.stored]}
    if not parts.keys().isdisjoint((COLUMNS, *LOW_RANK)):  # blocks have no place for them
        return None
    last = len(stored.shape) - 1
    is_whole = p.dims[-1] == last and p.dims.count(last) == 1 and not p.base[last] and not p.shift
    if not is_whole or p.mults[-1] != 1 or p.shape[-1] != stored.shape[last]:
        return None
    both = [_place_part(p, part) for part in (parts[CODES], parts[SCALE])]
    return (both[0], both[1]) if both[0] and both[1] else None


def _place_part(p: Placement, part: PackedPart) -> Placement | None:
    """Where a part of a weight lies, whose dimensions are those of the weight."""
    last = len(p.base) - 1
    if tuple(s.dim for s in part.spans) != tuple(range(last + 1)):
        return None
    if any(s.per != 1 for s in part.spans[:last]):
        return None
    shape = (*p.shape[:-1], part.shape[last])
    name = _part_name(p.stored, part.role)
    return replace(p, canonical=name, stored=name, shape=shape)


def _add_scales(
    scales: NDArray[np.float32],
    catalogue: Catalogue,
    reader: CheckpointReader,
    source: Placement,
    to: Placement,
) -> bool:
    """Put the scale of a piece where it belongs; False where another one is there already.

    Raises:
        FormatError: it is NaN, infinite, negative or larger than any weight.
    """
    part = next(
        f.part for f in catalogue.packed[source.stored] if f.part.role in (SCALE_2, DIVISOR)
    )
    if any(s.dim != WHOLE for s in part.spans):
        return False
    stored = reader.open_stored(_part_name(source.stored, part.role))
    values = single(stored.read(), stored.dtype.name).reshape(-1)
    value = (reciprocal(values) if part.role == DIVISOR else values)[0]
    if not 0 <= value <= LARGEST_SCALE:
        raise FormatError(
            f"the scale of the whole weight is {value:.3g}, of which no engine makes its numbers",
            file=catalogue.root,
            tensor=source.stored,
            hint="it is damaged, or was quantized so: megtool lint says which scales are wrong",
            error_id="nan-scales",
        )
    experts = slice(None)
    if len(scales) > 1:
        along = [n for n, d in zip(to.shape, to.dims, strict=True) if d == 0]
        experts = slice(to.base[0], to.base[0] + int(np.prod(along)))
    there = scales[experts]
    if (there[~np.isnan(there)] != value).any():
        return False
    scales[experts] = value
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedBlocks(GrainFeed):
    """Grains of a weight, counted in bytes of blocks, out of `codes` and `scales`.

    `name` is that of the weight in the source.
    """

    name: str
    codes: Placement
    scales: Placement

    @property
    def reads(self) -> tuple[Placement, ...]:
        """Codes and scales."""
        return self.codes, self.scales

    @property
    def identity(self) -> bytes:
        """The grains and their order."""
        return digest_facts(NVFP4, self.first, self.end, self.grains)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        size = self.grains.num_elements
        rows = size // self.tensor.shape[-1]
        per_row = [p.shape[-1] for p in self.reads]
        with ExitStack() as stack:
            runs = [stack.enter_context(reader.open_stored(p)) for p in self.reads]
            steps = self.iter_steps(max(1, reader.tile_bytes // size))
            for number, begin, stop, offset, shape in steps:
                parts = [
                    run.read(begin * rows * n, stop * rows * n).copy().reshape(-1, n)
                    for run, n in zip(runs, per_row, strict=True)
                ]
                try:
                    packed = pack_nvfp4(*parts)
                except FormatError as e:
                    raise FormatError(e.message, tensor=self.name, hint=e.hint) from e
                yield number, offset, self.grains.sort(packed.reshape(-1)).reshape(shape)


def plan_carried(weight: CarriedWeight, to: Placement, target: GlobalTensor) -> list[CarriedBlocks]:
    """The feeds of one canonical tensor of a weight, each of about a unit of work.

    `to` places it among elements, `target` is what is stored, in bytes.

    Raises:
        MappingError: see `find_grain_order`.
    """
    codes, scales = weight.pieces[to.canonical]
    lines = replace(to, shape=(*to.shape[:-1], target.shape[-1]))
    grains = find_grain_order(lines, target)
    count = numel(lines.shape) // grains.num_elements
    step = max(1, UNIT_BYTES // grains.num_elements)
    return [
        CarriedBlocks(
            name=codes.stored.removesuffix(f":{CODES}"),
            codes=codes,
            scales=scales,
            tensor=target,
            grains=grains,
            first=first,
            end=min(first + step, count),
        )
        for first in range(0, count, step)
    ]
