"""Beside: what LoRA, quantisation-aware training and distillation need beside settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.commands.running import Runnable, Source, open_runnable
from megtool.config import ParallelConfig
from megtool.errors import UsageError
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


def check_beside(
    runnable: Runnable, settings: TrainSettings, layout: ParallelConfig, dtype: str, device: str
) -> int:
    """Refuse beforehand what `beside_of` and FP8 would; returns a rank's bytes of the teacher.

    Raises:
        UsageError: there is no FP8 on the device, or no layer is left to it.
        MegtoolError: see `beside_of`.
    """
    import torch

    from megtool.optim.fp8.linear import require_products
    from megtool.train.distill import check_pair
    from megtool.train.fp8 import layers_in_fp8
    from megtool.train.further import fp8_settings
    from megtool.train.sizes import seated, weight_bytes_of

    if (told := fp8_settings(settings)) is not None:
        layers_in_fp8(told, runnable.config.num_layers)
        if dtype == "float16":
            raise UsageError("FP8 with fp16", hint="train in bf16 or fp32 beside FP8")
        require_products(torch.device(device))
    if settings.qat is not None:
        from megtool.commands.rounding import job_for_training

        job_for_training(
            runnable.opened.path,
            settings.qat,
            settings.calibration,
            iteration=settings.iteration,
            family=settings.family,
            like=settings.like,
        )
    if settings.teacher is None:
        return 0
    found = open_runnable(Source(path=settings.teacher))
    check_pair(runnable.config, found.config, seated(layout, 0))
    return weight_bytes_of(found.config, layout, dtype)


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
