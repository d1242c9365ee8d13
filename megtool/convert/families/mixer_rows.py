"""Mapping rows of Mamba-2 mixers, gated delta nets and gated attention."""

from __future__ import annotations

from megtool.convert.language.mapping import Cat, Grouped, Row, Table

_OURS = "layers.{l}.mamba."
_WHEN = "l in mamba_layers"
_STORED, _ATTN = "model.layers.{l}.", "layers.{l}.attn."
_NET, _DELTA = _STORED + "linear_attn.", "layers.{l}.delta."

HF_GATED_ATTENTION: Table = (
    Row(
        _STORED + "self_attn.q_proj.weight",
        Grouped(_ATTN + "q.weight", _ATTN + "gate.weight", by="num_heads"),
    ),
    *(Row(f"{_STORED}self_attn.{x}_proj.weight", f"{_ATTN}{x}.weight") for x in "kvo"),
)
"""Attention whose output each head multiplies by a gate, which is projected with its queries."""

HF_DELTA_NET: Table = (
    Row(
        _NET + "conv1d.weight",
        Cat(_DELTA + "conv_q.weight", _DELTA + "conv_k.weight", _DELTA + "conv_v.weight"),
        when="l in delta_layers",
    ),
    Row(_NET + "A_log", _DELTA + "A_log"),
    Row(_NET + "dt_bias", _DELTA + "dt_bias"),
    Row(_NET + "norm.weight", _DELTA + "norm.weight"),
    Row(_NET + "out_proj.weight", _DELTA + "o.weight"),
)
"""Gated delta nets without what projects their input."""

HF_DELTA_NET_INPUTS: Table = (
    Row(
        _NET + "in_proj_qkv.weight",
        Cat(_DELTA + "q.weight", _DELTA + "k.weight", _DELTA + "v.weight"),
        when="l in delta_layers",
    ),
    *(Row(f"{_NET}in_proj_{x}.weight", f"{_DELTA}{x}.weight") for x in "zba"),
)
"""The four projections of their input, of which one has queries, keys and values."""


def hf_mamba(stored: str) -> Table:
    """The rows of a mixer whose tensors' names begin with `stored`."""
    return (
        Row(
            stored + "in_proj.weight",
            Cat(*(f"{_OURS}in_{part}.weight" for part in ("z", "x", "B", "C", "dt"))),
            when=_WHEN,
        ),
        *(
            Row(
                f"{stored}conv1d.{kind}",
                Cat(*(f"{_OURS}conv_{part}.{kind}" for part in ("x", "B", "C"))),
                when=_WHEN,
            )
            for kind in ("weight", "bias")
        ),
        *(
            Row(stored + name, _OURS + name, when=_WHEN)
            for name in ("A_log", "D", "dt_bias", "norm.weight")
        ),
        Row(stored + "out_proj.weight", _OURS + "out.weight", when=_WHEN),
    )
