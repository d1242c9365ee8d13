"""Megatron's names for DeepSeek-V4: compressed attention, residuals side by side, hash routing.

megatron-core 0.19.2 has none of these; they are the names of its development branch (0.20), and of
Megatron-Bridge for it: transformer/experimental_attention_variant/deepseek_v4_hybrid_attention.py,
transformer/hyper_connection.py, models/deepseek/deepseek_v4_bridge.py.
"""

from __future__ import annotations

from megtool.convert.language.mapping import Row, Table

_L = "decoder.layers.{l}."
_A, _C = _L + "self_attention.", _L + "self_attention.core_attention."
_ATTN = "layers.{l}.attn."
_COMPRESSED = "is_compressed and l in attn_layers"
_OVERLAPS = "is_compressed and l in index_layers"
_HEAVY = "l in heavy_layers"
_SCALES = ("pre", "post", "res")
_HEAD = (("hc_head_fn", "weight"), ("hc_head_base", "bias"), ("hc_head_scale", "scale"))


def _compressor(stored: str, ours: str, when: str) -> tuple[Row, ...]:
    return tuple(
        Row(f"{stored}compressor.{name}", ours + part, when=when)
        for name, part in (
            ("linear_wkv.weight", "kv.weight"),
            ("linear_wgate.weight", "gate.weight"),
            ("ape", "bias"),
            ("norm.weight", "norm.weight"),
        )
    )


WRITTEN: Table = (
    Row(_A + "linear_kv_proj.weight", _ATTN + "kv.weight", when=_COMPRESSED),
    Row(_A + "kv_layernorm.weight", _ATTN + "kv_norm.weight", when=_COMPRESSED),
    Row(_A + "linear_o_group_proj", _ATTN + "o_down.weight", when=_COMPRESSED),
    Row(_C + "attn_sink", _ATTN + "sinks", when=_COMPRESSED),
    *_compressor(_C, _ATTN + "heavy_", _HEAVY),
    *_compressor(_C, _ATTN + "overlap_", _OVERLAPS),
    *_compressor(_C + "indexer.", _ATTN + "index_overlap_", _OVERLAPS),
    *(
        Row(f"{_L}{module}_hyper_connection.{name}", f"layers.{{l}}.{branch}_hyper.{part}")
        for module, branch in (("self_attention", "attn"), ("mlp", "mlp"))
        for name, part in (
            ("mapping_proj.weight", "weight"),
            ("bias", "bias"),
            *((f"alpha_{x}", f"scale_{x}") for x in _SCALES),
        )
    ),
    Row(
        _L + "mlp.router.tid2eid",
        "layers.{l}.mlp.router.experts_of_tokens",
        when="l in hash_layers",
    ),
    *(Row(f"decoder.{name}", f"hyper_head.{part}") for name, part in _HEAD),
)

MTP: tuple[Row, ...] = (
    *(
        Row(f"mtp.layers.{{m}}.{x}_proj.weight", f"mtp.{{m}}.{y}_proj.weight", when="hyper_streams")
        for x, y in (("e", "embed"), ("h", "hidden"))
    ),
    *(Row(f"mtp.layers.{{m}}.{name}", f"mtp.{{m}}.hyper_head.{part}") for name, part in _HEAD),
)
"""Rows of layers of multi-token prediction beside those of the layer within."""
