"""What a configuration computes, whatever words say it: two models compared field by field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from megtool.spec import layer_sets
from megtool.spec.layer_symbols import ATTENTION, EXPERTS, MLP
from megtool.spec.model_config import CONFIG_FIELDS, PART_OF, ModelConfig

_TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate")
_SAME_ACTIVATION = {"swish": "silu", "gelu_python": "gelu"} | dict.fromkeys(
    _TANH_GELUS, "gelu_pytorch_tanh"
)
_ORIGINAL = "original_max_position_embeddings"


def compare_functions(a: ModelConfig, b: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two configurations compute something else, with both values.

    Fields that change nothing by themselves (`changes_function`), or not in such a model (a router
    without experts), are left out, and values that mean the same are equal: no window and one that
    no layer has, a scale of None and the usual one.
    """
    of_a, of_b = function_fields(a), function_fields(b)
    return {
        name: (_shown(a.get(name), of_a[name]), _shown(b.get(name), of_b[name]))
        for name in of_a
        if name in of_b and not _is_same(of_a[name], of_b[name])
    }


def _shown(value: Any, meaning: Any) -> Any:
    """A field's value, or the number that it stands for."""
    return meaning if isinstance(meaning, float) and not value else value


def function_fields(config: ModelConfig) -> dict[str, Any]:
    """Return what each field that changes the function means, by name, of those that matter."""
    values = {n: config.get(n) for n, facts in CONFIG_FIELDS.items() if facts.changes_function}
    for matters, names in _MATTERS:
        if not matters(config):
            for name in names:
                values.pop(name, None)
    return {n: _MEANINGS[n](config) if n in _MEANINGS else v for n, v in values.items()}


def _is_same(a: Any, b: Any) -> bool:
    """Whether two meanings are equal; numbers may differ by what a short decimal loses."""
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-7)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_same(a[k], b[k]) for k in a)
    return bool(a == b)


def _fields_of(*parts: str, but: str = "") -> tuple[str, ...]:
    return tuple(n for n in CONFIG_FIELDS if PART_OF[n] in parts and n != but)


def _turning_layers(config: ModelConfig) -> frozenset[int]:
    """The layers whose queries and keys turn."""
    if config.positions.position_embedding != "rope":
        return frozenset()
    still = config.positions.no_rope_layers or ()
    return frozenset(i for i in layer_sets.attn_layers(config) if i >= len(still) or not still[i])


def _windowed_layers(config: ModelConfig) -> frozenset[int]:
    return frozenset(i for i in layer_sets.attn_layers(config) if config.window.has_window(i))


def _has_rope(config: ModelConfig) -> bool:
    is_rope = config.positions.position_embedding == "rope"
    return is_rope and (bool(_turning_layers(config)) or config.compression.is_compressed)


def _has_groups(config: ModelConfig) -> bool:
    """The router's groups narrow the choice."""
    groups, best = config.router.router_num_groups, config.router.router_topk_groups
    return bool(config.moe.num_experts) and groups > 1 and 0 < best < groups


def _has_mlp(config: ModelConfig) -> bool:
    return bool(layer_sets.dense_layers(config)) or MLP in layer_sets.mtp_branches(config)


def _is_softmax_router(config: ModelConfig) -> bool:
    return bool(config.moe.num_experts) and config.router.router_score == "softmax"


