"""GPTQ: never worse than rounding to the nearest, and just that where inputs are independent."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megtool.errors import CalibrationError
from megtool.quant.algorithms import gptq
from megtool.quant.algorithms.weight_grid import make_grid
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.qparams import WeightQParams
from megtool.quant.recipes.formats import RecipeFormat
from tests.support.quant import algorithm_inputs

INT4 = make_grid(RecipeFormat(name="f", algo="W4A16_AWQ", group_size=32))
INT8 = make_grid(RecipeFormat(name="f", algo="W8A8_SQ_PER_CHANNEL"))
NVFP4 = make_grid(RecipeFormat(name="f", algo="NVFP4", group_size=16))
MXFP4 = make_grid(RecipeFormat(name="f", algo="MXFP4", group_size=32))
W4A8 = make_grid(RecipeFormat(name="f", algo="W4A8_AWQ", group_size=32))


def chosen(weight: Tensor, gram: Tensor, grid: object = INT4, *, descending: bool = True) -> Tensor:
    order = gptq.order_columns(gram, desc_act=descending)
    upper = gptq.compute_inverse_cholesky(gram[order][:, order])
    second = float(weight.abs().max()) if grid in (W4A8, NVFP4) else None
    return gptq.quantize_columns(weight, upper, order, grid, grid.amax(weight), second)  # type: ignore[attr-defined,arg-type]


def lost(weight: Tensor, codes: Tensor, gram: Tensor, amax: Tensor) -> float:
    return float(gptq.row_errors(weight, codes, amax / 7, gram).sum())


@pytest.mark.parametrize("descending", [True, False])
def test_independent_inputs_leave_nothing_to_make_up_for(descending: bool) -> None:
    weight = algorithm_inputs.weight(24, 128)
    gram = torch.diag(torch.rand(128, generator=torch.Generator().manual_seed(0)) + 0.1)
    codes = chosen(weight, gram, descending=descending)
    nearest = INT4.nearest_codes(weight / INT4.broadcast(INT4.scale(INT4.amax(weight))))
    assert torch.equal(codes, nearest)
    assert torch.equal(gptq.refine_codes(weight, codes, gram, INT4, INT4.amax(weight)), nearest)


def test_columns_are_made_up_for_one_by_one() -> None:
    """The textbook's recursion: H^-1 without the columns that are done."""
    weight, x = algorithm_inputs.weight(8, 64), algorithm_inputs.rows(200, 64)
    gram = gptq.damp_gram(x.T @ x / 200, 0.01).double()
    amax = INT4.amax(weight)
    scale = INT4.broadcast(INT4.scale(amax)).double()
    rest, inverse = weight.double().clone(), torch.linalg.inv(gram)
    codes = torch.zeros_like(rest)
    for i in range(64):
        codes[:, i] = (rest[:, i] / scale[:, i]).round().clamp(-8, 7)
        left = (rest[:, i] - codes[:, i] * scale[:, i]) / inverse[i, i]
        rest -= left[:, None] * inverse[i]
        inverse = inverse - inverse[:, i : i + 1] * inverse[i : i + 1] / inverse[i, i]
        rest[:, : i + 1] = 0
    assert (chosen(weight, gram.float(), descending=False) == codes).float().mean() > 0.99


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), groups=st.integers(1, 4), out=st.integers(1, 9))
def test_each_step_lowers_the_error(seed: int, groups: int, out: int) -> None:
    width = 32 * groups
    weight, x = (
        algorithm_inputs.weight(out, width, seed=seed),
        algorithm_inputs.rows(3 * width, width, seed=seed),
    )
    gram = gptq.damp_gram(x.T @ x / len(x), 0.01)
    amax = INT4.amax(weight)
    codes = chosen(weight, gram)
    better = gptq.refine_codes(weight, codes, gram, INT4, amax, passes=2)
    assert lost(weight, better, gram, amax) <= lost(weight, codes, gram, amax) * (1 + 1e-5)
    scales = gptq.refit_amax(weight, better, gram, INT4, amax)
    assert lost(weight, better, gram, scales) <= lost(weight, better, gram, amax) * (1 + 1e-5)
    assert codes.abs().max() <= 8
    assert bool((scales >= 0).all())


GRIDS = {"int4": INT4, "int8": INT8, "w4a8": W4A8, "nvfp4": NVFP4, "mxfp4": MXFP4}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=list(GRIDS))
def test_the_output_is_nearer_than_rounded_to_nearest(grid: object) -> None:
    weight, x = algorithm_inputs.weight(32, 128), algorithm_inputs.rows(400, 128)
    gram = gptq.damp_gram(x.T @ x / len(x), 0.01)
    second = float(weight.abs().max())
    amax = grid.amax(weight)  # type: ignore[attr-defined]
    by = grid.broadcast(grid.scale(amax, second))  # type: ignore[attr-defined]
    values = grid.requantize(chosen(weight, gram, grid) * by, second)  # type: ignore[attr-defined]
    nearest = grid.fake_quantize(weight, amax, second)  # type: ignore[attr-defined]
    errors = [float(((x @ (q - weight).T) ** 2).sum()) for q in (values, nearest)]
    assert errors[0] < 0.75 * errors[1]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 4),
    out=st.integers(1, 9),
    name=st.sampled_from(["NVFP4", "MXFP4"]),
)
def test_each_step_of_fp4_lowers_the_error(seed: int, groups: int, out: int, name: str) -> None:
    grid, width = {"NVFP4": NVFP4, "MXFP4": MXFP4}[name], 32 * groups
    weight, x = (
        algorithm_inputs.weight(out, width, seed=seed),
        algorithm_inputs.rows(3 * width, width, seed=seed),
    )
    weight[0, :32] = 0
    gram = gptq.damp_gram(x.T @ x / len(x), 0.01)
    second = float(weight.abs().max()) * 1.75 or None
    amax = grid.amax(weight)
    order = gptq.order_columns(gram, desc_act=True)
    upper = gptq.compute_inverse_cholesky(gram[order][:, order])
    codes = gptq.quantize_columns(weight, upper, order, grid, amax, second)

    def error(codes: Tensor, amax: Tensor) -> float:
        off = codes * grid.broadcast(grid.scale(amax, second)) - weight
        return float(((off @ gram) * off).sum())

    errors = [error(codes, amax)]
    for _ in range(2):
        amax = gptq.refit_block_amax(weight, codes, gram, grid, amax, second)
        errors.append(error(codes, amax))
        codes = gptq.refine_codes(weight, codes, gram, grid, amax, second)
        errors.append(error(codes, amax))
    assert all(b <= a * (1 + 1e-4) + 1e-9 for a, b in itertools.pairwise(errors))
    scale = grid.scale(amax, second)
    assert torch.equal(grid.scale(scale * 6, second), scale), "scales can be stored"
    stored = WeightQParams(
        module="m",
        format=RecipeFormat(name="f", algo=name, group_size=grid.columns),
        amax=amax.numpy(),
        global_amax=second or 0.0,
        codes=grid.stored_codes(codes).numpy(),
    )
    assert torch.equal(fake_weight(weight, stored), codes * grid.broadcast(scale))


def test_a_column_that_is_always_zero_is_harmless() -> None:
    x = algorithm_inputs.rows(100, 64)
    x[:, 5] = 0
    weight = algorithm_inputs.weight(8, 64)
    codes = chosen(weight, gptq.damp_gram(x.T @ x, 0.0001))
    assert bool(torch.isfinite(codes).all())


def test_what_cannot_be_inverted_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="cannot be inverted"):
        gptq.compute_inverse_cholesky(-torch.eye(4))
