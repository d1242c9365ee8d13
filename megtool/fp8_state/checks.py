"""Check a module's delayed scaling state for contradictions, and against its weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megtool.megatron_state.extra_states.fp8_faults import (
    column_layout,
    find_faults,
    is_unused,
    make_finding,
)
from megtool.megatron_state.extra_states.te_state import ExtraState
from megtool.number_formats import delayed_scaling
from megtool.number_formats.delayed_scaling import WEIGHT, Array, kinds_of

SLACK = 1 / 16
"""A weight may exceed the range of its scale by so much: that clips less than FP8 rounds."""

LOOSE = 8.0
"""A scale for numbers so many times larger than the weight's belongs to another weight.

Weights shrink in training and histories are long, so smaller factors occur and cost only range
(E4M3 has 2^15 of it in normal numbers); from `ROOMY` times on they are reported, not changed.
"""

ROOMY = 2.0
"""A scale for numbers so many times larger than the weight's is reported."""

EXACT = 1e-3
"""Scales with a smaller relative difference are equal."""

LAG = 2.0
"""A scale may be so much smaller than its history implies: a maximum just left the history."""

NAMES = {"fwd": ("input", "weight", "output"), "bwd": ("output's gradient", "input's gradient")}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFinding:
    """A finding about one module. Findings that are not `is_wrong` are information.

    Kinds: `nan`, `inf`, `negative`, `zeros` (an empty history), `scale` (not that of its history),
    `lag` (of a maximum that left the history), `uncovered` (the weight is larger), `stale` (for
    another weight), `loose` (larger than the weight needs), `pending` (the current step is not the
    weight's), `weight` (the weight has NaN or Inf), `shape`, `columns`. Those that are `is_fixable`
    can be rebuilt from the states and the weights.
    """

    kind: str
    text: str
    is_wrong: bool = True
    is_fixable: bool = False


def check_state(name: str, state: ExtraState, weight: float | None = None) -> list[StateFinding]:
    """All findings about a state, by its object's name; `weight` is the amax of its weight."""
    if not state.is_delayed:
        return []
    out = [
        StateFinding(kind=f.kind, text=make_finding("", f, state).text)
        for f in find_faults(name, state)
    ]
    if weight is not None and not is_single_linear(state):
        products = delayed_scaling.num_gemms(state.tensors)
        many = f"{products} products" if products else "no whole number of products"
        out.append(StateFinding(kind="shape", text=f"a state of {many} for one weight"))
    out += _check_scales(state)
    if weight is not None and is_single_linear(state):
        out += check_weight(state, weight)
    return out


def is_single_linear(state: ExtraState) -> bool:
    """Whether the state is that of one linear layer or expert, and has one weight."""
    return state.is_delayed and delayed_scaling.num_gemms(state.tensors) == 1


def implied_scales(state: ExtraState, direction: str) -> Array | None:
    """The scales that a state's histories imply; NaN where they imply none."""
    history = state.tensors.get(f"amax_history_{direction}")
    rule = state.scaling_rule
    if history is None or rule.algorithm is None:
        return None
    amaxes = delayed_scaling.amax(history, rule.algorithm)
    unknown = np.full_like(amaxes, np.nan)
    return delayed_scaling.scale(amaxes, unknown, rule.fp8_max(direction), rule.margin)


def without_current_step(history: Array) -> Array:
    """A history without the current step, which no scale includes yet."""
    if len(history) < 2 or not history[0].any():
        return history
    out = history.copy()
    out[0] = 0
    return out


def _check_scales(state: ExtraState) -> Iterator[StateFinding]:
    for d, names in NAMES.items():
        wrong, ratio = find_wrong_scales(state, d)
        layout = column_layout(state)
        kinds = kinds_of(d, len(ratio), layout) if layout is not None else None
        for column in np.flatnonzero(np.isfinite(ratio)).tolist():
            r = float(ratio[column])
            if abs(r - 1) <= EXACT:
                continue
            tensor = names[kinds[column]] if kinds is not None else "one of several products"
            distance = f"{r:.4g} times that of its history"
            if wrong[column]:
                yield StateFinding(kind="scale", text=f"the scale of the {tensor} is {distance}")
            else:
                yield StateFinding(
                    kind="lag", text=f"the scale of the {tensor} is {distance}", is_wrong=False
                )


