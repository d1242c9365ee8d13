"""Rules about scales: which ones a module has, their types and shapes, and their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megtool.lint.config_rules import effective_config, more
from megtool.lint.context import Check, LinearModule, LintContext
from megtool.lint.engines import EngineTarget, load_engines
from megtool.lint.folder_view import KV_CACHE_SCALES
from megtool.lint.module_rules import excluded_units, expected_algo
from megtool.lint.scale_sanity import (
    OUTLIER_RATIO,
    SCALE_NAMES,
    LayerOutliers,
    check_values,
    describe_difference,
)
from megtool.lint.stored_format import (
    STORED_FORMATS,
    check_scale_names,
    check_shapes,
    check_types,
)
from megtool.quant.recipes.formats import FORMATS
from megtool.report.finding import Finding, Severity
from megtool.tensors.box import numel

MAX_ELEMENTS = 1 << 16
"""Elements of a scale that is read; `megtool verify` reads larger ones."""

_PLACEHOLDER = {"W4A16_NVFP4": ("input_scale",)}
"""Scales that loaders read and discard."""

_FOREIGN = ("weight_scale_inv", "weight_global_scale", "input_global_scale")
"""Scales of DeepSeek's and compressed-tensors' folders, which no format of ModelOpt has."""

_GLOBAL_SCALES = ("weight_scale_2", "weight_global_scale")

MAX_WEIGHT = 2688.0
"""The largest plausible weight; those of trained models are below some tens. At this value, too,
NVFP4's divisor (2688 over the largest weight) is 1: a smaller one is most likely a scale that was
not inverted, as ModelOpt has it."""

MAX_INPUT = 65504.0
"""The largest plausible input: the largest number of float16. A few elements of models' inputs come
to some thousands."""

MIN_AMAX = 1e-9
"""The smallest plausible amax of a matrix that is used."""

_LARGEST_CODE: Mapping[str, float] = {
    "FP8": 448.0,
    "W8A8_SQ_PER_CHANNEL": 127.0,
    "W4A8_AWQ": 448.0,
    "NVFP4": 2688.0,
    "NVFP4_SVD": 2688.0,
    "W4A16_NVFP4": 2688.0,
    "W4A8_NVFP4_FP8": 2688.0,
}
"""What a scale is multiplied by to give the amax that it was made for."""


@dataclass(frozen=True, slots=True)
class _SingleScale:
    """A scale of one value: the formats in which it spans the whole range, whether it is one of
    inputs, and whether engines divide by it."""

    algos: tuple[str, ...]
    is_input: bool
    divides: bool = False


_NVFP4 = ("NVFP4", "NVFP4_SVD", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
_SINGLE_SCALES: Mapping[str, _SingleScale] = {
    "weight_scale": _SingleScale(("FP8",), is_input=False),
    "weight_scale_2": _SingleScale(_NVFP4, is_input=False),
    "weight_global_scale": _SingleScale(_NVFP4, is_input=False, divides=True),
    "input_scale": _SingleScale(
        ("FP8", "W8A8_SQ_PER_CHANNEL", "W4A8_AWQ", "NVFP4", "NVFP4_SVD"), is_input=True
    ),
    "input_global_scale": _SingleScale(_NVFP4, is_input=True, divides=True),
}


def _quantized_modules(
    context: LintContext, engine: EngineTarget
) -> Iterator[tuple[LinearModule, str]]:
    """Modules that the engine reads as quantized, with the format that it expects."""
    excluded = excluded_units(context, engine)
    for module in context.quantized():
        algo = expected_algo(context, engine, module)
        if module.unit not in excluded and algo in STORED_FORMATS and "weight" in module.tensors:
            yield module, algo


def _check_missing(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for module, algo in _quantized_modules(context, engine):
        for finding in check_scale_names(module.name, module.tensors, algo):
            if finding.id == "scale-missing":
                yield Finding(module=module.name, message=finding.message)


def _check_extra(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for module, algo in _quantized_modules(context, engine):
        needed = STORED_FORMATS[algo].scales
        foreign = (*_FOREIGN, *(() if FORMATS[algo].smooths else ("pre_quant_scale",)))
        unneeded = [last for last, is_needed in needed.items() if not is_needed]
        for last in (*unneeded, *foreign):
            if last in module.tensors and last not in _PLACEHOLDER.get(algo, ()):
                text = f"has {last}, which {algo} does not have"
                yield Finding(module=module.name, message=text)
    quantized = {module.name for module in context.quantized()}
    for name, tensors in context.folder.modules.items():
        scales = [n for n in tensors if n in SCALE_NAMES]
        if not scales or name in quantized:
            continue
        if "weight" not in tensors:
            yield Finding(module=name, message=f"has {', '.join(scales)}, and no weight")
        elif name not in context.embeddings:
            yield Finding(module=name, message=f"has {', '.join(scales)}, and holds no codes")


def _check_types(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for module, algo in _quantized_modules(context, engine):
        for finding in check_types(module.name, module.tensors, algo, is_strict=False):
            yield Finding(module=module.name, message=finding.message)


def _check_shapes(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    config = effective_config(context, engine)
    for module, algo in _quantized_modules(context, engine):
        stored = STORED_FORMATS[algo]
        rows, columns = module.tensors["weight"].shape
        shape = (rows * stored.rows, columns * stored.columns)
        declared = config.group_size_of(module.name) if config is not None else None
        sizes = FORMATS[algo].groups
        size = declared or (sizes[0] if len(sizes) == 1 else module.group_size)
        findings = check_shapes(module.name, module.tensors, algo, shape, size, is_strict=False)
        for finding in findings:
            yield Finding(module=module.name, message=finding.message)


def _check_values(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for module, tensors in context.folder.modules.items():
        for last, t in tensors.items():
            is_read = context.reads_all_scales or numel(t.shape) <= MAX_ELEMENTS
            if last in (*SCALE_NAMES, *KV_CACHE_SCALES) and is_read:
                for f in check_values(module, last, t, context.statistics(t)):
                    yield Finding(module=module, message=f.message, severity=f.severity)


def _check_pre_quant_scale(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    modules = context.folder.modules_with("pre_quant_scale")
    if not modules:
        return
    if engine.engine != "trtllm":
        yield Finding(module=modules[0], message="has a pre_quant_scale" + more(modules))
        return
    linears = {module.name: module for module in context.linears}
    for name in modules:
        t = context.folder.modules[name]["pre_quant_scale"]
        module = linears.get(name)
        if module is not None and t.shape != (module.shape[1],):
            text = f"pre_quant_scale is {list(t.shape)}, for {module.shape[1]} columns"
            yield Finding(module=name, message=text)
    configs = context.quant_configs
    if configs and not any(c.pre_quant_scale for c in configs):
        yield Finding(
            module=modules[0],
            message=f"has a pre_quant_scale{more(modules)}, and no config file declares it",
            hint="write pre_quant_scale: true",
        )


def _check_pre_quant_scale_missing(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    if not context.folder.modules_with("pre_quant_scale"):
        for config in context.quant_configs:
            if config.pre_quant_scale:
                text = "declares pre_quant_scale, and there is none"
                yield Finding(module=config.file, message=text)


def _fused_parts(context: LintContext) -> Iterator[tuple[str, list[LinearModule]]]:
    """The parts of each fused projection of dense layers."""
    for unit, modules in context.units().items():
        if len(modules) > 1 and modules[0].expert is None:
            yield unit, modules


def _check_siblings(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Global scales, of which engines keep one for all parts of a fused projection."""
    for unit, modules in _fused_parts(context):
        yield from _compare_global_scales(context, unit, modules)


