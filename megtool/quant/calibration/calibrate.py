"""Calibrate: a model shown data layer by layer, each layer settled before the next one is read.

The loop over layers is outside, that over data inside: one layer's weights are in memory, and what
enters it is kept between layers. What a layer's inputs were is taken by a Recorder, settled by
`settle`, and kept; where the algorithm wants later layers to see what rounding makes of this one,
the layer is run once more as the engine will run it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megtool.console import Progress, silent
from megtool.errors import CalibrationError, UsageError
from megtool.model.batch import Batch
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.activation_sites import Point
from megtool.quant.calibration.calibration_file import Artefact
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.expert_coverage import filled
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.micro_batches import cut, num_valid, share
from megtool.quant.calibration.rank_sync import Ranks
from megtool.quant.calibration.resume_folder import Work
from megtool.quant.calibration.sequential import Run
from megtool.quant.calibration.statistics import Statistics
from megtool.quant.qparams import Settlement
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.requirements import needs
from megtool.quant.solve_qparams import settle
from megtool.reshard.source import CheckpointSource

Found = tuple[dict[str, Statistics], Settlement]


def calibrate(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    recipe: Recipe,
    points: Sequence[Point],
    batches: Sequence[Batch],
    *,
    groups: ProcessGroups | None = None,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    resident: bool = False,
    sequential: bool | None = None,
    policy: str = "share",
    route_all: bool = False,
    work: Path | None = None,
    fingerprint: Fingerprint,
    spill: bool = False,
    threads: int | None = None,
    progress: Progress = silent,
    rehearsed: bool = False,
) -> Artefact:
    """Statistics of all points, and what becomes of all modules that have one.

    Every rank is given the same batches; data-parallel ranks share them out. With `resident` the
    model is loaded once, whole. `sequential` has later layers see what was made of earlier ones
    (None: where an algorithm asks for it). `policy` and `route_all` are for experts without data
    (see `coverage`). `work` is a folder to go on from after a kill; with `spill` it holds what is
    between layers, too, instead of memory. The same on every rank comes back.

    Raises:
        CalibrationError: no data, a NaN (says in which layer and sample), work that belongs to
            another calibration.
        UsageError: `spill` without `work`; weights that do not fit.
        CheckpointError: the weights cannot be read; the disk is full.
    """
    if spill and work is None:
        raise UsageError(
            "activations have nowhere to go", hint="--work FOLDER says where they are spilled to"
        )
    groups = ProcessGroups.alone(device) if groups is None else groups
    if source.config is None:
        raise CalibrationError("nothing says what model this is", hint="--like HF_FOLDER")
    by_module = {d.module.name: d for d in decisions}
    if sequential is None:
        sequential = any(needs(recipe, d).sequential for d in decisions)
    micro_batches = cut(batches, source.config)
    ranks = Ranks(groups=groups)
    resume = None
    if work is not None:
        resume = Work(
            work,
            fingerprint=fingerprint,
            leads=groups.rank == 0,
            settings={
                "dtype": str(dtype),
                "device": groups.device.type,
                "sequential": sequential,
                "policy": policy,
                "route_all": route_all,
                "layout": f"tp={groups.tp.size} pp={groups.pp.size} dp={groups.dp.size} "
                f"ep={groups.ep.size} etp={groups.etp.size}",
                "pieces": [list(p.batch.shape) for p in micro_batches],
            },
        )
    run = Run(
        source=source,
        config=source.config,
        decisions=by_module,
        recipe=recipe,
        points=tuple(points),
        ranks=ranks,
        pieces=share(micro_batches, groups.dp),
        sequential=sequential,
        policy=policy,
        route_all=route_all,
        work=resume,
        spill=spill,
        rehearsed=rehearsed,
        progress=progress,
        how={
            "groups": groups,
            "dtype": dtype,
            "device": groups.device,
            "on_demand": not resident,
            "threads": threads,
        },
    )
    with contextlib.ExitStack() as stack:
        with ranks.together():
            if resume is not None:
                stack.enter_context(resume.claim())
        results = run.all()
    statistics: dict[str, Statistics] = {}
    qparams = Settlement()
    for unit in sorted(results):
        statistics |= results[unit][0]
        qparams.add(results[unit][1])
    return Artefact(
        fingerprint=fingerprint,
        num_samples=sum(p.batch.shape[0] for p in micro_batches),
        num_tokens=num_valid(micro_batches),
        sequential=sequential,
        policy=policy,
        route_all=route_all,
        statistics=statistics,
        settlement=qparams,
    )


def settled_anew(
    artefact: Artefact,
    source: CheckpointSource,
    decisions: Sequence[Decision],
    recipe: Recipe,
    points: Sequence[Point],
    *,
    fingerprint: Fingerprint | None = None,
    written: str = "",
    policy: str | None = None,
) -> Artefact:
    """The artefact as if it had been made with these decisions, which statistics suffice for.

    `artefact.check_fits` comes first. `fingerprint` is that of the recipe at hand, `written` the
    hash of it with formats still to be chosen, where that is another one;
    `policy` is for experts without data (None: that of the artefact).

    Raises:
        CalibrationError: a decision needs what is not there.
    """
    if source.config is None:
        raise CalibrationError("nothing says what model this is", hint="--like HF_FOLDER")
    policy = artefact.policy if policy is None else policy
    by_module = {d.module.name: d for d in decisions}
    qparams = Settlement()
    by_layer: dict[int | None, list[Point]] = {}
    for p in points:
        by_layer.setdefault(p.layer, []).append(p)
    with CanonicalWeights(source) as weights:
        for layer_sites in by_layer.values():
            measured = {
                p.name: artefact.statistics[p.name]
                for p in layer_sites
                if p.name in artefact.statistics
            }
            full, notes = filled(layer_sites, measured, policy)
            qparams.add(
                settle(
                    layer_sites,
                    full,
                    by_module,
                    recipe,
                    weights,
                    config=source.config,
                    norms=weights.norm,
                )
            )
            qparams.add(Settlement(notes=list(notes)))
    solved_recipe = artefact.settled_for if fingerprint is None else fingerprint.recipe
    if fingerprint is None and not written:
        written = artefact.fingerprint.recipe
    return replace(
        artefact,
        fingerprint=replace(artefact.fingerprint, recipe=written or solved_recipe),
        settled_for=solved_recipe,
        policy=policy,
        settlement=qparams,
        needs_settling=False,
    )
