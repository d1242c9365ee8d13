"""Quantization parameters of every module, from weights alone, data, or calibration files."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.console import Progress
from megtool.errors import CalibrationError, UsageError
from megtool.inference.runtime import on_ranks
from megtool.quant.pipeline.calibration_data import CalibrationSamples
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.rules import KEEP
from megtool.reshard.execute import ExecutionOptions
from megtool.reshard.megatron.optimizer import NONE
from megtool.reshard.run import reshard_checkpoint
from megtool.reshard.source_options import SelectionOptions
from megtool.reshard.writers.target_spec import TargetOptions

if TYPE_CHECKING:
    from megtool.quant.calibration.calibration_file import CalibrationFile
    from megtool.quant.calibration.fingerprint import Fingerprint
    from megtool.quant.qparams import QParams

from megtool.quant.pipeline.request import QuantizeRequest


@dataclass(slots=True, kw_only=True)
class SolvedQParams:
    """The quantization parameters of a model, and the calibration they come from (None for
    weights alone).
    """

    settlement: QParams
    artefact: CalibrationFile | None
    ranks: int = 1


def solve(
    job: QuantizeRequest, samples: CalibrationSamples | None, progress: Progress
) -> SolvedQParams | None:
    """Solve the quantization parameters of all modules; None in every process except the first.

    Raises:
        CalibrationError: see `calibrate` and `check_fits`.
    """
    from megtool.quant.qparams import QParams, WeightQParams
    from megtool.quant.requirements import is_format_only

    done: SolvedQParams | None
    c = job.calibrating
    keeps = job.auto is not None and (c.only or c.keep is not None)  # what it was chosen by
    if not (job.asks_data or keeps):
        if os.environ.get("RANK", "0") != "0":
            return None
        done = SolvedQParams(settlement=QParams(), artefact=None)
        if not all(is_format_only(job.decided.recipe, d) for d in job.decisions):
            done.settlement.update(_by_weights(job))
    elif c.files:
        done = _from_files(job)
    else:
        done = _calibrated(job, samples, progress)
    if done is None:
        return None
    for d in job.decisions:  # what has no point: an embedding, layers that draft
        name, number_format = d.module.name, d.format
        if number_format is not None and number_format.algo and name not in done.settlement.weights:
            done.settlement.weights[name] = WeightQParams(
                module=name, format=number_format, input_amax=number_format.input_amax
            )
    return done


def _by_weights(job: QuantizeRequest) -> QParams:
    """Quantization parameters from weights alone."""
    from megtool.quant.calibration.canonical_weights import CanonicalWeights
    from megtool.quant.solve_qparams import solve_qparams

    decided = {d.module.name: d for d in job.decisions}
    with CanonicalWeights(job.source()) as weights:
        recipe, config = job.decided.recipe, job.runnable.config
        return solve_qparams(job.points, {}, decided, recipe, weights, config=config)


def _from_files(job: QuantizeRequest) -> SolvedQParams:
    """Quantization parameters from calibration files, solved again if the recipe differs."""
    from megtool.quant.calibration.calibrate import resolve_calibration

    artefact, fingerprint = job.artefact, job.fingerprint(None)
    if artefact is None:
        raise ValueError("no calibration files were named")
    if not _fits(job, artefact, fingerprint):
        artefact = resolve_calibration(
            artefact,
            job.source(),
            job.decisions,
            job.decided.recipe,
            job.points,
            fingerprint=fingerprint,
            stored_recipe=job.written,
            policy=job.calibrating.unseen,
        )
    return SolvedQParams(settlement=artefact.qparams, artefact=artefact)


def _fits(job: QuantizeRequest, artefact: CalibrationFile, fingerprint: Fingerprint) -> bool:
    """Whether the files' quantization parameters can be used unchanged; see `check_fits`."""
    from megtool.quant.calibration.calibration_file import check_fits

    return check_fits(
        artefact,
        fingerprint,
        job.decided.recipe,
        job.decisions,
        job.points,
        policy=job.calibrating.unseen,
        route_all=job.calibrating.route_all,
    )


def choose_from_files(job: QuantizeRequest) -> None:
    """Choose formats by the sensitivities in calibration files, if the recipe leaves formats open.

    Raises:
        CalibrationError: the files are of another model, know no costs, or those of other formats.
        UsageError: the budget cannot be met.
    """
    if job.artefact is None or not job.chooses:
        return
    from megtool.quant.calibration.calibration_file import check_model
    from megtool.quant.mixed_precision.sensitivity import method_for

    check_model(job.artefact, job.fingerprint(None))
    sensitivities, recipe = job.artefact.sensitivities, job.decided.recipe
    if sensitivities is None or sensitivities.method != method_for(recipe):
        several = len(job.calibrating.files) > 1
        subject = "the calibrations do not all hold" if several else "the calibration does not hold"
        raise CalibrationError(
            f"{subject} sensitivities by {method_for(recipe)}, and recipe {recipe.name} chooses "
            "by that",
            hint="calibrate with this recipe and --save-calibration FILE, without --calibration: "
            "that FILE then serves any --bits",
        )
    job.choose(sensitivities)


