"""A folder as the rules see it: linear modules by what their tensors are, and the config files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from megtool.lint.engines import EngineTarget, load_engines
from megtool.lint.folder_view import (
    BRANCH,
    KV_CACHE_SCALES,
    FolderView,
    ScaleStatistics,
    StoredTensor,
)
from megtool.lint.model_shapes import ModelMismatch, check_model
from megtool.lint.quant_config import (
    QuantConfig,
    parse_hf_quant_config,
    parse_quantization_config,
)
from megtool.lint.scale_sanity import SCALE_NAMES
from megtool.report.finding import Finding

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<last>[^.]+)")
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_FP8, _E8M0 = ("float8_e4m3fn", "float8_e5m2"), ("uint8", "float8_e8m0fnu")
_CODES = (*_FP8, "int8", "uint8", "int32")
_USUAL_BLOCK = 128

_COMPANIONS = (
    *(*SCALE_NAMES, *KV_CACHE_SCALES, "q_scale", "prob_scale"),
    *("weight_packed", "weight_shape", "weight_g_idx", "weight_zero_point", "input_zero_point"),
    *("k_zero_point", "v_zero_point", "k_bias", "v_bias", "output_scale"),
    *(*BRANCH, *(f"_{name}" for name in BRANCH)),
)
"""Tensors that belong to the quantization, and are no weights of a model."""

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModule:
    """One linear module, described by its tensors alone.

    `shape` is `[out, in]`; `algo` one of `quant.recipes.formats.FORMATS`, "" for a plain weight and
    "?" for codes without a scale. `group_size` is the number of columns (or the side of blocks)
    under one scale, 0 without groups. `unit` is what engines run it in: a fused projection, or the
    experts of a layer.
    """

    name: str
    shape: Shape
    algo: str
    group_size: int
    tensors: Mapping[str, StoredTensor]
    unit: str
    expert: int | None = None

    @property
    def last(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def is_router(self) -> bool:
        """Whether it chooses experts."""
        return self.last in load_engines().modules.routers


@dataclass(slots=True, kw_only=True)
class LintContext:
    """A folder to be linted.

    `form` is `modelopt`, `compressed-tensors`, `fp8`, `mxfp4`, "" if no file declares a
    quantization, or any other `quant_method`. `declared` is the quantization_config as it stands in
    config.json; `config_json` and `hf_quant_config` are what the two files declare in ModelOpt's
    form. `stacked` are weights of all experts in one tensor, `embeddings` those that
    hold codes. `mismatch` compares the weights with the model's family (None: unknown family).
    `reads_all_scales`: also large ones, of which `lint` reads headers alone. Without
    `has_engine_limits` a rule reports what contradicts the folder, not what an engine cannot run.
    """

    folder: FolderView
    form: str
    declared: Mapping[str, Any]
    config_json: QuantConfig | None
    hf_quant_config: QuantConfig | None
    linears: list[LinearModule] = field(default_factory=list)
    towers: dict[str, list[LinearModule]] = field(default_factory=dict)
    stacked: list[StoredTensor] = field(default_factory=list)
    embeddings: list[str] = field(default_factory=list)
    mismatch: ModelMismatch | None = None
    reads_all_scales: bool = False
    has_engine_limits: bool = True
    _statistics: dict[str, ScaleStatistics] = field(default_factory=dict)

    def statistics(self, tensor: StoredTensor) -> ScaleStatistics:
        """The statistics of a scale, read once for all rules."""
        if tensor.name not in self._statistics:
            self._statistics[tensor.name] = self.folder.read_statistics(tensor)
        return self._statistics[tensor.name]

    @property
    def model_config(self) -> Mapping[str, Any]:
        """config.json; keys of its text model come first."""
        config = self.folder.config or {}
        text = config.get("text_config")
        return {**config, **text} if isinstance(text, dict) else config

    @property
    def architectures(self) -> list[str]:
        """The `architectures` of config.json."""
        value = (self.folder.config or {}).get("architectures")
        return [str(v) for v in value] if isinstance(value, list) else []

    @property
    def quant_configs(self) -> list[QuantConfig]:
        """What the files declare in ModelOpt's form, hf_quant_config.json first."""
        return [c for c in (self.hf_quant_config, self.config_json) if c is not None]

    def units(self) -> dict[str, list[LinearModule]]:
        """Modules by what engines run them in."""
        units: dict[str, list[LinearModule]] = {}
        for module in self.linears:
            units.setdefault(module.unit, []).append(module)
        return units

    def quantized(self) -> Iterator[LinearModule]:
        """Modules that hold codes."""
        return (module for module in self.linears if module.algo)


