"""Layer-by-layer calibration of a model.

The outer loop is over layers and the inner loop over data: only one layer's weights are in memory,
and its inputs are kept between layers. An `ActivationRecorder` collects statistics of a layer's
inputs and `solve_qparams` turns them into quantization parameters. If the algorithm is sequential,
the layer then runs once more with fake quantization, so later layers see its quantized outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megtool.console import Progress, silent
from megtool.errors import CalibrationError, UsageError
from megtool.model.batch import Batch
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.activation_sites import ActivationSite
from megtool.quant.calibration.calibration_file import CalibrationFile
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.expert_coverage import fill_missing_statistics
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.micro_batches import num_valid, shard_micro_batches, split_batches
from megtool.quant.calibration.rank_sync import RankSync
from megtool.quant.calibration.resume_folder import ResumeFolder
from megtool.quant.calibration.sequential import CalibrationRun
from megtool.quant.calibration.statistics import ActivationStatistics
from megtool.quant.qparams import QParams
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.requirements import derive_requirements
from megtool.quant.solve_qparams import solve_qparams
from megtool.reshard.source import CheckpointSource

LayerResult = tuple[dict[str, ActivationStatistics], QParams]


def calibrate(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    recipe: Recipe,
    sites: Sequence[ActivationSite],
    batches: Sequence[Batch],
    *,
    groups: ProcessGroups | None = None,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    resident: bool = False,
    sequential: bool | None = None,
    policy: str = "share",
    route_all: bool = False,
    resume_folder: Path | None = None,
    fingerprint: Fingerprint,
    spills: bool = False,
    threads: int | None = None,
    progress: Progress = silent,
    emulate_graphs: bool = False,
) -> CalibrationFile:
    """Calibrate a model: collect statistics of all sites and solve quantization parameters.

    Every rank gets the same batches and returns the same result.

    Args:
        source: the checkpoint.
        decisions: the format of each module.
        recipe: the recipe, for its algorithm.
        sites: all activation sites of the model.
        batches: the data; data-parallel ranks split it.
        groups: process groups (None: a single process).
        dtype: dtype of activations and weights.
        device: device of a single process.
        resident: load the whole model once instead of layer by layer.
        sequential: later layers see the quantized outputs of earlier ones (None: if the algorithm
            asks for it).
        policy: how experts without data are handled (see `expert_coverage`).
        route_all: experts see all tokens.
        resume_folder: folder to resume from after an interruption.
        fingerprint: identifies model, recipe and data.
        spills: keep activations between layers in `resume_folder` instead of memory.
        threads: threads that read weights.
        progress: reports tokens.
        emulate_graphs: emulate CUDA graphs on a CPU, for tests.

    Raises:
        CalibrationError: no data; NaN or Inf (names layer and sample); `resume_folder` belongs to
            another calibration.
        UsageError: `spills` without `resume_folder`; weights that do not fit.
        CheckpointError: the weights cannot be read; the disk is full.
    """
    if spills and resume_folder is None:
        raise UsageError(
            "spilling activations needs a folder", hint="set it with --work-dir FOLDER"
        )
    groups = ProcessGroups.alone(device) if groups is None else groups
    if source.config is None:
        raise CalibrationError(
            "the model is unknown: the checkpoint has no config", hint="--like HF_FOLDER"
        )
    by_module = {d.module.name: d for d in decisions}
    if sequential is None:
        sequential = any(derive_requirements(recipe, d).sequential for d in decisions)
    micro_batches = split_batches(batches, source.config)
    resume = None
    if resume_folder is not None:
        resume = ResumeFolder(
            resume_folder,
            fingerprint=fingerprint,
            is_leader=groups.rank == 0,
            settings={
                "dtype": str(dtype),
                "device": groups.device.type,
                "sequential": sequential,
                "policy": policy,
                "route_all": route_all,
                "layout": _layout_text(groups),
                "pieces": [list(p.batch.shape) for p in micro_batches],
            },
        )
    run = CalibrationRun(
        source=source,
        config=source.config,
        decisions=by_module,
        recipe=recipe,
        sites=tuple(sites),
        ranks=RankSync(groups=groups),
        micro_batches=shard_micro_batches(micro_batches, groups.dp),
        sequential=sequential,
        policy=policy,
        route_all=route_all,
        resume=resume,
        spills=spills,
        emulate_graphs=emulate_graphs,
        progress=progress,
        load_options={
            "groups": groups,
            "dtype": dtype,
            "device": groups.device,
            "on_demand": not resident,
            "threads": threads,
        },
    )
    with contextlib.ExitStack() as stack:
        with run.ranks.raise_together():
            if resume is not None:
                stack.enter_context(resume.claim())
        results = run.run()
    statistics, qparams = _merge_results(results)
    return CalibrationFile(
        fingerprint=fingerprint,
        num_samples=sum(p.batch.shape[0] for p in micro_batches),
        num_tokens=num_valid(micro_batches),
        sequential=sequential,
        policy=policy,
        route_all=route_all,
        statistics=statistics,
        qparams=qparams,
    )


def _layout_text(groups: ProcessGroups) -> str:
    return (
        f"tp={groups.tp.size} pp={groups.pp.size} dp={groups.dp.size} "
        f"ep={groups.ep.size} etp={groups.etp.size}"
    )


def _merge_results(
    results: Mapping[int, LayerResult],
) -> tuple[dict[str, ActivationStatistics], QParams]:
    """Statistics and quantization parameters of all units, in the units' order."""
    statistics: dict[str, ActivationStatistics] = {}
    qparams = QParams()
    for unit in sorted(results):
        statistics |= results[unit][0]
        qparams.update(results[unit][1])
    return statistics, qparams


