"""Mapping rows of LFM2: its own names for norms, attention, short convolutions and MLPs."""

from __future__ import annotations

from megtool.convert.families.decoder_rows import HF_MODEL, stacked_experts, with_bias
from megtool.convert.language.mapping import Cat, Row, Table

_STORED, _OURS = "model.layers.{l}.", "layers.{l}."
_CONV, _EXPERTS = _OURS + "short_conv.", _STORED + "feed_forward.experts."
_MLP = (("w1", "gate"), ("w3", "up"), ("w2", "down"))

HF_LFM2_MODEL: Table = (
    Row("model.embedding_norm.weight", "norm.weight"),
    *(row for row in HF_MODEL if not getattr(row, "stored", "").startswith("model.norm.")),
    Row(_STORED + "operator_norm.weight", _OURS + "attn_norm.weight"),
    Row(_STORED + "ffn_norm.weight", _OURS + "mlp_norm.weight"),
)
"""The ends, where the norm after the last layer is called that of the embedding, and norms."""

HF_LFM2_ATTENTION: Table = (
    *(Row(f"{_STORED}self_attn.{x}_proj.weight", f"{_OURS}attn.{x}.weight") for x in "qkv"),
    Row(_STORED + "self_attn.out_proj.weight", _OURS + "attn.o.weight"),
    *(
        Row(f"{_STORED}self_attn.{x}_layernorm.weight", f"{_OURS}attn.{x}_norm.weight")
        for x in "qk"
    ),
)

HF_SHORT_CONV: Table = (
    *(
        Row(
            f"{_STORED}conv.in_proj.{kind}",
            Cat(*(f"{_CONV}in_{part}.{kind}" for part in ("B", "C", "x"))),
            when="l in conv_layers",
        )
        for kind in ("weight", "bias")
    ),
    *with_bias(_STORED + "conv.conv", _CONV + "conv_x"),
    *with_bias(_STORED + "conv.out_proj", _CONV + "out"),
)
"""Gated short convolutions."""

HF_LFM2_MLP: Table = tuple(
    Row(f"{_STORED}feed_forward.{stored}.weight", f"{_OURS}mlp.{ours}.weight")
    for stored, ours in _MLP
)

HF_LFM2_EXPERTS: Table = (
    Row(_STORED + "feed_forward.gate.weight", _OURS + "mlp.router.weight"),
    Row(_STORED + "feed_forward.expert_bias", _OURS + "mlp.router.expert_bias"),
    *(
        Row(f"{_EXPERTS}{{e}}.{stored}.weight", f"{_OURS}mlp.experts.{{e}}.{ours}.weight")
        for stored, ours in _MLP
    ),
    *stacked_experts(_EXPERTS),
)
"""The router and its experts, one by one, or fused in two tensors of all."""
