"""The largest singular values of weights, beside the whole decomposition and ModelOpt's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megtool.errors import FormatError
from megtool.quant.algorithms.svdquant import split_low_rank
from tests.support.errors import raises
from tests.support.quant import algorithm_inputs


@pytest.mark.parametrize("shape", [(96, 64), (48, 128)])
def test_residuals_are_the_small_singular_values(shape: tuple[int, int]) -> None:
    weights = {"q": algorithm_inputs.weight(*shape), "k": algorithm_inputs.weight(16, shape[1])}
    branches, residuals = split_low_rank(weights, 8)
    assert np.array_equal(branches["q"].down, branches["k"].down)
    whole = torch.cat(list(weights.values()))
    values = torch.linalg.svdvals(whole.double())
    left = torch.linalg.svdvals(torch.cat(list(residuals.values())).double())
    assert left.square().sum() == pytest.approx(float(values[8:].square().sum()), rel=1e-3)
    for name, weight in weights.items():
        up, down = (torch.from_numpy(m) for m in (branches[name].up, branches[name].down))
        assert torch.equal(up.bfloat16().float(), up)
        assert torch.equal(down.bfloat16().float(), down)
        torch.testing.assert_close(up @ down + residuals[name], weight, rtol=0, atol=1e-6)


def test_a_rank_above_the_matrix_is_filled_with_zeros() -> None:
    branches, residuals = split_low_rank({"w": algorithm_inputs.weight(6, 32)}, 8)
    assert branches["w"].up.shape == (6, 8)
    assert branches["w"].down.shape == (8, 32)
    assert not branches["w"].up[:, 6:].any()
    assert float(residuals["w"].abs().max()) < 0.02
    zeros, rest = split_low_rank({"w": torch.zeros(4, 8)}, 2)
    assert not zeros["w"].up.any()
    assert not rest["w"].any()


def test_a_weight_with_nan_is_refused() -> None:
    weight = algorithm_inputs.weight(8, 32)
    weight[1, 2] = float("nan")
    with raises(FormatError, "the weight of layers.0.attn.q is NaN", tensor="layers.0.attn.q"):
        split_low_rank({"layers.0.attn.q": weight}, 2)


@pytest.mark.peers
@pytest.mark.parametrize("shape", [(96, 64), (48, 128)])
def test_as_modelopt_decomposes(shape: tuple[int, int]) -> None:
    pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.quantization.model_calib import svd

    weight = algorithm_inputs.weight(*shape)
    up, down = svd(weight, 8)
    branches, _ = split_low_rank({"w": weight}, 8)
    ours = torch.from_numpy(branches["w"].up @ branches["w"].down)
    assert (ours - up @ down).norm() / (up @ down).norm() < 4e-3  # bfloat16's rounding
