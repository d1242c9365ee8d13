"""Splits and joins the extra states of experts that share a grouped linear module.

Megatron-Core splits the state of a rank's experts, to save one per expert in `torch_dist`, and
joins them on loading, both as if columns were `blocked` (`TEGroupedLinear._split_extra_state` and
`merge_extra_states`, core 0.10 to 0.17 and main of 2026). From Transformer Engine 2.3 on they are
`interleaved`: it then saves a mixture of all G experts for each of them, which it joins correctly
for the same G only. `unmix_expert_states` recovers each expert's state, and `mix_expert_states`
produces what Megatron-Core joins correctly for that G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megtool.megatron_state.extra_states.te_state import (
    EXTRA_VARIABLES,
    NUM_GEMMS,
    ExtraState,
    convert_release,
    replace_tensors,
)
from megtool.number_formats import delayed_scaling, grouped_delayed_scaling
from megtool.number_formats.delayed_scaling import Columns


def split_gemms(
    state: ExtraState, parts: int, default_order: Columns | None = None
) -> list[ExtraState] | None:
    """The state of each of `parts` GEMMs of a module.

    `default_order` is used if the state does not determine its column order. None if it does not
    have `parts` GEMMs, or if the order is unknown and matters.
    """
    if not has_gemms(state, parts):
        return None
    order = state.column_order or default_order
    if order is None:
        if not grouped_delayed_scaling.is_same_in_both(state.tensors):
            return None
        order = "blocked"
    tensors_by_gemm = grouped_delayed_scaling.split(state.tensors, parts, order) or []
    facts = _set_num_gemms(state.facts, 1)
    return [replace(state, tensors=tensors, facts=facts) for tensors in tensors_by_gemm]


def has_gemms(state: ExtraState, parts: int) -> bool:
    """Whether the state has `parts` GEMMs."""
    if not state.is_delayed:
        return state.num_gemms == parts
    return delayed_scaling.num_gemms(state.tensors) == parts


def join_gemms(states: Sequence[ExtraState | None], column_order: Columns) -> ExtraState | None:
    """The joined state of one module's GEMMs; None if they are not compatible.

    A GEMM without a state (None) gets an empty history.
    """
    first = next((s for s in states if s is not None), None)
    if first is None:
        return None
    converted = [
        replace_tensors(first, delayed_scaling.unseen(first.tensors))
        if s is None
        else convert_release(s, first.release)
        for s in states
    ]
    matching = [s for s in converted if s is not None and s.num_gemms == 1]
    if len(matching) != len(states):
        return None
    tensors = grouped_delayed_scaling.join([s.tensors for s in matching], column_order)
    if tensors is None:
        return None
    return replace_tensors(replace(first, facts=_set_num_gemms(first.facts, len(states))), tensors)


def unmix_expert_states(
    states: Sequence[ExtraState | None],
) -> tuple[list[ExtraState | None], Columns | None] | None:
    """Each expert's state, recovered from those that Megatron-Core saved for one rank.

    The second value is the column order before the split; None if it makes no difference.
    None if the states are not compatible or the order is unknown.
    """
    joined = join_gemms(states, "blocked")
    if joined is None:
        return None
    order = joined.column_order
    if order is None:
        return (
            (list(states), None)
            if grouped_delayed_scaling.is_same_in_both(joined.tensors)
            else None
        )
    if order == "blocked":
        return list(states), order
    separate = split_gemms(joined, len(states), "interleaved")
    return None if separate is None else (list(separate), "interleaved")


def mix_expert_states(states: Sequence[ExtraState]) -> list[ExtraState] | None:
    """States that Megatron-Core joins to the interleaved state of one rank's experts.

    None if they are not compatible.
    """
    joined = join_gemms(states, "interleaved")
    if joined is None:
        return None
    parts = grouped_delayed_scaling.split(joined.tensors, len(states), "blocked") or []
    converted = [convert_release(s, joined.release) or joined for s in states]
    return [replace_tensors(s, t) for s, t in zip(converted, parts, strict=True)]


def _set_num_gemms(facts: dict[Any, Any], num_gemms: int) -> dict[Any, Any]:
    variables = facts.get(EXTRA_VARIABLES)
    if not isinstance(variables, dict) or NUM_GEMMS not in variables:
        return facts
    return {**facts, EXTRA_VARIABLES: {**variables, NUM_GEMMS: num_gemms}}
