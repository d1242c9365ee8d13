"""Faults of FP8 states in words: what is wrong with the numbers of which module's.

The same words serve a reshard's report, `amax inspect`, and what ranks disagree about.
"""

from __future__ import annotations

from megtool.checkpoint.containers.te_extra_state import ExtraState
from megtool.number_formats.delayed_scaling import (
    Columns,
    ScalingFault,
    faults,
    kinds_of,
    num_gemms,
)
from megtool.reshard.megatron.amax_report import AmaxFinding
from megtool.reshard.megatron.extra_state_names import site_of

_KINDS = {
    "fwd": ("input", "weight", "output"),
    "bwd": ("gradient of the output", "gradient of the input"),
}
_SAYS = {
    "nan": "NaN",
    "inf": "infinity",
    "negative": "negative numbers",
    "zeros": "nothing but zeros",
}
_LINEAR = ("eh_proj", "output_layer")


def layout_of(state: ExtraState) -> Columns | None:
    """How its columns lie, of one product either way; None where that is not known."""
    return "blocked" if (num_gemms(state.tensors) or 1) == 1 else state.columns


def label(name: str) -> str:
    """The module whose state an object of this name is, as a person reads it."""
    site = site_of(name)
    if site is None:
        return name
    return site.module if site.expert is None else f"{site.module} of expert {site.expert}"


def faults_of(name: str, state: ExtraState) -> list[ScalingFault]:
    """What is wrong with the numbers of a state, by the name of its object."""
    site = site_of(name)
    last = (site.module if site else name).rpartition(".")[2]
    linear = last.startswith("linear_") or last in _LINEAR
    return faults(state.tensors, linear=linear, columns=layout_of(state))


def as_finding(where: str, fault: ScalingFault, state: ExtraState) -> AmaxFinding:
    """A fault in words."""
    direction, layout = fault.array[-3:], layout_of(state)
    if layout is None:
        whose = dict.fromkeys(["one of several products"])
    else:
        kinds = kinds_of(direction, state.tensors[fault.array].shape[-1], layout)
        whose = dict.fromkeys(_KINDS[direction][kinds[c]] for c in fault.columns)
    what = "history" if fault.array.startswith("amax") else fault.array.rpartition("_")[0]
    text = f"{_SAYS[fault.kind]} in the {what} of the {' and the '.join(whose)}"
    return AmaxFinding(module=where, kind=fault.kind, text=text)
