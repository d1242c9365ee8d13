"""Rebuild: states that their weights or their own numbers contradict, made right again.

What a weight's scale has to be follows from the weight, so its history and scale are replaced where
they cannot be the weight's. Of inputs and gradients nothing is known but the history: numbers that
are none are taken out of it, and scales that contradict it are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from megtool.checkpoint.containers.te_extra_state import ExtraState, with_tensors
from megtool.checkpoint.parallel_scan import usual_threads
from megtool.number_formats import delayed_scaling
from megtool.number_formats.delayed_scaling import KINDS, WEIGHT, Array
from megtool.reshard.fp8_state.checks import check_weight, fits, pending, wrong_scales
from megtool.reshard.fp8_state.weight_amax import weight_amaxes
from megtool.reshard.megatron.amax_report import AmaxFinding
from megtool.reshard.megatron.extra_state_names import Site

if TYPE_CHECKING:
    from megtool.reshard.open_source import CheckpointSource

STALE = ("uncovered", "stale", "zeros")


def rebuild(
    source: CheckpointSource, states: Mapping[Site, ExtraState], *, threads: int | None = None
) -> tuple[dict[Site, ExtraState], list[AmaxFinding]]:
    """The states that change, and what was wrong with each of them.

    Reads the weights of all these modules once.

    Raises:
        StorageError: a weight cannot be read.
    """
    linear = [site for site, state in states.items() if fits(state)]
    amaxes = weight_amaxes(source.catalogue, linear, threads=usual_threads(threads))
    out: dict[Site, ExtraState] = {}
    findings: list[AmaxFinding] = []
    for site, state in states.items():
        new, said = rebuilt(state, amaxes.get(site))
        where = site.module if site.expert is None else f"{site.module} of expert {site.expert}"
        findings += [AmaxFinding(module=where, kind=kind, text=text) for kind, text in said]
        if new is not None:
            out[site] = new
    return out, findings


def rebuilt(
    state: ExtraState, weight: float | None
) -> tuple[ExtraState | None, list[tuple[str, str]]]:
    """A state made right, None where it is; and what was done, as `(kind, text)`.

    `weight` is the amax of the module's weight, None where it has none that is stored.
    """
    if not state.is_delayed:
        return None, []
    said: list[tuple[str, str]] = []
    tensors = _without_nonsense(state, said)
    now = with_tensors(state, tensors) if said else state
    if weight is not None and fits(now):
        now = _with_weight(now, weight, said)
    now = _with_scales(now, said)
    changed = any(
        not np.array_equal(t, now.tensors[n], equal_nan=True) for n, t in state.tensors.items()
    )
    return (now if changed else None), said


def _without_nonsense(state: ExtraState, said: list[tuple[str, str]]) -> dict[str, Array]:
    """Histories without NaN, infinity and negative numbers; of scales these wait for others."""
    out = dict(state.tensors)
    for d in KINDS:
        past, held = f"amax_history_{d}", f"scale_{d}"
        if past in out:
            bad = ~(np.isfinite(out[past]) & (out[past] >= 0))
            if bad.any():
                out[past] = np.where(bad, np.float32(0), out[past])
                said.append(("cleaned", f"{int(bad.sum())} entries of {past} were no magnitudes"))
        if held in out:
            bad = ~(np.isfinite(out[held]) & (out[held] > 0))
            if bad.any():
                usable = {**out, held: np.where(bad, np.float32(1), out[held])}
                again = delayed_scaling.rescaled(usable, state.rule)[held]
                _put_scales(out, d, np.where(bad, again, out[held]))
                said.append(("cleaned", f"{int(bad.sum())} entries of {held} were no scales"))
    return out


def _with_weight(state: ExtraState, weight: float, said: list[tuple[str, str]]) -> ExtraState:
    """The state with the weight's own amax and scale where what it has cannot be the weight's."""
    history, scale = (state.tensors.get(f"{n}_fwd") for n in ("amax_history", "scale"))
    if history is None or scale is None or not len(history):
        return state
    if not math.isfinite(weight):
        said.append(("weight", "the weight holds NaN or infinity: nothing is made from it"))
        return state
    if not weight:
        return state
    tensors = dict(state.tensors)
    if (text := pending(state, weight)) is not None:
        tensors["amax_history_fwd"] = history = history.copy()
        history[0, WEIGHT] = weight
        said.append(("pending", f"{text}, as it is now"))
        state = with_tensors(state, tensors)
    why = [f for f in check_weight(state, weight) if f.kind in STALE]
    nothing = len(history) > 1 and not history[:, WEIGHT].any()
    if not why and not nothing:
        return state
    tensors["amax_history_fwd"] = history.copy()
    column = np.zeros(len(history), np.float32)
    if len(history) > 1:  # of a history of one step nothing outlives the step
        column[-1] = weight
        column[0] = weight if history[0, WEIGHT] == np.float32(weight) else 0
    tensors["amax_history_fwd"][:, WEIGHT] = column
    rule = state.rule
    top = np.array([weight], np.float32)
    found = delayed_scaling.scale(top, scale[WEIGHT : WEIGHT + 1], rule.max_fwd, rule.margin)
    before = float(scale[WEIGHT])
    at = np.arange(len(scale)) == WEIGHT
    _put_scales(tensors, "fwd", np.where(at, found[0], scale))
    kind = why[0].kind if why else "zeros"
    text = why[0].text if why else f"nothing in its history, and the weight reaches {weight:.4g}"
    said.append((kind, f"{text}: scale {before:.6g} -> {float(found[0]):.6g}"))
    return with_tensors(state, tensors)


def _with_scales(state: ExtraState, said: list[tuple[str, str]]) -> ExtraState:
    """The state with scales that do not contradict their histories."""
    tensors = dict(state.tensors)
    for d in KINDS:
        wrong, _ = wrong_scales(state, d)
        if not wrong.any():
            continue
        held = f"scale_{d}"
        again = delayed_scaling.rescaled(state.tensors, state.rule)[held]
        _put_scales(tensors, d, np.where(wrong, again, tensors[held]))
        said.append(("scale", f"{int(wrong.sum())} of {held} were not those of their histories"))
    return with_tensors(state, tensors) if said else state


def _put_scales(tensors: dict[str, Array], direction: str, scales: Array) -> None:
    """Put scales in the place of others; of releases 1.x the inverses of those that change too."""
    name, inverse = f"scale_{direction}", f"scale_inv_{direction}"
    changed = ~(tensors[name] == scales)
    tensors[name] = np.asarray(scales, np.float32)
    if inverse in tensors:
        turned = (np.float32(1) / tensors[name]).astype(np.float32)
        tensors[inverse] = np.where(changed, turned, tensors[inverse])
