"""Sensitivity of each decision unit, by KL divergence or by gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megtool.config import ParallelConfig
from megtool.console import Progress, silent
from megtool.errors import UsageError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.activation_sites import ActivationSite
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.micro_batches import (
    MicroBatch,
    num_valid,
    shard_micro_batches,
    split_batches,
)
from megtool.quant.calibration.rank_sync import RankSync
from megtool.quant.calibration.sensitivities import Sensitivities, SensitivityMethod
from megtool.quant.mixed_precision.candidates import CandidateSurvey
from megtool.quant.mixed_precision.decision_units import list_units
from megtool.quant.mixed_precision.gradient_sensitivity import by_gradient
from megtool.quant.mixed_precision.kl_sensitivity import by_divergence
from megtool.quant.mixed_precision.sensitivity_cache import SensitivityCache
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe
from megtool.reshard.source import CheckpointSource

MOST_TOKENS, SHORT = 256, 64
"""Divergence takes a run for each unit and format, and some hundred tokens tell which of two is
larger: of more data, so many are run, in rows cut to `SHORT` (where there are enough of them) and
taken from all over it."""

STATES_BYTES = 1 << 30
"""What the states of all runs that go on together may take."""


def method_for(recipe: Recipe) -> SensitivityMethod:
    """The sensitivity method of a recipe: KL divergence by default."""
    return "gradient" if recipe.method == "gradient" else "kl_div"


def check_layout(recipe: Recipe, parallel: ParallelConfig) -> None:
    """Refuse layouts in which sensitivity is not measured.

    Raises:
        UsageError: stages, whose layers no rank has all of; or for `gradient`, weights in parts.
    """
    sizes = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "ep", "etp")}
    refused = ["pp"] if method_for(recipe) == "kl_div" else [*sizes]
    if flags := " ".join(f"--{axis} {sizes[axis]}" for axis in refused if sizes[axis] > 1):
        raise UsageError(
            f"{flags}, and what formats cost by {method_for(recipe)} is not measured so",
            hint="torchrun without "
            + ("it" if len(flags.split()) == 2 else "them")
            + ": ranks then "
            "share the data out" + ("; or with --tp or --ep" if refused == ["pp"] else ""),
        )


def measure(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    recipe: Recipe,
    points: Sequence[ActivationSite],
    batches: Sequence[Batch],
    *,
    group_size: int = 0,
    groups: ProcessGroups | None = None,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    resident: bool = False,
    most_tokens: int = MOST_TOKENS,
    memory_bytes: int = STATES_BYTES,
    threads: int | None = None,
    work: Path | None = None,
    fingerprint: Fingerprint | None = None,
    progress: Progress = silent,
) -> Sensitivities:
    """The sensitivity of each decision unit in each of its formats, the same on every rank.

    Formats are settled as the recipe says, from statistics of all `batches`; divergence is over
    `most_tokens` tokens from all over them. Every rank is given the same batches; data-parallel
    ranks share them out. Layers are loaded as they are needed, or with
    `resident` (and for `gradient`, always) all at once. `memory_bytes` bounds the states of runs
    under way: fewer at a time go over the layers more often. `work` is a folder to go on from after
    a kill, with the same numbers; the `fingerprint` says whose it is.

    Raises:
        UsageError: in a layout for which `check_layout` has an error.
        CalibrationError: no data, an activation that is NaN or infinite, or work that belongs to
            another measurement.
        RecipeError: what engines run as one is not left to one choice.
    """
    groups = ProcessGroups.alone(device) if groups is None else groups
    check_layout(recipe, groups.parallel)
    ranks = RankSync(groups=groups)
    units = list_units(decisions, recipe, group_size=group_size)
    method = method_for(recipe)
    cache = None
    with contextlib.ExitStack() as stack:
        if work is not None and fingerprint is not None:
            settings = {
                "dtype": str(dtype),
                "device": torch.device(device).type,
                "method": method,
                "tokens": [most_tokens, SHORT],
                "rows": [list(b.shape) for b in batches],
                "layout": [getattr(groups, axis).size for axis in ("tp", "ep", "etp", "dp")],
            }
            leads = groups.rank == 0
            cache = SensitivityCache(
                work, fingerprint=fingerprint, units=units, settings=settings, leads=leads
            )
            with ranks.raise_together():
                stack.enter_context(cache.work.claim())
        decoder = load(
            source,
            groups=groups,
            dtype=dtype,
            device=device,
            on_demand=not resident and method == "kl_div",
            threads=threads,
        )
        pieces = split_batches(batches, decoder.config)
        weights = stack.enter_context(CanonicalWeights(source))
        local_pieces = shard_micro_batches(pieces, groups.dp)
        survey = CandidateSurvey(
            decoder, units, decisions, recipe, points, weights, local_pieces, cache
        )
        if method == "gradient":
            measured_losses, tokens = (
                by_gradient(survey, pieces, progress, cache),
                num_valid(pieces),
            )
        else:
            some = spread(pieces, most_tokens)
            local_pieces = shard_micro_batches(some, groups.dp)
            measured_losses = by_divergence(survey, local_pieces, memory_bytes, progress, cache)
            tokens = num_valid(some)
        with ranks.raise_together():  # none reads what is settled any more
            measured_losses = ranks.all_gather(measured_losses)[0]
        if cache is not None and groups.rank == 0:
            cache.forget_settled(range(decoder.config.num_layers + 1))
    losses: dict[str, dict[str, float]] = {u.name: {} for u in units}
    for run in survey.runs():
        losses[run.unit.name][run.key] = measured_losses[run.unit.name, run.key]
    return Sensitivities(method=method, num_tokens=tokens, losses=losses)


def spread(pieces: Sequence[MicroBatch], most: int) -> list[MicroBatch]:
    """Micro batches of about `tokens` tokens: short rows, spread over the data."""
    rows = [(piece, row) for piece in pieces for row in range(piece.batch.shape[0])]
    width = max(piece.batch.shape[1] for piece in pieces)
    if not any(_is_padded_left(p.batch) for p in pieces):
        width = min(max(SHORT, -(-most // len(rows))), width)
    num_rows = min(len(rows), max(-(-most // width), 1))
    samples: dict[int, tuple[MicroBatch, list[int]]] = {}
    for number in range(num_rows):
        piece, row = rows[number * len(rows) // num_rows]
        samples.setdefault(piece.first_row, (piece, []))[1].append(row)
    return [replace(p, batch=_short(p.batch, some, width)) for p, some in samples.values()]


def _is_padded_left(batch: Batch) -> bool:
    return batch.valid_BS is not None and not bool(batch.valid_BS[:, 0].all())


def _short(batch: Batch, rows: Sequence[int], width: int) -> Batch:
    """The beginnings of some rows of a batch."""

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