_MATTERS: tuple[tuple[Callable[[ModelConfig], object], tuple[str, ...]], ...] = (
    (
        lambda c: c.moe.num_experts,
        _fields_of("moe", "router", but="num_experts"),
    ),
    (_has_groups, ("router_group_best", "router_topk_groups")),
    (lambda c: c.router.router_score == "sparsemixer", ("router_jitter",)),
    (_is_softmax_router, ("router_pre_softmax",)),
    (lambda c: c.moe.shared_ffn_hidden_size, ("shared_expert_gate",)),
    (lambda c: layer_sets.attn_layers(c) or layer_sets.has_mtp_attn(c), _fields_of("attention")),
    (_has_mlp, ("ffn_hidden_size",)),
    (lambda c: c.mlp.gated, ("activation_limit", "glu_offset", "mlp_gate_scale", "mlp_out_scale")),
    (layer_sets.mamba_layers, _fields_of("mamba")),
    (lambda c: c.mamba.mamba_norm, ("mamba_norm_eps", "mamba_norm_first")),
    (lambda c: layer_sets.delta_layers(c) | layer_sets.kda_layers(c), _fields_of("delta")),
    (layer_sets.conv_layers, _fields_of("short_conv")),
    (lambda c: c.latent.kv_lora_rank, ("qk_nope_head_dim", "qk_rope_head_dim")),
    (lambda c: c.latent.kv_lora_rank or c.compression.is_compressed, ("q_lora_rank",)),
    (lambda c: not c.latent.kv_lora_rank, ("num_kv_heads",)),
    (
        lambda c: c.indexer.index_num_heads,
        _fields_of("indexer", but="index_num_heads"),
    ),
    (
        lambda c: c.compression.is_compressed,
        _fields_of("compression", but="compress_ratios"),
    ),
    (
        _has_rope,
        (
            *("rotary_percent", "rope_interleaved", "rope_reversed", "rope_base"),
            *("rope_local_base", "rope_scaling", "no_rope_layers"),
        ),
    ),
    (_windowed_layers, ("window_skip_freq", "rope_local_base")),
    (lambda c: _windowed_layers(c) and c.attention.attn_sinks, ("window_sinks",)),
    (
        lambda c: c.positions.position_embedding == "relative",
        ("relative_num_buckets", "relative_max_distance", "relative_per_layer"),
    ),
    (lambda c: c.positions.position_embedding == "alibi", ("alibi_bias_max",)),
    (lambda c: c.latent.kv_lora_rank, ("latent_norm_eps",)),
    (lambda c: c.window.attn_chunk_size, ("chunk_layers",)),
    (
        lambda c: c.moe.num_experts and c.router.router_score != "softmax",
        ("router_normalized",),
    ),
    (lambda c: c.positions.position_embedding == "learned", ("position_offset",)),
    (
        lambda c: c.attention.attn_temperature_scale,
        ("attn_temperature_floor", "attn_temperature_rotated"),
    ),
    (layer_sets.parallel_layers, ("attn_in_scale", "attn_out_scale", "mamba_out_scale")),
    (lambda c: c.norms.norm == "layernorm" and c.norms.norm_weight, ("norm_bias",)),
    (lambda c: c.norms.norm_weight, ("zero_centered_norm",)),
    (lambda c: c.norms.pre_norms, ("first_attn_norm", "shared_norm")),
    (lambda c: c.norms.post_norms, ("norms_after_add",)),
    (lambda c: c.norms.qk_norm, ("qk_norm_of", "qk_norm_rotated")),
    (lambda c: c.residual.hyper_streams, ("hyper_iterations", "hyper_eps")),
    (lambda c: c.head.masked_head, ("head_dense_bias", "head_activation")),
    (lambda c: c.head.num_labels, ("score_dense", "score_bias")),
    (lambda c: not c.head.num_labels, ("tied_embeddings", "head_bias")),
    (lambda c: False, ("mtp_hidden_first", "mtp_window", "mtp_kind")),
)
"""The fields that change the function only where something holds."""


def rope_meaning(config: ModelConfig) -> tuple[Any, ...] | None:
    """Return a rotary scaling as the numbers that transformers makes of it; None for none."""
    scaling = dict(config.positions.rope_scaling or {})
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    length = int(
        scaling.get(_ORIGINAL) or config.extra.get(_ORIGINAL) or config.positions.max_positions
    )
    factor = scaling.get("factor")
    if kind in ("default", "mrope"):
        return None
    if kind == "linear":
        return None if factor in (None, 1) else (kind, factor)
    if kind == "dynamic":
        if alpha := scaling.get("alpha"):
            return kind, "alpha", alpha
        return None if factor in (None, 1) else (kind, factor, config.positions.max_positions)
    if kind == "llama3":
        numbers = (factor, scaling.get("low_freq_factor"), scaling.get("high_freq_factor"))
        return None if factor == 1 else (kind, *numbers, length)
    if factor is None:
        factor = config.positions.max_positions / length
    if kind == "yarn":
        return _yarn_meaning(config, scaling, float(factor), length)
    if kind in ("longrope", "su"):
        scale = scaling.get("attention_factor")
        if scale is None and factor > 1:
            scale = math.sqrt(1 + math.log(factor) / math.log(length))
        lists = (tuple(scaling.get(f"{n}_factor") or ()) for n in ("short", "long"))
        scales = (scaling.get(f"{n}_mscale", scale or 1.0) for n in ("short", "long"))
        return "longrope", *lists, *scales, length
    return kind, tuple(sorted((k, repr(v)) for k, v in scaling.items() if v is not None))


