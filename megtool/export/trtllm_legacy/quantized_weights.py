"""Coded weights: which canonical weights are quantized, how, and what their scales are.

Weights that engines multiply as one (queries with keys and values, the two halves of a gated MLP,
those of one expert) have one single scale in a legacy checkpoint, the largest of theirs, and one
scale of inputs; a mixture has one scale of inputs for all its experts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError, MappingError, listed
from megtool.export.quantized_module import Coded, CodedFolder
from megtool.export.small_tensors import Values
from megtool.export.trtllm_legacy.layout import Need, columns_need, rows_need
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
    "NVFP4": "nvfp4 without factors of columns",
}
_CALIBRATED = ("FP8", "W8A8_SQ_PER_CHANNEL", "W4A8_AWQ", "NVFP4")
_SMOOTHED = ("W8A8_SQ_PER_CHANNEL", "W4A16_AWQ", "W4A8_AWQ")

_WITH = re.compile(r"(.+\.attn)\.(?:q|k|v)\.weight|(.+\.(?:mlp|experts\.\d+))\.(?:gate|up)\.weight")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate|up|down)\.weight")


def scaled_with(canonical: str) -> str:
    """What a weight has its single scale in common with: equal for those that share one."""
    found = _WITH.fullmatch(canonical)
    return canonical if found is None else found[1] or found[2]


def fed_with(canonical: str) -> str:
    """What a weight has its scale of inputs in common with."""
    if found := _EXPERT.fullmatch(canonical):
        return f"{found[1]}.{'down' if found[2] == 'down' else 'up'}"
    return scaled_with(canonical)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A canonical weight that is quantized: its module, and its first row there."""

    coded: Coded
    row: int


@dataclass(slots=True)
class CodedWeights:
    """The quantized weights of a folder by canonical name, and their scales, read as needed.

    `values` reads the folder's raw catalogue. `requantized` collects those whose own single scale
    is not the one they are to have.
    """

    folder: CodedFolder
    held: Mapping[str, Held]
    values: Values
    requantized: set[str] = field(default_factory=set)
    _scales: dict[tuple[str, str], NDArray[np.float32] | None] = field(default_factory=dict)
    _vectors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    _shared: dict[str, list[str]] = field(default_factory=dict)
    _fed: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shared, fed = defaultdict(list), defaultdict(list)
        for name in self.held:
            shared[scaled_with(name)].append(name)
            fed[fed_with(name)].append(name)
        self._shared, self._fed = dict(shared), dict(fed)

    def of(self, tensor: RankTensor) -> Coded | None:
        """A module of those that a rank's tensor is cut of, which all have its format; None where
        none of them is quantized.

        Raises:
            MappingError: they have several formats, or some are not quantized.
        """
        if not tensor.is_linear or not tensor.boxes:
            return None
        found = [(b.canonical, self.held.get(b.canonical)) for b in tensor.boxes]
        first = found[0][1]
        for name, held in found:
            if _format(held) != _format(first):
                a, b = found[0][0].removesuffix(".weight"), name.removesuffix(".weight")
                raise MappingError(
                    f"{a} is {_label(first)} and {b} is {_label(held)}, and a legacy checkpoint "
                    f"has them as one tensor, {tensor.module!r}",
                    tensor=name,
                    hint="give all of them one format, or keep all of them",
                )
        return None if first is None else first.coded

    def single(self, canonical: str, role: str) -> NDArray[np.float32] | None:
        """The single scale a weight has for itself; None where it has one for rows or groups."""
        key = canonical, role
        if key not in self._scales:
            self._scales[key] = self.values.single(self.held[canonical].coded, role)
        return self._scales[key]

    def common(self, canonical: str, role: str) -> NDArray[np.float32] | None:
        """The single scale a weight is to have; it is noted where that is not its own."""
        own = self.single(canonical, role)
        if own is None:
            return None
        all_of = [self.single(n, role) for n in self._shared[scaled_with(canonical)]]
        top = np.float32(max(float(x) for x in all_of if x is not None))
        decides = role == SCALE or self.held[canonical].coded.algo == "NVFP4"
        if decides and top != own:
            self.requantized.add(canonical)
        return np.asarray(top, np.float32)

    def input_scale(self, canonical: str) -> NDArray[np.float32] | None:
        """The scale of inputs a weight is to have; None where its format has none.

        Raises:
            FormatError: its format has one, and the folder does not.
        """
        if self.held[canonical].coded.algo not in _CALIBRATED:
            return None
        found = []
        for name in self._fed[fed_with(canonical)]:
            coded = self.held[name].coded
            value = self.values.inputs(coded)
            if value is None:
                raise FormatError(
                    f"{coded.name} is {coded.algo} and has no scale of its inputs, which a legacy "
                    "checkpoint needs",
                    file=self.folder.catalogue.root,
                    tensor=coded.name,
                    hint="quantize it with data, or with fp8_per_channel, whose inputs are scaled "
                    "as they come",
                )
            found.append(float(value))
        return np.asarray(max(found), np.float32)

    def columns(self, canonical: str) -> NDArray[np.float32] | None:
        """What inputs are multiplied by, column by column; None where nothing is stored."""
        found = self.held[canonical].coded.part(COLUMNS)
        return None if found is None else self.vector(found[1])

    @property
    def is_smoothed(self) -> bool:
        """Some module multiplies its inputs first."""
        return any(h.coded.is_smoothed for h in self.held.values())

    def vector(self, stored: str) -> NDArray[np.float32]:
        """A small stored tensor, flat."""
        if stored not in self._vectors:
            self._vectors[stored] = self.values.of(stored).reshape(-1)
        return self._vectors[stored]

    def needs(self) -> Iterator[Need]:
        """What `tp` has to leave whole."""
        seen = set()
        for name, held in self.held.items():
            coded, last = held.coded, name.split(".")[-2]
            packed = coded.packing.startswith("int4")
            grain = coded.group_size if packed or coded.algo == "NVFP4" else 1
            if last in ("o", "down"):
                need = columns_need(last, coded.shape[1], max(grain, 1))
            else:
                need = rows_need(last, coded.shape[0], 2 if packed else 1)
            if last not in ("k", "v") and (need[0], last) not in seen:
                seen.add((need[0], last))
                yield need


