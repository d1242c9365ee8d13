"""Rebuild states that contradict their weights or themselves.

A weight determines its scale, so its history and scale are replaced where they cannot be the
weight's. Of inputs and gradients only the history is known: NaN, Inf and negative numbers are
removed from it, and scales that contradict it are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from megtool.fp8_state.checks import (
    check_weight,
    find_pending_step,
    find_wrong_scales,
    is_single_linear,
)
from megtool.fp8_state.weight_amax import read_weight_amaxes
from megtool.megatron_state.extra_states.amax_report import AmaxFinding
from megtool.megatron_state.extra_states.names import Site
from megtool.megatron_state.extra_states.te_state import ExtraState, replace_tensors
from megtool.number_formats import delayed_scaling
from megtool.number_formats.delayed_scaling import KINDS, WEIGHT, Array
from megtool.source.checkpoint import CheckpointSource
from megtool.transport.reading.parallel_scan import default_threads

STALE = ("uncovered", "stale", "zeros")


def rebuild_states(
    source: CheckpointSource, states: Mapping[Site, ExtraState], *, threads: int | None = None
) -> tuple[dict[Site, ExtraState], list[AmaxFinding]]:
    """The states that change, and what was wrong with each.

    Reads the weights of these modules once.

    Raises:
        StorageError: a weight cannot be read.
    """
    linear = [site for site, state in states.items() if is_single_linear(state)]
    amaxes = read_weight_amaxes(
        source.catalogue, linear, threads=default_threads(threads, source.path)
    )
    out: dict[Site, ExtraState] = {}
    findings: list[AmaxFinding] = []
    for site, state in states.items():
        new, changes = rebuild_state(state, amaxes.get(site))
        module = site.module if site.expert is None else f"{site.module} of expert {site.expert}"
        findings += [AmaxFinding(module=module, kind=kind, text=text) for kind, text in changes]
        if new is not None:
            out[site] = new
    return out, findings


def rebuild_state(
    state: ExtraState, weight: float | None
) -> tuple[ExtraState | None, list[tuple[str, str]]]:
    """The rebuilt state, None if it was right; and the changes, as `(kind, text)`.

    `weight` is the amax of the module's weight, None if no weight is stored.
    """
    if not state.is_delayed:
        return None, []
    changes: list[tuple[str, str]] = []
    tensors = _clean_tensors(state, changes)
    new = replace_tensors(state, tensors) if changes else state
    if weight is not None and is_single_linear(new):
        new = _fit_weight(new, weight, changes)
    new = _fit_scales(new, changes)
    changed = any(
        not np.array_equal(t, new.tensors[n], equal_nan=True) for n, t in state.tensors.items()
    )
    return (new if changed else None), changes


def _clean_tensors(state: ExtraState, changes: list[tuple[str, str]]) -> dict[str, Array]:
    """Histories without NaN, Inf and negative numbers, and scales computed again where invalid."""
    out = dict(state.tensors)
    for d in KINDS:
        history, scale = f"amax_history_{d}", f"scale_{d}"
        if history in out:
            bad = ~(np.isfinite(out[history]) & (out[history] >= 0))
            if bad.any():
                out[history] = np.where(bad, np.float32(0), out[history])
                changes.append(
                    ("cleaned", f"{int(bad.sum())} entries of {history} were not magnitudes")
                )
        if scale in out:
            bad = ~(np.isfinite(out[scale]) & (out[scale] > 0))
            if bad.any():
                usable = {**out, scale: np.where(bad, np.float32(1), out[scale])}
                rescaled = delayed_scaling.rescaled(usable, state.scaling_rule)[scale]
                _put_scales(out, d, np.where(bad, rescaled, out[scale]))
                changes.append(("cleaned", f"{int(bad.sum())} entries of {scale} were not scales"))
    return out


def _fit_weight(state: ExtraState, weight: float, changes: list[tuple[str, str]]) -> ExtraState:
    """The state with the weight's amax and scale where its own cannot be the weight's."""
    history, scale = (state.tensors.get(f"{n}_fwd") for n in ("amax_history", "scale"))
    if history is None or scale is None or not len(history):
        return state
    if not math.isfinite(weight):
        changes.append(("weight", "the weight has NaN or Inf: nothing is computed from it"))
        return state
    if not weight:
        return state
    tensors = dict(state.tensors)
    if (text := find_pending_step(state, weight)) is not None:
        tensors["amax_history_fwd"] = history = history.copy()
        history[0, WEIGHT] = weight
        changes.append(("pending", f"{text}: replaced"))
        state = replace_tensors(state, tensors)
    findings = [f for f in check_weight(state, weight) if f.kind in STALE]
    is_zero = len(history) > 1 and not history[:, WEIGHT].any()
    if not findings and not is_zero:
        return state
    tensors["amax_history_fwd"] = history.copy()
    column = np.zeros(len(history), np.float32)
    if len(history) > 1:  # a history of one step keeps nothing after the step
        column[-1] = weight
        column[0] = weight if history[0, WEIGHT] == np.float32(weight) else 0
    tensors["amax_history_fwd"][:, WEIGHT] = column
    rule = state.scaling_rule
    top = np.array([weight], np.float32)
    new_scale = delayed_scaling.scale(top, scale[WEIGHT : WEIGHT + 1], rule.max_fwd, rule.margin)
    before = float(scale[WEIGHT])
    is_weight = np.arange(len(scale)) == WEIGHT
    _put_scales(tensors, "fwd", np.where(is_weight, new_scale[0], scale))
    kind = findings[0].kind if findings else "zeros"
    text = (
        findings[0].text
        if findings
        else f"its history is empty, and the weight reaches {weight:.4g}"
    )
    changes.append((kind, f"{text}: scale {before:.6g} -> {float(new_scale[0]):.6g}"))
    return replace_tensors(state, tensors)


def _fit_scales(state: ExtraState, changes: list[tuple[str, str]]) -> ExtraState:
    """The state with scales that agree with their histories."""
    tensors = dict(state.tensors)
    for d in KINDS:
        wrong, _ = find_wrong_scales(state, d)
        if not wrong.any():
            continue
        name = f"scale_{d}"
        rescaled = delayed_scaling.rescaled(state.tensors, state.scaling_rule)[name]
        _put_scales(tensors, d, np.where(wrong, rescaled, tensors[name]))
        changes.append(("scale", f"{int(wrong.sum())} of {name} contradicted their histories"))
    return replace_tensors(state, tensors) if changes else state


def _put_scales(tensors: dict[str, Array], direction: str, scales: Array) -> None:
    """Replace scales; in releases 1.x also the inverses of those that change."""
    name, inverse = f"scale_{direction}", f"scale_inv_{direction}"
    changed = ~(tensors[name] == scales)
    tensors[name] = np.asarray(scales, np.float32)
    if inverse in tensors:
        turned = (np.float32(1) / tensors[name]).astype(np.float32)
        tensors[inverse] = np.where(changed, turned, tensors[inverse])
