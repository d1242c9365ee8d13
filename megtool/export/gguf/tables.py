"""Names of tensors in files of llama.cpp's architectures that are written and not read.

llama.cpp turns heads in halves in some architectures and in pairs of neighbours in others. Where
it turns pairs and the model halves, rows of queries and keys are permuted.
"""

from __future__ import annotations

from megtool.convert.families.decoder_rows import own_mtp_ends
from megtool.convert.language.mapping import (
    Cat,
    Row,
    Stacked,
    Table,
    Vector,
    in_mtp,
)
from megtool.export.gguf.words import Paired

_OURS = "layers.{l}."
_ATTN, _MLP = _OURS + "attn.", _OURS + "mlp."
_EXPERT, _SHARED = _MLP + "experts.{e}.", _MLP + "shared."
_KINDS = ("weight", "bias")

ENDS: Table = (
    Row("token_embd.weight", "embed.weight"),
    Row("position_embd.weight", "positions.weight"),
    Row("token_embd_norm.weight", "embed_norm.weight"),
    Row("token_embd_norm.bias", "embed_norm.bias"),
    Row("output_norm.weight", "norm.weight"),
    Row("output_norm.bias", "norm.bias"),
    Row("output.weight", "head.weight", when="not tied_embeddings"),
    Row("output.bias", "head.bias"),
)


NORMS: Table = tuple(
    Row(f"blk.{{l}}.{stored}.{kind}", f"{_OURS}{name}.{kind}")
    for stored, name in (("attn_norm", "attn_norm"), ("ffn_norm", "mlp_norm"))
    for kind in _KINDS
)
LATER_NORMS: Table = (
    Row("blk.{l}.attn_norm.weight", _OURS + "attn_norm.weight"),
    Row("blk.{l}.post_attention_norm.weight", _OURS + "mlp_norm.weight"),
)
"""With the norm before the MLP called after what it follows."""

FALCON_NORMS: Table = tuple(
    Row(f"blk.{{l}}.{stored}.{kind}", f"{_OURS}{name}.{kind}", when=when)
    for stored, name, when in (
        ("attn_norm", "attn_norm", "shared_norm"),
        ("attn_norm", "mlp_norm", "not shared_norm"),
        ("attn_norm_2", "attn_norm", "not shared_norm"),
    )
    for kind in _KINDS
)
"""A second norm is that of attention, the first one that of the MLP."""

POST_NORMS: Table = (
    Row("blk.{l}.post_attention_norm.weight", _OURS + "attn_post_norm.weight"),
    Row("blk.{l}.post_ffw_norm.weight", _OURS + "mlp_post_norm.weight"),
)

_OUTPUT: Table = (
    *(Row(f"blk.{{l}}.attn_output.{kind}", f"{_ATTN}o.{kind}") for kind in _KINDS),
    Row("blk.{l}.attn_q_norm.weight", _ATTN + "q_norm.weight", when="qk_norm_of != 'each'"),
    Row("blk.{l}.attn_k_norm.weight", _ATTN + "k_norm.weight", when="qk_norm_of != 'each'"),
    Row(
        "blk.{l}.attn_q_norm.weight",
        Stacked(_ATTN + "q_norms.{h}.weight", "h"),
        when="qk_norm_of == 'each'",
    ),
    Row(
        "blk.{l}.attn_k_norm.weight",
        Stacked(_ATTN + "k_norms.{g}.weight", "g"),
        when="qk_norm_of == 'each'",
    ),
    Row("blk.{l}.attn_sinks.weight", _ATTN + "sinks"),
)
ATTENTION: Table = (
    *(
        Row(f"blk.{{l}}.attn_{name}.{kind}", f"{_ATTN}{name}.{kind}")
        for name in "qkv"
        for kind in _KINDS
    ),
    *_OUTPUT,
)
PAIRED_ATTENTION: Table = (
    *(
        Row(
            f"blk.{{l}}.attn_{name}.{kind}",
            Paired(f"{_ATTN}{name}.{kind}", heads),
        )
        for name, heads in (("q", "num_heads"), ("k", "num_kv_heads"))
        for kind in _KINDS
    ),
    *(Row(f"blk.{{l}}.attn_v.{kind}", f"{_ATTN}v.{kind}") for kind in _KINDS),
    *_OUTPUT,
)
FUSED_ATTENTION: Table = (
    *(
        Row(f"blk.{{l}}.attn_qkv.{kind}", Cat(*(f"{_ATTN}{name}.{kind}" for name in "qkv")))
        for kind in _KINDS
    ),
    *_OUTPUT,
)

MLP: Table = tuple(
    Row(f"blk.{{l}}.ffn_{name}.{kind}", f"{_MLP}{name}.{kind}")
    for name in ("gate", "up", "down")
    for kind in _KINDS
)
FUSED_MLP: Table = (
    Row("blk.{l}.ffn_up.weight", Cat(_MLP + "gate.weight", _MLP + "up.weight")),
    Row("blk.{l}.ffn_down.weight", _MLP + "down.weight"),
)

EXPERTS: Table = (
    Row("blk.{l}.ffn_gate_inp.weight", _MLP + "router.weight"),
    Row("blk.{l}.ffn_gate_inp.bias", _MLP + "router.bias"),
    Row("blk.{l}.exp_probs_b.bias", _MLP + "router.expert_bias"),
    *(
        Row(
            f"blk.{{l}}.ffn_{name}_exps.{kind}",
            Stacked(f"{_EXPERT}{name}.{kind}", "e"),
            when="l in moe_layers",
        )
        for name in ("gate", "up", "down")
        for kind in _KINDS
    ),
    *(
        Row(f"blk.{{l}}.ffn_{name}_shexp.weight", f"{_SHARED}{name}.weight")
        for name in ("gate", "up", "down")
    ),
    Row("blk.{l}.ffn_gate_inp_shexp.weight", Vector(_SHARED + "router.weight")),
)


def with_mtp(layers: Table) -> Table:
    """The rows of layers, and behind them those of multi-token prediction (llama.cpp's NextN).

    llama.cpp takes embedding and head of the model where such a layer has none.
    """
    further = "blk.{num_layers+m}."
    return (
        *layers,
        *in_mtp(layers, ("blk.{l}.", further)),
        Row(further + "nextn.eh_proj.weight", "mtp.{m}.proj.weight"),
        Row(further + "nextn.enorm.weight", "mtp.{m}.embed_norm.weight"),
        Row(further + "nextn.hnorm.weight", "mtp.{m}.hidden_norm.weight"),
        Row(further + "nextn.shared_head_norm.weight", "mtp.{m}.norm.weight"),
        *own_mtp_ends(
            further + "nextn.embed_tokens.weight", further + "nextn.shared_head_head.weight"
        ),
    )
