"""SmoothQuant, AWQ and its clip search beside ModelOpt's own, from the same inputs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megtool.quant.algorithms import awq, clip, smoothquant
from megtool.quant.algorithms.weight_grid import make_grid
from megtool.quant.recipes.formats import RecipeFormat
from tests.support.quant import algorithm_inputs

pytestmark = [pytest.mark.peers, pytest.mark.slow]
GROUP = 32
INT4 = make_grid(RecipeFormat(name="f", algo="W4A16_AWQ", group_size=GROUP))


def grouped(settings: Any) -> Any:
    """Settings with groups of `GROUP` columns."""
    if isinstance(settings, dict):
        sizes = {k: GROUP if k in (-1, "-1") else grouped(v) for k, v in settings.items()}
        return sizes
    return [grouped(s) for s in settings] if isinstance(settings, list) else settings


def quantized(weight: Tensor, x: Tensor, preset: str, algorithm: Any) -> nn.Linear:
    """A linear layer that ModelOpt has calibrated with `x`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq

        model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
        model[0].weight.data = weight.clone()
        settings = getattr(mtq, preset)
        settings = settings if isinstance(settings, dict) else settings.model_dump()
        settings = grouped(copy.deepcopy(settings))
        settings["algorithm"] = algorithm
        mtq.quantize(model, settings, lambda m: m(x))
    found = model[0]
    assert isinstance(found, nn.Module)
    return found  # type: ignore[return-value]


def factor(layer: Any) -> Tensor:
    """What inputs are divided by."""
    scale: Tensor = layer.input_quantizer.pre_quant_scale
    return 1 / scale.detach().float().reshape(-1)


@pytest.mark.parametrize("alpha", [0.5, 0.8, 1.0])
def test_smoothquant(alpha: float) -> None:
    x, weight = algorithm_inputs.rows(64, 128), algorithm_inputs.weight(96, 128)
    theirs = quantized(weight, x, "INT8_SMOOTHQUANT_CFG", {"method": "smoothquant", "alpha": alpha})
    ours = smoothquant.compute_scale(x.abs().amax(dim=0), [weight], alpha)
    torch.testing.assert_close(ours, factor(theirs), rtol=1e-5, atol=0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_awq_lite(seed: int) -> None:
    x, weight = (
        algorithm_inputs.rows(256, 128, seed=seed),
        algorithm_inputs.weight(96, 128, seed=seed),
    )
    theirs = quantized(weight, x, "INT4_AWQ_CFG", {"method": "awq_lite", "alpha_step": 0.1})
    share = awq.measure_weight_share([weight], GROUP)
    tried = awq.propose_scales([x.abs().mean(dim=0)], share, 0.1, matches_modelopt=True)
    ours = awq.search_scale([weight], x.T @ x, INT4, tried)
    torch.testing.assert_close(ours, factor(theirs), rtol=1e-4, atol=0)


def test_awq_clip() -> None:
    x, weight = algorithm_inputs.rows(64, 128), algorithm_inputs.weight(96, 128)
    theirs: Any = quantized(weight, x, "INT4_AWQ_CFG", {"method": "awq_clip"})
    shrinks = [round(0.5 + 0.05 * i, 2) for i in range(11)]
    ours = clip.search_by_output(weight, x.T @ x, INT4, None, shrinks)
    found = theirs.weight_quantizer.amax.reshape(ours.shape)
    # Two shares may lose the same to the last places.
    assert torch.isclose(ours, found, rtol=1e-5).float().mean() > 0.99
