"""Inspect: every module's FP8 scaling, looked over and held against the weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from megtool.checkpoint.containers.te_extra_state import ExtraState
from megtool.checkpoint.parallel_scan import usual_threads
from megtool.console import Progress, silent
from megtool.number_formats import delayed_scaling
from megtool.number_formats.delayed_scaling import Array, kinds_of
from megtool.reshard.fp8_state.checks import Found, check, fits, implied
from megtool.reshard.fp8_state.collect import Scaling, State, scaling_of
from megtool.reshard.fp8_state.inspect_report import AmaxInspection, AmaxLine
from megtool.reshard.fp8_state.modelopt_amax import Buffer, check_buffer, is_mendable
from megtool.reshard.fp8_state.rebuild import rebuilt
from megtool.reshard.fp8_state.weight_amax import num_bytes, weight_amaxes
from megtool.reshard.megatron.extra_state_names import Site
from megtool.reshard.megatron.fp8_faults import layout_of
from megtool.reshard.megatron.rank_extra_state import merged_of
from megtool.reshard.open_source import CheckpointSource, open_model

_NAMES = {"fwd": ("input", "weight", "output"), "bwd": ("grad_output", "grad_input")}


def inspect_amax(
    source: str | Path,
    *,
    weights: bool = True,
    modules: bool = False,
    iteration: str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> AmaxInspection:
    """Say what the FP8 scaling of the checkpoint `source` is, and what is wrong with it.

    With `weights` those of the modules that have any are read, in bounded memory; `modules` lists
    every module on its own. A checkpoint without any is no error.

    Raises:
        MegtoolError: there is no checkpoint, it is broken, or a state is damaged or hostile.
    """
    opened = open_model(Path(source), iteration=iteration, lenient=True, optimizer=False)
    scaling = scaling_of(opened)
    amaxes: dict[Site, float] = {}
    if weights and scaling.linear:
        total = num_bytes(opened.catalogue, scaling.linear)
        progress("amax", 0, total)
        amaxes = weight_amaxes(
            opened.catalogue,
            scaling.linear,
            threads=usual_threads(threads),
            progress=lambda n: progress("amax", n, total),
        )
    lines = [
        _line(s, amaxes, untold=s.name in scaling.untold)
        for s in scaling.states if s.state.is_delayed
    ]  # fmt: skip
    lines += _of_buffers(scaling, amaxes)
    ranks, differing = _merged(opened, scaling)
    return AmaxInspection(
        source=str(source),
        format=opened.catalogue.format,
        lines_of=tuple(lines),
        stateless=dict(
            Counter(s.state.recipe_name or "?" for s in scaling.states if not s.state.is_delayed)
        ),
        empty=scaling.empty,
        foreign=scaling.foreign,
        ranks=ranks,
        differing=differing,
        together=scaling.findings,
        compared=bool(amaxes),
        in_full=modules,
    )


def _line(held: State, amaxes: Mapping[Site, float], *, untold: bool) -> AmaxLine:
    state, site = held.state, held.site
    weight = amaxes.get(site) if site is not None else None
    amax: dict[str, float] = {}
    scale: dict[str, float | None] = {}
    asked: dict[str, float | None] = {}
    for d, names in _NAMES.items():
        history, own = (state.tensors.get(f"{n}_{d}") for n in ("amax_history", "scale"))
        follows = implied(state, d)
        for k, name in enumerate(names):
            if history is not None:
                amax[name] = _share(state, delayed_scaling.amax(history), d, k)
            if own is not None:
                scale[name] = _share(state, own, d, k, smallest=True)
            if follows is not None:
                found = _share(state, follows, d, k, smallest=True)
                asked[name] = None if np.isnan(found) else found
    recipe = state.recipe_name or "delayed scaling"
    return AmaxLine(
        module=site.module if site else held.name,
        expert=site.expert if site else None,
        release=state.release,
        recipe=f"{recipe} of {state.num_gemms}" if not fits(state) else recipe,
        steps=state.history_length,
        margin=state.rule.margin,
        amax=amax,
        scale=scale,
        implied=asked,
        weight=weight,
        findings=() if untold else _found(held, weight),
    )


def _found(held: State, weight: float | None) -> tuple[Found, ...]:
    """What is found, and of what is wrong whether it is still found once it was mended."""
    found = check(held.name, held.state, weight)
    if not any(f.is_wrong for f in found):
        return tuple(found)
    mended, _ = rebuilt(held.state, weight)
    left = check(held.name, mended, weight) if mended is not None else found
    kinds = {f.kind for f in left if f.is_wrong}
    return tuple(replace(f, is_mended=f.is_wrong and f.kind not in kinds) for f in found)


def _share(
    state: ExtraState, values: Array, direction: str, kind: int, *, smallest: bool = False
) -> float:
    """The largest (or smallest) of the columns of one kind; NaN where it is not known which."""
    layout = layout_of(state)
    if layout is None:
        return float("nan")
    mine = values[kinds_of(direction, len(values), layout) == kind]
    if not mine.size:
        return float("nan")
    return float(mine.min() if smallest else mine.max())


def _of_buffers(scaling: Scaling, amaxes: Mapping[Site, float]) -> list[AmaxLine]:
    by_site: dict[Site, list[Buffer]] = defaultdict(list)
    for buffer in scaling.buffers:
        by_site[buffer.site].append(buffer)
    return [
        AmaxLine(
            module=site.module,
            expert=site.expert,
            release=0,
            recipe="ModelOpt",
            steps=0,
            margin=0,
            amax={b.quantizer: b.top for b in some},
            scale={},
            implied={},
            weight=amaxes.get(site),
            findings=tuple(
                replace(f, is_mended=is_mendable(b, amaxes))
                for b in some for f in check_buffer(b, amaxes)
            ),
        )
        for site, some in by_site.items()
    ]  # fmt: skip


def _merged(opened: CheckpointSource, scaling: Scaling) -> tuple[int, int]:
    """How many ranks the states are of at most, and in how many modules these differed."""
    merged = merged_of(opened.catalogue)
    held = opened.catalogue.objects
    ids = [id(held[s.name].value) for s in scaling.states]
    ranks = max((merged.ranks.get(key, 1) for key in ids), default=1)
    return ranks, sum(key in merged.differing for key in ids)
