"""llama.cpp's architectures of models with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.convert.language.mapping import Row, Table
from megtool.export.gguf import hybrid_tables, tables
from megtool.export.gguf.architecture import (
    MIXED_LAYERS,
    Choice,
    Limit,
    group_keys,
    written,
)
from megtool.export.gguf.block_encoder import DECAY
from megtool.export.gguf.words import HeadsOf
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

_ATTN = "layers.{l}.attn."
_ATTENTION: Table = (
    Row("blk.{l}.attn_q.weight", _ATTN + "q.weight"),
    Row("blk.{l}.attn_q_a.weight", _ATTN + "q_down.weight"),
    Row("blk.{l}.attn_q_a_norm.weight", _ATTN + "q_down_norm.weight"),
    Row("blk.{l}.attn_q_b.weight", _ATTN + "q_up.weight"),
    Row("blk.{l}.attn_kv_a_mqa.weight", _ATTN + "kv_down.weight"),
    Row("blk.{l}.attn_kv_a_norm.weight", _ATTN + "kv_down_norm.weight"),
    Row("blk.{l}.attn_k_b.weight", HeadsOf(_ATTN + "k_up.weight", is_transposed=True)),
    Row("blk.{l}.attn_v_b.weight", HeadsOf(_ATTN + "v_up.weight")),
    Row("blk.{l}.attn_output.weight", _ATTN + "o.weight"),
)


def _latent_keys(c: ModelConfig) -> dict[str, Any]:
    """Sizes of heads: of the one that all queries attend to, and of a head's own."""
    out = {
        "attention.head_count_kv": 1,
        "attention.key_length": c.latent.kv_lora_rank + c.latent.qk_rope_head_dim,
        "attention.value_length": c.latent.kv_lora_rank,
        "attention.key_length_mla": c.latent.qk_nope_head_dim + c.latent.qk_rope_head_dim,
        "attention.value_length_mla": c.attention.v_head_dim,
        "attention.kv_lora_rank": c.latent.kv_lora_rank,
        "rope.dimension_count": c.latent.qk_rope_head_dim,
    }
    if c.latent.q_lora_rank:
        out["attention.q_lora_rank"] = c.latent.q_lora_rank
    if not c.moe.num_experts:
        # What the architecture asks for; no layer has experts.
        none = {"expert_feed_forward_length": c.mlp.ffn_hidden_size, "expert_shared_count": 0}
        return out | none | {"leading_dense_block_count": c.num_layers}
    return out | group_keys(c)


def _best_of_groups(c: ModelConfig) -> bool:
    return c.router.router_num_groups > 1 and c.router.router_group_best != 2


_OTHER_GROUPS: Limit = (
    _best_of_groups,
    "llama.cpp ranks groups of experts by the sum of their two best scores, the model by the best",
)
_ODD_QUERIES: Limit = (
    lambda c: (not c.latent.q_lora_rank) != (c.num_layers in (26, 27)),
    "llama.cpp projects queries directly (no q_lora_rank) in models of 26 and 27 layers, and in no "
    "others",
)
_LAYERS = (tables.NORMS, _ATTENTION, tables.MLP, tables.EXPERTS)
_DEEPSEEK: dict[str, Any] = {
    "is_latent": True,
    "runs": ("groups",),
    "yarn": "deepseek",
    "keys": _latent_keys,
    "limits": (MIXED_LAYERS, _ODD_QUERIES),
}
_DEEPSEEK_2 = written("deepseek2", *_LAYERS, **_DEEPSEEK, oddities=(_OTHER_GROUPS,))

_INDEX = "layers.{l}.attn.index_"
_INDEXER: Table = (
    Row("blk.{l}.indexer.attn_q_b.weight", _INDEX + "q.weight"),
    Row("blk.{l}.indexer.attn_k.weight", _INDEX + "k.weight"),
    Row("blk.{l}.indexer.k_norm.weight", _INDEX + "k_norm.weight"),
    Row("blk.{l}.indexer.k_norm.bias", _INDEX + "k_norm.bias"),
    Row("blk.{l}.indexer.proj.weight", _INDEX + "heads.weight"),
)


def _index_keys(c: ModelConfig) -> dict[str, Any]:
    """The indexer, and which layers have one."""
    return _latent_keys(c) | {
        "attention.indexer.head_count": c.indexer.index_num_heads,
        "attention.indexer.key_length": c.indexer.index_head_dim,
        "attention.indexer.top_k": c.indexer.index_topk,
        "attention.indexer.types": [i in layer_sets.index_layers(c) for i in range(c.num_layers)],
    }


_HADAMARD: Limit = (
    lambda c: c.indexer.index_head_dim % 64 != 0,
    "llama.cpp has heads of indexers of a multiple of 64 elements",
)
_SPARSE = _DEEPSEEK | {"keys": _index_keys, "limits": (MIXED_LAYERS, _HADAMARD)}


def _mistral_keys(c: ModelConfig) -> dict[str, Any]:
    out = _latent_keys(c)
    if not c.attention.attn_temperature_scale:
        return out
    return out | {
        "attention.temperature_scale": float(c.attention.attn_temperature_scale),
        "attention.temperature_length": c.attention.attn_temperature_floor,
    }


def _kimi_keys(c: ModelConfig) -> dict[str, Any]:
    """Kimi delta attention in layers without heads of keys."""
    kinds = [int(i in layer_sets.attn_layers(c)) for i in range(c.num_layers)]
    return _latent_keys(c) | {
        "attention.head_count_kv": kinds,
        "ssm.conv_kernel": c.delta.linear_conv_kernel,
        "kda.head_dim": c.delta.linear_key_head_dim,
    }


_KIMI_LIMITS: tuple[Limit, ...] = (
    MIXED_LAYERS,
    (
        lambda c: c.delta.linear_num_key_heads != c.attention.num_heads,
        "llama.cpp has as many heads of Kimi delta attention as of attention",
    ),
    (
        lambda c: c.delta.linear_key_head_dim != c.delta.linear_value_head_dim,
        "llama.cpp has values of Kimi delta attention of the size of keys",
    ),
    (lambda c: bool(c.latent.q_lora_rank), "llama.cpp projects queries directly (no q_lora_rank)"),
    (lambda c: not c.moe.num_experts, "llama.cpp has experts"),
)

LATENTS: Mapping[str, Choice] = {
    "deepseek_v2": _DEEPSEEK_2,
    "deepseek_v3": _DEEPSEEK_2,
    "glm4_moe_lite": _DEEPSEEK_2,
    "youtu": _DEEPSEEK_2,
    "kimi_linear": written(
        "kimi-linear",
        *_LAYERS,
        hybrid_tables.KIMI_DELTA,
        is_latent=True,
        runs=("no_rope",),
        keys=_kimi_keys,
        changes=lambda _: {"layers.kda.A_log": DECAY},
        limits=_KIMI_LIMITS,
    ),
    "mistral4": written("mistral4", *_LAYERS, **_DEEPSEEK | {"keys": _mistral_keys}),
    "deepseek_v32": written("deepseek32", *_LAYERS, _INDEXER, **_SPARSE),
    "glm_moe_dsa": written("glm-dsa", *_LAYERS, _INDEXER, **_SPARSE),
}
"""By the name of the family."""
