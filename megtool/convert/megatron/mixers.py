"""Megatron's names for Mamba-2 mixers and delta rules, whole and in parts; short convolutions.

Projections and convolutions hold several parts, of which tensor parallelism cuts each for itself.
In a checkpoint with global shapes (`torch_dist`) every part is a tensor of its own (`PARTS`); a
module, and so whatever is stored by rank, has them one after the other (`WHOLE`). `READ` are
spellings that are accepted but never written. Mixers beside attention, under one norm, are called
as in Megatron-Bridge's layer of Falcon-H1. Megatron has no gated short convolutions: their names
are like those of mixers. Kimi delta attention has the names of its development branch, with gates
in two stages. Sources: megatron-core 0.19.2, ssm/{mamba_mixer,gated_delta_net/common}.py and
models/hybrid/hybrid_block.py; its development branch, ssm/gated_delta_net/kda.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megtool.convert.language.mapping import Blocks, Row, Shifted, Table

_L = "decoder.layers.{l}."
_X, _A = _L + "mixer.", _L + "self_attention."
_BESIDE, _S = _L + "mamba_mixer.", _L + "short_conv."
_MAMBA = "l in mamba_layers and not l in parallel_layers"
_PARALLEL = "l in mamba_layers and l in parallel_layers"
_DELTA, _CONVOLVED, _KDA = "l in delta_layers", "l in conv_layers", "l in kda_layers"
_NAMED = ((_X, _MAMBA), (_BESIDE, _PARALLEL))
_NORM_PARTS = ("weight", "bias")
_OUR_MAMBA, _OUR_DELTA = "layers.{l}.mamba.", "layers.{l}.delta."
_OUR_CONV, _OUR_KDA = "layers.{l}.short_conv.", "layers.{l}.kda."

_IN = tuple((part, f"in_{part}") for part in ("z", "x", "B", "C", "dt"))
_CONV = tuple((part, f"conv_{part}") for part in ("x", "B", "C"))
_DELTA_IN = (
    ("query", "q"),
    ("key", "k"),
    ("value", "v"),
    ("z", "z"),
    ("beta", "b"),
    ("alpha", "a"),
)
_SHORT_IN = tuple((part, f"in_{part}") for part in ("B", "C", "x"))
_DELTA_CONV = tuple((long, f"conv_{short}") for long, short in _DELTA_IN[:3])

_INNER, _STATE = "mamba_num_heads * mamba_head_dim", "mamba_num_groups * mamba_state_dim"
_KEYS = "linear_num_key_heads * linear_key_head_dim"
_VALUES = "linear_num_value_heads * linear_value_head_dim"
_CONV_ROWS = (("x", _INNER), ("B", _STATE), ("C", _STATE))
_DELTA_ROWS = (("query", _KEYS), ("key", _KEYS), ("value", _VALUES))
_OUTSIDE_KDA = "0 if kda_layers else {}"

SECTIONS: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        **{
            f"{mixer}.{name}": rows
            for mixer in ("mixer", "mamba_mixer")
            for name, rows in (
                ("in_proj.weight", (("z", _INNER), *_CONV_ROWS, ("dt", "mamba_num_heads"))),
                ("conv1d.weight", _CONV_ROWS),
                ("conv1d.bias", _CONV_ROWS),
            )
        },
        "self_attention.in_proj.weight": (
            *_DELTA_ROWS,
            ("z", _OUTSIDE_KDA.format(_VALUES)),
            ("beta", _OUTSIDE_KDA.format("linear_num_value_heads")),
            ("alpha", _OUTSIDE_KDA.format("linear_num_value_heads")),
        ),
        "self_attention.conv1d.weight": _DELTA_ROWS,
        **{
            f"short_conv.in_proj.{kind}": tuple((part, "hidden_size") for part, _ in _SHORT_IN)
            for kind in _NORM_PARTS
        },
    }
)
"""Of each tensor with several parts: the names of the parts and their numbers of rows, which are 0
for the parts of a gated delta net that Kimi delta attention lacks under the same name."""


def _fused(
    stored: str,
    ours: str,
    parts: tuple[tuple[str, str], ...],
    kind: str,
    when: str,
    *also: str,
) -> tuple[Row, tuple[Row, ...]]:
    """The row of a tensor with several parts, and those of its parts."""
    words = [f"{ours}{name}.{kind}" for _, name in parts]
    rows = (
        Row(f"{stored}.{part}", w, when=when) for (part, _), w in zip(parts, words, strict=True)
    )
    return Row(stored, Blocks(*words), also=also, when=when), tuple(rows)


_SEVERAL = (
    *(
        _fused(stored + "in_proj.weight", _OUR_MAMBA, _IN, "weight", when)
        for stored, when in _NAMED
    ),
    *(
        _fused(f"{stored}conv1d.{kind}", _OUR_MAMBA, _CONV, kind, when, f"{stored}conv1d_{kind}")
        for stored, when in _NAMED
        for kind in ("weight", "bias")
    ),
    _fused(_A + "in_proj.weight", _OUR_DELTA, _DELTA_IN, "weight", _DELTA),
    _fused(_A + "conv1d.weight", _OUR_DELTA, _DELTA_CONV, "weight", _DELTA),
    _fused(_A + "in_proj.weight", _OUR_KDA, _DELTA_IN[:3], "weight", _KDA),
    _fused(_A + "conv1d.weight", _OUR_KDA, _DELTA_CONV, "weight", _KDA),
    *(_fused(f"{_S}in_proj.{x}", _OUR_CONV, _SHORT_IN, x, _CONVOLVED) for x in _NORM_PARTS),
)
WHOLE: Table = tuple(row for row, _ in _SEVERAL)
PARTS: Table = tuple(row for _, rows in _SEVERAL for row in rows)

# Of gated delta nets Megatron centres the norm of the output around zero like every other norm,
# and Hugging Face's files around one.
WRITTEN: Table = (
    *(
        Row(
            f"{stored}in_proj.layer_norm_{kind}",
            f"layers.{{l}}.attn_norm.{kind}",
            also=(_L + norm + kind,),
            when=when,
        )
        for kind in _NORM_PARTS
        for stored, norm, when in (
            (_X, "norm.", _MAMBA),
            (_A, "input_layernorm.", _DELTA),
            (_S, "input_layernorm.", _CONVOLVED),
        )
    ),
    *(Row(_L + f"norm.{x}", f"layers.{{l}}.attn_norm.{x}", when=_PARALLEL) for x in _NORM_PARTS),
    *(
        Row(
            f"{_L}input_layernorm.{kind}",
            f"layers.{{l}}.attn_norm.{kind}",
            also=(f"{_A}in_proj.layer_norm_{kind}",),
            when=_KDA,
        )
        for kind in _NORM_PARTS
    ),
    *(
        Row(stored + name, _OUR_MAMBA + name, when=when)
        for stored, when in _NAMED
        for name in ("A_log", "D", "dt_bias", "norm.weight")
    ),
    *(
        Row(stored + "out_proj.weight", _OUR_MAMBA + "out.weight", when=when)
        for stored, when in _NAMED
    ),
    *(
        row
        for ours, when in ((_OUR_DELTA, _DELTA), (_OUR_KDA, _KDA))
        for row in (
            *(Row(_A + name, ours + name, when=when) for name in ("A_log", "dt_bias")),
            Row(
                _A + "out_norm.weight",
                Shifted(ours + "norm.weight", by=-1),
                when=f"zero_centered_norm and {when}",
            ),
            Row(
                _A + "out_norm.weight",
                ours + "norm.weight",
                when=f"not zero_centered_norm and {when}",
            ),
            Row(_A + "out_proj.weight", ours + "o.weight", when=when),
        )
    ),
    *(
        Row(f"{_A}{stored}_proj.weight", f"{_OUR_KDA}{ours}.weight", when=_KDA)
        for stored, ours in (
            ("beta", "b"),
            ("f_a", "f_down"),
            ("f_b", "f_up"),
            ("g_a", "g_down"),
            ("g_b", "g_up"),
        )
    ),
    *(
        Row(f"{_S}{stored}.{kind}", f"{_OUR_CONV}{ours}.{kind}", when=_CONVOLVED)
        for stored, ours in (("conv1d", "conv_x"), ("out_proj", "out"))
        for kind in _NORM_PARTS
    ),
)
