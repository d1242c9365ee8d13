"""Mapping rows of Granite with experts, which are fused in two tensors, and with shared ones."""

from __future__ import annotations

from dataclasses import replace

from megtool.convert.language.mapping import Cat, Row, Stacked, Table

_STORED, _MLP = "model.layers.{l}.", "layers.{l}.mlp."
_MOE, _EXPERT, _SHARED = _STORED + "block_sparse_moe.", _MLP + "experts.{e}.", _MLP + "shared."

HF_GRANITE_EXPERTS: Table = (
    Row(
        _MOE + "router.layer.weight",
        _MLP + "router.weight",
        also=(_MOE + "router.weight",),
    ),
    Row(
        _MOE + "input_linear.weight",
        Stacked(Cat(_EXPERT + "gate.weight", _EXPERT + "up.weight"), "e"),
        also=(_MOE + "experts.gate_up_proj",),
        plain=True,
    ),
    Row(
        _MOE + "output_linear.weight",
        Stacked(_EXPERT + "down.weight", "e"),
        also=(_MOE + "experts.down_proj",),
        plain=True,
    ),
)
"""The router and all experts, under the names that older releases of transformers write."""

HF_GRANITE_NEW_EXPERTS: Table = tuple(
    replace(row, stored=row.also[0], also=(row.stored,))
    for row in HF_GRANITE_EXPERTS
    if isinstance(row, Row)
)
"""The same under the names of families that came with transformers 5."""


def granite_single_experts(gate: str, up: str, down: str) -> Table:
    """Experts one by one, under the names by which vLLM looks for their codes."""
    return tuple(
        Row(f"{_MOE}experts.{{e}}.{stored}.weight", f"{_EXPERT}{ours}.weight")
        for stored, ours in ((gate, "gate"), (up, "up"), (down, "down"))
    )


def granite_shared_expert(when: str) -> Table:
    """The expert that always takes part, with both inputs in one tensor."""
    return (
        Row(
            _STORED + "shared_mlp.input_linear.weight",
            Cat(_SHARED + "gate.weight", _SHARED + "up.weight"),
            when=when,
        ),
        Row(_STORED + "shared_mlp.output_linear.weight", _SHARED + "down.weight", when=when),
    )
