"""Rules about the KV cache: the format that is declared, and its scales."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from megtool.lint.config_rules import effective_config, more
from megtool.lint.context import Check, LintContext
from megtool.lint.engines import EngineTarget
from megtool.lint.folder_view import CONFIG_FILE, KV_CACHE_SCALES, FolderView
from megtool.quant.recipes.formats import KV_BITS
from megtool.report.finding import Finding
from megtool.tensors.box import numel

_BIASES = ("k_bias", "v_bias")
_PROJECTIONS = (".k_proj", ".v_proj")
_ATTENTION = ".attn"
"""The module that vLLM itself stores them with."""


def _scales_by_attention(folder: FolderView) -> dict[str, set[str]]:
    """The KV cache scales of each attention, whether they are stored with it or its projections."""
    scales: dict[str, set[str]] = defaultdict(set)
    for module, tensors in folder.modules.items():
        for last in KV_CACHE_SCALES:
            if last in tensors:
                attention = module
                for suffix in (*_PROJECTIONS, _ATTENTION):
                    attention = attention.removesuffix(suffix)
                scales[attention].add(last)
    return scales


def _effective_algo(context: LintContext, engine: EngineTarget) -> str:
    """The KV cache format that the engine finds in the file it follows.

    In config.json vLLM and TensorRT-LLM read a `kv_cache_scheme` of eight-bit floats alone.
    """
    config = effective_config(context, engine)
    scheme = context.declared.get("kv_cache_scheme")
    has_8_bits = isinstance(scheme, dict) and scheme.get("num_bits") == 8
    if config is None:
        return "FP8" if has_8_bits else ""
    if config is context.hf_quant_config or (engine.engine == "sglang" and config.kv_algo):
        return config.kv_algo
    if isinstance(scheme, dict) and has_8_bits and scheme.get("type") == "float":
        return "FP8"
    return ""


def _is_declared(context: LintContext) -> bool:
    return any(c.kv_algo for c in context.quant_configs)


def _check_format(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    if context.form != "modelopt":
        scheme = context.declared.get("kv_cache_scheme")
        if context.form != "compressed-tensors" or scheme is None:
            return
        kind = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type"))
        if kind != (8, "float"):
            text = f"kv_cache_scheme {scheme} is not of 8-bit floats"
            yield Finding(module=CONFIG_FILE, message=text)
        return
    supported = sorted({a for s in engine.target.supported("kv") for a in s.algos})
    for algo in sorted({c.kv_algo for c in context.quant_configs if c.kv_algo}):
        if algo not in supported:
            state = "not supported" if algo in KV_BITS else "unknown"
            yield Finding(
                module=CONFIG_FILE,
                message=f"a KV cache in {algo} is {state}",
                hint="supported: " + ", ".join(supported),
            )
        elif _effective_algo(context, engine) != algo:
            yield Finding(
                module=CONFIG_FILE,
                message=f"the engine does not see that the KV cache is in {algo}",
                severity="warning",
                hint="kv_cache_scheme of config.json must declare it; or choose the KV cache when "
                "the engine starts",
            )


def _check_scales(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    algo = _effective_algo(context, engine)
    scales = [n for n in context.folder.tensors if n.rpartition(".")[2] in KV_CACHE_SCALES]
    if algo and not scales:
        text = f"declares a KV cache in {algo}, and there is no k_scale or v_scale"
        yield Finding(module=CONFIG_FILE, message=text)
    if scales and not algo and (context.form != "modelopt" or not _is_declared(context)):
        text = f"{scales[0]} exists, and no file declares a quantized KV cache"
        yield Finding(module=CONFIG_FILE, message=text + more(scales))


def _check_pairs(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """Each attention has both scales or none; so have all layers."""
    if not _effective_algo(context, engine) and not _is_declared(context):
        return  # `kv-scales` reports scales that should not exist
    by_attention = _scales_by_attention(context.folder)
    for attention, scales in by_attention.items():
        if missing := [s for s in KV_CACHE_SCALES if s not in scales]:
            text = f"has {', '.join(sorted(scales))}, and no {', '.join(missing)}"
            is_error = engine.engine == "vllm" and "k_scale" in missing
            yield Finding(module=attention, message=text, severity="error" if is_error else None)
    attentions = {n.rpartition(".")[0] for n in _value_projections(context)}
    complete = {a for a, scales in by_attention.items() if len(scales) == len(KV_CACHE_SCALES)}
    without = sorted(attentions - by_attention.keys())
    if complete & attentions and without:
        text = "has no k_scale and v_scale, and other layers have them"
        yield Finding(module=without[0], message=text + more(without))


def _value_projections(context: LintContext) -> Iterator[str]:
    """Without those of multi-token prediction layers, whose caches are separate."""
    num_layers = context.model_config.get("num_hidden_layers")
    for module in context.linears:
        numbers = [int(p) for p in module.name.split(".") if p.isdecimal()]
        is_mtp = type(num_layers) is int and any(n >= num_layers for n in numbers[:1])
        is_mtp |= any(p == "mtp" or p.startswith("mtp_") for p in module.name.split("."))
        if module.last == "v_proj" and not is_mtp:
            yield module.name


def _check_shape(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    scheme = context.declared.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("strategy") == "attn_head":
        return  # compressed-tensors has one per head
    for module, tensors in context.folder.modules.items():
        for last in KV_CACHE_SCALES:
            t = tensors.get(last)
            if t is not None and numel(t.shape) != 1:
                yield Finding(module=module, message=f"{last} is {list(t.shape)}, not one number")


def _check_bias(context: LintContext, engine: EngineTarget) -> Iterator[Finding]:
    """ModelOpt's affine caches: `key = code * k_scale + k_bias`; loaders know no bias."""
    biases = [
        f"{module}.{last}"
        for module, tensors in context.folder.modules.items()
        for last in _BIASES
        if last in tensors
        and (module.endswith(_PROJECTIONS) or set(tensors) & set(KV_CACHE_SCALES))
    ]
    if biases:
        text = "is the bias of an affine KV cache"
        yield Finding(module=biases[0], message=text + more(biases))


CHECKS: Mapping[str, Check] = {
    "kv-cache": _check_format,
    "kv-scales": _check_scales,
    "kv-scales-half": _check_pairs,
    "kv-scale-shape": _check_shape,
    "kv-bias": _check_bias,
}