def read_context(folder: FolderView) -> LintContext:
    """Describe a folder by its headers, config files, and the few bytes of `weight_shape`."""
    names = load_engines().modules
    declared = folder.quantization or {}
    form = str(declared.get("quant_method", "")).lower().replace("_tensors", "-tensors")
    hf_quant_config = parse_hf_quant_config(folder.hf_quant_config)
    if form in load_engines().modelopt_spellings or (not form and hf_quant_config is not None):
        form = "modelopt"
    context = LintContext(
        folder=folder,
        form=form,
        declared=declared,
        config_json=parse_quantization_config(folder.quantization),
        hf_quant_config=hf_quant_config,
    )
    for name, tensors in folder.modules.items():
        if tower := next((p for p in name.split(".") if p in names.unquantized_towers), None):
            codes = tensors.get("weight")
            is_linear = codes is not None and len(codes.shape) == 2 and codes.dtype in _FLOATS
            if is_linear and codes is not None and "embed" not in name.rpartition(".")[2]:
                context.towers.setdefault(tower, []).append(_linear(folder, name, codes, tensors))
            continue
        if ".experts" in f".{name}.":
            context.stacked += [
                t for n, t in tensors.items() if len(t.shape) >= 3 and "scale" not in n
            ]
        codes = tensors.get("weight_packed") or tensors.get("weight")
        if codes is None or len(codes.shape) != 2:
            continue
        if name.rpartition(".")[2] in names.embeddings:
            if codes.dtype in _CODES:
                context.embeddings.append(name)
        elif codes.dtype in (*_CODES, *_FLOATS) and not name.endswith("norm"):  # one row a head
            context.linears.append(_linear(folder, name, codes, tensors))
    context.mismatch = _compare_with_family(context)
    return context


def _compare_with_family(context: LintContext) -> ModelMismatch | None:
    """The weights against the model's family, if each is a tensor of its own."""
    if context.form == "mxfp4" or any(t.dtype in _CODES for t in context.stacked):
        return None
    weights = {f"{module.name}.weight": module.shape for module in context.quantized()}
    plain = {
        n: t.shape
        for n, t in context.folder.tensors.items()
        if n not in weights and n.rpartition(".")[2] not in _COMPANIONS
    }
    if context.folder.is_deepseek_v4:
        plain = {n: shape for n, shape in plain.items() if not n.endswith(".scale")}
    towers = set(load_engines().modules.unquantized_towers)
    named = (*weights.items(), *plain.items())
    shapes = [(n, shape) for n, shape in named if not set(n.split(".")) & towers]
    return check_model(context.folder.config or {}, shapes)


