"""Beside: what LoRA, quantization-aware training and distillation need beside settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.checkpoint.megatron_metadata import args_of
from megtool.config import ModelConfig, ParallelConfig
from megtool.console import Progress
from megtool.convert.sharding import check_layout
from megtool.errors import UsageError
from megtool.inference.runtime import Runnable, Source, open_runnable, usual_device
from megtool.train.config import TrainSettings

if TYPE_CHECKING:
    from megtool.model.decoder import Decoder
    from megtool.quant.pipeline.request import QuantizeRequest
    from megtool.train.features.protocol import Beside
    from megtool.train.run_plan import RunPlan


def check_early(runnable: Runnable, settings: TrainSettings) -> None:
    """Refuse what headers alone forbid, before data are read and weights are loaded.

    Raises:
        LayoutError: the layout does not divide the model, or the teacher.
        UsageError: routers, adapters or CUDA graphs are asked for what they do not do; a pattern is
            of no parameter; no layer is left to FP8.
        MappingError: PEFT's form has no place for adapters of this model.
        RecipeError: there is no such recipe, or it does not fit the model.
        CalibrationError: it needs a calibration and there is none, or one of another model.
        MissingPackageError: Transformer Engine is asked for, and not there.
        MegtoolError: the teacher cannot be opened, or has another vocabulary.
    """
    from megtool.train.cuda_graph import check_graphs
    from megtool.train.features.distillation import check_pair, teachers_layout
    from megtool.train.features.fp8 import layers_in_fp8
    from megtool.train.features.moe_load_balancing import balance_settings
    from megtool.train.features.protocol import check_lora, check_patterns, fp8_settings

    config, model, layout = runnable.config, runnable.opened.model, settings.layout
    check_layout(config, layout)
    check_graphs(settings, config)
    if settings.kernels == "te":
        _check_te(settings, config)
    balance_settings(settings, config, args_of(runnable.opened.catalogue))
    check_lora(settings, config, None if model is None else model.family)
    check_patterns(settings, config)
    if (told := fp8_settings(settings)) is not None:
        layers_in_fp8(told, config.num_layers)
    if settings.qat is not None:
        _job(runnable, settings)
    if settings.teacher is not None:
        taught = open_runnable(Source(path=settings.teacher)).config
        check_pair(config, taught)
        teachers_layout(layout, config, taught)


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
    from megtool.train.features.moe_load_balancing import balance_settings
    from megtool.train.features.protocol import Beside

    model, rounded, teacher = runnable.opened.model, None, None
    if settings.qat is not None:
        from megtool.train.features.qat_setup import settle_for_training

        rounded = settle_for_training(_job(runnable, settings), progress)
    if settings.teacher is not None:
        teacher = _teacher(settings.teacher, settings, stages[-1], progress)
    return Beside(
        family=None if model is None else model.family,
        base=str(runnable.opened.path),
        rounded=rounded,
        teacher=teacher,
        num_microbatches=plan.num_microbatches,
        balance=balance_settings(settings, runnable.config, args_of(runnable.opened.catalogue)),
    )


def check_beside(
    runnable: Runnable, settings: TrainSettings, layout: ParallelConfig, dtype: str, device: str
) -> tuple[int, int]:
    """Refuse beforehand what `beside_of` and FP8 would, and `check_early` has not; returns a rank's
    bytes of the teacher, and of the weights that are kept while rounded ones are in their place.

    Raises:
        UsageError: there is no FP8 on the device.
        MegtoolError: see `beside_of`.
    """
    import torch

    from megtool.optim.fp8.linear import require_products
    from megtool.optim.fp8.transformer_engine import require_recipe
    from megtool.train.features.distillation import teachers_layout
    from megtool.train.features.protocol import fp8_settings
    from megtool.train.memory_estimate import rounded_bytes_of, weight_bytes_of

    if (told := fp8_settings(settings)) is not None:
        if dtype == "float16":
            raise UsageError("FP8 with fp16", hint="train in bf16 or fp32 beside FP8")
        require_products(torch.device(device))
        if settings.kernels == "te":
            require_recipe(told.recipe)
    copied = 0
    if settings.qat is not None:
        named = [d.module.name for d in _job(runnable, settings).decisions if d.format is not None]
        copied = rounded_bytes_of(runnable.config, layout, dtype, named)
    if settings.teacher is None:
        return 0, copied
    found = open_runnable(Source(path=settings.teacher))
    layout = teachers_layout(layout, runnable.config, found.config)
    return weight_bytes_of(found.config, layout, dtype), copied


def _job(runnable: Runnable, settings: TrainSettings) -> QuantizeRequest:
    """What quantization-aware training rounds, and by what, from headers alone."""
    from megtool.train.features.qat_setup import job_for_training

    return job_for_training(
        runnable.opened.path,
        settings.qat or "",
        settings.calibration,
        iteration=settings.iteration,
        family=settings.family,
        like=settings.like,
    )


def _check_te(settings: TrainSettings, config: ModelConfig) -> None:
    """Refuse what Transformer Engine does not do, or that it is not there.

    Raises:
        MissingPackageError: it is not installed, or does not run on the device.
        UsageError: a linear layer has sides of which it makes no products in FP8.
    """
    from megtool.kernels import transformer_engine
    from megtool.train.features.fp8 import check_te
    from megtool.train.features.protocol import fp8_settings

    transformer_engine.require((settings.device or usual_device()).partition(":")[0])
    if (told := fp8_settings(settings)) is not None:
        check_te(told, config, settings.tp)


def _teacher(
    path: Path, settings: TrainSettings, student: Decoder, progress: Progress
) -> list[Decoder]:
    """The teacher's chunks on this rank, in the student's type and layout."""
    from megtool.commands.finetune_dry_run import stored_of
    from megtool.train.build_model import load_for_training
    from megtool.train.features.distillation import teachers_layout

    found = open_runnable(Source(path=path))
    groups = student.groups
    layout = teachers_layout(groups.parallel, student.config, found.config)
    return load_for_training(
        stored_of(found.opened),
        replace(groups, parallel=layout),
        dtype=student.dtype,
        threads=settings.threads,
        vocab_multiple=student.padded_vocab // groups.tp.size,
        progress=progress,
    )
