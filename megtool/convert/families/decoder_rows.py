"""Mapping rows shared by many families: names of decoders, mixtures of experts and MLA.

A family takes the parts it has, `hf=(*HF_MODEL, *HF_NORMS, *HF_ATTENTION, *HF_GATED_MLP)`, and
adds its own rows for the rest. A row whose tensor a model lacks (a bias) is harmless: the canonical
vocabulary decides whether the tensor is required. Experts are stored one by one, or (by
transformers 5 on request) fused in two tensors of all experts. Both are read; one by one is
written, which every release loads.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import MappingProxyType

from megtool.convert.language.canonical import Weight
from megtool.convert.language.mapping import (
    Cat,
    Dropped,
    Padded,
    Renamed,
    Row,
    Stacked,
    Table,
    Vector,
    in_mtp,
)

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

# Norms of what attention and MLP add to the residual, in models that have no other norms, or that
# call the one before the MLP differently.
HF_POST_NORMS: Table = (
    Row(_STORED + "post_attention_layernorm.weight", _OURS + "attn_post_norm.weight"),
    Row(_STORED + "post_feedforward_layernorm.weight", _OURS + "mlp_post_norm.weight"),
)
POST_NORM_WEIGHTS = MappingProxyType(
    {
        f"{_OURS}{branch}_post_norm.{part}": Weight(("hidden_size",), when)
        for part, when in (("weight", True), ("bias", "norm == 'layernorm' and norm_bias"))
        for branch in ("attn", "mlp")
    }
)
# As Megatron-Bridge calls them; Megatron itself has no norm there.
MEGATRON_POST_NORMS: Table = tuple(
    Row(f"decoder.layers.{{l}}.{last}.post_layernorm.{part}", f"{_OURS}{branch}_post_norm.{part}")
    for part in ("weight", "bias")
    for branch, last in (("attn", "self_attention.linear_proj"), ("mlp", "mlp.linear_fc2"))
)

MEGATRON_EXPERT_POST_NORMS: Table = (
    Row(
        "decoder.layers.{l}.post_ffn_layernorm.weight",
        f"{_OURS}mlp_post_norm.weight",
        when="l in moe_layers",
    ),
    *MEGATRON_POST_NORMS,
)

# Megatron's BERT has these, but for the norm of embeddings; word types follow positions.
MEGATRON_MASKED_MODEL: Table = (
    Row("embedding.tokentype_embeddings.weight", "token_types.weight"),
    Row("embedding.norm.weight", "embed_norm.weight"),
    Row("embedding.norm.bias", "embed_norm.bias"),
    Row("lm_head.dense.weight", "transform.weight"),
    Row("lm_head.dense.bias", "transform.bias"),
    Row("lm_head.layer_norm.weight", "transform_norm.weight"),
    Row("lm_head.layer_norm.bias", "transform_norm.bias"),
    Row("output_layer.bias", Padded("head.bias")),
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

HF_HUNYUAN_QK_NORMS: Table = (
    Row(_STORED + "self_attn.query_layernorm.weight", _OURS + "attn.q_norm.weight"),
    Row(_STORED + "self_attn.key_layernorm.weight", _OURS + "attn.k_norm.weight"),
)

HF_GATED_MLP: Table = tuple(
    Row(f"{_STORED}mlp.{name}_proj.{part}", f"{_OURS}mlp.{name}.{part}")
    for part in ("weight", "bias")
    for name in ("gate", "up", "down")
)

HF_FUSED_MLP: Table = (
    Row(
        _STORED + "mlp.gate_up_proj.weight",
        Cat(_OURS + "mlp.gate.weight", _OURS + "mlp.up.weight"),
    ),
    Row(_STORED + "mlp.down_proj.weight", _OURS + "mlp.down.weight"),
)

# The numbers of each layer's xIELU (Apertus): two that are trained, and two that are not.
_XIELU = (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
XIELU_WEIGHTS = MappingProxyType({f"{_OURS}mlp.xielu.{n}": Weight(shape) for n, shape in _XIELU})
HF_XIELU: Table = tuple(
    Row(f"{_STORED}mlp.act_fn.{name}", f"{_OURS}mlp.xielu.{name}") for name, _ in _XIELU
)
MEGATRON_XIELU: Table = tuple(
    Row(f"decoder.layers.{{l}}.mlp.activation_func.{name}", f"{_OURS}mlp.xielu.{name}")
    for name, _ in _XIELU
)

# The MLP of Bamba and Falcon-H1, and the norm before it.
HF_FEED_FORWARD: Table = (
    Row(_STORED + "pre_ff_layernorm.weight", _OURS + "mlp_norm.weight"),
    *(
        Row(f"{_STORED}feed_forward.{name}_proj.{part}", f"{_OURS}mlp.{name}.{part}")
        for part in ("weight", "bias")
        for name in ("gate", "up", "down")
    ),
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


_GGUF_QK_NORMS = ("blk.{l}.attn_q_norm.weight", "blk.{l}.attn_k_norm.weight")

GGUF_WITHOUT_QK_NORMS: Table = tuple(
    row for row in GGUF_DECODER if getattr(row, "stored", "") not in _GGUF_QK_NORMS
)
"""For families whose norms of queries and keys are one for each head."""


_EXPERT, _SHARED = _OURS + "mlp.experts.{e}.", _OURS + "mlp.shared."

HF_EXPERT_BIAS: Table = (
    Row(_STORED + "mlp.gate.e_score_correction_bias", _OURS + "mlp.router.expert_bias"),
)


def stacked_experts(stored: str, *, plain: bool = False) -> Table:
    """All experts of a layer as two tensors, whose names begin with `stored`."""
    return (
        Row(
            stored + "gate_up_proj",
            Stacked(Cat(_EXPERT + "gate.weight", _EXPERT + "up.weight"), "e"),
            when="l in moe_layers",
            plain=plain,
        ),
        Row(
            stored + "down_proj",
            Stacked(_EXPERT + "down.weight", "e"),
            when="l in moe_layers",
            plain=plain,
        ),
    )


# Families whose files have them so write these first; codes are stored one by one.
HF_STACKED_EXPERTS = stacked_experts(_STORED + "mlp.experts.", plain=True)

HF_EXPERTS: Table = (
    Row(_STORED + "mlp.gate.weight", _OURS + "mlp.router.weight"),
    *(
        Row(f"{_STORED}mlp.experts.{{e}}.{name}_proj.weight", f"{_EXPERT}{name}.weight")
        for name in ("gate", "up", "down")
    ),
    *stacked_experts(_STORED + "mlp.experts."),
)

HF_SHARED_EXPERT: Table = (
    *(
        Row(f"{_STORED}mlp.shared_expert.{name}_proj.weight", f"{_SHARED}{name}.weight")
        for name in ("gate", "up", "down")
    ),
    Row(_STORED + "mlp.shared_expert_gate.weight", _SHARED + "router.weight"),
)

HF_SHARED_EXPERTS: Table = tuple(
    Row(f"{_STORED}mlp.shared_experts.{name}_proj.weight", f"{_SHARED}{name}.weight")
    for name in ("gate", "up", "down")
)

HF_LATENT_ATTENTION: Table = (
    Row(_STORED + "self_attn.q_proj.weight", _OURS + "attn.q.weight"),
    Row(_STORED + "self_attn.q_a_proj.weight", _OURS + "attn.q_down.weight"),
    Row(_STORED + "self_attn.q_a_layernorm.weight", _OURS + "attn.q_down_norm.weight"),
    Row(_STORED + "self_attn.q_b_proj.weight", _OURS + "attn.q_up.weight"),
    Row(_STORED + "self_attn.kv_a_proj_with_mqa.weight", _OURS + "attn.kv_down.weight"),
    Row(_STORED + "self_attn.kv_a_layernorm.weight", _OURS + "attn.kv_down_norm.weight"),
    Row(_STORED + "self_attn.kv_b_proj.weight", _OURS + "attn.kv_up.weight"),
    Row(_STORED + "self_attn.o_proj.weight", _OURS + "attn.o.weight"),
)

# DeepSeek Sparse Attention.
HF_INDEXER: Table = tuple(
    Row(f"{_STORED}self_attn.indexer.{stored}", f"{_OURS}attn.index_{name}")
    for stored, name in (
        ("wq_b.weight", "q.weight"),
        ("wk.weight", "k.weight"),
        ("k_norm.weight", "k_norm.weight"),
        ("k_norm.bias", "k_norm.bias"),
        ("weights_proj.weight", "heads.weight"),
    )
)


GGUF_EXPERTS: Table = (
    Row("blk.{l}.ffn_gate_inp.weight", _OURS + "mlp.router.weight"),
    *(
        Row(
            f"blk.{{l}}.ffn_{name}_exps.weight",
            Stacked(f"{_EXPERT}{name}.weight", "e"),
            when="l in moe_layers",
        )
        for name in ("gate", "up", "down")
    ),
)

GGUF_SHARED_EXPERT: Table = (
    Row("blk.{l}.ffn_gate_inp_shexp.weight", Vector(_SHARED + "router.weight")),
    *(
        Row(f"blk.{{l}}.ffn_{name}_shexp.weight", f"{_SHARED}{name}.weight")
        for name in ("gate", "up", "down")
    ),
)


def hf_mtp(
    *tables: Table,
    layer: str = "model.layers.{num_layers+m}.",
    embed_norm: str = "enorm",
    hidden_norm: str = "hnorm",
    proj: str = "eh_proj",
    norm: str = "shared_head.norm",
    hidden_first: bool = False,
) -> Table:
    """The rows of layers also for multi-token prediction.

    A layer's names begin with `layer`: DeepSeek counts them after the last one. The other arguments
    are what its own modules are called; `hidden_first` as `ModelConfig.mtp_hidden_first`. Published
    checkpoints repeat the embedding and the head in each of those layers.
    """
    halves = ("mtp.{m}.hidden_proj.weight", "mtp.{m}.embed_proj.weight")
    return (
        Row(f"{layer}{embed_norm}.weight", "mtp.{m}.embed_norm.weight"),
        Row(f"{layer}{hidden_norm}.weight", "mtp.{m}.hidden_norm.weight"),
        Row(
            f"{layer}{proj}.weight",
            Cat(*halves, dim=1) if hidden_first else "mtp.{m}.proj.weight",
        ),
        Row(f"{layer}{norm}.weight", "mtp.{m}.norm.weight"),
        *(row for table in tables for row in in_mtp(table, (_STORED, layer))),
        *own_mtp_ends(layer + "embed_tokens.weight", layer + "shared_head.head.weight"),
    )


def own_mtp_ends(embedding: str, head: str) -> Table:
    """The rows of an embedding and a head of each layer of multi-token prediction.

    Published ones are copies of the model's, and left out; one that is not is kept.
    """
    return tuple(
        row
        for stored, name, flag in (
            (embedding, "embed", "mtp_own_embedding"),
            (head, "head", "mtp_own_head"),
        )
        for row in (
            Row(stored, f"mtp.{{m}}.{name}.weight", when=flag),
            Dropped(
                re.sub(r"\{[^}]*\}", "*", stored),
                f"a copy of the {'embedding' if name == 'embed' else 'head'}",
                when=f"not {flag}",
                copy_of=f"{name}.weight",
            ),
        )
    )


def hf_outer_mtp(*tables: Table) -> Table:
    """The rows of layers also for one layer of multi-token prediction beside the model, `mtp.`."""
    return (
        *(
            Row(f"mtp.{stored}.weight", Renamed(f"mtp.{{m}}.{ours}.weight", "{m}", "0"))
            for stored, ours in (
                ("pre_fc_norm_embedding", "embed_norm"),
                ("pre_fc_norm_hidden", "hidden_norm"),
                ("fc", "proj"),
                ("norm", "norm"),
            )
        ),
        *(row for table in tables for row in in_mtp(table, (_STORED, "mtp.layers.{m}."))),
    )


def with_bias(stored: str, ours: str) -> Table:
    """The rows of a module's weight and bias."""
    return tuple(Row(f"{stored}.{part}", f"{ours}.{part}") for part in ("weight", "bias"))


def also_named(table: Table, old: str, new: str) -> Table:
    """The table, which also reads names that begin with `new` where it has `old`."""

    def both(row: Row) -> Row:
        names = (row.stored, *row.also)
        begun = tuple(new + n.removeprefix(old) for n in names if n.startswith(old))
        return replace(row, also=(*row.also, *begun))

    return tuple(both(row) if isinstance(row, Row) else row for row in table)
