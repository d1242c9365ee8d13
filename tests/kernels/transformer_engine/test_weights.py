"""Transformer Engine's modules around our weights, held against our own layers on a GPU.

Off a GPU they run on the emulated one (`tests/emulated`), by Transformer Engine's own Python part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megtool.kernels.elementwise.activation import activate, gated
from megtool.kernels.elementwise.norm import layer_norm, rms_norm
from megtool.kernels.experts.grouped_gemm import grouped_linear
from megtool.kernels.experts.transformer_engine import TeGroupedLinear
from megtool.kernels.transformer_engine.library import KINDS
from megtool.kernels.transformer_engine.norm_linear import TeNorm, TeNormLinear, TeNormMlp
from megtool.kernels.wgrad_accumulation import set_gradient_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
    ),
]
HIDDEN, INNER, ROWS = 32, 48, 20
COUNTS = ([7, 0, 13], [0, 0, 20], [20, 0, 0])


class Sum:
    """A weight's gradients over passes, as the optimizer has it."""

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.full_like(weight, 7.0, dtype=torch.float32)  # of the step before
        self.num, self.begun = 0, 0

    def begin(self) -> tuple[Tensor, bool]:
        """The sum, which the first pass overwrites."""
        self.begun += 1
        assert self.begun == self.num + 1
        return self.total, self.num == 0

    def end(self) -> None:
        """A gradient was added."""
        self.num += 1
        assert self.begun == self.num


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return nn.Parameter(values.to(dtype).cuda())


def rows(num: int = ROWS, size: int = HIDDEN, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, size, generator=generator).bfloat16().cuda().requires_grad_()


