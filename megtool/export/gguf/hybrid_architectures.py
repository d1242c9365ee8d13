"""llama.cpp's architectures of models with Mamba-2, gated delta nets or short convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megtool.convert.families.family import Family
from megtool.convert.language.mapping import in_branches
from megtool.export.gguf import hybrid_tables, tables
from megtool.export.gguf.architecture import (
    BIASED,
    MIXED_LAYERS,
    OTHER_HEADS,
    PARTLY_MOE,
    SCALED_SHARES,
    UNNORMALIZED,
    Architecture,
    Choice,
    Limit,
    expert_keys,
    granite_keys,
    list_sections,
    written,
)
from megtool.export.gguf.block_encoder import DECAY, Change
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

_LIMITED_STEPS: Limit = (
    lambda c: c.mamba.mamba_step_limit is not None,
    "llama.cpp does not keep the steps (dt) of Mamba-2 within time_step_limit",
)
_NORM_BEFORE_GATE: Limit = (
    lambda c: c.mamba.mamba_norm and c.mamba.mamba_norm_first,
    "llama.cpp normalizes what Mamba-2 makes after its gate, the model before",
)
_OTHER_VALUES: Limit = (
    lambda c: c.delta.linear_key_head_dim != c.delta.linear_value_head_dim,
    "llama.cpp has value heads of gated delta nets of the size of key heads",
)


def _num_branches(c: ModelConfig) -> int:
    """How many of our layers one of llama.cpp's has, where mixer and MLP are layers each."""
    return 2 if c.layer_kinds else 1


def _mamba_keys(c: ModelConfig) -> dict[str, Any]:
    """The sizes of Mamba-2."""
    return {
        "ssm.conv_kernel": c.mamba.mamba_conv_kernel,
        "ssm.state_size": c.mamba.mamba_state_dim,
        "ssm.group_count": c.mamba.mamba_num_groups,
        "ssm.inner_size": c.mamba.mamba_num_heads * c.mamba.mamba_head_dim,
        "ssm.time_step_rank": c.mamba.mamba_num_heads,
    }


def _mamba_changes(_: ModelConfig) -> Mapping[str, Change]:
    return {"layers.mamba.A_log": DECAY}


def _branch_keys(c: ModelConfig) -> dict[str, Any]:
    """Mamba-2 in layers without heads of keys; whether others have rotary embedding."""
    n = _num_branches(c)
    kv = [
        c.attention.num_kv_heads * (i in layer_sets.attn_layers(c))
        for i in range(0, c.num_layers, n)
    ]
    return _mamba_keys(c) | {
        "block_count": c.num_layers // n,
        "attention.head_count_kv": kv,
        "rope.scaling.finetuned": c.positions.position_embedding == "rope",
    }


def _granite_hybrid(_: Family, c: ModelConfig) -> Architecture:
    """Granite 4, which llama.cpp calls as it does Granite 3 where no layer is of Mamba-2."""
    known: dict[str, Any] = {
        "rope.scaling.finetuned": c.positions.position_embedding == "rope",
        "block_count": c.num_layers // _num_branches(c),
    }
    common: dict[str, Any] = {
        "scales_logits": True,
        "runs": ("residual_scale", "no_rope"),
        "limits": (_MIXED_FEEDS, UNNORMALIZED),
    }
    parts = (tables.NORMS, tables.PAIRED_ATTENTION, tables.MLP, tables.EXPERTS)
    if not layer_sets.mamba_layers(c):
        name = "granitemoe" if c.moe.num_experts else "granite"
        return written(
            name,
            *map(in_branches, parts),
            **common,
            keys=lambda c: granite_keys(c) | known,
        )(_, c)
    return written(
        "granitehybrid",
        *map(in_branches, (*parts, hybrid_tables.MAMBA)),
        **common,
        oddities=(_LIMITED_STEPS,),
        keys=lambda c: granite_keys(c) | _branch_keys(c),
        changes=_mamba_changes,
    )(_, c)


_MIXED_FEEDS: Limit = (
    lambda c: bool(layer_sets.moe_layers(c) and layer_sets.dense_layers(c)),
    "llama.cpp has experts in all layers or in none",
)