def resolve_calibration(
    calibration: CalibrationFile,
    source: CheckpointSource,
    decisions: Sequence[Decision],
    recipe: Recipe,
    sites: Sequence[ActivationSite],
    *,
    fingerprint: Fingerprint | None = None,
    stored_recipe: str = "",
    policy: str | None = None,
) -> CalibrationFile:
    """Solve quantization parameters again from stored statistics, for other decisions.

    Call `calibration_file.check_fits` first. `fingerprint` is that of the current recipe,
    `stored_recipe` its hash before formats are chosen, if different; `policy` is for experts
    without data (None: as in the file).

    Raises:
        CalibrationError: a decision needs data that the file does not have.
    """
    if source.config is None:
        raise CalibrationError(
            "the model is unknown: the checkpoint has no config", hint="--like HF_FOLDER"
        )
    policy = calibration.policy if policy is None else policy
    by_module = {d.module.name: d for d in decisions}
    qparams = QParams()
    by_layer: dict[int | None, list[ActivationSite]] = {}
    for p in sites:
        by_layer.setdefault(p.layer, []).append(p)
    with CanonicalWeights(source) as weights:
        for layer_sites in by_layer.values():
            measured = {
                p.name: calibration.statistics[p.name]
                for p in layer_sites
                if p.name in calibration.statistics
            }
            full, notes = fill_missing_statistics(layer_sites, measured, policy)
            qparams.update(
                solve_qparams(
                    layer_sites,
                    full,
                    by_module,
                    recipe,
                    weights,
                    config=source.config,
                    read_norm=weights.norm,
                )
            )
            qparams.update(QParams(notes=list(notes)))
    solved_recipe = calibration.solved_recipe if fingerprint is None else fingerprint.recipe
    if fingerprint is None and not stored_recipe:
        stored_recipe = calibration.fingerprint.recipe
    return replace(
        calibration,
        fingerprint=replace(calibration.fingerprint, recipe=stored_recipe or solved_recipe),
        solved_recipe=solved_recipe,
        policy=policy,
        qparams=qparams,
        needs_solving=False,
    )
