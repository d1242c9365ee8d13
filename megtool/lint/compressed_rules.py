"""Rules about compressed-tensors' groups and tensors, and about DeepSeek's FP8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from megtool.formats.safetensors.quantization_config import online_transforms
from megtool.lint.context import Check, LinearModule, LintContext
from megtool.lint.engines import EngineTarget, load_engines, rows_for
from megtool.lint.folder_view import CONFIG_FILE
from megtool.quant.recipes.compressed_arguments import means
from megtool.quant.recipes.formats import FORMATS
from megtool.report.finding import Finding
from megtool.tensors.box import numel

_FLOATS = ("float32", "bfloat16", "float16")
_POWERS_OF_TWO = ("uint8", "float8_e8m0fnu")
_BLOCK = (128, 128)
_SINGLE = ("input_scale", "weight_global_scale", "input_global_scale")

_CODES: Mapping[tuple[str, int, bool], str] = {
    **{("int", bits, True): "int32" for bits in range(1, 9)},
    **{("int", bits, False): "int8" for bits in range(1, 9)},
    ("float", 8, False): "float8_e4m3fn",
    ("float", 4, True): "uint8",
}
"""The type of codes by what a group declares: type, bits, and whether its format packs them."""


def ignored_modules(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that a quantization_config leaves unquantized, by whatever key."""
    names: list[str] = []
    for key in ("ignore", "ignored_layers", "modules_to_not_convert"):
        value = quantization.get(key)
        names += map(str, value) if isinstance(value, list) else []
    return tuple(dict.fromkeys(names))


def find_group(
    quantization: Mapping[str, Any], module: str, *, classes: bool = True
) -> Mapping[str, Any] | None:
    """The first of `config_groups` whose targets name a module, or all linear modules if `classes`
    (the library itself counts the output layer among these)."""
    for group in _groups(quantization).values():
        targets = group.get("targets")
        for target in map(str, targets) if isinstance(targets, list) else ():
            if means(target, module) or (classes and target.lower() == "linear"):
                return group
    return None


def group_in_engines(
    quantization: Mapping[str, Any], module: LinearModule
) -> Mapping[str, Any] | None:
    """The first of `config_groups` whose targets name a module, or its class in engines."""
    return find_group(quantization, module.name, classes=module.last != "lm_head")


def _groups(quantization: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict):
        return {}
    return {str(n): g for n, g in groups.items() if isinstance(g, dict)}


def _inputs_of(group: Mapping[str, Any]) -> str:
    """How inputs are quantized, in the words of `CompressedScheme.inputs`."""
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict):
        return "none"
    strategy = str(inputs.get("strategy") or ("token" if inputs.get("dynamic") else "tensor"))
    if strategy in ("tensor_group", "group", "token"):
        return strategy
    return "dynamic" if inputs.get("dynamic") else strategy


def _strategy_of(weights: Mapping[str, Any]) -> tuple[str, Any]:
    return str(weights.get("strategy") or "tensor"), weights.get("group_size")


