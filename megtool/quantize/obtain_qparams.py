"""Quantization parameters of every module, from weights alone, data, or calibration files."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megtool.console import Progress
from megtool.errors import CalibrationError
from megtool.inference.runtime import on_ranks
from megtool.quant.recipes.algorithm import SENSITIVITY_METHODS
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.rules import KEEP
from megtool.quantize.calibration_data import CalibrationSamples

if TYPE_CHECKING:
    from megtool.quant.calibration.calibration_file import CalibrationFile
    from megtool.quant.calibration.fingerprint import Fingerprint
    from megtool.quant.qparams import QParams
    from megtool.quant.resolve import ResolvedRecipe

from megtool.quantize.request import QuantizeRun


@dataclass(slots=True, kw_only=True)
class SolvedQParams:
    """The quantization parameters of a model, and the calibration they come from (None for
    weights alone).
    """

    qparams: QParams
    calibration_file: CalibrationFile | None
    ranks: int = 1


def solve(
    request: QuantizeRun,
    samples: CalibrationSamples | None,
    progress: Progress,
    *,
    everywhere: bool = False,
) -> SolvedQParams | None:
    """Solve the quantization parameters of all modules; None in every process except the first,
    unless they are solved `everywhere`, without data.

    Raises:
        CalibrationError: see `calibrate` and `check_fits`.
    """
    from megtool.quant.calibration.requirements import is_format_only
    from megtool.quant.qparams import QParams, WeightQParams

    done: SolvedQParams | None
    c = request.calibration
    # Formats were chosen by sensitivities, which the calibration file has to contain.
    keeps = request.auto is not None and (c.calibrate_only or c.save_calibration is not None)
    if not (request.needs_data or keeps):
        is_first = everywhere or os.environ.get("RANK", "0") == "0"
        if request.worker is None and not is_first:
            return None
        done = SolvedQParams(qparams=QParams(), calibration_file=None)
        if not all(is_format_only(request.resolved.recipe, d) for d in request.decisions):
            done.qparams.update(_by_weights(request))
    elif c.calibration:
        done = _from_files(request)
    else:
        done = _calibrated(request, samples, progress)
    if done is None:
        return None
    for d in request.decisions:  # modules without an activation site: embeddings, MTP layers
        name, number_format = d.module.name, d.format
        if number_format is not None and number_format.algo and name not in done.qparams.weights:
            done.qparams.weights[name] = WeightQParams(
                module=name, format=number_format, input_amax=number_format.input_amax
            )
    return done


def _by_weights(request: QuantizeRun) -> QParams:
    from megtool.quant.calibration.canonical_weights import CanonicalWeights
    from megtool.quant.calibration.solve_qparams import solve_qparams

    resolved = {d.module.name: d for d in request.decisions}
    with CanonicalWeights(request.source()) as weights:
        return solve_qparams(request.sites, {}, resolved, request.resolved.recipe, weights)


def _from_files(request: QuantizeRun) -> SolvedQParams:
    """Quantization parameters from calibration files, solved again if the recipe differs."""
    from megtool.quant.calibration.calibrate import resolve_calibration

    calibration_file, fingerprint = request.calibration_file, request.fingerprint(None)
    if calibration_file is None:
        raise ValueError("there are no calibration files")
    if not _fits(request, calibration_file, fingerprint):
        calibration_file = resolve_calibration(
            calibration_file,
            request.source(),
            request.decisions,
            request.resolved.recipe,
            request.sites,
            fingerprint=fingerprint,
            stored_recipe=request.written,
            uncalibrated_experts=request.calibration.uncalibrated_experts,
        )
    return SolvedQParams(qparams=calibration_file.qparams, calibration_file=calibration_file)


def _fits(
    request: QuantizeRun, calibration_file: CalibrationFile, fingerprint: Fingerprint
) -> bool:
    """Whether the files' quantization parameters can be used unchanged; see `check_fits`."""
    from megtool.quant.calibration.calibration_file import check_fits

    return check_fits(
        calibration_file,
        fingerprint,
        request.resolved.recipe,
        request.decisions,
        request.sites,
        uncalibrated_experts=request.calibration.uncalibrated_experts,
        calibrate_all_experts=request.calibration.calibrate_all_experts,
    )


def choose_from_files(request: QuantizeRun) -> None:
    """Choose formats by the sensitivities in calibration files, if the recipe leaves formats open.

    Raises:
        CalibrationError: the files are of another model, have no sensitivities, or those of other
            formats.
        UsageError: the budget cannot be met.
    """
    if request.calibration_file is None or not request.needs_choice:
        return
    from megtool.quant.calibration.calibration_file import check_model
    from megtool.quant.mixed_precision.sensitivity import method_for

    check_model(request.calibration_file, request.fingerprint(None))
    sensitivities, recipe = request.calibration_file.sensitivities, request.resolved.recipe
    if sensitivities is None or sensitivities.method != method_for(recipe):
        several = len(request.calibration.calibration) > 1
        subject = "some calibration files have no" if several else "the calibration file has no"
        raise CalibrationError(
            f"{subject} sensitivities by {method_for(recipe)}, which recipe {recipe.name} needs",
            hint="calibrate with this recipe and --save-calibration FILE, without --calibration; "
            "FILE can then be used for any --bits",
        )
    request.choose(sensitivities)


