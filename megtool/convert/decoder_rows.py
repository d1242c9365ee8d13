"""Mapping rows shared by many families: the names most decoders have in transformers and GGUF.

A family takes the parts it has, `hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP)`, and
writes rows of its own for the rest. A row whose tensor a model lacks (a bias) does no harm: whether
the tensor has to be there, the canonical vocabulary says.
"""

from __future__ import annotations

from megtool.convert.mapping import Dropped, Row, Table

_STORED, _OURS = "model.layers.{l}.", "layers.{l}."

HF_MODEL: Table = (
    Row("model.embed_tokens.weight", "embed.weight"),
    Row("model.norm.weight", "norm.weight"),
    Row("model.norm.bias", "norm.bias"),
    Row("lm_head.weight", "head.weight", when="not tied_embeddings"),
    Dropped(
        "lm_head.weight",
        "a copy of the tied embedding",
        when="tied_embeddings",
        copy_of="embed.weight",
    ),
    Dropped("*.rotary_emb.inv_freq", "computed from the configuration"),
)

HF_NORMS: Table = (
    Row(_STORED + "input_layernorm.weight", _OURS + "attn_norm.weight"),
    Row(_STORED + "input_layernorm.bias", _OURS + "attn_norm.bias"),
    Row(_STORED + "post_attention_layernorm.weight", _OURS + "mlp_norm.weight"),
    Row(_STORED + "post_attention_layernorm.bias", _OURS + "mlp_norm.bias"),
)

HF_ATTENTION: Table = tuple(
    Row(f"{_STORED}self_attn.{name}_proj.{part}", f"{_OURS}attn.{name}.{part}")
    for part in ("weight", "bias")
    for name in "qkvo"
)

HF_QK_NORMS: Table = tuple(
    Row(f"{_STORED}self_attn.{name}_norm.weight", f"{_OURS}attn.{name}_norm.weight")
    for name in "qk"
)

HF_GATED_MLP: Table = tuple(
    Row(f"{_STORED}mlp.{name}_proj.{part}", f"{_OURS}mlp.{name}.{part}")
    for part in ("weight", "bias")
    for name in ("gate", "up", "down")
)

# Queries and keys as transformers has them: files of architectures that llama.cpp rotates in
# halves. (`llama` files hold rotary pairs side by side: see converters/llama.py.)
GGUF_DECODER: Table = (
    Row("token_embd.weight", "embed.weight"),
    Row("blk.{l}.attn_norm.weight", _OURS + "attn_norm.weight"),
    Row("blk.{l}.attn_q.weight", _OURS + "attn.q.weight"),
    Row("blk.{l}.attn_k.weight", _OURS + "attn.k.weight"),
    Row("blk.{l}.attn_v.weight", _OURS + "attn.v.weight"),
    Row("blk.{l}.attn_q.bias", _OURS + "attn.q.bias"),
    Row("blk.{l}.attn_k.bias", _OURS + "attn.k.bias"),
    Row("blk.{l}.attn_v.bias", _OURS + "attn.v.bias"),
    Row("blk.{l}.attn_q_norm.weight", _OURS + "attn.q_norm.weight"),
    Row("blk.{l}.attn_k_norm.weight", _OURS + "attn.k_norm.weight"),
    Row("blk.{l}.attn_output.weight", _OURS + "attn.o.weight"),
    Row("blk.{l}.ffn_norm.weight", _OURS + "mlp_norm.weight"),
    Row("blk.{l}.ffn_gate.weight", _OURS + "mlp.gate.weight"),
    Row("blk.{l}.ffn_up.weight", _OURS + "mlp.up.weight"),
    Row("blk.{l}.ffn_down.weight", _OURS + "mlp.down.weight"),
    Row("output_norm.weight", "norm.weight"),
    Row("output.weight", "head.weight", when="not tied_embeddings"),
    Dropped("rope_freqs.weight", "rotary factors: rope_scaling in config.json says them"),
    Dropped("rope_factors_*.weight", "rotary factors: rope_scaling in config.json says them"),
)
