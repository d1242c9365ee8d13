"""The frozen weights of a model kept packed, as the checkpoint stores them (QLoRA).

Codes and scales are in memory, those of this rank's rows or columns, and a layer's weights are
decoded while it computes: into the same numbers that a load in the model's dtype gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megtool.dtypes import dtype as named_dtype
from megtool.errors import MappingError
from megtool.model.attention.mla import DownLinear
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.moe.experts import ExpertLinear
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.unpacked_forward import make_in_passes
from megtool.number_formats.decode_torch import PACKINGS, as_bytes, decode_torch
from megtool.number_formats.packed_parts import Index
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.fake_quant.weight_views import ParameterPart, WeightViews, strided_view
from megtool.quant.recipes.modules import list_modules
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.tensors.placement import Placement, narrow
from megtool.transport.cast import numeric_values
from megtool.transport.reading.packed_windows import (
    PackedBox,
    PackedWindows,
    find_box,
    read_windows,
)
from megtool.transport.reading.reader import CheckpointReader


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPacked:
    """The groups of a model whose packed weights stay packed."""

    groups: ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor(PackedBox):
    """A box of a stored tensor: windows of its parts on the rank's device."""

    windows: Mapping[str, Tensor]

    @classmethod
    def of(cls, read: PackedWindows, device: torch.device) -> PackedTensor:
        """What was read, on a device."""
        windows = {r: as_bytes(torch.from_numpy(w)).to(device) for r, w in read.windows.items()}
        return cls(packing=read.packing, parts=read.parts, windows=windows, lo=read.lo, hi=read.hi)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(w.nbytes for w in self.windows.values())

    def decode(self, view: Placement) -> Tensor:
        """The elements of a view, float32 of its shape."""
        values = decode_torch(self.packing, self.parts, self.windows, self.lo, self.hi)
        steps = values.stride()
        start = sum((b - x) * s for b, x, s in zip(view.base, self.lo, steps, strict=True))
        strides = [m * steps[d] for m, d in zip(view.mults, view.dims, strict=True)]
        return values.as_strided(view.shape, strides, values.storage_offset() + start)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeightSlice:
    """The rows and columns of a canonical weight `[out, in]` from `first` on that a rank needs.

    `values` of `shape` are packed, or as they are. `boxes` are where they are in the rank's
    parameter, and in the whole weight.
    """

    view: Placement
    shape: tuple[int, int]
    first: tuple[int, int]
    boxes: tuple[tuple[Placement, Placement], ...]
    values: PackedTensor | Tensor

    def write(self, into: Tensor) -> None:
        """Put the elements into the parameter, cast to its dtype."""
        values = self.values
        if isinstance(values, PackedTensor):
            values = values.decode(self.view).reshape(self.shape).contiguous()
        for local, whole in self.boxes:
            base = tuple(b - f for b, f in zip(whole.base, self.first, strict=True))
            strided_view(into, local).copy_(strided_view(values, replace(whole, base=base)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedParameter:
    """A parameter of a rank, made of slices of canonical weights."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    slices: tuple[PackedWeightSlice, ...]

    def make(self) -> Tensor:
        """The parameter in its dtype."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for part in self.slices:
            part.write(out)
        return out


class PackedBase:
    """Which parameters of a rank's stages can be kept packed.

    Those are the weights of linear layers and experts of which a canonical weight is packed in a
    format that torch decodes.

    Raises:
        MappingError: there is none.
    """

    def __init__(self, source: CheckpointSource, stages: Sequence[Decoder]) -> None:
        self._source = source
        self._stages = stages
        self._views: list[WeightViews] = []
        self._by_parameter: list[dict[str, list[str]]] = []
        modules = [m.name for m in list_modules(source.view).modules if m.kind == "linear"]
        modules = [m for m in modules if m.startswith("layers.")]
        packed = {m for m in modules if self._is_packed(m)}
        if not packed:
            raise MappingError(
                "no weight of a layer is packed in a format that is decoded while it computes",
                file=source.path,
                hint=f"formats are {', '.join(PACKINGS)}; without --qlora weights are decoded "
                "when they are loaded",
            )
        for stage in stages:
            views = WeightViews(stage, [m for m in modules if _layer(m) in stage.stage.layers])
            linears = {
                f"{n}.weight"
                for n, m in stage.named_modules()
                if isinstance(m, ColumnLinear | RowLinear | DownLinear | ExpertLinear)
            }
            by_name: dict[str, list[str]] = {}
            for module, part in views.parts.items():
                if part.parameter in linears:
                    by_name.setdefault(part.parameter, []).append(module)
            packable = {}
            for name, members in by_name.items():
                numel = sum(_numel(views.parts[m]) for m in members)
                if packed & set(members) and numel == stage.get_parameter(name).numel():
                    packable[name] = members
            self._views.append(views)
            self._by_parameter.append(packable)

    def _is_packed(self, module: str) -> bool:
        stored = self._source.view.placements[f"{module}.weight"].stored
        packing = self._source.catalogue[stored].packing or ""
        name = packing.partition(":")[0]
        return stored in self._source.catalogue.packed and name in PACKINGS

    @property
    def parameters(self) -> set[str]:
        """The names of these parameters."""
        return {name for members in self._by_parameter for name in members}

    @property
    def saved_bytes(self) -> int:
        """How many bytes these parameters take less than decoded ones, by headers."""
        saved = 0.0
        catalogue = self._source.catalogue
        stages = zip(self._stages, self._views, self._by_parameter, strict=True)
        for stage, views, parameters in stages:
            for name, members in parameters.items():
                itemsize = stage.get_parameter(name).element_size()
                for module in filter(self._is_packed, members):
                    stored = catalogue[self._source.view.placements[f"{module}.weight"].stored]
                    whole = sum(
                        math.prod(p.part.shape) * named_dtype(p.part.dtype).itemsize
                        for p in catalogue.packed[stored.name]
                    )
                    numel = _numel(views.parts[module])
                    saved += numel * itemsize - whole * numel / stored.numel
        return round(saved)

    def load(self) -> int:
        """Read them, packed, into the stages; returns the bytes that they take.

        Raises:
            StorageError: a file cannot be read.
        """
        tensors: dict[tuple[str, Index, Index], PackedTensor] = {}
        with CheckpointReader(self._source.catalogue, Files()) as reader:
            stages = zip(self._stages, self._views, self._by_parameter, strict=True)
            for stage, views, parameters in stages:
                makers = {}
                for name, members in parameters.items():
                    old = stage.get_parameter(name)
                    parts = [(m, views.parts[m]) for m in members]
                    slices = (self._read(reader, stage, m, p, tensors) for m, p in parts)
                    parameter = PackedParameter(
                        shape=old.shape,
                        dtype=old.dtype,
                        device=stage.groups.device,
                        slices=tuple(slices),
                    )
                    makers[name] = parameter.make
                make_in_passes(stage, makers)
        return sum(t.num_bytes for t in tensors.values())

    def _read(
        self,
        reader: CheckpointReader,
        stage: Decoder,
        module: str,
        part: ParameterPart,
        tensors: dict[tuple[str, Index, Index], PackedTensor],
    ) -> PackedWeightSlice:
        """The slice of a weight; packed tensors that several have are read once."""
        view = self._source.placement_of(f"{module}.weight")
        rows, columns = part.shape
        first, end = (0, 0), (rows, columns)
        if len(view.shape) == 2:  # else the rows are in another order, and all of them are there
            first, end = _bounds(part)
            view = narrow(view, first, end)
        shape = end[0] - first[0], end[1] - first[1]
        stored = reader.catalogue[view.stored]
        values: PackedTensor | Tensor
        if self._is_packed(module):
            lo, hi = find_box(view, stored.shape)
            key = view.stored, lo, hi
            if key not in tensors:
                read = read_windows(reader, view.stored, lo, hi)
                tensors[key] = PackedTensor.of(read, stage.groups.device)
            values = tensors[key]
        else:
            opened = reader.open_canonical(view)
            numbers = numeric_values(opened.read().reshape(-1), opened.dtype)
            values = torch.from_numpy(numbers.copy()).reshape(shape)
            values = values.to(stage.dtype).to(stage.groups.device)
        return PackedWeightSlice(
            view=view, shape=shape, first=first, boxes=part.boxes, values=values
        )


def _layer(module: str) -> int:
    return int(module.split(".")[1])


def _numel(part: ParameterPart) -> int:
    return sum(math.prod(local.shape) for local, _ in part.boxes)


def _bounds(part: ParameterPart) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first row and column of a weight that a rank has, and the end of each."""
    first, end = list(part.shape), [0, 0]
    for _, whole in part.boxes:
        for d in (0, 1):
            reach = sum(
                (n - 1) * m
                for n, m, dim in zip(whole.shape, whole.mults, whole.dims, strict=True)
                if dim == d
            )
            first[d] = min(first[d], whole.base[d])
            end[d] = max(end[d], whole.base[d] + reach + 1)
    return (first[0], first[1]), (end[0], end[1])
