"""Rounding: what becomes of a model by a recipe, for training that is to know of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.console import Progress
from megtool.errors import CalibrationError, UsageError
from megtool.options.groups import RuntimeOptions
from megtool.quant.pipeline.calibration_data import CalibrationDataOptions
from megtool.quant.pipeline.request import (
    CalibrationOptions,
    QuantizeOutputOptions,
    QuantizeRequest,
)
from megtool.quant.pipeline.solve import check_given, solve
from megtool.quant.resolve import resolve_recipe

if TYPE_CHECKING:
    from megtool.quant.calibration.activation_sites import ActivationSite
    from megtool.quant.qparams import QParams


def solve_qat_qparams(
    job: QuantizeRequest, progress: Progress
) -> tuple[tuple[ActivationSite, ...], QParams]:
    """The points of the model of a `job_for_training`, and what `megtool quantize` would do there.

    Raises:
        CalibrationError: nothing came of it.
    """
    result = solve(job, None, progress)
    if result is None:
        raise CalibrationError(f"recipe {job.decided.recipe.name} settled nothing")
    return job.points, result.settlement


def make_qat_request(
    source: Path,
    recipe: str,
    calibration: Path | None,
    *,
    iteration: str | None,
    family: str | None,
    like: Path | None,
) -> QuantizeRequest:
    """What `settle_for_training` settles, of the model in `source`, from headers alone.

    Raises:
        RecipeError: with all that is wrong with the recipe, or for this model.
        CalibrationError: it needs a calibration and there is none, or one of another model.
        UsageError: it leaves formats to be chosen.
    """
    decided = resolve_recipe(source, recipe, iteration=iteration, family=family, like=like)
    job = QuantizeRequest(
        decided=decided,
        destination=source,
        recipe=recipe,
        bits=None,
        group_size=0,
        began=time.monotonic(),
        manner=RuntimeOptions(),
        calibrating=CalibrationOptions(
            data_options=CalibrationDataOptions(),
            tokenizer=None,
            unseen=None,
            route_all=False,
            resident=False,
            spill=False,
            backend="megtool",
            files=() if calibration is None else (calibration,),
            keep=None,
            only=False,
            work=None,
        ),
        writing=QuantizeOutputOptions(
            memory_bytes=0,
            max_shard_bytes=None,
            overwrite=False,
            fsync=False,
            evaluate=None,
            evaluate_tokens=0,
            page=None,
        ),
    )
    if job.chooses:
        raise UsageError(
            f"--qat {recipe}, which chooses formats by what they cost",
            hint="a recipe that says each module's format",
        )
    if job.asks_data and calibration is None:
        raise CalibrationError(
            f"recipe {decided.recipe.name} needs to know the model's inputs",
            hint=f"megtool quantize {source} FILE --recipe {recipe} --calibrate-only makes a FILE "
            "for --calibration",
        )
    check_given(job)
    return job