def _nemotron_keys(c: ModelConfig) -> dict[str, Any]:
    """What is in a layer, by sizes that are 0 in the others."""
    size = c.moe.moe_ffn_hidden_size if c.moe.num_experts else c.mlp.ffn_hidden_size
    feeds = layer_sets.dense_layers(c) | layer_sets.moe_layers(c)
    out = _branch_keys(c) | {
        "block_count": c.num_layers,
        "attention.layer_norm_epsilon": float(c.norms.norm_eps),
        "attention.head_count_kv": [
            c.attention.num_kv_heads * (i in layer_sets.attn_layers(c)) for i in _each(c)
        ],
        "feed_forward_length": [size * (i in feeds) for i in _each(c)],
    }
    del out["rope.scaling.finetuned"]
    if not c.moe.num_experts:
        return out
    experts = expert_keys(c)
    del experts["leading_dense_block_count"]
    experts |= {"expert_shared_count": 1, "expert_group_count": 1}
    latent = {"moe_latent_size": c.moe.moe_latent_size} if c.moe.moe_latent_size else {}
    return out | experts | latent


def _each(c: ModelConfig) -> range:
    return range(c.num_layers)


def _nemotron_h(_: Family, c: ModelConfig) -> Architecture:
    return written(
        "nemotron_h_moe" if c.moe.num_experts else "nemotron_h",
        hybrid_tables.ONE_NORM,
        tables.ATTENTION,
        tables.MLP,
        tables.EXPERTS,
        hybrid_tables.LATENT_EXPERTS,
        hybrid_tables.MAMBA,
        runs=("no_rope",),
        keys=_nemotron_keys,
        changes=_mamba_changes,
        limits=(_MIXED_FEEDS,),
        oddities=(_LIMITED_STEPS,),
    )(_, c)


def _falcon_changes(c: ModelConfig) -> Mapping[str, Change]:
    """llama.cpp has no multipliers: they are part of the weights."""
    attention = c.attention
    scale = attention.head_dim**-0.5 if attention.softmax_scale is None else attention.softmax_scale
    key = scale * math.sqrt(attention.head_dim)
    factors = {
        "embed.weight": c.embedding.embedding_scale,
        "head.weight": c.head.logit_scale,
        "layers.attn.q.weight": attention.attn_in_scale,
        "layers.attn.k.weight": attention.attn_in_scale * key,
        "layers.attn.k.bias": key,
        "layers.attn.v.weight": attention.attn_in_scale,
        "layers.attn.o.weight": attention.attn_out_scale,
        "layers.attn.o.bias": attention.attn_out_scale,
        "layers.mlp.gate.weight": c.mlp.mlp_gate_scale,
        "layers.mlp.gate.bias": c.mlp.mlp_gate_scale,
        "layers.mlp.down.weight": c.mlp.mlp_out_scale,
        "layers.mlp.down.bias": c.mlp.mlp_out_scale,
        "layers.mamba.out.weight": c.mamba.mamba_out_scale,
    }
    parts = zip(("z", "x", "B", "C", "dt"), c.mamba.mamba_in_scales or (1.0,) * 5, strict=True)
    factors |= {f"layers.mamba.in_{part}.weight": x for part, x in parts}
    changes = {n: Change(factor=float(x)) for n, x in factors.items() if x != 1}
    return changes | {"layers.mamba.A_log": DECAY}


_TIED_MULTIPLES: Limit = (
    lambda c: (
        c.embedding.tied_embeddings
        and (c.embedding.embedding_scale != 1 or c.head.logit_scale != 1)
    ),
    "llama.cpp has multipliers as part of the weights, and embedding and output matrix, which are "
    "one, have two",
)


def _delta_keys(c: ModelConfig) -> dict[str, Any]:
    """The sizes of gated delta nets, and which layers are some."""
    out: dict[str, Any] = {
        "ssm.conv_kernel": c.delta.linear_conv_kernel,
        "ssm.state_size": c.delta.linear_key_head_dim,
        "ssm.group_count": c.delta.linear_num_key_heads,
        "ssm.time_step_rank": c.delta.linear_num_value_heads,
        "ssm.inner_size": c.delta.linear_num_value_heads * c.delta.linear_value_head_dim,
        "block_count": c.num_layers + c.mtp.num_mtp_layers,
    }
    if c.mtp.num_mtp_layers:
        out["nextn_predict_layers"] = c.mtp.num_mtp_layers
    every = min(layer_sets.attn_layers(c), default=c.num_layers) + 1
    if all((i in layer_sets.attn_layers(c)) == ((i + 1) % every == 0) for i in _each(c)):
        return out | {"full_attention_interval": every}
    later = [False] * c.mtp.num_mtp_layers
    return out | {
        "attention.recurrent_layers": [i in layer_sets.delta_layers(c) for i in _each(c)] + later
    }


