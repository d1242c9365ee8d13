"""Mapping rows of Kimi Linear: Kimi delta attention, latent attention, experts like Mixtral's."""

from __future__ import annotations

from dataclasses import replace

from megtool.convert.families.decoder_rows import HF_LATENT_ATTENTION, stacked_experts
from megtool.convert.language.mapping import Cat, Row, Table, Unsqueezed

_STORED, _OURS = "model.layers.{l}.", "layers.{l}."
_NET, _KDA, _WHEN = _STORED + "self_attn.", _OURS + "kda.", "l in kda_layers"
_GATE = _NET + "forget_gate."
_MOE, _EXPERT = _STORED + "block_sparse_moe.", _OURS + "mlp.experts.{e}."
_MLP = (("w1", "gate"), ("w3", "up"), ("w2", "down"))

HF_KIMI_DELTA: Table = (
    *(
        Row(f"{_NET}{stored}_proj.weight", f"{_KDA}{ours}.weight", when=_WHEN)
        for stored, ours in (
            *((x, x) for x in "qkvbo"),
            ("g_a", "g_down"),
            ("g_b", "g_up"),
        )
    ),
    *(
        Row(
            f"{_NET}f_{stored}_proj.weight",
            f"{_KDA}f_{ours}.weight",
            also=(f"{_GATE}f_{stored}_proj.weight",),
            when=_WHEN,
        )
        for stored, ours in (("a", "down"), ("b", "up"))
    ),
    *(Row(f"{_NET}{x}_conv1d.weight", f"{_KDA}conv_{x}.weight", when=_WHEN) for x in "qkv"),
    Row(
        _NET + "conv1d.weight",
        Cat(*(f"{_KDA}conv_{x}.weight" for x in "qkv")),
        when=_WHEN,
    ),
    Row(
        _NET + "A_log",
        Unsqueezed(_KDA + "A_log", before=2, after=1),
        also=(_GATE + "A_log",),
        when=_WHEN,
    ),
    Row(_NET + "dt_bias", _KDA + "dt_bias", also=(_GATE + "dt_bias",), when=_WHEN),
    Row(_NET + "o_norm.weight", _KDA + "norm.weight", when=_WHEN),
)
"""Kimi delta attention. transformers puts its three convolutions together, and calls what makes
decays `forget_gate`, in models in memory."""

HF_KIMI_LATENT: Table = tuple(
    replace(row, when="l in attn_layers") for row in HF_LATENT_ATTENTION if isinstance(row, Row)
)
"""Latent attention, whose projections have names that Kimi delta attention has, too."""

HF_KIMI_MLP: Table = (
    # transformers 5 renames the MLP of layers without experts as well, where it saves them.
    *(
        Row(
            f"{_STORED}mlp.{x}_proj.weight",
            f"{_OURS}mlp.{x}.weight",
            also=(f"{_MOE}{x}_proj.weight",),
        )
        for x in ("gate", "up", "down")
    ),
    *(
        Row(_MOE + stored, f"{_OURS}mlp.{ours}", also=(f"{_STORED}mlp.{stored}",))
        for stored, ours in (
            ("gate.weight", "router.weight"),
            ("gate.e_score_correction_bias", "router.expert_bias"),
            *(
                (f"shared_experts.{x}_proj.weight", f"shared.{x}.weight")
                for x in ("gate", "up", "down")
            ),
        )
    ),
    *(
        Row(f"{_MOE}experts.{{e}}.{stored}.weight", f"{_EXPERT}{ours}.weight")
        for stored, ours in _MLP
    ),
    *stacked_experts(_STORED + "mlp.experts."),
)
