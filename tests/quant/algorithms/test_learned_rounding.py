"""Learned rounding: the steps of the paper's formula in float64, and from given codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megtool.quant.algorithms import gptq
from megtool.quant.algorithms.learned_rounding import LearnedRounding
from megtool.quant.algorithms.weight_grid import Grid, make_grid
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.qparams import WeightQParams
from megtool.quant.recipes.formats import RecipeFormat
from tests.support.quant import algorithm_inputs

FORMATS = {
    "int4": RecipeFormat(name="f", algo="W4A16_AWQ", group_size=32),
    "int8": RecipeFormat(name="f", algo="W8A8_SQ_PER_CHANNEL"),
    "nvfp4": RecipeFormat(name="f", algo="NVFP4", group_size=16),
    "mxfp4": RecipeFormat(name="f", algo="MXFP4", group_size=32),
}
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def begin(name: str, weight: Tensor, codes: Tensor | None = None) -> LearnedRounding:
    grid = make_grid(FORMATS[name])
    return LearnedRounding(
        weight_OI=weight,
        grid=grid,
        amax=grid.amax(weight),
        global_amax=1.75 * float(weight.abs().max()) if grid.has_global_scale else None,
        codes_OI=codes,
    )


class Reference:
    """The formula in float64, with gradients by torch that pass through roundings unchanged."""

    def __init__(self, name: str, weight: Tensor, grid: Grid) -> None:
        self.name, self.size = name, grid.columns or weight.shape[1]
        self.groups = weight.double().reshape(len(weight), -1, self.size)
        self.amax = self.groups.abs().amax(2, keepdim=True)
        self.top = 1.75 * float(weight.abs().max())
        self.v = torch.zeros_like(self.groups, requires_grad=True)
        self.factor = torch.ones_like(self.amax, requires_grad=True)

    def scale(self) -> Tensor:
        largest = {"int4": 7, "int8": 127}.get(self.name, 6)
        plain = self.amax * self.factor / largest
        if self.name == "mxfp4":
            stored = 2 ** torch.ceil(torch.log2(plain.detach()))
        elif self.name == "nvfp4":
            second = self.top / (6 * 448)
            stored = (plain.detach() / second).float().to(torch.float8_e4m3fn).double() * second
        else:
            return plain
        return plain * (stored / plain).detach()

    def weight(self) -> Tensor:
        scale = self.scale()
        quotient = self.groups / scale
        if self.name.startswith("int"):
            top = 7 if self.name == "int4" else 127
            point = quotient + self.v
            rounded = point + (point.round() - point).detach()
            out = rounded.clamp(-top - 1, top)
            inside = point.abs() <= top + 0.5
        else:
            exponent = quotient.detach().abs().log2().floor().clamp(min=0)
            point = quotient + self.v * 2**exponent / 2
            grid = torch.cat((-FP4.flip(0), FP4))
            nearest = grid[(point.detach()[..., None] - grid).abs().argmin(-1)]
            out = point + (nearest - point).detach()
            inside = point.abs() <= 7
        return (torch.where(inside, out, out.detach()) * scale).reshape(len(scale), -1)

    def step(self, gradient: Tensor, rate: float) -> None:
        self.v.grad = self.factor.grad = None
        self.weight().backward(gradient)
        with torch.no_grad():
            assert self.v.grad is not None
            assert self.factor.grad is not None
            self.v -= rate * self.v.grad.sign()
            self.v.clamp_(-0.5, 0.5)
            self.factor -= rate * self.factor.grad.sign()
            self.factor.clamp_(0.5, 1.5)


@pytest.mark.parametrize("name", list(FORMATS))
def test_steps_are_those_of_the_formula(name: str) -> None:
    weight, x = algorithm_inputs.weight(16, 64), algorithm_inputs.rows(200, 64)
    rounding = begin(name, weight)
    reference = Reference(name, weight, rounding.grid)
    gram = x.T @ x / len(x)
    for step in range(12):
        values = rounding.values()
        torch.testing.assert_close(values, reference.weight().detach().float())
        gradient = (values - weight) @ gram
        rate = (1 - step / 12) / 12
        rounding.step(gradient, rate)
        reference.step(gradient.double(), rate)
    torch.testing.assert_close(
        rounding.offset_OI, reference.v.detach().reshape(16, -1).float(), atol=1e-6, rtol=0
    )
    assert float(rounding.offset_OI.abs().max()) > 0.4, "some elements always move the same way"
    factor = reference.factor.detach().float().reshape(rounding.factor.shape)
    torch.testing.assert_close(rounding.factor, factor)
    assert float((rounding.factor - 1).abs().mean()) > 0.01


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_output_is_nearer_than_rounded_to_nearest(name: str) -> None:
    weight = algorithm_inputs.weight(32, 128)
    x = torch.randn(400, 128, generator=torch.Generator().manual_seed(0))
    x += x.mean(dim=1, keepdim=True) * 4
    gram = x.T @ x / len(x)
    rounding = begin(name, weight)

    def error(values: Tensor) -> float:
        return float((((values - weight) @ gram) * (values - weight)).sum())

    nearest = error(rounding.values())
    for step in range(100):
        rounding.step((rounding.values() - weight) @ gram, (1 - step / 100) / 1000)
    assert error(rounding.values()) < 0.99 * nearest
    amax, codes = rounding.solve()
    stored = WeightQParams(
        module="m",
        format=FORMATS[name],
        amax=amax.numpy(),
        global_amax=rounding.global_amax or 0.0,
        codes=codes.numpy(),
    )
    torch.testing.assert_close(fake_weight(weight, stored), rounding.values())


@pytest.mark.parametrize("name", list(FORMATS))
def test_it_begins_with_given_codes(name: str) -> None:
    weight, x = algorithm_inputs.weight(16, 128), algorithm_inputs.rows(400, 128)
    weight[0, :32] = 0
    gram = gptq.damp_gram(x.T @ x / len(x), 0.01)
    plain = begin(name, weight)
    upper = gptq.compute_inverse_cholesky(gram)
    codes = gptq.quantize_columns(
        weight, upper, torch.arange(128), plain.grid, plain.amax, plain.global_amax
    )
    scale = plain.grid.broadcast(plain.grid.scale(plain.amax, plain.global_amax))
    assert not torch.equal(codes * scale, plain.values()), "not the nearest ones"
    given = begin(name, weight, codes)
    torch.testing.assert_close(given.values(), codes * scale)
    assert torch.equal(given.solve()[1], plain.grid.stored_codes(codes))
    assert torch.equal(plain.grid.code_values(plain.grid.stored_codes(codes)), codes + 0.0)
    is_nearest = codes * scale == plain.values()
    moved = ((given.weight_OI - weight) / scale).abs()
    assert float(moved[is_nearest].max()) < 0.01, "off the edge at most, where ties are"