def find_wrong_scales(state: ExtraState, direction: str) -> tuple[np.ndarray, Array]:
    """Which scales contradict their histories, and each divided by what its history implies.

    A larger one lets the largest numbers overflow. A smaller one is that of a maximum which has
    left the history since, unless it is smaller by more than `LAG`.
    """
    scales, history = (state.tensors.get(f"{n}_{direction}") for n in ("scale", "amax_history"))
    implied = implied_scales(state, direction)
    if scales is None or history is None or implied is None or scales.shape != implied.shape:
        return np.zeros(0, bool), np.zeros(0, np.float32)
    rule = state.scaling_rule
    before = delayed_scaling.amax(without_current_step(history), rule.algorithm)
    largest = delayed_scaling.scale(
        before, np.full_like(before, np.nan), rule.fp8_max(direction), rule.margin
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        usable = np.isfinite(scales) & (scales > 0)
        ratio = np.where(usable, scales / implied, np.nan).astype(np.float32)
        over = usable & (scales / largest > 1 + EXACT)
        wrong = over | (ratio < (1 - EXACT) / LAG)
    # A current step that is larger than all earlier steps is not a fault of the scale.
    pending = usable & ~over & (ratio > 1)
    return np.asarray(wrong), np.where(pending, np.float32(1), ratio)


def check_weight(state: ExtraState, weight: float) -> Iterator[StateFinding]:
    """Findings about a state of one product and the amax of its weight."""
    if not math.isfinite(weight):
        yield StateFinding(kind="weight", text="the weight holds NaN or infinity")
        return
    history, scale = (state.tensors.get(f"{n}_fwd") for n in ("amax_history", "scale"))
    if history is None or scale is None or is_unused(state) or not weight:
        return
    rule, weight_scale = state.scaling_rule, float(scale[WEIGHT])
    column = history[:, WEIGHT]
    if (text := find_pending_step(state, weight)) is not None:
        yield StateFinding(kind="pending", text=text)
        column = without_current_step(column) if len(column) > 1 else column[:0]
    if not (math.isfinite(weight_scale) and weight_scale > 0):
        return  # reported already
    reach = rule.max_fwd / weight_scale
    if len(column) and not np.isfinite(column).all():
        return
    if len(column) > 1 and not column.any():
        return  # reported already, and its scale has no meaning
    history_amax = (
        float(delayed_scaling.amax(column[:, None], rule.algorithm)[0]) if len(column) else 0.0
    )
    covered = reach if not history_amax else min(reach, history_amax * 2.0**rule.margin)
    made_for = reach / 2.0**rule.margin
    if weight > covered * (1 + SLACK):
        yield StateFinding(
            kind="uncovered",
            text=f"the weight reaches {weight:.4g}, and its scale covers {covered:.4g}",
        )
    elif made_for > LOOSE * weight:
        yield StateFinding(
            kind="stale",
            text=f"the weight reaches {weight:.4g}, and its scale is made for {made_for:.4g}",
        )
    elif made_for > ROOMY * weight:
        text = f"the weight reaches {weight:.4g}, and its scale is made for {made_for:.4g}"
        yield StateFinding(kind="loose", text=text, is_wrong=False)


def find_pending_step(state: ExtraState, weight: float) -> str | None:
    """What is wrong with the weight's current step in releases 1.x, if anything.

    There, a change of dtype copies weights in place, and the copy leaves another amax in row 0.
    Source: `correct_amax_history_if_needed` in megatron-core, which puts the weight's there.
    """
    history = state.tensors.get("amax_history_fwd")
    if state.release != 1 or history is None or not len(history):
        return None
    entry = float(history[0, WEIGHT])
    if entry == 0 or (math.isfinite(entry) and abs(entry / weight - 1) <= SLACK):
        return None
    return f"row 0 of the weight's history is {entry:.4g}, and the weight reaches {weight:.4g}"
