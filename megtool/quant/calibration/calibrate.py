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

from megtool.console import Progress, silent
from megtool.errors import CalibrationError, UsageError
from megtool.model.batch import Batch
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.calibration_file import CalibrationFile
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.expert_coverage import fill_missing_statistics
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.micro_batches import num_valid, shard_micro_batches, split_batches
from megtool.quant.calibration.rank_sync import RankSync
from megtool.quant.calibration.requirements import derive_requirements
from megtool.quant.calibration.resume_folder import ResumeFolder
from megtool.quant.calibration.sequential import CalibrationRun
from megtool.quant.calibration.settings import CalibrationMethod
from megtool.quant.calibration.solve_qparams import solve_qparams
from megtool.quant.qparams import QParams
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.quant.statistics.site_statistics import ActivationStatistics
from megtool.source.checkpoint import CheckpointSource
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

LayerResult = tuple[dict[str, ActivationStatistics], QParams]


def calibrate(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    recipe: Recipe,
    sites: Sequence[ActivationSite],
    batches: Sequence[Batch],
    *,
    fingerprint: Fingerprint,
    settings: CalibrationMethod | None = None,
    progress: Progress = silent,
) -> CalibrationFile:
    """Calibrate a model: collect statistics of all sites and solve quantization parameters.

    Every rank gets the same batches and returns the same result.

    Args:
        source: the checkpoint.
        decisions: the format of each module.
        recipe: the recipe, for its algorithm.
        sites: all activation sites of the model.
        batches: the data; data-parallel ranks split it, context-parallel ones its rows.
        fingerprint: identifies model, recipe and data.
        settings: ranks, dtype, experts and the folder to resume from.
        progress: reports tokens.

    Raises:
        CalibrationError: no data; NaN or Inf (names layer and sample); `resume_folder` belongs to
            another calibration.
        UsageError: `offload_activations` without `resume_folder`; weights that do not fit.
        CheckpointError: the weights cannot be read; the disk is full.
    """
    settings = CalibrationMethod() if settings is None else settings
    if settings.offload_activations and settings.resume_folder is None:
        raise UsageError(
            "spilling activations needs a folder", hint="set it with --work-dir FOLDER"
        )
    groups = settings.process_groups()
    if source.config is None:
        raise CalibrationError(
            "the model is unknown: the checkpoint has no config", hint="--like HF_FOLDER"
        )
    by_module = {d.module.name: d for d in decisions}
    sequential = settings.sequential
    if sequential is None:
        sequential = any(derive_requirements(recipe, d).sequential for d in decisions)
    learned = any(derive_requirements(recipe, d).learned for d in decisions)
    if learned:
        _check_learned(source.config, groups)
        sequential = True
    micro_batches = split_batches(batches, source.config)
    resume = None
    if settings.resume_folder is not None:
        resume = ResumeFolder(
            settings.resume_folder,
            fingerprint=fingerprint,
            is_leader=groups.rank == 0,
            settings={
                "dtype": settings.dtype,
                "device": groups.device.type,
                "sequential": sequential,
                "policy": settings.uncalibrated_experts,
                "route_all": settings.calibrate_all_experts,
                "layout": _layout_text(groups),
                "pieces": [list(p.batch.shape) for p in micro_batches],
                **({} if settings.solver is None else {"solver": settings.solver.name}),
            },
        )
    run = CalibrationRun(
        source=source,
        config=source.config,
        decisions=by_module,
        recipe=recipe,
        sites=tuple(sites),
        ranks=RankSync(groups=groups),
        micro_batches=shard_micro_batches(micro_batches, groups),
        sequential=sequential,
        learned=learned,
        settings=settings,
        resume=resume,
        progress=progress,
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
        uncalibrated_experts=settings.uncalibrated_experts,
        calibrate_all_experts=settings.calibrate_all_experts,
        statistics=statistics,
        qparams=qparams,
    )


def _check_learned(config: ModelConfig, groups: ProcessGroups) -> None:
    """Check that the rounding of a model can be learned here.

    Raises:
        UsageError: on several ranks, or layers read more than the residual.
    """
    if groups.world.size > 1:
        raise UsageError(
            f"learned rounding runs in one process, and there are {groups.world.size}",
            hint="start one process without --tp, --pp, --ep, --cp; layers are loaded one by one",
            error_id="learned-rounding",
        )
    if layer_sets.has_side_inputs(config):
        raise UsageError(
            "learned rounding is for layers that read the residual alone, and those of this model "
            "also read what other layers computed",
            hint="a recipe without learned_rounding, such as nvfp4_gptq",
            error_id="learned-rounding",
        )


def _layout_text(groups: ProcessGroups) -> str:
    axes = ("tp", "pp", "dp", "ep", "etp", *(["cp"] if groups.cp.size > 1 else []))
    return " ".join(f"{axis}={getattr(groups, axis).size}" for axis in axes)


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
    uncalibrated_experts: str | None = None,
) -> CalibrationFile:
    """Solve quantization parameters again from stored statistics, for other decisions.

    Call `calibration_file.check_fits` first. `fingerprint` is that of the current recipe,
    `stored_recipe` its hash before formats are chosen, if different; `uncalibrated_experts` None
    is as in the file.

    Raises:
        CalibrationError: a decision needs data that the file does not have.
    """
    if source.config is None:
        raise CalibrationError(
            "the model is unknown: the checkpoint has no config", hint="--like HF_FOLDER"
        )
    if uncalibrated_experts is None:
        uncalibrated_experts = calibration.uncalibrated_experts
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
            full, notes = fill_missing_statistics(layer_sites, measured, uncalibrated_experts)
            qparams.update(
                solve_qparams(
                    layer_sites,
                    full,
                    by_module,
                    recipe,
                    weights,
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
        uncalibrated_experts=uncalibrated_experts,
        qparams=qparams,
        needs_solving=False,
    )
