"""Mapping rows of Mamba-2 mixers, which families keep under several names."""

from __future__ import annotations

from megtool.convert.mapping import Cat, Row, Table

_OURS = "layers.{l}.mamba."
_WHEN = "l in mamba_layers"


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
