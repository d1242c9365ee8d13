"""Grids: bit for bit what the packed weight means, in every format."""

from __future__ import annotations

import pytest
import torch

from megtool.quant.algorithms.weight_grid import grid_of, rounded_inputs
from megtool.quant.fake_quant.fake_quantize import fake_input, fake_weight
from megtool.quant.qparams import INPUTS, Treatment
from megtool.quant.recipes.formats import FORMATS, Format
from tests.support.quant import algorithm_inputs


def format_of(algo: str) -> Format:
    groups = FORMATS[algo].groups
    return Format(name="f", algo=algo, group_size=groups[0] if groups else 0)


@pytest.mark.parametrize("algo", FORMATS)
@pytest.mark.parametrize("shrink", [1.0, 0.7])
def test_weights_become_what_is_packed(algo: str, shrink: float) -> None:
    found = format_of(algo)
    weight = algorithm_inputs.weight(128, 256)
    weight[0, :128] = 0
    grid = grid_of(found)
    amax = grid.amax(weight) * shrink
    treatment = Treatment(module="m", format=found, amax=amax.numpy())
    assert torch.equal(grid.rounded(weight, amax), fake_weight(weight, treatment, as_run=True))


@pytest.mark.parametrize("algo", INPUTS)
def test_inputs_become_what_an_engine_multiplies(algo: str) -> None:
    x = algorithm_inputs.rows(32, 128)
    treatment = Treatment(module="m", format=format_of(algo), input_amax=float(x.abs().max()) / 2)
    found = rounded_inputs(x, format_of(algo), treatment.input_amax)
    torch.testing.assert_close(found, fake_input(x, treatment), rtol=1e-6, atol=0)