def check_given(job: QuantizeRequest) -> None:
    """Refuse calibration files that are invalid, of another model, or that lack what this recipe
    needs.

    Raises:
        CalibrationError: they are; says which.
    """
    from megtool.quant.calibration.calibration_file import check_model

    if job.artefact is None:
        return
    if job.asks_data:
        _fits(job, job.artefact, job.fingerprint(None))
    else:
        check_model(job.artefact, job.fingerprint(None))


def check_choosing(job: QuantizeRequest) -> None:
    """Refuse, before any work, layouts in which sensitivities cannot be measured.

    Raises:
        UsageError: this is one.
    """
    if job.chooses:
        from megtool.quant.mixed_precision.sensitivity import check_layout

        check_layout(job.decided.recipe, job.manner.layout)


def check_modelopt(job: QuantizeRequest) -> None:
    """Refuse, before any work, what ModelOpt does not support.

    Raises:
        MissingPackageError, RecipeError, UsageError: see `calibrate_with_modelopt` and
            `check_quantizers`; of formats that are still to be chosen it has to know all.
    """
    from megtool.quant.backend_modelopt import build_modelopt_config, check_quantizers
    from megtool.quant.mixed_precision.decision_units import format_of
    from megtool.reshard.source import collect_hf_files

    world = max(job.manner.layout.world_size, int(os.environ.get("WORLD_SIZE", "1")))
    if world > 1:
        raise UsageError(
            f"--backend modelopt in {world} processes",
            hint="it runs a whole model in one: no torchrun, no --tp, --pp and --ep",
        )
    recipe, decisions = job.decided.recipe, list[Decision]()
    for d in job.decisions:
        formats = [format_of(name, recipe, job.group_size) for name in d.choices if name != KEEP]
        decisions += [replace(d, format=f, choices=()) for f in formats] if d.choices else [d]
    config = build_modelopt_config(recipe, decisions, device=job.manner.device or "cpu")
    built = collect_hf_files(job.decided.source, None)["config.json"]
    check_quantizers(built, config, decisions, job.points)


def _calibrated(
    job: QuantizeRequest, samples: CalibrationSamples | None, progress: Progress
) -> SolvedQParams | None:
    """The model shown the samples, on all processes."""
    from megtool.quant.calibration.calibrate import calibrate

    if samples is None:
        raise ValueError("a recipe that asks for data is given some")
    c = job.calibrating
    if c.backend == "modelopt":
        return _by_modelopt(job, samples, progress)
    with on_ranks(job.manner) as groups:
        artefact = calibrate(
            job.source(),
            job.decisions,
            job.decided.recipe,
            job.points,
            samples.batches(),
            groups=groups,
            dtype=job.manner.dtype or "float32",
            device=groups.device,
            resident=c.resident,
            policy=c.unseen or "share",
            route_all=c.route_all,
            resume_folder=job.work,
            fingerprint=job.fingerprint(samples),
            spills=c.spill,
            threads=job.manner.threads,
            progress=progress,
        )
        first, world = groups.rank == 0, groups.parallel.world_size
    if not first:
        return None
    if job.auto is not None:
        fingerprint = artefact.fingerprint
        artefact = replace(
            artefact,
            fingerprint=replace(fingerprint, recipe=job.written),
            settled_for=fingerprint.recipe,
            sensitivities=job.sensitivities,
        )
    return SolvedQParams(settlement=artefact.qparams, artefact=artefact, ranks=world)


def _by_modelopt(
    job: QuantizeRequest, samples: CalibrationSamples, progress: Progress
) -> SolvedQParams:
    """ModelOpt shown the samples: in a Hugging Face folder, made for it where there is none."""
    import torch

    from megtool.quant.backend_modelopt import calibrate_with_modelopt

    if job.manner.threads:
        torch.set_num_threads(job.manner.threads)
    opened = job.decided.source
    with tempfile.TemporaryDirectory(prefix="megtool-") as temporary:
        folder = opened.path
        if opened.catalogue.format != "hf":
            folder = Path(temporary) / "hf"
            reshard_checkpoint(
                opened.path,
                SelectionOptions(family=job.decided.family, like=opened.like),
                TargetOptions(to="hf", optimizer=NONE, destination=folder),
                ExecutionOptions(fsync=False),
            )
        settlement = calibrate_with_modelopt(
            folder,
            job.decided.recipe,
            job.decisions,
            job.points,
            samples.batches(),
            dtype=job.manner.dtype or "float32",
            device=job.manner.device or "cpu",
            progress=progress,
        )
    return SolvedQParams(settlement=settlement, artefact=None)
