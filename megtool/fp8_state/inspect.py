"""Inspect every module's FP8 scaling state, and compare it with the weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from megtool.console import Progress, silent
from megtool.fp8_state.checks import (
    StateFinding,
    check_state,
    implied_scales,
    is_single_linear,
)
from megtool.fp8_state.collect import FP8ScalingState, ModuleState, collect_fp8_state
from megtool.fp8_state.inspect_report import AmaxInspection, AmaxLine
from megtool.fp8_state.modelopt_amax import AmaxBuffer, check_amax_buffer, is_rebuildable
from megtool.fp8_state.rebuild import rebuild_state
from megtool.fp8_state.weight_amax import count_weight_bytes, read_weight_amaxes
from megtool.megatron_state.extra_states.fp8_faults import column_layout
from megtool.megatron_state.extra_states.merge_ranks import read_merge
from megtool.megatron_state.extra_states.names import Site
from megtool.megatron_state.extra_states.te_state import ExtraState
from megtool.number_formats import delayed_scaling
from megtool.number_formats.delayed_scaling import Array, kinds_of
from megtool.options.groups import SourceOptions
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_source
from megtool.transport.reading.parallel_scan import default_threads
from megtool.transport.reading.shared_scan import SharedScan

_NAMES = {"fwd": ("input", "weight", "output"), "bwd": ("grad_output", "grad_input")}


def inspect_amax(
    path: Path,
    *,
    weights: bool = True,
    modules: bool = False,
    iteration: str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
    scan: SharedScan | None = None,
) -> AmaxInspection:
    """Report the FP8 scaling state of the checkpoint at `path`, and what is wrong with it.

    `weights` reads and compares the weights of modules with a state, in bounded memory; `modules`
    lists every module separately. With `scan`, workers share the reading out. A checkpoint without
    FP8 state is not an error.

    Raises:
        MegtoolError: there is no checkpoint, it is broken, or a state is damaged or hostile.
    """
    checkpoint = open_source(
        path,
        SourceOptions(iteration=iteration),
        lenient=True,
        compare_copies=False,
        optimizer=False,
    )
    scaling = collect_fp8_state(checkpoint)
    amaxes: dict[Site, float] = {}
    if weights and scaling.linear:
        total = count_weight_bytes(checkpoint.catalogue, scaling.linear)
        progress("amax", 0, total)
        amaxes = read_weight_amaxes(
            checkpoint.catalogue,
            scaling.linear,
            threads=default_threads(threads, checkpoint.path),
            progress=lambda n: progress("amax", n, total),
            scan=scan.part("amax") if scan else None,
        )
    lines = [
        _state_line(s, amaxes, is_ambiguous=s.name in scaling.ambiguous)
        for s in scaling.states if s.state.is_delayed
    ]  # fmt: skip
    lines += _buffer_lines(scaling, amaxes)
    ranks, differing = _count_merged(checkpoint, scaling)
    return AmaxInspection(
        source=str(path),
        format=checkpoint.catalogue.format,
        modules=tuple(lines),
        stateless=dict(
            Counter(s.state.recipe_name or "?" for s in scaling.states if not s.state.is_delayed)
        ),
        empty=scaling.empty,
        foreign=scaling.foreign,
        ranks=ranks,
        differing=differing,
        joint_findings=scaling.findings,
        compared=bool(amaxes),
        is_full=modules,
    )


def _state_line(
    module_state: ModuleState, amaxes: Mapping[Site, float], *, is_ambiguous: bool
) -> AmaxLine:
    state, site = module_state.state, module_state.site
    weight = amaxes.get(site) if site is not None else None
    amax: dict[str, float] = {}
    scale: dict[str, float | None] = {}
    implied: dict[str, float | None] = {}
    for d, names in _NAMES.items():
        history, scales = (state.tensors.get(f"{n}_{d}") for n in ("amax_history", "scale"))
        implied_values = implied_scales(state, d)
        for k, name in enumerate(names):
            if history is not None:
                amax[name] = _column_extreme(state, delayed_scaling.amax(history), d, k)
            if scales is not None:
                scale[name] = _column_extreme(state, scales, d, k, smallest=True)
            if implied_values is not None:
                value = _column_extreme(state, implied_values, d, k, smallest=True)
                implied[name] = None if np.isnan(value) else value
    recipe = state.recipe_name or "delayed scaling"
    return AmaxLine(
        module=site.module if site else module_state.name,
        expert=site.expert if site else None,
        release=state.release,
        recipe=f"{recipe} of {state.num_gemms}" if not is_single_linear(state) else recipe,
        steps=state.history_length,
        margin=state.scaling_rule.margin,
        amax=amax,
        scale=scale,
        implied=implied,
        weight=weight,
        findings=() if is_ambiguous else _find_problems(module_state, weight),
    )


def _find_problems(module_state: ModuleState, weight: float | None) -> tuple[StateFinding, ...]:
    """The findings about a state; `is_fixable` if a rebuilt state no longer has them."""
    findings = check_state(module_state.name, module_state.state, weight)
    if not any(f.is_wrong for f in findings):
        return tuple(findings)
    rebuilt, _ = rebuild_state(module_state.state, weight)
    remaining = check_state(module_state.name, rebuilt, weight) if rebuilt is not None else findings
    kinds = {f.kind for f in remaining if f.is_wrong}
    return tuple(replace(f, is_fixable=f.is_wrong and f.kind not in kinds) for f in findings)


def _column_extreme(
    state: ExtraState, values: Array, direction: str, kind: int, *, smallest: bool = False
) -> float:
    """The largest (or smallest) of the columns of one kind; NaN where their order is not known."""
    layout = column_layout(state)
    if layout is None:
        return float("nan")
    columns = values[kinds_of(direction, len(values), layout) == kind]
    if not columns.size:
        return float("nan")
    return float(columns.min() if smallest else columns.max())


def _buffer_lines(scaling: FP8ScalingState, amaxes: Mapping[Site, float]) -> list[AmaxLine]:
    by_site: dict[Site, list[AmaxBuffer]] = defaultdict(list)
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
            amax={b.quantizer: b.amax for b in some},
            scale={},
            implied={},
            weight=amaxes.get(site),
            findings=tuple(
                replace(f, is_fixable=is_rebuildable(b, amaxes))
                for b in some for f in check_amax_buffer(b, amaxes)
            ),
        )
        for site, some in by_site.items()
    ]  # fmt: skip


def _count_merged(source: CheckpointSource, scaling: FP8ScalingState) -> tuple[int, int]:
    """The most ranks that a state was merged from, and in how many modules ranks differed."""
    merged = read_merge(source.catalogue)
    objects = source.catalogue.objects
    ids = [id(objects[s.name].value) for s in scaling.states]
    ranks = max((merged.ranks.get(key, 1) for key in ids), default=1)
    return ranks, sum(key in merged.differing for key in ids)
