"""A quantize run from the first measurement to the report."""

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
from megtool.quant.pipeline.calibration_data import CalibrationSamples

if TYPE_CHECKING:
    from megtool.quant.pipeline.report import QuantizeReport

from megtool.quant.pipeline.request import QuantizeRequest
from megtool.quant.pipeline.solve import solve


def carry_out(
    job: QuantizeRequest, samples: CalibrationSamples | None, progress: Progress
) -> QuantizeReport:
    """Calibrate if need be, write, prove and measure.

    What is kept for another run goes when all is done, and when this run, which began it, was ended
    by what would end the same command again: of another one it would only be in the way.

    Raises:
        MegtoolError: see `quantize`.
    """
    is_new = not job.work.exists()
    try:
        report = _run_stages(job, samples, progress)
    except DestinationError:  # its place may be made free
        raise
    except (CalibrationError, UsageError, RecipeError, MappingError, FormatError):
        if is_new:
            _remove_work(job)
        raise
    _remove_work(job)
    return report


def _remove_work(job: QuantizeRequest) -> None:
    """Remove what is kept between runs, unless its folder was named; the first process does."""
    if job.calibrating.work is None and os.environ.get("RANK", "0") == "0":
        shutil.rmtree(job.work, ignore_errors=True)


def _run_stages(
    job: QuantizeRequest, samples: CalibrationSamples | None, progress: Progress
) -> QuantizeReport:
    from megtool.quant.pipeline.finalize import build_calibration_report, finalize
    from megtool.quant.pipeline.report import QuantizeReport

    seconds: dict[str, float] = {"plan": time.monotonic() - job.began}
    if job.chooses:
        with _timed(seconds, "measure"):
            _measure(job, samples, progress)
    with _timed(seconds, "calibrate"):
        solved = solve(job, samples, progress)
    if solved is None:  # another process writes
        return QuantizeReport.elsewhere(str(job.decided.source.path), str(job.destination))
    if solved.artefact is not None:
        if job.calibrating.only:
            solved.artefact.save(job.destination)
        if job.calibrating.keep is not None:
            solved.artefact.save(job.calibrating.keep)
    if job.calibrating.only:
        return build_calibration_report(job, solved, samples, seconds)
    return finalize(job, solved, samples, seconds, progress)


def _measure(job: QuantizeRequest, samples: CalibrationSamples | None, progress: Progress) -> None:
    """Measure what each format costs, and choose."""
    from megtool.quant.calibration.resume_folder import SENSITIVITY_FOLDER
    from megtool.quant.mixed_precision.sensitivity import measure

    if samples is None:
        raise ValueError("a recipe that chooses formats is given data")
    with on_ranks(job.manner) as groups:
        sensitivities = measure(
            job.source(),
            job.decisions,
            job.decided.recipe,
            job.points,
            samples.batches(),
            group_size=job.group_size,
            groups=groups,
            dtype=job.manner.dtype or "float32",
            device=groups.device,
            resident=job.calibrating.resident,
            threads=job.manner.threads,
            work=job.work / SENSITIVITY_FOLDER,
            fingerprint=job.fingerprint(samples),
            progress=progress,
        )
    job.choose(sensitivities)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = time.monotonic() - began
