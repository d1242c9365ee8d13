"""Products of an extra state: the states of experts that share a module, taken apart and joined.

Megatron-Core splits the state of a rank's experts, to save one for each in `torch_dist`, and joins
them on loading, both as if columns were `blocked` (`TEGroupedLinear._split_extra_state` and
`merge_extra_states`, core 0.10 to 0.17 and main of 2026). From Transformer Engine 2.3 on they are
`interleaved`: what it saves for each of G experts is then a mixture of all G, which its own joining
puts together again for the same G and for no other number. `unmixed` gives each expert its own, and
`mixed` is what Megatron-Core puts together rightly for that G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megtool.checkpoint.containers.te_extra_state import (
    MORE,
    NUM_GEMMS,
    ExtraState,
    at_release,
    with_tensors,
)
from megtool.number_formats import delayed_scaling, grouped_delayed_scaling
from megtool.number_formats.delayed_scaling import Columns


def split(state: ExtraState, parts: int, columns: Columns | None = None) -> list[ExtraState] | None:
    """The state of each of `parts` products of a module.

    `columns` stand in where the state does not tell how its own lie. None where it is not of so
    many products, or where nothing tells and it matters.
    """
    if not fits(state, parts):
        return None
    known = state.columns or columns
    if known is None:
        if not grouped_delayed_scaling.is_same_in_both(state.tensors):
            return None
        known = "blocked"
    found = grouped_delayed_scaling.split(state.tensors, parts, known) or []
    facts = _with_gemms(state.facts, 1)
    return [replace(state, tensors=tensors, facts=facts) for tensors in found]


def fits(state: ExtraState, parts: int) -> bool:
    """The state is of so many products."""
    if not state.is_delayed:
        return state.num_gemms == parts
    return delayed_scaling.num_gemms(state.tensors) == parts


def join(states: Sequence[ExtraState | None], columns: Columns) -> ExtraState | None:
    """The state of one module whose products had these; None where they do not fit together.

    A product without a state (None) gets one that has seen nothing.
    """
    first = next((s for s in states if s is not None), None)
    if first is None:
        return None
    alike = [
        with_tensors(first, delayed_scaling.unseen(first.tensors))
        if s is None
        else at_release(s, first.release)
        for s in states
    ]
    fit = [s for s in alike if s is not None and s.num_gemms == 1]
    if len(fit) != len(states):
        return None
    tensors = grouped_delayed_scaling.join([s.tensors for s in fit], columns)
    if tensors is None:
        return None
    return with_tensors(replace(first, facts=_with_gemms(first.facts, len(states))), tensors)


def unmixed(
    states: Sequence[ExtraState | None],
) -> tuple[list[ExtraState | None], Columns | None] | None:
    """Each expert's own state, of those that Megatron-Core saved for the experts of one rank.

    The second value is how the columns lay before it split them, None where it makes no difference.
    None where they do not fit together, or nothing tells.
    """
    whole = join(states, "blocked")
    if whole is None:
        return None
    columns = whole.columns
    if columns is None:
        return (
            (list(states), None) if grouped_delayed_scaling.is_same_in_both(whole.tensors) else None
        )
    if columns == "blocked":
        return list(states), columns
    found = split(whole, len(states), "interleaved")
    return None if found is None else (list(found), "interleaved")


def mixed(states: Sequence[ExtraState]) -> list[ExtraState] | None:
    """What Megatron-Core joins to the interleaved state of one rank whose experts have these.

    None where they do not fit together.
    """
    whole = join(states, "interleaved")
    if whole is None:
        return None
    parts = grouped_delayed_scaling.split(whole.tensors, len(states), "blocked") or []
    alike = [at_release(s, whole.release) or whole for s in states]
    return [with_tensors(s, t) for s, t in zip(alike, parts, strict=True)]


def _with_gemms(facts: dict[Any, Any], number: int) -> dict[Any, Any]:
    more = facts.get(MORE)
    if not isinstance(more, dict) or NUM_GEMMS not in more:
        return facts
    return {**facts, MORE: {**more, NUM_GEMMS: number}}
