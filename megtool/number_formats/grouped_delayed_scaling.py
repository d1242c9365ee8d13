"""Delayed scaling of a module with several GEMMs, split and joined.

A grouped linear layer (experts on one rank) keeps one state for its G products. Transformer Engine
lays their columns out `blocked` up to release 2.2 (all inputs, all weights, all outputs; all
gradients of outputs, all of inputs) and `interleaved` from 2.3 on (input, weight, output of the
first, then of the second; the two gradients likewise). Both have `3 * G` and `2 * G` columns, and
releases 2.x say nothing of it. It shows in what no linear layer uses, its output and the gradient
of its input: their histories stay 0 and their scales 1.
Source: `_offsets` in `pytorch/module/grouped_linear.py`, at v1.11 to v2.2 and v2.3 to v2.18.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megtool.number_formats.delayed_scaling import (
    KINDS,
    Array,
    Columns,
    State,
    direction_of,
    lengthened,
    num_gemms,
    same_shapes,
    unused,
)

LAYOUTS: tuple[Columns, Columns] = ("blocked", "interleaved")


def columns_of(state: State) -> Columns | None:
    """How the columns of a state lie, by those that are never used; None where that is not told.

    It is told where one layout alone has nothing in the columns that it does not use: a weight that
    was seen once contradicts the other layout, whatever the number of products.
    """
    if (num_gemms(state) or 1) == 1:
        return None
    fit = [layout for layout in LAYOUTS if is_idle(state, layout)]
    return fit[0] if len(fit) == 1 else None


def is_idle(state: State, columns: Columns) -> bool:
    """Whether the columns that this layout does not use are untouched."""
    for name, array in state.items():
        unused_slots = array[..., unused(direction_of(name), array.shape[-1], columns)]
        if (unused_slots != (0 if name.startswith("amax_history_") else 1)).any():
            return False
    return True


def split(state: State, parts: int, columns: Columns) -> list[dict[str, Array]] | None:
    """The state of each of `parts` products of a module; None where it is not of so many."""
    if state and num_gemms(state) != parts:
        return None
    out: list[dict[str, Array]] = []
    for k in range(parts):
        part_state = {}
        for n, a in state.items():
            kinds = KINDS[direction_of(n)]
            if columns == "blocked":
                part_state[n] = a.reshape(*a.shape[:-1], kinds, parts)[..., k].copy()
            else:
                part_state[n] = a.reshape(*a.shape[:-1], parts, kinds)[..., k, :].copy()
        out.append(part_state)
    return out


def join(states: Sequence[State], columns: Columns) -> dict[str, Array] | None:
    """The state of one module whose products had these; None where they do not fit together.

    Histories are brought to the longest among them.
    """
    if not same_shapes(states) or (states[0] and num_gemms(states[0]) != 1):
        return None
    out: dict[str, Array] = {}
    for name in states[0]:
        arrays = [s[name] for s in states]
        if name.startswith("amax_history_"):
            length = max(map(len, arrays))
            arrays = [lengthened(a, length) for a in arrays]
        stacked = np.stack(arrays, -1 if columns == "blocked" else -2)
        out[name] = stacked.reshape(*stacked.shape[:-2], -1)
    return out


def is_same_in_both(state: State) -> bool:
    """The columns may be taken either way: one product, or a state that has seen nothing."""
    parts = num_gemms(state)
    if parts is None:
        return not state
    readings = [split(state, parts, layout) or [] for layout in LAYOUTS]
    return all(
        np.array_equal(a[n], b[n], equal_nan=True)
        for a, b in zip(*readings, strict=True)
        for n in a
    )  # fmt: skip