def _linear(
    folder: FolderView, name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> LinearModule:
    algo, shape, group_size = _infer_format(folder, codes, tensors)
    match = _EXPERT.fullmatch(name)
    return LinearModule(
        name=name,
        shape=shape,
        algo=algo,
        group_size=group_size,
        tensors=tensors,
        unit=match["experts"] if match else _unit_of(name),
        expert=int(match["number"]) if match else None,
    )


def _unit_of(name: str) -> str:
    """The projection that a module is a part of, or the module itself."""
    parent, dot, last = name.rpartition(".")
    names = load_engines().modules
    for fused, parts in names.fused.items():
        if last in parts and parent.rpartition(".")[2] not in names.never_quantized_within:
            return f"{parent}{dot}{fused}"
    return name


def parts_of(unit: str) -> tuple[str, ...]:
    """The modules that a fused projection is made of; empty if it is none."""
    parent, dot, last = unit.rpartition(".")
    return tuple(f"{parent}{dot}{p}" for p in load_engines().modules.fused.get(last, ()))


def _infer_format(
    folder: FolderView, codes: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> tuple[str, Shape, int]:
    """The format that tensors have by their types and shapes, whatever a config declares."""
    rows, columns = codes.shape
    scale = tensors.get("weight_scale", tensors.get("weight_scale_inv"))
    inputs = "input_scale" in tensors or "input_global_scale" in tensors
    if codes.dtype in _FLOATS:
        return "", (rows, columns), 0
    if codes.dtype == "int32":
        return _infer_int32_format(folder, codes, tensors)
    if scale is None:
        return "?", (rows, columns), 0
    if codes.dtype == "int8" and scale.dtype == "float8_e8m0fnu":  # DeepSeek-V4's experts
        return "MXFP4", (rows, 2 * columns), _columns_per_scale(2 * columns, scale)
    if codes.dtype == "int8":
        return ("W8A8_SQ_PER_CHANNEL" if inputs else "W8A16"), (rows, columns), 0
    if codes.dtype in _FP8:
        return _infer_fp8_format(scale, rows), (rows, columns), _block_side(scale, (rows, columns))
    if scale.dtype in _FP8:
        size = _columns_per_scale(2 * columns, scale)
        nvfp4 = "W4A8_NVFP4_FP8" if size == 32 and inputs else ""
        nvfp4 = nvfp4 or ("" if tensors.keys().isdisjoint(BRANCH) else "NVFP4_SVD")
        return nvfp4 or ("NVFP4" if inputs else "W4A16_NVFP4"), (rows, 2 * columns), size
    if scale.dtype in _E8M0:
        return "MXFP4", (rows, 2 * columns), _columns_per_scale(2 * columns, scale)
    algo = "W4A8_AWQ" if "weight_scale_2" in tensors else "W4A16_AWQ"
    return algo, (2 * rows, columns), _columns_per_scale(columns, scale)


def _infer_fp8_format(scale: StoredTensor, rows: int) -> str:
    """FP8 by what has one scale."""
    if scale.dtype in _E8M0 and len(scale.shape) == 2 and scale.shape[0] == rows:
        return "MXFP8"
    if scale.shape in ((), (1,)):
        return "FP8"
    return "FP8_PER_CHANNEL_PER_TOKEN" if scale.shape in ((rows,), (rows, 1)) else "FP8_PB_WO"


def _block_side(scale: StoredTensor, shape: Shape) -> int:
    """Columns under one scale, of a group or a block; 0 for one scale per row or tensor.

    The last block may be cut. Where all columns have one block, rows show how large blocks are,
    and a whole matrix in one block is taken for one of the usual size.
    """
    rows, columns = shape
    if len(scale.shape) == 4:
        counts = scale.shape[0], scale.shape[2]
    elif len(scale.shape) == 2 and (scale.shape[1] > 1 or scale.shape[0] < max(rows, 2)):
        counts = scale.shape[0], scale.shape[1]
    else:
        return 0
    if counts[1] > 1:
        return _next_power_of_two(ceil(columns / counts[1]))
    side = _next_power_of_two(max(columns, ceil(rows / max(counts[0], 1))))
    return max(side, _USUAL_BLOCK) if counts[0] == 1 else side


def _next_power_of_two(size: int) -> int:
    """Blocks are powers of two, and the last may be a part of one."""
    return 1 << max(size - 1, 0).bit_length()


def _columns_per_scale(columns: int, scale: StoredTensor) -> int:
    count = scale.shape[-1] if len(scale.shape) == 2 else 1
    return ceil(columns / max(count, 1))


def _infer_int32_format(
    folder: FolderView, codes: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> tuple[str, Shape, int]:
    """compressed-tensors' words of 32 bits, whose shape is stored in `weight_shape`."""
    rows, words = codes.shape
    weight_shape = tensors.get("weight_shape")
    columns = 8 * words
    if weight_shape is not None and weight_shape.shape == (2,):
        columns = int(folder.read_values(weight_shape)[1])
    scale = tensors.get("weight_scale")
    has_groups = scale is not None and scale.shape[-1:] != (1,)
    group_size = _columns_per_scale(columns, scale) if scale is not None and has_groups else 0
    return ("W8A16" if columns / max(words, 1) <= 4 else "W4A16_AWQ"), (rows, columns), group_size


Check = Callable[[LintContext, EngineTarget], Iterator[Finding]]
"""A rule: its findings in a folder for an engine."""
