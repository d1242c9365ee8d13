"""Beside: what LoRA, quantisation-aware training and distillation need beside settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.commands.running import Runnable, Source, open_runnable
from megtool.log import Progress
from megtool.train.settings import TrainSettings

if TYPE_CHECKING:
    from megtool.model.decoder import Decoder
    from megtool.train.further import Beside
    from megtool.train.plan import RunPlan


def beside_of(
    runnable: Runnable,
    settings: TrainSettings,
    stages: Sequence[Decoder],
    plan: RunPlan,
    progress: Progress,
) -> Beside:
    """What the run of a model whose stages are loaded needs beside `settings`.

    Raises:
        RecipeError: there is no such recipe, or it does not fit the model.
        CalibrationError: it needs a calibration and there is none, or one of another model.
        MegtoolError: the teacher cannot be read, or cannot teach here.
    """
    from megtool.train.further import Beside

    model, rounded, teacher = runnable.opened.model, None, None
    if settings.qat is not None:
        from megtool.commands.rounding import settle_for_training

        rounded = settle_for_training(
            runnable.opened.path,
            settings.qat,
            settings.calibration,
            iteration=settings.iteration,
            family=settings.family,
            like=settings.like,
            progress=progress,
        )
    if settings.teacher is not None:
        teacher = _teacher(settings.teacher, settings, stages[-1], progress)
    return Beside(
        family=None if model is None else model.family,
        base=str(runnable.opened.path),
        rounded=rounded,
        teacher=teacher,
        num_microbatches=plan.num_microbatches,
    )


def _teacher(path: Path, settings: TrainSettings, student: Decoder, progress: Progress) -> Decoder:
    """The teacher on this rank, in the student's type and layout."""
    from megtool.commands.finetune_plan import stored_of
    from megtool.train.distill import check_pair
    from megtool.train.setup import load_for_training

    found = open_runnable(Source(path=path))
    groups = student.groups
    check_pair(student.config, found.config, groups)
    (teacher,) = load_for_training(
        stored_of(found.opened),
        groups,
        dtype=student.dtype,
        threads=settings.threads,
        vocab_multiple=student.padded_vocab // groups.tp.size,
        progress=progress,
    )
    return teacher
