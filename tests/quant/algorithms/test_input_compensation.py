"""Weights that make up for the rounding of inputs: better on rounded inputs, the same without."""

from __future__ import annotations

import pytest
import torch

from megtool.errors import CalibrationError
from megtool.quant.algorithms import gptq
from megtool.quant.algorithms.algorithm_config import AlgorithmConfig
from megtool.quant.algorithms.fused_group import solve_fused_group
from megtool.quant.algorithms.input_compensation import compensate_inputs, fit_rounding
from megtool.quant.algorithms.weight_grid import fake_quantize_inputs, max_input_code
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.qparams import WeightQParams
from megtool.quant.recipes.formats import FORMATS, RecipeFormat
from tests.support.quant import algorithm_inputs


def format_of(algo: str) -> RecipeFormat:
    return RecipeFormat(name="f", algo=algo, group_size=FORMATS[algo].groups[0])


@pytest.mark.parametrize("normalize", [False, True])
def test_inputs_that_are_not_rounded_change_nothing(normalize: bool) -> None:
    x = algorithm_inputs.rows(200, 64)
    x[:, 7] = 0
    factor, noise = fit_rounding(x, x, normalize_tokens=normalize)
    torch.testing.assert_close(factor, torch.ones(64))
    torch.testing.assert_close(noise, torch.zeros(64), rtol=0, atol=1e-5)
    weight, gram = algorithm_inputs.weight(8, 64), gptq.damp_gram(x.T @ x / 200, 0.01)
    out, rounded = compensate_inputs({"w": weight}, gram, factor, noise)
    torch.testing.assert_close(out["w"], weight, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rounded, gram, rtol=1e-4, atol=1e-4)


def test_channels_that_round_to_zero_are_left_to_others() -> None:
    x = algorithm_inputs.rows(400, 64)
    rounded = x.clone()
    rounded[:, ::4] = 0
    factor, noise = fit_rounding(x, rounded)
    assert factor[::4].abs().max() == 0
    weight, gram = algorithm_inputs.weight(8, 64), gptq.damp_gram(x.T @ x / 400, 0.001)
    out, _ = compensate_inputs({"w": weight}, gram, factor, noise)
    exact = torch.linalg.lstsq(rounded[:, 1:].double(), (x @ weight.T).double())
    assert exact.solution.shape == (63, 8)
    errors = [float((rounded @ w.T - x @ weight.T).norm()) for w in (out["w"], weight)]
    assert errors[0] < 0.95 * errors[1]
    assert bool(torch.isfinite(out["w"]).all())


@pytest.mark.parametrize("algo", ["MXFP4", "NVFP4"])
def test_other_inputs_have_a_smaller_error(algo: str) -> None:
    """Calibrated on some rows, measured on others, with codes chosen by GPTQ."""
    format, every = format_of(algo), algorithm_inputs.rows(3000, 128)
    x, other = every[:1500], every[1500:]
    weight = algorithm_inputs.weight(32, 128)
    seen = algorithm_inputs.statistics(x)
    errors = []
    for compensates in (False, True):
        config = AlgorithmConfig(gptq=True, scale_search=True, compensate_inputs=compensates)
        result = solve_fused_group({"w": weight}, format, config, seen)
        qparams = WeightQParams(
            module="w",
            format=format,
            amax=result.amaxes["w"],
            global_amax=result.global_amax,
            codes=result.codes["w"],
        )
        inputs = fake_quantize_inputs(other, format, result.input_amax)
        assert (result.input_amax > 0) == (max_input_code(format) > 0)
        wrong = inputs @ fake_weight(weight, qparams).T - other @ weight.T
        errors.append(float(wrong.square().sum()))
    assert errors[1] < 0.97 * errors[0]


def test_moments_that_cannot_be_inverted_are_an_error() -> None:
    ones = torch.ones(4)
    with pytest.raises(CalibrationError, match="cannot be inverted"):
        compensate_inputs(
            {"w": torch.ones(2, 4)},
            torch.ones(4, 4) * -1 + 3 * torch.eye(4) * 0.1 + torch.eye(4),
            ones,
            ones * 0,
        )
