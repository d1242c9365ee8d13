"""Which canonical weights are quantized, how, and with which scales.

Weights that engines multiply as one (queries with keys and values, the two halves of a gated MLP,
those of one expert) have one single scale in a legacy checkpoint, the largest of theirs, and one
scale of inputs; a mixture has one scale of inputs for all its experts.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError, MappingError, listed
from megtool.export.quantized_module import QuantizedModule, QuantizedModules
from megtool.export.small_tensors import SmallTensorReader
from megtool.export.trtllm_legacy.layout import (
    TpRequirement,
    require_column_groups,
    require_row_grain,
)
from megtool.export.trtllm_legacy.ranks import RankTensor
from megtool.number_formats.decode import COLUMNS, SCALE
from megtool.tensors.box import strides
from megtool.tensors.placement import Placement

ALGOS: Mapping[str, str] = {
    "FP8": "fp8:tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8:channel",
    "W8A8_SQ_PER_CHANNEL": "int8:channel",
    "W4A16_AWQ": "int4rows:{group}",
    "W4A8_AWQ": "int4rows:{group}",
    "NVFP4": "nvfp4:{group}",
}
"""Formats that legacy engines have layers for, and how their codes lie."""

_NEAREST: Mapping[str, str] = {
    "FP8_PB_WO": "fp8_per_channel",
    "MXFP8": "fp8",
    "mxfp4": "nvfp4",
    "W4A8_MXFP4_FP8": "w4a8_awq",
    "W4A16_NVFP4": "nvfp4 or int4_awq",
    "W4A8_NVFP4_FP8": "w4a8_awq",
    "W8A16": "int8_sq",
    "NVFP4_SVD": "nvfp4",
    "NVFP4": "nvfp4 without factors of columns",
}
_NEWER = "; newer TensorRT-LLM loads the folder as it is: --to trtllm"
_CALIBRATED = ("FP8", "W8A8_SQ_PER_CHANNEL", "W4A8_AWQ", "NVFP4")
_SMOOTHED = ("W8A8_SQ_PER_CHANNEL", "W4A16_AWQ", "W4A8_AWQ")

_FUSED = re.compile(
    r"(.+\.attn)\.(?:q|k|v)\.weight|(.+\.(?:mlp|shared|experts\.\d+))\.(?:gate|up)\.weight"
)
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate|up|down)\.weight")


def scale_group(canonical: str) -> str:
    """What a weight has its single scale in common with: equal for those that share one."""
    match = _FUSED.fullmatch(canonical)
    return canonical if match is None else match[1] or match[2]


def input_group(canonical: str) -> str:
    """What a weight has its scale of inputs in common with."""
    if match := _EXPERT.fullmatch(canonical):
        return f"{match[1]}.{'down' if match[2] == 'down' else 'up'}"
    return scale_group(canonical)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """A canonical weight that is quantized: its module, and the row there of each of its own."""

    module: QuantizedModule
    rows: NDArray[np.int64]

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The rows `first:end` as runs of the module's: where each begins and ends there, and how
        many rows of the weight are before it."""
        rows = self.rows[first:end]
        cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for a, b in pairwise(cuts):
            yield int(rows[a]), int(rows[b - 1]) + 1, a


@dataclass(slots=True)
class QuantizedWeights:
    """The quantized weights of a folder by canonical name, and their scales, read as needed.

    `values` reads the folder's raw catalogue. `requantized` collects those whose own single scale
    is not the one they are to have.
    """

    folder: QuantizedModules
    rows: Mapping[str, QuantizedRows]
    values: SmallTensorReader
    requantized: set[str] = field(default_factory=set)
    _scales: dict[tuple[str, str], NDArray[np.float32] | None] = field(default_factory=dict)
    _vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    _shared: dict[str, list[str]] = field(default_factory=dict)
    _fed: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shared, fed = defaultdict(list), defaultdict(list)
        for name in self.rows:
            shared[scale_group(name)].append(name)
            fed[input_group(name)].append(name)
        self._shared, self._fed = dict(shared), dict(fed)

    def module_of(self, tensor: RankTensor) -> QuantizedModule | None:
        """A module of those that a rank's tensor is cut of, which all have its format; None where
        none of them is quantized.

        Raises:
            MappingError: they have several formats, or some are not quantized.
        """
        if not tensor.is_linear or not tensor.boxes:
            return None
        candidates = [(b.canonical, self.rows.get(b.canonical)) for b in tensor.boxes]
        first = candidates[0][1]
        for name, rows in candidates:
            if _format(rows) != _format(first):
                a, b = candidates[0][0].removesuffix(".weight"), name.removesuffix(".weight")
                raise MappingError(
                    f"{a} is {_label(first)} and {b} is {_label(rows)}, and a legacy checkpoint "
                    f"has them as one tensor, {tensor.module!r}",
                    tensor=name,
                    hint="give all of them one format, or keep all of them",
                    error_id="unsupported-by-engine",
                )
        return None if first is None else first.module

    def single_scale(self, canonical: str, role: str) -> NDArray[np.float32] | None:
        """The single scale a weight has for itself; None where it has one for rows or groups."""
        key = canonical, role
        if key not in self._scales:
            self._scales[key] = self.values.read_single(self.rows[canonical].module, role)
        return self._scales[key]

    def shared_scale(self, canonical: str, role: str) -> NDArray[np.float32] | None:
        """The single scale a weight is to have; it is noted where that is not its own."""
        scale = self.single_scale(canonical, role)
        if scale is None:
            return None
        all_of = [self.single_scale(n, role) for n in self._shared[scale_group(canonical)]]
        top = np.float32(max(float(x) for x in all_of if x is not None))
        decides = role == SCALE or self.rows[canonical].module.algo == "NVFP4"
        if decides and top != scale:
            self.requantized.add(canonical)
        return np.asarray(top, np.float32)

    def input_scale(self, canonical: str) -> NDArray[np.float32] | None:
        """The scale of inputs a weight is to have; None where its format has none.

        Raises:
            FormatError: its format has one, and the folder does not.
        """
        if self.rows[canonical].module.algo not in _CALIBRATED:
            return None
        scales = []
        for name in self._fed[input_group(canonical)]:
            module = self.rows[name].module
            value = self.values.read_input_scale(module)
            if value is None:
                raise FormatError(
                    f"{module.name} is {module.algo} and has no scale of its inputs, which a "
                    "legacy checkpoint needs",
                    file=self.folder.catalogue.root,
                    tensor=module.name,
                    hint="quantize it with data, or with fp8_per_channel, whose inputs are scaled "
                    "as they come",
                )
            scales.append(float(value))
        return np.asarray(max(scales), np.float32)

    def smoothing_scale(self, canonical: str) -> NDArray[np.float32] | None:
        """What inputs are multiplied by, column by column; None where nothing is stored."""
        part = self.rows[canonical].module.part(COLUMNS)
        return None if part is None else self.read_vector(part[1])

    @property
    def is_smoothed(self) -> bool:
        """Some module multiplies its inputs first."""
        return any(h.module.is_smoothed for h in self.rows.values())

    def read_vector(self, stored: str) -> NDArray[np.float32]:
        """A small stored tensor, flat."""
        if stored not in self._vectors:
            self._vectors[stored] = self.values.read(stored).reshape(-1)
        return self._vectors[stored]

    def requirements(self) -> Iterator[TpRequirement]:
        """What `tp` has to leave whole."""
        reported = set()
        for name, rows in self.rows.items():
            module, last = rows.module, name.split(".")[-2]
            packed = module.packing.startswith("int4")
            grain = module.group_size if packed or module.algo == "NVFP4" else 1
            if last in ("o", "down"):
                need = require_column_groups(last, module.shape[1], max(grain, 1))
            else:
                need = require_row_grain(last, module.shape[0], 2 if packed else 1)
            if last not in ("k", "v") and (need[0], last) not in reported:
                reported.add((need[0], last))
                yield need