def _yarn_meaning(
    config: ModelConfig, scaling: Mapping[str, Any], factor: float, length: int
) -> tuple[Any, ...]:
    def temperature(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    first, second = scaling.get("mscale"), scaling.get("mscale_all_dim")
    scale = scaling.get("attention_factor")
    if scale is None:
        both = bool(first and second)
        scale = temperature(first or 1) / temperature(second or 1) if both else temperature()
    of_scores = temperature(second) if config.latent.kv_lora_rank and second else 1.0
    ends = (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
    return "yarn", factor, length, *ends, bool(scaling.get("truncate", True)), scale, of_scores


def _branches(config: ModelConfig) -> tuple[str, ...]:
    if config.layer_kinds is not None:
        return tuple("".join(kind) for kind in config.layer_kinds)
    moe = layer_sets.moe_layers(config)
    return tuple(ATTENTION + (EXPERTS if i in moe else MLP) for i in range(config.num_layers))


def _position_meaning(config: ModelConfig) -> str:
    declared = config.positions.position_embedding
    return declared if declared != "rope" or _has_rope(config) else "none"


def _score_scale(config: ModelConfig) -> float:
    attention = config.attention
    usual = config.latent.qk_nope_head_dim + config.latent.qk_rope_head_dim
    size = usual if config.latent.kv_lora_rank else attention.head_dim
    return float(size**-0.5 if attention.softmax_scale is None else attention.softmax_scale)


_LEAST_EPS = 1e-5
"""Epsilons up to this one differ by no more than rounding beside the size of latents."""


def _head_activation(config: ModelConfig) -> str:
    name = config.head.head_activation or config.mlp.activation
    return _SAME_ACTIVATION.get(name, name)


def _latent_eps(config: ModelConfig) -> float:
    return max(config.latent.latent_norm_eps or config.norms.norm_eps, _LEAST_EPS)


def _chunked_layers(config: ModelConfig) -> frozenset[int]:
    flags = config.window.chunk_layers
    return _turning_layers(config) if flags is None else _flagged(flags, config)


def _normalizes(config: ModelConfig) -> bool:
    """Whether scores of the chosen experts that are no softmax are divided by their sum."""
    router = config.router
    if router.router_normalized is not None:
        return router.router_normalized
    return config.moe.num_experts_per_token > 1 and not router.router_scales_input


def _flagged(flags: tuple[int, ...] | None, config: ModelConfig) -> frozenset[int]:
    return frozenset(i for i, flag in enumerate(flags or ()) if flag and i < config.num_layers)


_MEANINGS: dict[str, Callable[[ModelConfig], Any]] = {
    "activation": lambda c: _SAME_ACTIVATION.get(c.mlp.activation, c.mlp.activation),
    "head_activation": _head_activation,
    "layer_kinds": _branches,
    "moe_layer_freq": layer_sets.moe_layers,
    "v_head_dim": lambda c: c.attention.value_size,
    "softmax_scale": _score_scale,
    "latent_norm_eps": _latent_eps,
    "mamba_norm_eps": lambda c: c.mamba.mamba_norm_eps or c.norms.norm_eps,
    "chunk_layers": _chunked_layers,
    "router_normalized": _normalizes,
    "tied_values": lambda c: _flagged(c.attention.tied_values, c),
    "shared_kv": lambda c: _flagged(c.attention.shared_kv, c),
    "shared_index_layers": lambda c: _flagged(c.indexer.shared_index_layers, c),
    "window_size": lambda c: c.window.window_size if _windowed_layers(c) else 0,
    "window_skip_freq": _windowed_layers,
    "position_embedding": _position_meaning,
    "no_rope_layers": _turning_layers,
    "rope_local_base": lambda c: c.positions.rope_local_base or c.positions.rope_base,
    "rope_scaling": rope_meaning,
    "router_num_groups": lambda c: c.router.router_num_groups if _has_groups(c) else 0,
    "layer_sizes": lambda c: dict(c.layer_sizes) if c.layer_sizes else None,
}
"""What fields mean whose values have several forms."""