def _check_pairs(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """The two matrices of an expert that run as one have one global scale."""
    for unit, modules in context.units().items():
        experts: dict[int, dict[str, LinearModule]] = {}
        for m in modules:
            if m.expert is not None:
                experts.setdefault(m.expert, {})[m.last] = m
        for number, parts in experts.items():
            for names in load_engines().modules.expert_pairs:
                pair = [parts[last] for last in names if last in parts]
                if len(pair) == 2:
                    yield from _compare_global_scales(context, f"{unit}.{number}", pair)


def _compare_global_scales(
    context: LintContext, unit: str, modules: Sequence[LinearModule]
) -> Iterator[Finding]:
    for last in _GLOBAL_SCALES:
        if text := _difference(context, modules, last):
            yield Finding(module=unit, message=text)
    if text := _far_apart(context, modules):
        yield Finding(module=unit, message=text)


def _check_input_siblings(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for unit, modules in _fused_parts(context):
        for last in ("input_scale", "input_global_scale"):
            if text := _difference(context, modules, last):
                has_global = not modules[0].tensors.keys().isdisjoint(_GLOBAL_SCALES)
                severity: Severity | None = "error" if has_global else None
                yield Finding(module=unit, message=text, severity=severity)


def _difference(context: LintContext, modules: Sequence[LinearModule], last: str) -> str:
    """How a single scale differs among modules; empty if it does not."""
    tensors = [(m.last, m.tensors[last]) for m in modules if last in m.tensors]
    singles = [(name, t) for name, t in tensors if numel(t.shape) == 1]
    text = describe_difference(context.folder, singles)
    return f"{last} differs: {text}" if text else ""


def _far_apart(context: LintContext, modules: Sequence[LinearModule]) -> str:
    """FP8 scales of joined matrices, so far apart that under the larger one nearly all codes of the
    other become zero; empty if they are not."""
    values: dict[str, float] = {}
    for m in modules:
        t = m.tensors.get("weight_scale")
        if m.algo == "FP8" and t is not None and numel(t.shape) == 1:
            value = context.statistics(t).first
            if 0 < value < float("inf"):
                values[m.last] = value
    if len(values) < 2 or max(values.values()) <= OUTLIER_RATIO * min(values.values()):
        return ""
    return "weight_scale is far apart: " + ", ".join(f"{n} {v:.6g}" for n, v in values.items())


def _check_range(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for module in context.quantized():
        for last, scale in _SINGLE_SCALES.items():
            t = module.tensors.get(last)
            if t is None or module.algo not in scale.algos or numel(t.shape) != 1:
                continue
            value = context.statistics(t).first
            if not 0 < value < float("inf"):
                continue  # `scale-value` reports it
            largest = _LARGEST_CODE[module.algo]
            amax = largest / value if scale.divides else largest * value
            if not MIN_AMAX <= amax <= (MAX_INPUT if scale.is_input else MAX_WEIGHT):
                kind = "inputs" if scale.is_input else "weights"
                text = f"{last} is {value:.3g}, which means {kind} up to {amax:.3g}"
                yield Finding(module=module.name, message=text)


def _check_outlier(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    outliers = LayerOutliers()
    for module in context.quantized():
        for last in _SINGLE_SCALES:
            t = module.tensors.get(last)
            if t is not None and numel(t.shape) == 1:
                outliers.add(module.name, last, context.statistics(t))
    for finding in outliers.check():
        yield Finding(module=finding.module, message=finding.message)


CHECKS: Mapping[str, Check] = {
    "scale-missing": _check_missing,
    "scale-extra": _check_extra,
    "type": _check_types,
    "shape": _check_shapes,
    "scale-value": _check_values,
    "pre-quant-scale": _check_pre_quant_scale,
    "pre-quant-scale-missing": _check_pre_quant_scale_missing,
    "siblings": _check_siblings,
    "input-siblings": _check_input_siblings,
    "w1-w3": _check_pairs,
    "scale-range": _check_range,
    "scale-outlier": _check_outlier,
}
