"""llama.cpp's architecture of models whose keys are compressed: DeepSeek-V4.

Source: llama.cpp, `src/models/deepseek4.cpp` and `conversion/deepseek.py` (2026-10).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.convert.language.mapping import Cat, Row, Table
from megtool.export.gguf import tables
from megtool.export.gguf.architecture import Choice, Limit, written
from megtool.spec.model_config import ModelConfig
from megtool.spec.sparse_attention import OVERLAP_RATIO

_L, _B = "layers.{l}.", "blk.{l}."
_A, _I = _L + "attn.", _L + "attn.index_"
_SQRT_SOFTPLUS = 4  # llama.cpp's number of the score
_STREAMS, _RATIOS = 4, (0, OVERLAP_RATIO, 128)
_PARTS = ("kv", "gate", "norm")


def _compressor(stored: str, ours: str, when: str) -> Table:
    """What makes a key of several tokens, and how places among them are told apart."""
    return (
        *(Row(f"{_B}{stored}_{x}.weight", f"{ours}_{x}.weight", when=when) for x in _PARTS),
        Row(f"{_B}{stored}_ape.weight", f"{ours}_bias", when=when),
    )


def _scales(branch: str) -> Cat:
    return Cat(*(f"{_L}{branch}_hyper.scale_{x}" for x in ("pre", "post", "res")))


_OVERLAPS = "l in index_layers"
_ATTENTION: Table = (
    Row(_B + "attn_q_a.weight", _A + "q_down.weight"),
    Row(_B + "attn_q_a_norm.weight", _A + "q_down_norm.weight"),
    Row(_B + "attn_q_b.weight", _A + "q_up.weight"),
    Row(_B + "attn_kv.weight", _A + "kv.weight"),
    Row(_B + "attn_kv_a_norm.weight", _A + "kv_norm.weight"),
    Row(_B + "attn_sinks.weight", _A + "sinks"),
    Row(_B + "attn_output_a.weight", _A + "o_down.weight"),
    Row(_B + "attn_output_b.weight", _A + "o.weight"),
    *_compressor("attn_compressor", _A + "heavy", "l in heavy_layers"),
    *_compressor("attn_compressor", _A + "overlap", _OVERLAPS),
    *_compressor("indexer_compressor", _I + "overlap", _OVERLAPS),
    Row(_B + "indexer.attn_q_b.weight", _I + "q.weight"),
    Row(_B + "indexer.proj.weight", _I + "heads.weight"),
)
_HYPER: Table = (
    *(
        Row(f"{_B}hc_{stored}_{part}.weight", f"{_L}{branch}_hyper.{ours}")
        for stored, branch in (("attn", "attn"), ("ffn", "mlp"))
        for part, ours in (("fn", "weight"), ("base", "bias"))
    ),
    Row(_B + "hc_attn_scale.weight", _scales("attn")),
    Row(_B + "hc_ffn_scale.weight", _scales("mlp")),
    *(
        Row(f"output_hc_{part}.weight", f"hyper_head.{ours}")
        for part, ours in (("fn", "weight"), ("base", "bias"), ("scale", "scale"))
    ),
)
_TABLES: Table = (Row(_B + "ffn_gate_tid2eid.weight", _L + "mlp.router.experts_of_tokens"),)


def _keys(c: ModelConfig) -> dict[str, Any]:
    return {
        "attention.q_lora_rank": c.latent.q_lora_rank,
        "attention.output_lora_rank": c.compression.out_lora_rank,
        "attention.output_group_count": c.compression.out_groups,
        "attention.compress_ratios": list(c.compression.compress_ratios or ()),
        "attention.compress_rope_freq_base": float(c.compression.compress_rope_base),
        "attention.indexer.head_count": c.indexer.index_num_heads,
        "attention.indexer.key_length": c.indexer.index_head_dim,
        "attention.indexer.top_k": c.indexer.index_topk,
        "expert_gating_func": _SQRT_SOFTPLUS,
        "expert_weights_scale": float(c.router.router_scaling),
        "expert_weights_norm": True,
        "expert_shared_count": c.moe.shared_ffn_hidden_size // c.moe.moe_ffn_hidden_size,
        "hash_layer_count": c.router.num_hash_layers,
        "swiglu_clamp_exp": [float(c.mlp.activation_limit)] * c.num_layers,
        "hyper_connection.count": c.residual.hyper_streams,
        "hyper_connection.sinkhorn_iterations": c.residual.hyper_iterations,
        "hyper_connection.epsilon": float(c.residual.hyper_eps),
    }


_LIMITS: tuple[Limit, ...] = (
    (
        lambda c: c.residual.hyper_streams != _STREAMS,
        f"llama.cpp has {_STREAMS} residuals side by side (hc_mult)",
    ),
    (
        lambda c: bool(set(c.compression.compress_ratios or ()) - set(_RATIOS)),
        f"llama.cpp compresses {_RATIOS[1]} or {_RATIOS[2]} tokens to a key (compress_ratios)",
    ),
    (
        lambda c: c.embedding.tied_embeddings,
        "llama.cpp has an output matrix beside the embedding",
    ),
    (
        lambda c: c.indexer.index_head_dim % 64 != 0,
        "llama.cpp has heads of indexers of a multiple of 64 elements",
    ),
    (
        lambda c: c.indexer.index_head_dim == c.attention.head_dim,
        "llama.cpp ends where heads of indexers are as large as others (index_head_dim)",
    ),
)

COMPRESSED: Mapping[str, Choice] = {
    "deepseek_v4": written(
        "deepseek4",
        tables.NORMS,
        _ATTENTION,
        _HYPER,
        _TABLES,
        tables.EXPERTS,
        runs=("sinks",),
        has_window=True,
        yarn="unscaled",
        keys=_keys,
        limits=_LIMITS,
    ),
}
"""By the name of the family."""
