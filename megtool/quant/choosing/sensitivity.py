"""Sensitivity: what rounding each unit of a model costs, by divergence or by gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megtool.errors import UsageError
from megtool.inference.load import load
from megtool.inference.weights import Source
from megtool.log import Progress, silent
from megtool.model.batch import Batch
from megtool.parallel.groups import Groups
from megtool.quant.calibration.canonical_weights import CanonicalWeights
from megtool.quant.calibration.pieces import Piece, cut, num_valid, rows_of
from megtool.quant.calibration.points import Point
from megtool.quant.choosing.divergence import by_divergence
from megtool.quant.choosing.gradient import by_gradient
from megtool.quant.choosing.sensitivities import How, Sensitivities
from megtool.quant.choosing.survey import Survey
from megtool.quant.choosing.units import list_units
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.recipe import Recipe

MOST_TOKENS = 1024
"""Tokens that divergence is measured over, where there are more: it takes a run for each unit and
format, and some hundred tokens tell which of two is larger."""

STATES_BYTES = 1 << 30
"""What the states of all runs that go on together may take."""


def method_for(recipe: Recipe) -> How:
    """How a recipe wants sensitivity measured: by divergence, where it does not say."""
    return "gradient" if recipe.method == "gradient" else "kl_div"


def measure(
    source: Source,
    decisions: Sequence[Decision],
    recipe: Recipe,
    points: Sequence[Point],
    batches: Sequence[Batch],
    *,
    group_size: int = 0,
    groups: Groups | None = None,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    resident: bool = False,
    most_tokens: int = MOST_TOKENS,
    memory_bytes: int = STATES_BYTES,
    threads: int | None = None,
    progress: Progress = silent,
) -> Sensitivities:
    """What each unit would cost in each of its formats.

    Formats are settled as the recipe says, from statistics of all `batches`; divergence is over
    the first `most_tokens` tokens of them. Layers are loaded as they are needed, or with
    `resident` (and for `gradient`, always) all at once. `memory_bytes` bounds the states of runs
    under way: fewer at a time go over the layers more often.

    Raises:
        UsageError: in several processes.
        CalibrationError: no data, or an activation that is NaN or infinite.
        RecipeError: what engines run as one is not left to one choice.
    """
    if groups is not None and groups.world.size > 1:
        raise UsageError(
            f"{groups.world.size} processes for an automatic choice of formats",
            hint="it is measured in one process, a layer at a time; run it without torchrun",
        )
    units = list_units(decisions, recipe, group_size=group_size)
    how = method_for(recipe)
    decoder = load(
        source,
        groups=groups,
        dtype=dtype,
        device=device,
        on_demand=not resident and how == "kl_div",
        threads=threads,
    )
    pieces = cut(batches, decoder.config)
    with CanonicalWeights(source) as weights:
        survey = Survey(decoder, units, decisions, recipe, points, weights, pieces)
        if how == "gradient":
            losses, tokens = by_gradient(survey, progress), num_valid(pieces)
        else:
            some = _first(pieces, most_tokens)
            losses, tokens = by_divergence(survey, some, memory_bytes, progress), num_valid(some)
    return Sensitivities(method=how, num_tokens=tokens, losses=losses)


def _first(pieces: Sequence[Piece], most: int) -> list[Piece]:
    """The first pieces, rows of them where one is too large, of about so many tokens."""
    out: list[Piece] = []
    left = most
    for piece in pieces:
        rows, width = piece.batch.shape
        taken = min(rows, max(-(-left // width), 0))
        if taken <= 0:
            break
        out.append(replace(piece, batch=rows_of(piece.batch, slice(0, taken), rows)))
        left -= taken * width
    return out
