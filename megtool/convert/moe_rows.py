"""Mapping rows shared by mixtures of experts and latent attention: transformers and GGUF.

Experts are stored one by one, or (by transformers 5 when asked to) fused in two tensors of all
experts. Both are read; one by one is written, which every release loads.
"""

from __future__ import annotations

from megtool.convert.mapping import Cat, Dropped, Row, Stacked, Table, Vector, in_mtp

_STORED, _OURS = "model.layers.{l}.", "layers.{l}."
_EXPERT, _SHARED = _OURS + "mlp.experts.{e}.", _OURS + "mlp.shared."

HF_EXPERTS: Table = (
    Row(_STORED + "mlp.gate.weight", _OURS + "mlp.router.weight"),
    *(
        Row(f"{_STORED}mlp.experts.{{e}}.{name}_proj.weight", f"{_EXPERT}{name}.weight")
        for name in ("gate", "up", "down")
    ),
    Row(
        _STORED + "mlp.experts.gate_up_proj",
        Stacked(Cat(_EXPERT + "gate.weight", _EXPERT + "up.weight"), "e"),
        when="l in moe_layers",
    ),
    Row(
        _STORED + "mlp.experts.down_proj",
        Stacked(_EXPERT + "down.weight", "e"),
        when="l in moe_layers",
    ),
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


def hf_mtp(*tables: Table) -> Table:
    """The rows of layers also for multi-token prediction, whose layers are counted after the last.

    Published checkpoints repeat the embedding and the head in each of those layers.
    """
    layer = "model.layers.{num_layers+m}."
    return (
        Row(layer + "enorm.weight", "mtp.{m}.embed_norm.weight"),
        Row(layer + "hnorm.weight", "mtp.{m}.hidden_norm.weight"),
        Row(layer + "eh_proj.weight", "mtp.{m}.proj.weight"),
        Row(layer + "shared_head.norm.weight", "mtp.{m}.norm.weight"),
        *(row for table in tables for row in in_mtp(table, (_STORED, layer))),
        Dropped(
            "model.layers.*.embed_tokens.weight", "a copy of the embedding", copy_of="embed.weight"
        ),
        Dropped(
            "model.layers.*.shared_head.head.weight", "a copy of the head", copy_of="head.weight"
        ),
    )
