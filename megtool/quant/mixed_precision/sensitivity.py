"""Sensitivity of each decision unit, by KL divergence or by gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megtool.console import Progress, silent
from megtool.dtypes import dtype as named_dtype
from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.options.layout import ParallelConfig
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.micro_batches import (
    MicroBatch,
    num_valid,
    shard_micro_batches,
    split_batches,
    split_rows,
)
from megtool.quant.calibration.rank_sync import RankSync
from megtool.quant.calibration.sensitivities import Sensitivities, SensitivityMethod
from megtool.quant.calibration.settings import CalibrationRuntime
from megtool.quant.mixed_precision.candidates import CandidateSurvey
from megtool.quant.mixed_precision.gradient_sensitivity import (
    BACKWARD_TOKENS,
    measure_gradient_sensitivity,
)
from megtool.quant.mixed_precision.kl_sensitivity import measure_kl_sensitivity
from megtool.quant.mixed_precision.sensitivity_cache import SensitivityCache
from megtool.quant.recipes.decision_units import DecisionUnit, list_units
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.source.checkpoint import CheckpointSource

MOST_TOKENS, SHORT_ROW = 256, 64
"""KL divergence takes a run per decision unit and format, so it uses about `MOST_TOKENS` tokens in
rows of `SHORT_ROW`, spread over the data. That is enough to rank formats."""

STATES_BYTES = 1 << 30
"""Memory for the states of all concurrent runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRuntime(CalibrationRuntime):
    """How sensitivities are measured.

    Args:
        group_size: replaces the group size of formats that allow several (0: their own).
        most_tokens: tokens for KL divergence.
        memory_bytes: memory for the states of concurrent runs; with less, the layers are loaded
            more often.
    """

    group_size: int = 0
    most_tokens: int = MOST_TOKENS
    memory_bytes: int = STATES_BYTES


def method_for(recipe: Recipe) -> SensitivityMethod:
    """The sensitivity method of a recipe: KL divergence by default; with the option `modelopt` by
    ModelOpt's own `auto_quantize`."""
    is_gradient = recipe.method == "gradient"
    if recipe.algorithm.get("modelopt"):
        return "modelopt_gradient" if is_gradient else "modelopt_kl_div"
    return "gradient" if is_gradient else "kl_div"


def check_layout(recipe: Recipe, parallel: ParallelConfig) -> None:
    """Refuse layouts in which sensitivity cannot be measured.

    Raises:
        UsageError: pipeline parallelism, or for `gradient` any split of weights or rows; several
            processes for ModelOpt's scores.
    """
    method = method_for(recipe)
    if method.startswith("modelopt") and parallel.world_size > 1:
        raise UsageError(
            f"ModelOpt scores the whole model in one process, and there are {parallel.world_size}",
            hint="run it without torchrun; or leave out `modelopt: true`, and ranks split the data",
        )
    sizes = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "ep", "etp", "cp")}
    refused = ["pp"] if method == "kl_div" else [*sizes]
    if flags := " ".join(f"--{axis} {sizes[axis]}" for axis in refused if sizes[axis] > 1):
        options = "this option" if len(flags.split()) == 2 else "these options"
        alternative = ", or with --tp or --ep" if refused == ["pp"] else ""
        raise UsageError(
            f"sensitivity by {method} cannot be measured with {flags}",
            hint=f"use torchrun without {options}: ranks then split the data{alternative}",
        )


