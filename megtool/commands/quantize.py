"""Quantize a checkpoint by a recipe into what an engine loads, and check the result."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from megtool.commands.options.quantize import CONDITIONS, QuantizeFacts, QuantizeOptions
from megtool.console import Progress, silent
from megtool.errors import UsageError
from megtool.options.effects import check_effects, without_effect
from megtool.process.worker_identity import WorkerIdentity, parse_worker
from megtool.quant.resolve import resolve_recipe
from megtool.quantize.calibration_data import (
    CalibrationSamples,
    read_samples,
)
from megtool.quantize.obtain_qparams import (
    check_choosing,
    check_given,
    check_modelopt,
    choose_from_files,
    choose_solver,
)
from megtool.quantize.pipeline import run_quantize
from megtool.quantize.request import (
    QuantizeRun,
)
from megtool.storage.location.path import require_local

if TYPE_CHECKING:
    from megtool.quantize.plan import QuantizePlan
    from megtool.quantize.report import QuantizeReport

_LOG = logging.getLogger(__name__)


def quantize(
    options: QuantizeOptions, *, progress: Progress = silent
) -> QuantizeReport | QuantizePlan:
    """Quantize the checkpoint `source` by a recipe, and write it to the folder `destination`.

    If the recipe needs data, `samples` rows of `seq_length` tokens of `data` (a text that comes
    with megtool, or with `synthetic` random tokens) go through the model, layer by layer unless
    `stream_layers` is off; finished layers are stored in the folder `work_dir` until all is
    done, and an interrupted run resumes there. `calibration` are files of an earlier run that are
    used instead of data; those of a recipe that chooses formats serve any `bits`.

    The result is read again and compared with the source before it appears at `destination`. On
    `eval_data`, perplexity and divergence are measured before and after. Of several processes
    (torchrun) the first writes.

    Raises:
        RecipeError: with all that is wrong with the recipe, for this model, and for the engine.
        CalibrationError: activations are NaN or Inf, or a calibration is of another model.
        UsageError: an option has no effect here.
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    start = time.monotonic()
    calibration, recipe, execution = options.calibration, options.recipe, options.execution
    if calibration.work_dir is not None:
        require_local(calibration.work_dir, "--work-dir")
    resolved = resolve_recipe(
        options.source,
        recipe.recipe,
        options.reading,
        target=recipe.target,
        group_size=recipe.group_size,
        as_class=options.output.to == "hf",
    )
    if resolved.doubt:
        _LOG.warning("%s", resolved.doubt)
    resolved = choose_solver(resolved, calibration.backend)
    _ = execution.memory_bytes, options.output.max_shard_bytes  # refused before any work
    request = QuantizeRun(
        resolved=resolved,
        destination=options.destination,
        began=start,
        recipe=recipe,
        bits=options.bits,
        runtime=options.runtime,
        calibration=calibration,
        output=options.output,
        execution=execution,
        page=options.report,
    )
    check_effects(options, _learn_facts(request), order=CONDITIONS)
    request.worker = _find_worker(request)
    _check_processes(request)
    if request.needs_data and calibration.backend == "modelopt":
        check_modelopt(request)
    choose_from_files(request)
    check_choosing(request)
    request.check_storable()
    check_given(request)
    samples = _read_samples(request)
    request.check_evaluation()
    if execution.dry_run:
        return request.make_plan(samples)
    request.check_free()
    return run_quantize(request, samples, progress)


def _learn_facts(request: QuantizeRun) -> QuantizeFacts:
    return QuantizeFacts(
        recipe=request.resolved.recipe.name,
        chooses_formats=request.needs_choice,
        needs_data=request.needs_data,
        has_experts=any("expert" in d.module.roles for d in request.decisions),
    )


def _find_worker(request: QuantizeRun) -> WorkerIdentity | None:
    """Which of several processes this is that write together.

    Those that run the model on calibration data are ranks, which torchrun starts, and the first of
    them writes.

    Raises:
        UsageError: a worker is named, and the model runs.
    """
    worker = request.execution.worker
    if not request.needs_data or request.calibration.calibration:
        return parse_worker(worker)
    if worker in (None, "auto", "0/1"):
        return None
    raise without_effect(
        f"--worker {worker} has no effect: the recipe needs data, and the model runs",
        "torchrun shares out calibration; with --calibration FILE of an earlier run, or a recipe "
        "without data, workers write together",
    )


def _check_processes(request: QuantizeRun) -> None:
    """Refuse several processes if there is nothing to distribute.

    Raises:
        UsageError: they would all do the same.
    """
    world = request.runtime.layout.world_size
    if request.worker is None and request.execution.worker != "0/1":
        world = max(world, int(os.environ.get("WORLD_SIZE", "1")))
    has_file = bool(request.calibration.calibration)
    if world > 1 and (has_file or not request.needs_data):
        why = "--calibration replaces data" if has_file else "the recipe needs no data"
        raise UsageError(
            f"{world} processes, and {why}: they would all do the same",
            hint="run it in one: no torchrun, no --tp, --pp and --ep; or --worker auto, with which "
            "each writes a share",
        )


def _read_samples(request: QuantizeRun) -> CalibrationSamples | None:
    if not request.needs_data or request.calibration.calibration:
        return None
    data_options, config = request.calibration.data, request.model_source.config
    synthetic = data_options.synthetic
    samples = read_samples(
        data_options,
        None if synthetic else request.model_source.tokenizer(request.calibration.tokenizer),
        vocab_size=config.embedding.vocab_size,
        max_positions=config.positions.max_positions,
    )
    if samples.note:
        _LOG.warning("%s", samples.note)
    return samples
