"""Rows of torchtitan's names (0.3), which are Meta's of Llama with its own of experts.

Those of 0.1 and 0.2 are read, too.

A family takes the parts it has: `torchtitan=(*TORCHTITAN_MODEL, *TORCHTITAN_ATTENTION, ...)`.
Experts of a layer are stacked; queries, keys and values are apart, whether or not the model fuses
them. Its Llama rotates pairs side by side (`ComplexRoPE`), as in the `llama` files of llama.cpp.
"""

from __future__ import annotations

from megtool.convert.language.mapping import (
    Dropped,
    Interleaved,
    Permuted,
    Row,
    Stacked,
    Table,
    in_mtp,
)

_STORED, _OURS = "layers.{l}.", "layers.{l}."
_MOE, _EXPERT = "layers.{l}.moe.", "layers.{l}.mlp.experts.{e}."
_INNER = _MOE + "routed_experts.inner_experts."
_PARTS = ("weight", "bias")
_MLP = (("w1", "gate"), ("w3", "up"), ("w2", "down"))

TORCHTITAN_MODEL: Table = (
    Row("tok_embeddings.weight", "embed.weight"),
    Row("norm.weight", "norm.weight"),
    Row("lm_head.weight", "head.weight", also=("output.weight",), when="not tied_embeddings"),
    *(
        Dropped(
            name,
            "a copy of the tied embedding",
            when="tied_embeddings",
            copy_of="embed.weight",
        )
        for name in ("lm_head.weight", "output.weight")
    ),
    Dropped("*.moe.tokens_per_expert*", "a count since the last step"),
    Dropped(
        "*.moe.expert_bias*",
        "the family has no bias of experts, and torchtitan's adapter leaves it out",
        when="not router_expert_bias",
    ),
)

TORCHTITAN_NORMS: Table = (
    Row(_STORED + "attention_norm.weight", _OURS + "attn_norm.weight"),
    Row(_STORED + "ffn_norm.weight", _OURS + "mlp_norm.weight"),
)

TORCHTITAN_ATTENTION: Table = (
    *(
        Row(
            f"{_STORED}attention.qkv_linear.w{n}.{part}",
            f"{_OURS}attn.{n}.{part}",
            also=(f"{_STORED}attention.w{n}.{part}",),
        )
        for part in _PARTS
        for n in "qkv"
    ),
    *(Row(f"{_STORED}attention.wo.{part}", f"{_OURS}attn.o.{part}") for part in _PARTS),
    *(Row(f"{_STORED}attention.{n}_norm.weight", f"{_OURS}attn.{n}_norm.weight") for n in "qk"),
    Row(_STORED + "attention.sinks", _OURS + "attn.sinks"),
)

TORCHTITAN_PAIRED_ATTENTION: Table = (
    *(
        Row(
            f"{_STORED}attention.qkv_linear.w{n}.{part}",
            Permuted(f"{_OURS}attn.{n}.{part}", (heads, 2, "head_dim // 2"), order=(0, 2, 1)),
            also=(f"{_STORED}attention.w{n}.{part}",),
        )
        for part in _PARTS
        for n, heads in (("q", "num_heads"), ("k", "num_kv_heads"))
    ),
    *(
        Row(
            f"{_STORED}attention.qkv_linear.wv.{part}",
            f"{_OURS}attn.v.{part}",
            also=(f"{_STORED}attention.wv.{part}",),
        )
        for part in _PARTS
    ),
    *(Row(f"{_STORED}attention.wo.{part}", f"{_OURS}attn.o.{part}") for part in _PARTS),
)

TORCHTITAN_LATENT_ATTENTION: Table = tuple(
    Row(f"{_STORED}attention.{stored}.weight", f"{_OURS}attn.{ours}.weight")
    for stored, ours in (
        ("wq", "q"),
        ("wq_a", "q_down"),
        ("q_norm", "q_down_norm"),
        ("wq_b", "q_up"),
        ("wkv_a", "kv_down"),
        ("kv_norm", "kv_down_norm"),
        ("wkv_b", "kv_up"),
        ("wo", "o"),
    )
)

TORCHTITAN_MLP: Table = tuple(
    Row(f"{_STORED}feed_forward.{stored}.{part}", f"{_OURS}mlp.{ours}.{part}")
    for part in _PARTS
    for stored, ours in _MLP
)

TORCHTITAN_EXPERTS: Table = (
    Row(_MOE + "router.gate.weight", _OURS + "mlp.router.weight"),
    Row(
        _MOE + "expert_bias_E",
        _OURS + "mlp.router.expert_bias",
        also=(_MOE + "expert_bias",),
        when="router_expert_bias",
    ),
    *(
        Row(
            _INNER + stored,
            Stacked(f"{_EXPERT}{ours}.weight", "e"),
            also=(f"{_MOE}experts.{stored.partition('_')[0]}",),
            when="l in moe_layers",
        )
        for stored, ours in (("w1_EFD", "gate"), ("w3_EFD", "up"), ("w2_EDF", "down"))
    ),
    *(
        Row(f"{_MOE}shared_experts.{stored}.weight", f"{_OURS}mlp.shared.{ours}.weight")
        for stored, ours in _MLP
    ),
)

# gpt-oss: gate and up rows alternate, and everything has a bias.
TORCHTITAN_BIASED_EXPERTS: Table = (
    *(Row(f"{_MOE}router.gate.{part}", f"{_OURS}mlp.router.{part}") for part in _PARTS),
    *(
        Row(
            _INNER + stored,
            Stacked(Interleaved(f"{_EXPERT}gate.{part}", f"{_EXPERT}up.{part}"), "e"),
        )
        for stored, part in (("mlp1_weight_EGD", "weight"), ("mlp1_bias_EG", "bias"))
    ),
    *(
        Row(_INNER + stored, Stacked(f"{_EXPERT}down.{part}", "e"))
        for stored, part in (("mlp2_weight_EDF", "weight"), ("mlp2_bias_ED", "bias"))
    ),
)


def torchtitan_mtp(*tables: Table) -> Table:
    """The rows of layers also for multi-token prediction."""
    return (
        *(
            Row(f"mtp_layers.{{m}}.{stored}.weight", f"mtp.{{m}}.{ours}.weight")
            for stored, ours in (
                ("enorm", "embed_norm"),
                ("hnorm", "hidden_norm"),
                ("eh_proj", "proj"),
                ("mtp_norm", "norm"),
            )
        ),
        *(row for table in tables for row in in_mtp(table, (_STORED, "mtp_layers.{m}."))),
    )