def coded_weights(
    folder: CodedFolder,
    placements: Mapping[str, Placement],
    shapes: Mapping[str, tuple[int, ...]],
    values: Values,
    *,
    are_decoded: bool = False,
) -> CodedWeights:
    """The canonical weights that a folder holds quantized; `are_decoded` where no code of them is
    to be moved, so that neither their format nor how they lie matters.

    Raises:
        MappingError: a format that legacy engines have no layer for (the modules, and the nearest
            recipe), or a weight that is not stored as whole rows.
    """
    by_name = {m.name: m for m in folder.modules}
    held: dict[str, Held] = {}
    for name, p in placements.items():
        coded = by_name.get(p.stored.removesuffix(".weight"))
        if coded is None:
            continue
        plain = _row_of(p, shapes[name], coded)
        if plain is None and not are_decoded:
            raise MappingError(
                f"{name.removesuffix('.weight')} is stored transposed or among others, and codes "
                "are cut by whole rows",
                tensor=p.stored,
                hint="export the plain checkpoint it was quantized from",
            )
        held[name] = Held(coded=coded, row=plain or 0)
    if not are_decoded:
        _check_algos(h.coded for h in held.values())
    return CodedWeights(folder, held, values)


def _row_of(p: Placement, shape: tuple[int, ...], coded: Coded) -> int | None:
    """The first row of a weight whose rows lie one after another; None where they do not."""
    apart = (coded.shape[1], 1)
    if len(shape) != 2 or len(p.base) != 2 or p.base[1] or shape[1] != coded.shape[1]:
        return None
    lies = [m * apart[d] for m, d in zip(p.mults, p.dims, strict=True)]
    plain = all(n == 1 or a == b for n, a, b in zip(p.shape, lies, strides(p.shape), strict=True))
    return p.base[0] if plain else None


def _check_algos(modules: Iterable[Coded]) -> None:
    wrong: dict[str, list[str]] = defaultdict(list)
    for m in modules:
        if m.algo not in ALGOS or (m.is_smoothed and m.algo not in _SMOOTHED):
            wrong[m.algo].append(m.name)
    for algo, names in wrong.items():
        raise MappingError(
            f"{listed(names)}: {algo} is no format of legacy TensorRT-LLM"
            + (", with inputs multiplied by factors first" if algo in ALGOS else ""),
            tensor=names[0],
            hint=f"the nearest recipe is {_NEAREST.get(algo, 'fp8')}; newer TensorRT-LLM loads the "
            "folder as it is: --to trtllm",
        )


def _format(held: Held | None) -> tuple[str, int]:
    return ("", 0) if held is None else (held.coded.algo, held.coded.group_size)


def _label(held: Held | None) -> str:
    algo, group = _format(held)
    return f"{algo} by {group}" if group else algo or "not quantized"
