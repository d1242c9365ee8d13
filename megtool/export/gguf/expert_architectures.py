"""llama.cpp's architectures of models with experts whose layers are attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.convert.language.mapping import Row, Table
from megtool.export.gguf import tables
from megtool.export.gguf.architecture import (
    BIASED,
    BIASED_OUTPUTS,
    GROUPED,
    IGNORES_WINDOW,
    MIXED_LAYERS,
    NORMALIZED,
    OTHER_HEADS,
    SCALED_SHARES,
    SIGMOID,
    UNNORMALIZED,
    Choice,
    Limit,
    differs_from_every,
    expert_keys,
    granite_keys,
    group_keys,
    lacks_rope_elsewhere,
    list_windows,
    written,
)
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


def _glm_moe_keys(c: ModelConfig) -> dict[str, Any]:
    """Layers of multi-token prediction are counted as layers."""
    out = expert_keys(c) | {"block_count": c.num_layers + c.mtp.num_mtp_layers}
    return out | ({"nextn_predict_layers": c.mtp.num_mtp_layers} if c.mtp.num_mtp_layers else {})


def _ernie_keys(c: ModelConfig) -> dict[str, Any]:
    """Which layers have experts, by a step."""
    return expert_keys(c) | {"interleave_moe_layer_step": 1}


def _llama_4_keys(c: ModelConfig) -> dict[str, Any]:
    """Which layers have experts, by a step."""
    first = min(layer_sets.moe_layers(c), default=c.num_layers) + 1
    return {"interleave_moe_layer_step": first, "expert_gating_func": SIGMOID}


def _ling_keys(c: ModelConfig) -> dict[str, Any]:
    """The size of one shared expert, which is multiplied by their number."""
    return group_keys(c) | {"expert_shared_feed_forward_length": c.moe.moe_ffn_hidden_size}


def _exaone_keys(c: ModelConfig) -> dict[str, Any]:
    """Which layers have a window, too."""
    return group_keys(c) | {"attention.sliding_window_pattern": list(list_windows(c))}


def _mimo_keys(c: ModelConfig) -> dict[str, Any]:
    """Heads of keys and values by layer, which layers have a window, the multiplier of values."""
    layers = range(c.num_layers)
    return expert_keys(c) | {
        "attention.head_count_kv": [x.attention.num_kv_heads for x in c.by_layer()],
        "attention.sliding_window_pattern": [c.window.has_window(i) for i in layers],
        "attention.value_scale": float(c.attention.attn_value_scale),
    }


def _is_stepped(c: ModelConfig) -> bool:
    step = min(layer_sets.moe_layers(c), default=0) + 1
    return layer_sets.moe_layers(c) != frozenset(range(step - 1, c.num_layers, step))


_LLAMA_4_LIMITS: tuple[Limit, ...] = (
    (_is_stepped, "llama.cpp has experts in every n-th layer, the model in others"),
    (lacks_rope_elsewhere(4), "llama.cpp has no rotary embedding in every fourth layer"),
    (lambda c: c.window.attn_chunk_size != 8192, "llama.cpp attends within chunks of 8192 tokens"),
    (
        lambda c: (
            (c.attention.attn_temperature_floor, c.attention.attn_temperature_scale) != (8192, 0.1)
        ),
        "llama.cpp scales queries by 0.1 times a logarithm of every 8192 tokens",
    ),
    (
        lambda c: c.norms.qk_l2_norm != (c.moe.num_experts != 128),
        "llama.cpp normalizes queries and keys in models of other than 128 experts",
    ),
    (
        lambda c: c.moe.shared_ffn_hidden_size != c.moe.moe_ffn_hidden_size,
        "llama.cpp has a shared expert of the size of the others",
    ),
    BIASED,
)


_PLAIN_BIAS: Table = (Row("blk.{l}.exp_probs_b", "layers.{l}.mlp.router.expert_bias"),)

_GRANITE = written(
    "granitemoe",
    tables.NORMS,
    tables.PAIRED_ATTENTION,
    tables.EXPERTS,
    scales_logits=True,
    runs=("residual_scale",),
    keys=granite_keys,
)

MOES: Mapping[str, Choice] = {
    "granitemoe": _GRANITE,
    "olmoe": written(
        "olmoe",
        tables.NORMS,
        tables.ATTENTION,
        tables.EXPERTS,
        limits=(BIASED, OTHER_HEADS, GROUPED, NORMALIZED),
    ),
    "dots1": written(
        "dots1",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        keys=expert_keys,
        limits=(BIASED, GROUPED, MIXED_LAYERS, IGNORES_WINDOW),
    ),
    "gpt_oss": written(
        "gpt-oss",
        tables.LATER_NORMS,
        tables.ATTENTION,
        tables.EXPERTS,
        has_window=True,
        rounds_yarn=True,
        runs=("sinks",),
        limits=(
            (differs_from_every(2), "llama.cpp has a window in every second layer"),
            (
                lambda c: c.mlp.activation_limit != 7,
                "llama.cpp limits what experts activate to 7 (swiglu_limit)",
            ),
        ),
        oddities=(
            (
                lambda c: (c.positions.rope_scaling or {}).get("truncate") is False,
                "llama.cpp rounds the range of YaRN's ramp to whole frequencies",
            ),
        ),
    ),
    "minimax_m2": written(
        "minimax-m2", tables.NORMS, tables.ATTENTION, tables.EXPERTS, keys=expert_keys
    ),
    "llama4": written(
        "llama4",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        factors="llama3",
        runs=("no_rope",),
        keys=_llama_4_keys,
        limits=_LLAMA_4_LIMITS,
    ),
    "glm4_moe": written(
        "glm4moe",
        tables.with_mtp((*tables.LATER_NORMS, *tables.ATTENTION, *tables.MLP, *tables.EXPERTS)),
        has_mtp=True,
        keys=_glm_moe_keys,
        limits=(MIXED_LAYERS,),
    ),
    "ernie4_5_moe": written(
        "ernie4_5-moe",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        keys=_ernie_keys,
        limits=(MIXED_LAYERS,),
    ),
    "solar_open": written(
        "glm4moe",
        tables.LATER_NORMS,
        tables.ATTENTION,
        tables.EXPERTS,
        runs=("groups",),
        keys=group_keys,
        limits=(BIASED_OUTPUTS,),
    ),
    "hy_v3": written(
        "hy_v3",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        _PLAIN_BIAS,
        tables.EXPERTS,
        keys=expert_keys,
        limits=(MIXED_LAYERS,),
    ),
    "afmoe": written(
        "afmoe",
        tables.NORMS,
        tables.POST_NORMS,
        tables.ATTENTION,
        (Row("blk.{l}.attn_gate.weight", "layers.{l}.attn.gate.weight"),),
        tables.MLP,
        tables.EXPERTS,
        has_window=True,
        runs=("no_rope", "gate"),
        keys=expert_keys,
        limits=(
            MIXED_LAYERS,
            BIASED,
            (differs_from_every(4), "llama.cpp has a window in all but every fourth layer"),
            (lacks_rope_elsewhere(4), "llama.cpp has no rotary embedding in every fourth layer"),
            (
                lambda c: c.embedding.embedding_scale != c.hidden_size**0.5,
                "llama.cpp multiplies embeddings by sqrt(hidden_size) (mup_enabled)",
            ),
        ),
    ),
    "mimo_v2_flash": written(
        "mimo2",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        has_window=True,
        runs=("sinks",),
        keys=_mimo_keys,
        limits=(
            BIASED,
            SCALED_SHARES,
            (lambda c: not c.window.window_size, "llama.cpp has a window in some layers"),
            (lambda c: not c.moe.num_experts, "llama.cpp has experts"),
        ),
    ),
    "hunyuan_v1_moe": written(
        "hunyuan-moe", tables.NORMS, tables.ATTENTION, tables.EXPERTS, limits=(UNNORMALIZED,)
    ),
    "granitemoeshared": _GRANITE,
    "exaone_moe": written(
        "exaone-moe",
        tables.NORMS,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        factors="llama3",
        has_window=True,
        runs=("no_rope", "groups"),
        keys=_exaone_keys,
        limits=(MIXED_LAYERS,),
    ),
    "bailing_moe_v2": written(
        "bailingmoe2",
        tables.NORMS,
        tables.FUSED_ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        runs=("groups",),
        keys=_ling_keys,
        limits=(MIXED_LAYERS, BIASED),
    ),
}
"""By the name of the family."""
