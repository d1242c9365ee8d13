"""Faults in the numbers of FP8 states, as findings.

The same words are used by a reshard's report, `amax inspect`, and findings about ranks.
"""

from __future__ import annotations

import numpy as np

from megtool.megatron_state.extra_states.amax_report import AmaxFinding
from megtool.megatron_state.extra_states.names import parse_site
from megtool.megatron_state.extra_states.te_state import ExtraState
from megtool.number_formats.delayed_scaling import (
    Columns,
    ScalingFault,
    faults,
    kinds_of,
    num_gemms,
)

_KINDS = {
    "fwd": ("input", "weight", "output"),
    "bwd": ("gradient of the output", "gradient of the input"),
}
_FAULT_WORDS = {
    "nan": "NaN",
    "inf": "infinity",
    "negative": "negative numbers",
    "zeros": "only zeros",
}
_LINEAR = ("eh_proj", "output_layer")


def column_layout(state: ExtraState) -> Columns | None:
    """The layout of a state's columns (that of one product fits both); None if unknown."""
    return "blocked" if (num_gemms(state.tensors) or 1) == 1 else state.column_order


def module_label(name: str) -> str:
    """The module whose state an object of this name is, for messages."""
    site = parse_site(name)
    if site is None:
        return name
    return site.module if site.expert is None else f"{site.module} of expert {site.expert}"


def find_faults(name: str, state: ExtraState) -> list[ScalingFault]:
    """Find what is wrong with the numbers of a state, by the name of its object."""
    site = parse_site(name)
    last = (site.module if site else name).rpartition(".")[2]
    linear = last.startswith("linear_") or last in _LINEAR
    return faults(state.tensors, linear=linear, columns=column_layout(state))


def make_finding(module: str, fault: ScalingFault, state: ExtraState) -> AmaxFinding:
    """A fault as a finding."""
    direction, layout = fault.array[-3:], column_layout(state)
    if layout is None:
        whose = dict.fromkeys(["one of several products"])
    else:
        kinds = kinds_of(direction, state.tensors[fault.array].shape[-1], layout)
        whose = dict.fromkeys(_KINDS[direction][kinds[c]] for c in fault.columns)
    array_name = "history" if fault.array.startswith("amax") else fault.array.rpartition("_")[0]
    text = f"{_FAULT_WORDS[fault.kind]} in the {array_name} of the {' and the '.join(whose)}"
    return AmaxFinding(module=module, kind=fault.kind, text=text)


def has_equal_tensors(a: ExtraState, b: ExtraState) -> bool:
    """Whether two states hold the same numbers, NaN included."""
    return a.tensors.keys() == b.tensors.keys() and all(
        np.array_equal(t, b.tensors[n], equal_nan=True) for n, t in a.tensors.items()
    )


def is_unused(state: ExtraState) -> bool:
    """Whether a state has never seen a tensor: histories of zeros, scales of one."""
    return all(
        not t.any() if n.startswith("amax_history_") else bool((t == 1).all())
        for n, t in state.tensors.items()
    )
