"""Our rounding to NVFP4 is ModelOpt's own, which its packed form shows without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megtool.errors import CalibrationError
from megtool.quant.modelopt.unit_modules import (
    UnitModules,
    WholeLinear,
    round_blocks,
    round_nvfp4,
)
from tests.support.errors import raises


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_modelopts(dtype: torch.dtype) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator).to(dtype)
    weight[:, 3] *= 30
    amax = weight.abs().amax().float()
    packed, scale, second = NVFP4QTensor.quantize(weight, 16, None, amax / (6 * 448))
    wanted = packed.dequantize(
        scale=scale, double_scale=second, block_sizes={-1: 16}, dtype=torch.float32
    )
    quantizer = SimpleNamespace(block_sizes={-1: 16}, amax=None)
    found = round_nvfp4(weight, quantizer)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted.to(dtype), rtol=0, atol=0)
    rows = weight.view(4, 8, 64)
    assert torch.equal(round_nvfp4(rows, quantizer).view(32, 64), found)


@pytest.mark.peers
@pytest.mark.parametrize("largest", [448.0, 256.0])
@pytest.mark.parametrize("factor", [1.0, 0.7, 1.5])
def test_rounding_by_chosen_scales_is_modelopts(largest: float, factor: float) -> None:
    """By the scales of its export, which its packed form has on any device."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator)
    weight[:, 3] *= 30
    weight[7] *= 1e-5
    amax = weight.view(-1, 16).abs().amax(1) * factor
    quantizer = SimpleNamespace(
        block_sizes={-1: 16, "four_over_six": largest == 256},
        global_amax=weight.abs().amax(),
        _amax=amax,
    )
    scale, second = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, weight)
    packed, scale, second = NVFP4QTensor.quantize(weight, 16, scale, second)
    wanted = packed.dequantize(
        scale=scale, double_scale=second, block_sizes={-1: 16}, dtype=torch.float32
    )
    found = round_blocks(weight, amax, weight.abs().amax(), largest, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_blocks_that_do_not_divide() -> None:
    with raises(CalibrationError, "16", "24"):
        round_nvfp4(torch.ones(2, 24), SimpleNamespace(block_sizes={-1: 16}, amax=None))


def test_modules_lie_at_their_names() -> None:
    unit = UnitModules()
    for name in ("model.layers.0.q_proj", "model.layers.0.k_proj", "head"):
        unit.put(name, WholeLinear(torch.eye(4), multiplies=name == "head"))
    assert torch.equal(unit.get_submodule("head")(torch.eye(4)), torch.eye(4))
    assert unit.get_submodule("model.layers.0.k_proj")(torch.eye(4)).shape == (0, 4)