def _check_scheme(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    groups = _groups(context.declared)
    if not groups:
        yield Finding(module=CONFIG_FILE, message="config_groups is empty")
        return
    common = str(context.declared.get("format", ""))
    since = load_engines().per_group_formats.get(engine.engine)
    reads_each = since is not None and engine.target.has(since)
    if common == "mixed-precision" and not reads_each:
        text = "format mixed-precision: groups have formats of their own"
        yield Finding(module=CONFIG_FILE, message=text)
        return
    has_experts = any(module.expert is not None for module in context.quantized())
    for name, group in groups.items():
        form = str(group.get("format") or common) if reads_each else common
        if text := _why_unsupported(group, form, has_experts, engine):
            yield Finding(module=f"{CONFIG_FILE}: {name}", message=text)


def _why_unsupported(
    group: Mapping[str, Any], form: str, has_experts: bool, engine: EngineTarget
) -> str:
    """Why an engine does not load a group; empty if it does."""
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return "weights are not quantized"
    bits, type_ = weights.get("num_bits"), str(weights.get("type", "int"))
    strategy, size = _strategy_of(weights)
    inputs = _inputs_of(group)
    scheme = (
        f"{form} of {type_} {bits} bits, one scale per {strategy}"
        + (f" of {size}" if size and strategy not in ("channel", "tensor") else "")
        + f", inputs {inputs}"
    )
    if weights.get("dynamic"):
        return f"{scheme}: the scales of weights are computed at run time"
    for row in rows_for(engine, load_engines().compressed_schemes):
        if (
            form in row.formats
            and type_ == row.type
            and bits in row.bits
            and strategy in row.strategies
            and inputs in row.inputs
            and (not row.group_sizes or size in row.group_sizes)
        ):
            if has_experts and not row.experts:
                return f"{scheme}: supported for dense modules alone, and there are experts"
            return ""
    return f"{scheme}: is not known to be supported"


def _check_targets(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """With several groups, TensorRT-LLM does not accept class names as targets."""
    groups = _groups(context.declared)
    if len(groups) < 2:
        return
    names = [module.name for module in context.linears]
    for name, group in groups.items():
        for target in group.get("targets") or ():
            if not any(means(str(target), n) for n in names):
                text = f"target {target!r} matches no module"
                yield Finding(module=f"{CONFIG_FILE}: {name}", message=text)


def _check_transforms(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Rotations are in the weights, or at locations where the engine computes them."""
    rows = rows_for(engine, load_engines().transforms)
    computed = {place for row in rows if row.form == context.form for place in row.locations}
    for text in online_transforms(context.declared):
        if text.rpartition(": ")[2] not in computed:
            yield Finding(module=CONFIG_FILE, message=f"transform_config has {text}")


def _check_packed(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Codes are stored under the name that belongs to the declared format."""
    for module in context.quantized():
        group = group_in_engines(context.declared, module) or {}
        form = str(group.get("format") or context.declared.get("format", ""))
        name = "weight_packed" if "weight_packed" in module.tensors else "weight"
        if form and ("pack-quantized" in form) != (name == "weight_packed"):
            yield Finding(module=module.name, message=f"has {name}, and the format is {form}")


def _check_parts(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    for module in context.quantized():
        group = group_in_engines(context.declared, module) or {}
        inputs = group.get("input_activations")
        needed = ["weight_scale"]
        if module.algo in ("NVFP4", "W4A16_NVFP4"):
            needed.append("weight_global_scale")
            if isinstance(inputs, dict):
                needed.append("input_global_scale")
        elif isinstance(inputs, dict) and inputs.get("dynamic") in (False, None):
            needed.append("input_scale")
        if "weight_packed" in module.tensors and module.tensors["weight_packed"].dtype == "int32":
            needed.append("weight_shape")
        if missing := [n for n in needed if n not in module.tensors]:
            yield Finding(module=module.name, message=f"{', '.join(missing)} is missing")


def _check_layout(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Codes and scales have the types and shapes that the library makes of their group."""
    for module in context.quantized():
        group = group_in_engines(context.declared, module)
        weights = group.get("weights") if group is not None else None
        if group is None or not isinstance(weights, dict):
            continue
        form = str(group.get("format") or context.declared.get("format", ""))
        for text in _layout_problems(module, weights, form):
            yield Finding(module=module.name, message=text)
        for last in _SINGLE:
            t = module.tensors.get(last)
            if t is not None and (t.dtype not in _FLOATS or numel(t.shape) != 1):
                text = f"{last} is {t.dtype} {list(t.shape)}, not one float32"
                yield Finding(module=module.name, message=text)


def _layout_problems(module: LinearModule, weights: Mapping[str, Any], form: str) -> Iterator[str]:
    is_packed = "weight_packed" in module.tensors
    codes = module.tensors["weight_packed" if is_packed else "weight"]
    type_, bits = str(weights.get("type", "int")), weights.get("num_bits")
    expected = _CODES.get((type_, bits if isinstance(bits, int) else 0, is_packed))
    if expected is None or expected != codes.dtype:
        name = expected or "no such packing"
        yield f"codes are {codes.dtype}, and {type_} of {bits} bits has {name}"
        return  # its shape means nothing then
    rows, columns = module.shape
    if expected == "int32" and isinstance(bits, int) and "weight_shape" in module.tensors:
        words = (rows, ceil(columns / (32 // bits)))
        if codes.shape != words:
            yield f"weight_packed is {list(codes.shape)}, {bits} bits have {list(words)}"
    scale = module.tensors.get("weight_scale")
    if scale is None:
        return  # `parts` reports it
    types = _scale_types(type_, int(bits or 0), weights, form)
    if scale.dtype not in types:
        yield f"weight_scale is {scale.dtype}, and {form or 'the format'} has {types[0]}"
    shapes = _scale_shapes(rows, columns, weights)
    if shapes and scale.shape not in shapes:
        strategy, size = _strategy_of(weights)
        groups = f" of {size}" if "group" in strategy else ""
        yield (
            f"weight_scale is {list(scale.shape)}, and one scale per {strategy}{groups} has "
            f"{list(shapes[0])}"
        )


def _scale_types(type_: str, bits: int, weights: Mapping[str, Any], form: str) -> tuple[str, ...]:
    """NVFP4's scales are FP8 themselves, those of MX formats powers of two."""
    if form.startswith("nvfp4") or weights.get("strategy") == "tensor_group":
        return ("float8_e4m3fn",)
    has_groups = weights.get("strategy") == "group"
    if form.startswith("mxfp") or (type_ == "float" and has_groups and bits in (4, 8)):
        return _POWERS_OF_TWO
    return _FLOATS


def _scale_shapes(
    rows: int, columns: int, weights: Mapping[str, Any]
) -> tuple[tuple[int, ...], ...]:
    """The shapes that a scale may have; empty if the strategy is unknown."""
    strategy, size = _strategy_of(weights)
    if strategy == "tensor":
        return ((1,), ())
    if strategy == "channel":
        return ((rows, 1), (rows,))
    if strategy in ("group", "tensor_group") and type(size) is int and size > 0:
        return ((rows, ceil(columns / size)),)
    if strategy == "block":
        block = weights.get("block_structure") or _BLOCK
        if (
            isinstance(block, list | tuple)
            and len(block) == 2
            and all(type(b) is int and b > 0 for b in block)
        ):
            return ((ceil(rows / block[0]), ceil(columns / block[1])),)
    return ()


def _check_fp8_config(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    block = context.declared.get("weight_block_size")
    scheme = context.declared.get("activation_scheme")
    is_trtllm = engine.engine == "trtllm"
    text = ""
    if scheme not in ("static", "dynamic"):
        if not is_trtllm or not block:
            text = f"activation_scheme is {scheme!r}"
    elif block is not None and (not isinstance(block, list) or len(block) != 2):
        text = f"weight_block_size is {block!r}"
    elif block and scheme != "dynamic" and not is_trtllm:
        text = "weight_block_size is given, and activation_scheme is static"
    elif is_trtllm and block and block != [128, 128]:
        text = f"weight_block_size is {block}, not [128, 128]"
    elif is_trtllm and not block and scheme == "dynamic":
        text = "one scale per tensor with activation_scheme dynamic is not supported"
    if text:
        yield Finding(module=CONFIG_FILE, message=text)


def _check_fp8_scales(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    block = context.declared.get("weight_block_size")
    name = "weight_scale_inv" if block else "weight_scale"
    for module in context.quantized():
        scale = module.tensors.get(name)
        if scale is None:
            yield Finding(module=module.name, message=f"{name} is missing")
            continue
        is_static = context.declared.get("activation_scheme") == "static"
        if is_static and "input_scale" not in module.tensors:
            yield Finding(module=module.name, message="input_scale is missing")
        sizes = [1, FORMATS["MXFP4"].groups[0]] if module.algo == "MXFP4" else block
        if isinstance(sizes, list) and len(sizes) == 2:
            expected = tuple(-(-n // b) for n, b in zip(module.shape, sizes, strict=True))
            if scale.shape != expected:
                text = f"{name} is {list(scale.shape)}, not {list(expected)}"
                yield Finding(module=module.name, message=text)
        elif scale.shape not in ((), (1,)):
            text = f"{name} is {list(scale.shape)}, not one number"
            yield Finding(module=module.name, message=text)


def _check_expert_dtype(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """What DeepSeek-V4's config.json says of experts is what engines read all scales by."""
    if not context.folder.is_deepseek_v4:
        return
    declared = context.model_config.get("expert_dtype", "fp4")
    if declared not in ("fp4", "fp8"):
        yield Finding(module=CONFIG_FILE, message=f"expert_dtype is {declared!r}")
        return
    is_fp4 = declared == "fp4"
    for module in context.quantized():
        scale = module.tensors.get("weight_scale_inv")
        if module.expert is not None and (module.algo == "MXFP4") != is_fp4:
            text = f"holds {module.algo}, and expert_dtype is {declared}"
            yield Finding(module=module.name, message=text)
        elif scale is not None and (scale.dtype == "float8_e8m0fnu") != is_fp4:
            text = f"has scales of {scale.dtype}, and expert_dtype is {declared}"
            yield Finding(module=module.name, message=text)


CHECKS: Mapping[str, Check] = {
    "scheme": _check_scheme,
    "transforms": _check_transforms,
    "targets": _check_targets,
    "packed": _check_packed,
    "parts": _check_parts,
    "fp8-config": _check_fp8_config,
    "expert-dtype": _check_expert_dtype,
    "fp8-scales": _check_fp8_scales,
    "layout": _check_layout,
}