def compare(
    theirs: Callable[[Tensor], Tensor],
    ours: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    x: Tensor,
    *,
    atol: float = 2e-2,
) -> None:
    """Outputs and gradients are those of our own layer, to the rounding of bf16."""
    results = []
    for run in (theirs, ours):
        out = run(x)
        pull = rows(out.shape[0], out.shape[1], seed=5).detach()
        wanted = [x, *(p for p in parameters if p.requires_grad)]
        results.append([out, *torch.autograd.grad(out, wanted, pull)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        scale = max(1.0, float(want.detach().abs().max()))
        torch.testing.assert_close(got, want, rtol=2e-2, atol=atol * scale)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_experts_are_ours(counts: list[int], has_bias: bool, num_rows: int) -> None:
    weight = parameter(3, INNER, HIDDEN)
    bias = parameter(3, INNER) if has_bias else None
    te, counts_E = TeGroupedLinear(weight, num_rows), torch.tensor(counts).cuda()
    parameters = [weight] if bias is None else [weight, bias]
    compare(
        lambda x: te(x, weight, counts_E, bias),
        lambda x: grouped_linear(x, weight, counts_E, bias),
        parameters,
        rows(),
    )


def test_experts_without_a_row_are_called_all_the_same() -> None:
    weight, counts_E = parameter(3, INNER, HIDDEN), torch.zeros(3, dtype=torch.int64).cuda()
    out = TeGroupedLinear(weight, 16)(rows(0), weight, counts_E)
    assert out.shape == (0, INNER)
    out.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def norm_of(kind: str, *, zero_centered: bool) -> tuple[TeNorm, Callable[[Tensor], Tensor]]:
    """A norm for Transformer Engine, and ours."""
    weight = nn.Parameter(1 - zero_centered + parameter(HIDDEN).detach())
    if kind == "rmsnorm":
        norm = TeNorm(weight=weight, bias=None, eps=1e-5, zero_centered=zero_centered)
        return norm, lambda x: rms_norm(x, weight, 1e-5, zero_centered=zero_centered)
    bias = parameter(HIDDEN, seed=9)
    norm = TeNorm(weight=weight, bias=bias, eps=1e-5, zero_centered=zero_centered)
    return norm, lambda x: layer_norm(x, weight, bias, 1e-5, zero_centered=zero_centered)


def of_norm(norm: TeNorm) -> list[nn.Parameter]:
    return [norm.weight] if norm.bias is None else [norm.weight, norm.bias]


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_norm_and_its_linear_layer_are_ours(
    kind: str, zero_centered: bool, num_rows: int
) -> None:
    norm, ours = norm_of(kind, zero_centered=zero_centered)
    weight, bias = parameter(INNER, HIDDEN), parameter(INNER)
    te = TeNormLinear(norm, weight, bias, num_rows=num_rows)
    compare(
        te,
        lambda x: nn.functional.linear(ours(x), weight, bias),
        [*of_norm(norm), weight, bias],
        rows(),
    )


@pytest.mark.parametrize("activation", sorted(KINDS))
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_mlp_behind_its_norm_is_ours(activation: str, is_gated: bool, has_bias: bool) -> None:
    norm, ours = norm_of("rmsnorm", zero_centered=False)
    inner = INNER * (2 if is_gated else 1)
    fc1 = parameter(inner, HIDDEN), parameter(inner) if has_bias else None
    fc2 = parameter(HIDDEN, INNER), parameter(HIDDEN, seed=3) if has_bias else None
    te = TeNormMlp(norm, fc1, fc2, activation=activation, is_gated=is_gated)

    def own(x: Tensor) -> Tensor:
        h = nn.functional.linear(ours(x), *fc1)
        h = gated(h, activation) if is_gated else activate(h, activation)
        return nn.functional.linear(h, *fc2)

    trained = [p for p in (norm.weight, *fc1, *fc2) if p is not None]
    compare(te, own, trained, rows(), atol=4e-2)


def made(kind: str) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:
    """A module and the weights of its products."""
    norm, _ = norm_of("rmsnorm", zero_centered=False)
    fc1, fc2 = parameter(2 * INNER, HIDDEN), parameter(HIDDEN, INNER)
    if kind == "mlp":
        te = TeNormMlp(norm, (fc1, None), (fc2, None), activation="silu", is_gated=True)
        return te, [fc1, fc2]
    if kind == "linear":
        return TeNormLinear(norm, fc1), [fc1]
    weight, counts_E = parameter(3, INNER, HIDDEN), torch.tensor([7, 0, 13]).cuda()
    experts = TeGroupedLinear(weight)
    return lambda x: experts(x, weight, counts_E), [weight]


@pytest.mark.parametrize("kind", ["mlp", "linear", "experts"])
def test_gradients_are_added_to_sums(kind: str) -> None:
    """In fp32 over two passes, the first of which overwrites what was there."""
    run, weights = made(kind)
    x = rows()
    for _ in range(2):
        run(x).float().square().sum().backward()
    want = [w.grad.float() for w in weights if w.grad is not None]
    assert len(want) == len(weights)
    sums = [Sum(w) for w in weights]
    for weight, total in zip(weights, sums, strict=True):
        weight.grad = None
        set_gradient_sum(weight, total)  # type: ignore[arg-type]
    for _ in range(2):
        run(x).float().square().sum().backward()
    for weight, total, expected in zip(weights, sums, want, strict=True):
        assert weight.grad is None
        assert total.num == 2
        scale = float(expected.abs().max())
        torch.testing.assert_close(total.total, expected, rtol=2e-2, atol=1e-2 * scale)


@pytest.mark.parametrize("kind", ["mlp", "linear", "experts"])
def test_frozen_weights_pass_gradients_on(kind: str) -> None:
    run, weights = made(kind)
    x = rows()
    (want,) = torch.autograd.grad(run(x).float().sum(), x)
    for weight in weights:
        weight.requires_grad_(False)
    (got,) = torch.autograd.grad(run(x).float().sum(), x)
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["mlp", "linear", "experts"])
def test_weights_may_move_and_are_not_kept(kind: str) -> None:
    """Optimizers put parameters into buffers of their own."""
    run, weights = made(kind)
    x = rows()
    want = run(x)
    for weight in weights:
        weight.data = weight.data.clone()
    assert torch.equal(run(x), want)
    for weight in weights:
        weight.data.zero_()
    assert not run(x).any()


def test_signatures_are_those_that_are_called() -> None:
    """Of the release that is installed."""
    te: Any = pytest.importorskip("transformer_engine.pytorch")
    arguments = {
        te.Linear: {"in_features", "out_features", "bias", "params_dtype", "device"},
        te.GroupedLinear: {
            *("num_gemms", "in_features", "out_features", "bias", "params_dtype", "device"),
        },
        te.LayerNormLinear: {
            *("in_features", "out_features", "eps", "bias", "normalization"),
            *("zero_centered_gamma", "params_dtype", "device"),
        },
        te.LayerNormMLP: {
            *("hidden_size", "ffn_hidden_size", "eps", "bias", "normalization", "activation"),
            *("zero_centered_gamma", "params_dtype", "device"),
        },
        te.GroupedLinear.forward: {"inp", "m_splits"},
        te.Fp8Padding: {"num_gemms", "align_size"},
        te.Fp8Unpadding: {"num_gemms", "align_size"},
    }
    for call, names in arguments.items():
        assert names <= set(inspect.signature(call).parameters), call