def measure(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    recipe: Recipe,
    sites: Sequence[ActivationSite],
    batches: Sequence[Batch],
    *,
    settings: SensitivityRuntime | None = None,
    fingerprint: Fingerprint | None = None,
    progress: Progress = silent,
) -> Sensitivities:
    """Measure the sensitivity of each decision unit in each of its candidate formats.

    Every rank gets the same batches and returns the same result; data-parallel ranks split the
    batches. Parameters are solved as the recipe says, from the statistics of all batches.

    Args:
        source: the checkpoint.
        decisions: the candidates of each module.
        recipe: the recipe, for its algorithms and its method.
        sites: all activation sites of the model.
        batches: the data.
        settings: ranks, dtype, sizes, and the folder to resume from.
        fingerprint: identifies model, recipe and data; needed to resume.
        progress: reports passes through layers.

    Raises:
        UsageError: the layout is not supported (see `check_layout`).
        CalibrationError: no data; NaN or Inf in activations; or the folder belongs to another
            measurement.
        RecipeError: modules that engines run as one do not have the same candidates.
    """
    settings = SensitivityRuntime() if settings is None else settings
    groups = settings.process_groups()
    check_layout(recipe, groups.parallel)
    ranks = RankSync(groups=groups)
    units = list_units(decisions, recipe, group_size=settings.group_size)
    method = method_for(recipe)
    if method.startswith("modelopt"):
        return _measure_by_modelopt(source, units, decisions, recipe, batches, settings)
    cache = None
    with contextlib.ExitStack() as stack:
        if settings.resume_folder is not None and fingerprint is not None:
            cache = SensitivityCache(
                settings.resume_folder,
                fingerprint=fingerprint,
                units=units,
                settings={
                    "dtype": settings.dtype,
                    "device": groups.device.type,
                    "method": method,
                    "tokens": [settings.most_tokens, SHORT_ROW],
                    "rows": [list(b.shape) for b in batches],
                    "layout": [
                        getattr(groups, axis).size for axis in ("tp", "ep", "etp", "dp", "cp")
                    ],
                },
                is_leader=groups.rank == 0,
            )
            with ranks.raise_together():
                stack.enter_context(cache.work.claim())
        decoder = settings.load(source, groups, stream_layers=method == "kl_div")
        micro_batches = split_batches(batches, decoder.config)
        weights = stack.enter_context(CanonicalWeights(source))
        survey = CandidateSurvey(
            decoder,
            units,
            decisions,
            recipe,
            sites,
            weights,
            shard_micro_batches(micro_batches, groups),
            cache,
        )
        if method == "gradient":
            losses_by_key = measure_gradient_sensitivity(survey, micro_batches, progress, cache)
        else:
            micro_batches = spread(micro_batches, settings.most_tokens)
            local_batches = shard_micro_batches(micro_batches, groups)
            losses_by_key = measure_kl_sensitivity(
                survey, local_batches, settings.memory_bytes, progress, cache
            )
        with ranks.raise_together():  # no rank reads the stored parameters any more
            losses_by_key = ranks.all_gather(losses_by_key)[0]
        if cache is not None and groups.rank == 0:
            cache.remove_qparams(range(decoder.config.num_layers + 1))
    losses: dict[str, dict[str, float]] = {u.name: {} for u in units}
    for run in survey.runs():
        losses[run.unit.name][run.key] = losses_by_key[run.unit.name, run.key]
    return Sensitivities(method=method, num_tokens=num_valid(micro_batches), losses=losses)


def _measure_by_modelopt(
    source: CheckpointSource,
    units: Sequence[DecisionUnit],
    decisions: Sequence[Decision],
    recipe: Recipe,
    batches: Sequence[Batch],
    settings: SensitivityRuntime,
) -> Sensitivities:
    """ModelOpt's scores, with the tokens that our own methods take. A run that stops begins again:
    nothing is kept to resume from."""
    from megtool.quant.modelopt.format_scores import check_memory, score_formats
    from megtool.quant.modelopt.quantizer_config import name_modules

    method, groups = method_for(recipe), settings.process_groups()
    num_bytes = named_dtype(settings.dtype).itemsize
    check_memory(units, {d.module.name: d.module.numel for d in decisions}, num_bytes)
    decoder = settings.load(source, groups, stream_layers=False)
    micro_batches = split_batches(batches, decoder.config)
    if method == "modelopt_gradient":
        micro_batches = [p for b in micro_batches for p in split_rows(b, BACKWARD_TOKENS)]
    else:
        micro_batches = spread(micro_batches, settings.most_tokens)
    with CanonicalWeights(source) as weights:
        losses_by_key = score_formats(
            decoder, units, recipe, name_modules(decisions), weights, micro_batches, method
        )
    losses: dict[str, dict[str, float]] = {u.name: {} for u in units}
    for (unit, key), loss in losses_by_key.items():
        losses[unit][key] = loss
    return Sensitivities(method=method, num_tokens=num_valid(micro_batches), losses=losses)


def spread(micro_batches: Sequence[MicroBatch], most: int) -> list[MicroBatch]:
    """Select micro-batches of about `most` tokens in short rows, spread over the data."""
    rows = [
        (micro_batch, row)
        for micro_batch in micro_batches
        for row in range(micro_batch.batch.shape[0])
    ]
    width = max(micro_batch.batch.shape[1] for micro_batch in micro_batches)
    if not any(_is_padded_left(p.batch) for p in micro_batches):
        width = min(max(SHORT_ROW, -(-most // len(rows))), width)
    num_rows = min(len(rows), max(-(-most // width), 1))
    samples: dict[int, tuple[MicroBatch, list[int]]] = {}
    for number in range(num_rows):
        micro_batch, row = rows[number * len(rows) // num_rows]
        samples.setdefault(micro_batch.first_row, (micro_batch, []))[1].append(row)
    return [
        replace(p, batch=_short(p.batch, row_numbers, width)) for p, row_numbers in samples.values()
    ]


def _is_padded_left(batch: Batch) -> bool:
    return batch.valid_BS is not None and not bool(batch.valid_BS[:, 0].all())


def _short(batch: Batch, rows: Sequence[int], width: int) -> Batch:
    """The first `width` tokens of some rows of a batch."""

    def part(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        return t[:, :width] if t.shape[0] == 1 else t[list(rows), :width]

    return Batch(
        tokens_BS=batch.tokens_BS[list(rows), :width],
        positions_BS=part(batch.positions_BS),
        valid_BS=part(batch.valid_BS),
        documents_BS=part(batch.documents_BS),
    )
