"""A quantize run, from measuring sensitivities to the report."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megtool.console import Progress
from megtool.errors import (
    CalibrationError,
    DestinationError,
    FormatError,
    MappingError,
    RecipeError,
    UsageError,
)
from megtool.inference.runtime import on_ranks
from megtool.quantize.calibration_data import CalibrationSamples

if TYPE_CHECKING:
    from megtool.quantize.report import QuantizeReport

from megtool.quantize.obtain_qparams import solve
from megtool.quantize.request import QuantizeRun


def run_quantize(
    request: QuantizeRun, samples: CalibrationSamples | None, progress: Progress
) -> QuantizeReport:
    """Calibrate if needed, write, verify and evaluate.

    The files to resume from are removed at the end. If this run created them, they are also removed
    after an error that the same command would raise again.

    Raises:
        MegtoolError: see `quantize`.
    """
    is_new = not request.work.exists()
    try:
        report = _run_stages(request, samples, progress)
    except DestinationError:  # the user can free the path and resume
        raise
    except (CalibrationError, UsageError, RecipeError, MappingError, FormatError):
        if is_new:
            _remove_work(request)
        raise
    _remove_work(request)
    return report


def _remove_work(request: QuantizeRun) -> None:
    """Remove the files to resume from, unless the user chose the folder; on the first process."""
    if request.calibration.work_dir is None and os.environ.get("RANK", "0") == "0":
        shutil.rmtree(request.work, ignore_errors=True)


def _run_stages(
    request: QuantizeRun, samples: CalibrationSamples | None, progress: Progress
) -> QuantizeReport:
    from megtool.quantize.finalize import build_calibration_report, finalize
    from megtool.quantize.report import QuantizeReport

    seconds: dict[str, float] = {"plan": time.monotonic() - request.began}
    if request.needs_choice:
        with _timed(seconds, "measure"):
            _measure(request, samples, progress)
    with _timed(seconds, "calibrate"):
        solved = solve(request, samples, progress)
    if solved is None:  # another process writes
        return QuantizeReport.elsewhere(str(request.resolved.source.path), str(request.destination))
    if solved.calibration_file is not None:
        if request.calibration.calibrate_only:
            solved.calibration_file.save(request.destination)
        if request.calibration.save_calibration is not None:
            solved.calibration_file.save(request.calibration.save_calibration)
    if request.calibration.calibrate_only:
        return build_calibration_report(request, solved, samples, seconds)
    return finalize(request, solved, samples, seconds, progress)


def _measure(request: QuantizeRun, samples: CalibrationSamples | None, progress: Progress) -> None:
    """Measure the sensitivity of each decision unit, and choose formats."""
    from megtool.quant.calibration.resume_folder import SENSITIVITY_FOLDER
    from megtool.quant.mixed_precision.sensitivity import SensitivityRuntime, measure

    if samples is None:
        raise ValueError("a recipe that chooses formats needs data")
    with on_ranks(request.runtime) as groups:
        sensitivities = measure(
            request.source(),
            request.decisions,
            request.resolved.recipe,
            request.sites,
            samples.batches(),
            settings=SensitivityRuntime(
                groups=groups,
                dtype=request.runtime.dtype or "float32",
                stream_layers=request.runtime.stream_layers,
                threads=request.runtime.threads,
                resume_folder=request.work / SENSITIVITY_FOLDER,
                group_size=request.recipe.group_size or 0,
            ),
            fingerprint=request.fingerprint(samples),
            progress=progress,
        )
    request.choose(sensitivities)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = time.monotonic() - began
