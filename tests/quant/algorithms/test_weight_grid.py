"""Grids: bit for bit what the packed weight means, in every format."""

from __future__ import annotations

import pytest
import torch

from megtool.quant.algorithms.weight_grid import fake_quantize_inputs, make_grid
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.qparams import WeightQParams
from megtool.quant.recipes.formats import FORMATS, INPUT_PACKINGS, RecipeFormat
from tests.support.quant import algorithm_inputs
from tests.support.quant.fake_inputs import fake_input


def format_of(algo: str) -> RecipeFormat:
    groups = FORMATS[algo].groups
    return RecipeFormat(name="f", algo=algo, group_size=groups[0] if groups else 0)


@pytest.mark.parametrize("algo", FORMATS)
@pytest.mark.parametrize("shrink", [1.0, 0.7])
def test_weights_become_what_is_packed(algo: str, shrink: float) -> None:
    found = format_of(algo)
    weight = algorithm_inputs.weight(128, 256)
    weight[0, :128] = 0
    grid = make_grid(found)
    amax = grid.amax(weight) * shrink
    treatment = WeightQParams(module="m", format=found, amax=amax.numpy())
    assert torch.equal(
        grid.fake_quantize(weight, amax), fake_weight(weight, treatment, as_run=True)
    )


@pytest.mark.parametrize("algo", INPUT_PACKINGS)
def test_inputs_become_what_an_engine_multiplies(algo: str) -> None:
    x = algorithm_inputs.rows(32, 128)
    treatment = WeightQParams(
        module="m", format=format_of(algo), input_amax=float(x.abs().max()) / 2
    )
    found = fake_quantize_inputs(x, format_of(algo), treatment.input_amax)
    torch.testing.assert_close(found, fake_input(x, treatment), rtol=1e-6, atol=0)