def check_given(request: QuantizeRun) -> None:
    """Refuse calibration files that are invalid, of another model, or that lack what this recipe
    needs.

    Raises:
        CalibrationError: says which.
    """
    from megtool.quant.calibration.calibration_file import check_model

    if request.calibration_file is None:
        return
    if request.needs_data:
        _fits(request, request.calibration_file, request.fingerprint(None))
    else:
        check_model(request.calibration_file, request.fingerprint(None))


def check_choosing(request: QuantizeRun) -> None:
    """Refuse, before any work, layouts in which sensitivities cannot be measured.

    Raises:
        UsageError: see `check_layout`.
    """
    if request.needs_choice:
        from megtool.quant.mixed_precision.sensitivity import check_layout

        check_layout(request.resolved.recipe, request.runtime.layout)


def choose_solver(resolved: ResolvedRecipe, backend: str) -> ResolvedRecipe:
    """The recipe as a backend runs it: ModelOpt scores formats that recipes of its own choose from.

    Raises:
        RecipeError: ModelOpt alone has the recipe's algorithm.
    """
    from megtool.quant.algorithms.algorithm_config import require_own_solver

    recipe = resolved.recipe
    if backend == "megtool":
        require_own_solver(recipe)
    elif recipe.dialect == "modelopt" and recipe.method in SENSITIVITY_METHODS:
        algorithm = {**recipe.algorithm, "modelopt": True}
        return replace(resolved, recipe=replace(recipe, algorithm=algorithm))
    return resolved


def check_modelopt(request: QuantizeRun) -> None:
    """Refuse, before any work, what ModelOpt does not support; all candidate formats are checked.

    Raises:
        MissingPackageError, RecipeError, UsageError: see `build_modelopt_config`.
    """
    from megtool.quant.modelopt.load import check_config, import_modelopt
    from megtool.quant.modelopt.quantizer_config import build_modelopt_config
    from megtool.quant.recipes.decision_units import format_of

    import_modelopt()
    recipe, decisions = request.resolved.recipe, list[Decision]()
    group_size = request.recipe.group_size or 0
    for d in request.decisions:
        formats = [format_of(name, recipe, group_size) for name in d.choices if name != KEEP]
        decisions += [replace(d, format=f, choices=()) for f in formats] if d.choices else [d]
    config = build_modelopt_config(recipe, decisions, device=request.runtime.device or "cpu")
    check_config(config)


def _calibrated(
    request: QuantizeRun, samples: CalibrationSamples | None, progress: Progress
) -> SolvedQParams | None:
    """Calibrate with the samples, on all processes."""
    from megtool.quant.calibration.calibrate import calibrate
    from megtool.quant.calibration.settings import CalibrationMethod

    if samples is None:
        raise ValueError("a recipe that needs data got none")
    c = request.calibration
    with on_ranks(request.runtime) as groups:
        solver = None
        if c.backend == "modelopt":
            from megtool.quant.modelopt.unit_solver import ModelOptSolver

            solver = ModelOptSolver(
                request.resolved.recipe,
                request.decisions,
                request.sites,
                groups,
                calibrate_all_experts=c.calibrate_all_experts,
            )
        calibration_file = calibrate(
            request.source(),
            request.decisions,
            request.resolved.recipe,
            request.sites,
            samples.batches(),
            fingerprint=request.fingerprint(samples),
            settings=CalibrationMethod(
                groups=groups,
                dtype=request.runtime.dtype or "float32",
                stream_layers=request.runtime.stream_layers,
                threads=request.runtime.threads,
                resume_folder=request.work,
                uncalibrated_experts=c.uncalibrated_experts or "share",
                calibrate_all_experts=c.calibrate_all_experts,
                offload_activations=c.offload_activations,
                sequential=None if solver is None else solver.sequential,
                solver=solver,
            ),
            progress=progress,
        )
        first, world = groups.rank == 0, groups.parallel.world_size
    if not first:
        return None
    if solver is not None:  # without statistics, there is nothing to solve again
        qparams = calibration_file.qparams
        return SolvedQParams(qparams=qparams, calibration_file=None, ranks=world)
    if request.auto is not None:
        fingerprint = calibration_file.fingerprint
        calibration_file = replace(
            calibration_file,
            fingerprint=replace(fingerprint, recipe=request.written),
            solved_recipe=fingerprint.recipe,
            sensitivities=request.sensitivities,
        )
    return SolvedQParams(
        qparams=calibration_file.qparams, calibration_file=calibration_file, ranks=world
    )
