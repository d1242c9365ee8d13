"""The end of a residual branch: exact without dropout, and with it the same ones fall twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megtool.kernels.dispatch import use
from megtool.kernels.elementwise.dropout_add import bias_dropout_add, drop

Agree = Callable[..., None]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_dropout_triton_is_the_reference(
    agree: Agree, device: str, dtype: torch.dtype
) -> None:
    for shape in ((0, 6), (1, 1), (3, 5, 70), (1, 3001)):
        x, residual = (numbers(*shape, seed=s).to(device, dtype) for s in (0, 1))
        bias = numbers(shape[-1], seed=2).to(device, dtype)
        noise = 0.02 if dtype != torch.float32 else 1e-5  # sums that cancel
        for scale in (1.0, 0.22):
            for given in (None, bias):
                agree(
                    lambda x, b, r: bias_dropout_add(x, b, r, 0.0, scale=scale),  # noqa: B023
                    (x, given, residual),
                    noise=noise,
                )


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_what_falls_forward_falls_backward(name: str, device: str) -> None:
    p, scale = 0.3, 0.5
    x = torch.ones(100, 77, device=device, requires_grad=True)
    bias = torch.ones(77, device=device, requires_grad=True)
    residual = torch.full((100, 77), 10.0, device=device, requires_grad=True)
    with use(name):
        out, other, same = (
            bias_dropout_add(x, bias, residual, p, seed=seed, scale=scale)
            for seed in (1 << 55, (1 << 55) + 1, 1 << 55)
        )
    kept = out > 10
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 10 + 2 * scale / (1 - p)))
    assert (out[~kept] == 10).all()
    assert abs(kept.float().mean().item() - (1 - p)) < 0.02
    assert torch.equal(out, same)
    assert not torch.equal(out, other)
    dx, d_bias, d_residual = torch.autograd.grad(out.sum(), (x, bias, residual))
    torch.testing.assert_close(dx, kept.float() * scale / (1 - p))
    torch.testing.assert_close(d_bias, dx.sum(0))
    assert (d_residual == 1).all()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_all_can_fall(name: str, device: str) -> None:
    x = numbers(3, 5).to(device)
    with use(name):
        assert torch.equal(bias_dropout_add(x, None, x, 1.0, seed=3), x)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_wide_residual_stays_wide(name: str, device: str) -> None:
    x, residual = numbers(3, 5).to(device).bfloat16(), numbers(3, 5, seed=1).to(device)
    with use(name):
        out = bias_dropout_add(x, None, residual, 0.0)
    assert torch.equal(out, x.float() + residual)


def test_dropout_keeps_the_mean_in_bfloat16() -> None:
    """1 / 0.9 is no number of bfloat16: as a factor it must not become one."""
    x = torch.full((4096, 64), 3.0, dtype=torch.bfloat16)
    out = drop(x, 0.1, 7)
    assert set(out.unique().tolist()) == {0.0, torch.tensor(3 / 0.9).bfloat16().item()}
    assert (out == 0).float().mean().item() == pytest.approx(0.1, abs=0.003)


@pytest.mark.slow
def test_torch_compile_leaves_dropout_to_others() -> None:
    x = numbers(3, 5)
    with use("compile"):
        out = bias_dropout_add(x, None, x, 0.5, seed=3)
    assert torch.equal(out, bias_dropout_add(x, None, x, 0.5, seed=3))
