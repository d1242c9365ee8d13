"""Names in GGUF files of Mamba-2, gated delta nets, short convolutions, and what is beside them."""

from __future__ import annotations

from megtool.convert.language.mapping import (
    Cat,
    Grouped,
    Row,
    Table,
    Transposed,
    Unsqueezed,
    WordLike,
)
from megtool.export.gguf.tables import ATTENTION
from megtool.export.gguf.words import InRows, Squeezed, Tiled

_STORED, _OURS = "blk.{l}.", "layers.{l}."
_MAMBA, _DELTA = _OURS + "mamba.", _OURS + "delta."


ONE_NORM: Table = (
    Row(_STORED + "attn_norm.weight", _OURS + "attn_norm.weight", when="l in mixer_layers"),
    Row(
        _STORED + "attn_norm.weight",
        _OURS + "mlp_norm.weight",
        when="l in dense_layers or l in moe_layers",
    ),
)
"""The norm of a layer that is one branch alone."""

FALCON_NORMS: Table = (
    Row(_STORED + "attn_norm.weight", _OURS + "attn_norm.weight"),
    Row(_STORED + "ffn_norm", _OURS + "mlp_norm.weight"),
)
"""llama.cpp calls the second one so, without a last part."""

MAMBA: Table = (
    Row(
        _STORED + "ssm_in.weight",
        Cat(*(f"{_MAMBA}in_{part}.weight" for part in ("z", "x", "B", "C", "dt"))),
    ),
    Row(
        _STORED + "ssm_conv1d.weight",
        Squeezed(Cat(*(f"{_MAMBA}conv_{part}.weight" for part in "xBC"))),
    ),
    Row(_STORED + "ssm_conv1d.bias", Cat(*(f"{_MAMBA}conv_{part}.bias" for part in "xBC"))),
    Row(_STORED + "ssm_dt.bias", _MAMBA + "dt_bias"),
    Row(_STORED + "ssm_a", Transposed(Unsqueezed(_MAMBA + "A_log"))),
    Row(_STORED + "ssm_d", Transposed(Unsqueezed(_MAMBA + "D"))),
    Row(_STORED + "ssm_norm.weight", InRows(_MAMBA + "norm.weight", "mamba_num_groups")),
    Row(_STORED + "ssm_out.weight", _MAMBA + "out.weight"),
)

LFM2_ENDS: Table = (
    Row("token_embd.weight", "embed.weight"),
    Row("token_embd_norm.weight", "norm.weight"),
    Row("output.weight", "head.weight", when="not tied_embeddings"),
)
"""The norm after the last layer is called that of the embedding."""

SHORT_CONV: Table = (
    Row(
        _STORED + "shortconv.in_proj.weight",
        Cat(*(f"{_OURS}short_conv.in_{part}.weight" for part in "BCx")),
    ),
    Row(_STORED + "shortconv.conv.weight", Squeezed(_OURS + "short_conv.conv_x.weight")),
    Row(_STORED + "shortconv.out_proj.weight", _OURS + "short_conv.out.weight"),
)
"""Gated short convolutions."""

LATENT_EXPERTS: Table = (
    Row(_STORED + "ffn_latent_down.weight", _OURS + "mlp.latent_in.weight"),
    Row(_STORED + "ffn_latent_up.weight", _OURS + "mlp.latent_out.weight"),
)

GATED_ATTENTION: Table = (
    Row(
        _STORED + "attn_q.weight",
        Grouped(_OURS + "attn.q.weight", _OURS + "attn.gate.weight", by="num_heads"),
    ),
    *(row for row in ATTENTION if isinstance(row, Row) and ".attn_q." not in row.stored),
)


def _delta_net(v: WordLike, z: WordLike, conv: WordLike, out: WordLike) -> Table:
    """The projections that are named alike, with value heads as these words have them."""
    return (
        Row(_STORED + "attn_qkv.weight", Cat(_DELTA + "q.weight", _DELTA + "k.weight", v)),
        Row(_STORED + "attn_gate.weight", z),
        Row(
            _STORED + "ssm_conv1d.weight",
            Squeezed(Cat(_DELTA + "conv_q.weight", _DELTA + "conv_k.weight", conv)),
        ),
        Row(_STORED + "ssm_norm.weight", _DELTA + "norm.weight"),
        Row(_STORED + "ssm_out.weight", out),
    )


_KDA = _OURS + "kda."
KIMI_DELTA: Table = (
    *(Row(f"{_STORED}attn_{x}.weight", f"{_KDA}{x}.weight", when="l in kda_layers") for x in "qkv"),
    *(Row(f"{_STORED}ssm_conv1d_{x}.weight", f"{_KDA}conv_{x}.weight") for x in "qkv"),
    *(
        Row(f"{_STORED}ssm_{stored}.weight", f"{_KDA}{ours}.weight")
        for stored, ours in (
            ("f_a", "f_down"),
            ("f_b", "f_up"),
            ("g_a", "g_down"),
            ("g_b", "g_up"),
            ("beta", "b"),
            ("norm", "norm"),
        )
    ),
    Row(_STORED + "ssm_a", Transposed(Unsqueezed(_KDA + "A_log"))),
    Row(_STORED + "ssm_dt.bias", _KDA + "dt_bias"),
    Row(_STORED + "attn_output.weight", _KDA + "o.weight", when="l in kda_layers"),
)

DELTA_NET: Table = (
    *_delta_net(
        _DELTA + "v.weight", _DELTA + "z.weight", _DELTA + "conv_v.weight", _DELTA + "o.weight"
    ),
    Row(_STORED + "ssm_a", _DELTA + "A_log"),
    Row(_STORED + "ssm_dt.bias", _DELTA + "dt_bias"),
    Row(
        _STORED + "ssm_ba.weight",
        Grouped(_DELTA + "b.weight", _DELTA + "a.weight", by="linear_num_key_heads"),
    ),
)
TILED_DELTA_NET: Table = (
    *_delta_net(
        Tiled(_DELTA + "v.weight"),
        Tiled(_DELTA + "z.weight"),
        Tiled(_DELTA + "conv_v.weight"),
        Tiled(_DELTA + "o.weight", dim=1),
    ),
    Row(_STORED + "ssm_a", Tiled(_DELTA + "A_log")),
    Row(_STORED + "ssm_dt.bias", Tiled(_DELTA + "dt_bias")),
    Row(_STORED + "ssm_beta.weight", Tiled(_DELTA + "b.weight")),
    Row(_STORED + "ssm_alpha.weight", Tiled(_DELTA + "a.weight")),
)
"""With value heads in llama.cpp's order."""
