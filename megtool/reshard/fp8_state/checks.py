"""Checks: what of a module's delayed scaling does not hold together, or not with its weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megtool.checkpoint.containers.te_extra_state import ExtraState
from megtool.number_formats import delayed_scaling
from megtool.number_formats.delayed_scaling import WEIGHT, Array, kinds_of
from megtool.reshard.fp8_state.transfer import is_unseen
from megtool.reshard.megatron.fp8_faults import as_finding, faults_of, layout_of

SLACK = 1 / 16
"""A weight may pass what its scale reaches by so much: that clips less than FP8 rounds off."""

LOOSE = 8.0
"""A scale made for numbers so many times larger than the weight's is another weight's.

Weights shrink in training and histories are long: less is possible, and costs but range (E4M3
has 2^15 of it in normal numbers); from `ROOMY` times on it is said, and nothing is changed.
"""

ROOMY = 2.0
"""A scale made for numbers so many times larger than the weight's is worth saying."""

EXACT = 1e-3
"""Scales that differ by less are the same."""

LAG = 2.0
"""A scale may be so much smaller than its history asks for: a maximum just left the history."""

NAMES = {"fwd": ("input", "weight", "output"), "bwd": ("output's gradient", "input's gradient")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One thing about one module. `kind` is one word; what is not `is_wrong` is only worth saying.

    Kinds: `nan`, `inf`, `negative`, `zeros` (a history that saw nothing), `scale` (not that of its
    history), `lag` (of a maximum that left it), `uncovered` (the weight is larger), `stale` (made
    for another weight), `loose` (made for more than the weight needs, but no other's), `pending` (a
    step under way that is not the weight's), `weight` (the weight is no number), `shape`,
    `columns`. What `is_mended` the states themselves and the weights put right.
    """

    kind: str
    text: str
    is_wrong: bool = True
    is_mended: bool = False


def check(name: str, state: ExtraState, weight: float | None = None) -> list[Found]:
    """All that is to be said about a state, by its object's name; `weight` is its weight's amax."""
    if not state.is_delayed:
        return []
    out = [Found(kind=f.kind, text=as_finding("", f, state).text) for f in faults_of(name, state)]
    if weight is not None and not fits(state):
        products = delayed_scaling.num_gemms(state.tensors)
        many = f"{products} products" if products else "no whole number of products"
        out.append(Found(kind="shape", text=f"a state of {many} for one weight"))
    out += _scales(state)
    if weight is not None and fits(state):
        out += check_weight(state, weight)
    return out


def fits(state: ExtraState) -> bool:
    """The state is that of one linear layer, or expert: what this module can compare and change."""
    return state.is_delayed and delayed_scaling.num_gemms(state.tensors) == 1


def implied(state: ExtraState, direction: str) -> Array | None:
    """The scales that a state's histories ask for; NaN where they ask for none."""
    history = state.tensors.get(f"amax_history_{direction}")
    rule = state.rule
    if history is None or rule.algorithm is None:
        return None
    seen = delayed_scaling.amax(history, rule.algorithm)
    nothing = np.full_like(seen, np.nan)
    return delayed_scaling.scale(seen, nothing, rule.fp8_max(direction), rule.margin)


def settled(history: Array) -> Array:
    """A history without what the step under way saw, which is in no scale yet."""
    if len(history) < 2 or not history[0].any():
        return history
    out = history.copy()
    out[0] = 0
    return out


def _scales(state: ExtraState) -> Iterator[Found]:
    for d, names in NAMES.items():
        wrong, ratio = wrong_scales(state, d)
        layout = layout_of(state)
        kinds = kinds_of(d, len(ratio), layout) if layout is not None else None
        for column in np.flatnonzero(np.isfinite(ratio)).tolist():
            r = float(ratio[column])
            if abs(r - 1) <= EXACT:
                continue
            what = names[kinds[column]] if kinds is not None else "one of several products"
            far = f"{r:.4g} times that of its history"
            if wrong[column]:
                yield Found(kind="scale", text=f"the scale of the {what} is {far}")
            else:
                yield Found(kind="lag", text=f"the scale of the {what} is {far}", is_wrong=False)


def wrong_scales(state: ExtraState, direction: str) -> tuple[np.ndarray, Array]:
    """Which scales contradict their histories, and each divided by what its history asks for.

    A larger one lets the largest numbers overflow. A smaller one is that of a maximum which has
    left the history since, unless it is smaller by more than `LAG`.
    """
    held, history = (state.tensors.get(f"{n}_{direction}") for n in ("scale", "amax_history"))
    asked = implied(state, direction)
    if held is None or history is None or asked is None or held.shape != asked.shape:
        return np.zeros(0, bool), np.zeros(0, np.float32)
    rule = state.rule
    before = delayed_scaling.amax(settled(history), rule.algorithm)
    most = delayed_scaling.scale(
        before, np.full_like(before, np.nan), rule.fp8_max(direction), rule.margin
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        usable = np.isfinite(held) & (held > 0)
        ratio = np.where(usable, held / asked, np.nan).astype(np.float32)
        over = usable & (held / most > 1 + EXACT)
        wrong = over | (ratio < (1 - EXACT) / LAG)
    # A step under way that is larger than all before it is no fault of the scale.
    pending = usable & ~over & (ratio > 1)
    return np.asarray(wrong), np.where(pending, np.float32(1), ratio)


def check_weight(state: ExtraState, weight: float) -> Iterator[Found]:
    """How a state of one product fits the weight's own amax."""
    if not math.isfinite(weight):
        yield Found(kind="weight", text="the weight holds NaN or infinity")
        return
    history, scale = (state.tensors.get(f"{n}_fwd") for n in ("amax_history", "scale"))
    if history is None or scale is None or is_unseen(state) or not weight:
        return
    rule, held = state.rule, float(scale[WEIGHT])
    column = history[:, WEIGHT]
    if (text := pending(state, weight)) is not None:
        yield Found(kind="pending", text=text)
        column = settled(column) if len(column) > 1 else column[:0]
    if not (math.isfinite(held) and held > 0):
        return  # found already
    reach = rule.max_fwd / held
    if len(column) and not np.isfinite(column).all():
        return
    if len(column) > 1 and not column.any():
        return  # found already, and its scale says nothing
    seen = float(delayed_scaling.amax(column[:, None], rule.algorithm)[0]) if len(column) else 0.0
    known = reach if not seen else min(reach, seen * 2.0**rule.margin)
    made_for = reach / 2.0**rule.margin
    if weight > known * (1 + SLACK):
        yield Found(
            kind="uncovered", text=f"the weight reaches {weight:.4g}, and its scale {known:.4g}"
        )
    elif made_for > LOOSE * weight:
        yield Found(
            kind="stale",
            text=f"the weight reaches {weight:.4g}, and its scale is made for {made_for:.4g}",
        )
    elif made_for > ROOMY * weight:
        text = f"the weight reaches {weight:.4g}, and its scale is made for {made_for:.4g}"
        yield Found(kind="loose", text=text, is_wrong=False)


def pending(state: ExtraState, weight: float) -> str | None:
    """What is wrong with the step under way of the weight in releases 1.x, if anything.

    There, a change of dtype copies weights in place, and the copy leaves an amax of its own in row
    0. Source: `correct_amax_history_if_needed` in megatron-core, which puts the weight's there.
    """
    history = state.tensors.get("amax_history_fwd")
    if state.release != 1 or history is None or not len(history):
        return None
    held = float(history[0, WEIGHT])
    if held == 0 or (math.isfinite(held) and abs(held / weight - 1) <= SLACK):
        return None
    return f"row 0 of the weight's history is {held:.4g}, and the weight reaches {weight:.4g}"
