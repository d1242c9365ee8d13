"""Subject: a folder as lint sees it: linear modules by what their tensors are, and what is said."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from megtool.checkpoint.formats.quantized import QUANT_FILE
from megtool.lint.model_shapes import ModelFaults, check_model
from megtool.lint.tables import APART, EMBEDDINGS, FUSED, MODELOPT_METHODS, ROUTERS
from megtool.quant.verification.quant_config_files import Declared, in_config, in_quant_file
from megtool.quant.verification.scale_checks import SCALE_NAMES
from megtool.quant.verification.stored_folder import CACHE_SCALES, Folder, Numbers, StoredTensor

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<last>[^.]+)")
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_E4M3, _E8M0 = ("float8_e4m3fn", "float8_e5m2"), ("uint8", "float8_e8m0fnu")
_CODES = (*_E4M3, "int8", "uint8", "int32")

_BESIDE = (
    *(*SCALE_NAMES, *CACHE_SCALES, "q_scale", "prob_scale"),
    *("weight_packed", "weight_shape", "weight_g_idx", "weight_zero_point", "input_zero_point"),
    *("k_zero_point", "v_zero_point", "k_bias", "v_bias"),
)
"""What lies beside weights, and is no weight of a model's."""

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear module by its tensors alone.

    `shape` is `[out, in]`; `algo` one of `quant.recipes.formats.FORMATS`, "" for a plain weight and
    "?" for codes without a scale. `group` are the columns (or the side of blocks) under one scale,
    0 where there is no group. `unit` is what engines run it in: a fused projection, or the experts
    of a layer.
    """

    name: str
    shape: Shape
    algo: str
    group: int
    tensors: Mapping[str, StoredTensor]
    unit: str
    expert: int | None = None

    @property
    def last(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def is_router(self) -> bool:
        """It chooses experts."""
        return self.last in ROUTERS


@dataclass(slots=True, kw_only=True)
class Subject:
    """A folder to be linted.

    `form` is `modelopt`, `compressed-tensors`, `fp8`, `mxfp4`, "" where nothing is said of
    quantization, or whatever else `quant_method` says. `inline` and `beside` are what config.json
    and hf_quant_config.json say, `stacked` weights of experts in one tensor, `embeddings` those
    that hold codes. `model` is what the model's own family has against the weights, None where
    none is known.
    """

    folder: Folder
    form: str
    said: Mapping[str, Any]
    inline: Declared | None
    beside: Declared | None
    linear: list[Linear] = field(default_factory=list)
    stacked: list[StoredTensor] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)
    model: ModelFaults | None = None
    _numbers: dict[str, Numbers] = field(default_factory=dict)

    def numbers(self, tensor: StoredTensor) -> Numbers:
        """What the values of a scale are; each is read once, however many rules ask."""
        if tensor.name not in self._numbers:
            self._numbers[tensor.name] = self.folder.numbers(tensor)
        return self._numbers[tensor.name]

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, that of the text model first."""
        config = self.folder.config or {}
        text = config.get("text_config")
        return {**config, **text} if isinstance(text, dict) else config

    def units(self) -> dict[str, list[Linear]]:
        """Modules by what engines run them in."""
        out: dict[str, list[Linear]] = {}
        for one in self.linear:
            out.setdefault(one.unit, []).append(one)
        return out

    def coded(self) -> Iterator[Linear]:
        """Modules that hold codes."""
        return (one for one in self.linear if one.algo)


def read_subject(folder: Folder) -> Subject:
    """What lint needs of a folder: headers, config files, and the few bytes of `weight_shape`."""
    said = folder.quantization or {}
    form = str(said.get("quant_method", "")).lower().replace("_tensors", "-tensors")
    beside = in_quant_file(folder)
    if form in MODELOPT_METHODS or (not form and beside is not None):
        form = "modelopt"
    out = Subject(folder=folder, form=form, said=said, inline=in_config(folder), beside=beside)
    for name, tensors in folder.modules.items():
        if any(part in APART for part in name.split(".")):
            continue
        if ".experts" in f".{name}.":
            out.stacked += [t for n, t in tensors.items() if len(t.shape) >= 3 and "scale" not in n]
        codes = tensors.get("weight_packed") or tensors.get("weight")
        if codes is None or len(codes.shape) != 2:
            continue
        if name.rpartition(".")[2] in EMBEDDINGS:
            if codes.dtype in _CODES:
                out.embeddings.append(name)
        elif codes.dtype in (*_CODES, *_FLOATS):
            out.linear.append(_linear(folder, name, codes, tensors))
    out.model = _checked(out)
    return out