def _turning_keys(c: ModelConfig) -> dict[str, Any]:
    """Rotary embedding of three positions, which are the same in text."""
    return _delta_keys(c) | {"rope.dimension_sections": list_sections(c, (11, 11, 10))}


def _conv_keys(c: ModelConfig) -> dict[str, Any]:
    """Short convolutions in layers without heads of keys."""
    out: dict[str, Any] = {
        "shortconv.l_cache": c.short_conv.short_conv_taps,
        "attention.head_count_kv": [
            c.attention.num_kv_heads * (i in layer_sets.attn_layers(c)) for i in _each(c)
        ],
    }
    return out | (expert_keys(c) if c.moe.num_experts else {})


_CONV_BIASES: Limit = (
    lambda c: c.short_conv.short_conv_bias,
    "llama.cpp has no biases in short convolutions (conv_bias)",
)
_ONE_TAP: Limit = (
    lambda c: bool(layer_sets.conv_layers(c)) and c.short_conv.short_conv_taps < 2,
    "llama.cpp has short convolutions over two tokens and more (conv_L_cache)",
)
_UNBIASED: Limit = (
    lambda c: not c.router.router_expert_bias,
    "llama.cpp has a bias in the choice of experts (use_expert_bias)",
)


def _delta_changes(_: ModelConfig) -> Mapping[str, Change]:
    return {"layers.delta.A_log": DECAY}


_DELTA: dict[str, Any] = {
    "norms_plus_one": True,
    "runs": ("gate",),
    "changes": _delta_changes,
}

_FALCON_H1 = written(
    "falcon-h1",
    hybrid_tables.FALCON_NORMS,
    tables.ATTENTION,
    tables.MLP,
    hybrid_tables.MAMBA,
    scales_logits=True,
    keys=_mamba_keys,
    changes=_falcon_changes,
    limits=(_TIED_MULTIPLES, _NORM_BEFORE_GATE),
    oddities=(_LIMITED_STEPS,),
)
_LFM2_LAYERS = (*tables.NORMS, *tables.ATTENTION, *hybrid_tables.SHORT_CONV, *tables.MLP)
_QWEN_LAYERS = (*tables.LATER_NORMS, *hybrid_tables.GATED_ATTENTION)

HYBRIDS: Mapping[str, Choice] = {
    "granitemoehybrid": _granite_hybrid,
    "bamba": written(
        "granitehybrid",
        *map(
            in_branches,
            (tables.NORMS, tables.PAIRED_ATTENTION, tables.MLP, hybrid_tables.MAMBA),
        ),
        oddities=(_LIMITED_STEPS,),
        keys=_branch_keys,
        changes=_mamba_changes,
    ),
    "falcon_h1": _FALCON_H1,
    "lfm2": written(
        "lfm2",
        _LFM2_LAYERS,
        ends=hybrid_tables.LFM2_ENDS,
        keys=_conv_keys,
        limits=(_CONV_BIASES, _ONE_TAP, OTHER_HEADS),
    ),
    "lfm2_moe": written(
        "lfm2moe",
        _LFM2_LAYERS,
        tables.EXPERTS,
        ends=hybrid_tables.LFM2_ENDS,
        keys=_conv_keys,
        limits=(_CONV_BIASES, _ONE_TAP, OTHER_HEADS, MIXED_LAYERS, _UNBIASED, SCALED_SHARES),
    ),
    "nemotron_h": _nemotron_h,
    "qwen3_next": written(
        "qwen3next",
        _QWEN_LAYERS,
        tables.EXPERTS,
        hybrid_tables.DELTA_NET,
        **_DELTA,
        keys=_delta_keys,
        limits=(BIASED, PARTLY_MOE, UNNORMALIZED, _OTHER_VALUES),
    ),
    "qwen3_5_text": written(
        "qwen35",
        tables.with_mtp((*_QWEN_LAYERS, *tables.MLP)),
        hybrid_tables.TILED_DELTA_NET,
        **_DELTA,
        has_mtp=True,
        keys=_turning_keys,
        limits=(BIASED, _OTHER_VALUES),
    ),
    "qwen3_5_moe_text": written(
        "qwen35moe",
        tables.with_mtp((*_QWEN_LAYERS, *tables.EXPERTS)),
        hybrid_tables.TILED_DELTA_NET,
        **_DELTA,
        has_mtp=True,
        keys=_turning_keys,
        limits=(BIASED, UNNORMALIZED, _OTHER_VALUES),
    ),
}
"""By the name of the family."""