def find_quantized_weights(
    folder: QuantizedModules,
    placements: Mapping[str, Placement],
    shapes: Mapping[str, tuple[int, ...]],
    values: SmallTensorReader,
    *,
    are_decoded: bool = False,
) -> QuantizedWeights:
    """The canonical weights that a folder holds quantized; `are_decoded` where no code of them is
    to be moved, so that neither their format nor how they lie matters.

    Raises:
        MappingError: a format that legacy engines have no layer for (the modules, and the nearest
            recipe), or a weight that is not stored as whole rows.
    """
    by_name = {m.name: m for m in folder.modules}
    rows: dict[str, QuantizedRows] = {}
    for name, p in placements.items():
        module = by_name.get(p.stored.removesuffix(".weight"))
        if module is None:
            continue
        stored_rows = _stored_rows(p, shapes[name], module)
        if stored_rows is None and not are_decoded:
            raise MappingError(
                f"{name.removesuffix('.weight')} is stored transposed or among others, and codes "
                "are cut by whole rows",
                tensor=p.stored,
                hint="export the plain checkpoint it was quantized from",
            )
        rows[name] = QuantizedRows(
            module=module, rows=np.zeros(0, np.int64) if stored_rows is None else stored_rows
        )
    if not are_decoded:
        _check_algos(h.module for h in rows.values())
    return QuantizedWeights(folder, rows, values)


def _stored_rows(
    p: Placement, shape: tuple[int, ...], module: QuantizedModule
) -> NDArray[np.int64] | None:
    """The module's row of every row of a weight (families interleave the rows of several by heads);
    None where a row of one is not a row of the other."""
    if len(shape) != 2 or len(p.base) != 2 or p.base[1] or shape[1] != module.shape[1]:
        return None
    along = sum(1 for d in p.dims if d == 0)
    if p.dims[:along] != (0,) * along:
        return None
    columns = p.shape[along:]
    if p.mults[along:] != strides(columns) or math.prod(columns) != shape[1]:
        return None
    rows = np.full((1,) * along, p.base[0], np.int64)
    for axis in range(along):
        steps = np.arange(p.shape[axis], dtype=np.int64) * p.mults[axis]
        rows = rows + steps.reshape([-1 if d == axis else 1 for d in range(along)])
    return rows.reshape(-1)


def _check_algos(modules: Iterable[QuantizedModule]) -> None:
    wrong: dict[str, list[str]] = defaultdict(list)
    for m in modules:
        if m.algo not in ALGOS or (m.is_smoothed and m.algo not in _SMOOTHED):
            wrong[m.algo].append(m.name)
    for algo, names in wrong.items():
        raise MappingError(
            f"{listed(names)}: {algo} is no format of legacy TensorRT-LLM"
            + (", with inputs multiplied by factors first" if algo in ALGOS else ""),
            tensor=names[0],
            hint=f"the nearest recipe is {_NEAREST.get(algo, 'fp8')}"
            + ("" if algo == "NVFP4_SVD" else _NEWER),
            error_id="unsupported-by-engine",
        )


def _format(rows: QuantizedRows | None) -> tuple[str, int]:
    return ("", 0) if rows is None else (rows.module.algo, rows.module.group_size)


def _label(rows: QuantizedRows | None) -> str:
    algo, group = _format(rows)
    return f"{algo} by {group}" if group else algo or "not quantized"