def _checked(subject: Subject) -> ModelFaults | None:
    """The weights against the model's family, where all of them lie in tensors of their own."""
    if subject.form == "mxfp4" or any(t.dtype in _CODES for t in subject.stacked):
        return None
    weights = {f"{one.name}.weight": one.shape for one in subject.coded()}
    plain = {
        n: t.shape
        for n, t in subject.folder.tensors.items()
        if n not in weights and n.rpartition(".")[2] not in _BESIDE
    }
    named = (*weights.items(), *plain.items())
    held = [(n, shape) for n, shape in named if not set(n.split(".")) & set(APART)]
    return check_model(subject.folder.config or {}, held)


def _linear(
    folder: Folder, name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> Linear:
    algo, shape, group = _observed(folder, codes, tensors)
    found = _EXPERT.fullmatch(name)
    return Linear(
        name=name,
        shape=shape,
        algo=algo,
        group=group,
        tensors=tensors,
        unit=found["experts"] if found else unit_of(name),
        expert=int(found["number"]) if found else None,
    )


def unit_of(name: str) -> str:
    """The projection that a module is a part of, or itself."""
    parent, dot, last = name.rpartition(".")
    for fused, parts in FUSED.items():
        if last in parts:
            return f"{parent}{dot}{fused}"
    return name


def shards_of(unit: str) -> tuple[str, ...]:
    """The modules that a fused projection is made of; nothing where it is none."""
    parent, dot, last = unit.rpartition(".")
    return tuple(f"{parent}{dot}{part}" for part in FUSED.get(last, ()))


def _observed(
    folder: Folder, codes: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> tuple[str, Shape, int]:
    """The format that tensors have, by types and shapes, whatever is said of it."""
    rows, columns = codes.shape
    scale = tensors.get("weight_scale", tensors.get("weight_scale_inv"))
    inputs = "input_scale" in tensors or "input_global_scale" in tensors
    if codes.dtype in _FLOATS:
        return "", (rows, columns), 0
    if codes.dtype == "int32":
        return _words(folder, codes, tensors)
    if scale is None:
        return "?", (rows, columns), 0
    if codes.dtype == "int8":
        return ("W8A8_SQ_PER_CHANNEL" if inputs else "W8A16"), (rows, columns), 0
    if codes.dtype in _E4M3:
        return _eight_bits(scale, rows), (rows, columns), _side(scale, columns)
    if scale.dtype in _E4M3:
        group = _per(2 * columns, scale)
        eights = "W4A8_NVFP4_FP8" if group == 32 and inputs else ""
        return eights or ("NVFP4" if inputs else "W4A16_NVFP4"), (rows, 2 * columns), group
    if scale.dtype in _E8M0:
        return "MXFP4", (rows, 2 * columns), _per(2 * columns, scale)
    algo = "W4A8_AWQ" if "weight_scale_2" in tensors else "W4A16_AWQ"
    return algo, (2 * rows, columns), _per(columns, scale)


def _eight_bits(scale: StoredTensor, rows: int) -> str:
    """FP8 by what has a scale."""
    if scale.dtype in _E8M0 and len(scale.shape) == 2 and scale.shape[0] == rows:
        return "MXFP8"
    if scale.shape in ((), (1,)):
        return "FP8"
    return "FP8_PER_CHANNEL_PER_TOKEN" if scale.shape in ((rows,), (rows, 1)) else "FP8_PB_WO"


def _side(scale: StoredTensor, columns: int) -> int:
    """Columns under one scale: of a group, or of a matrix of blocks."""
    if len(scale.shape) == 4:
        return _round(ceil(columns / max(scale.shape[2], 1)))
    if len(scale.shape) == 2 and (scale.shape[1] > 1 or scale.shape == (1, 1)):
        return _round(ceil(columns / scale.shape[1]))
    return 0


def _round(size: int) -> int:
    """Blocks are powers of two, and the last may be a part of one."""
    return 1 << max(size - 1, 0).bit_length()


def _per(columns: int, scale: StoredTensor) -> int:
    held = scale.shape[-1] if len(scale.shape) == 2 else 1
    return ceil(columns / max(held, 1))


def _words(
    folder: Folder, codes: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> tuple[str, Shape, int]:
    """compressed-tensors' words of 32 bits, whose shape is said beside them."""
    rows, words = codes.shape
    said = tensors.get("weight_shape")
    columns = 8 * words
    if said is not None and said.shape == (2,):
        columns = int(folder.values(said)[1])
    per = columns / max(words, 1)
    scale = tensors.get("weight_scale")
    group = _per(columns, scale) if scale is not None and scale.shape[-1:] != (1,) else 0
    return ("W8A16" if per <= 4 else "W4A16_AWQ"), (rows, columns), group


def faults_of(folder: Folder) -> Iterator[tuple[str, str]]:
    """Faults of the folder itself; a folder need not have a file of ModelOpt's."""
    return (f for f in folder.faults if f != (QUANT_FILE, "is not there"))
