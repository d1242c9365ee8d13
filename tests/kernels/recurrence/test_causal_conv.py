"""The causal convolution: the reference is transformers' own, and Triton's kernels are it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megtool.kernels.dispatch import use
from megtool.kernels.recurrence.causal_conv import causal_conv, last_inputs, runs_of

Agree = Callable[..., None]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_the_reference_is_transformers_convolution(tokens: int, silu: bool) -> None:
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    activation = "silu" if silu else None
    x, weight, bias = numbers(2, tokens, 6), numbers(6, 4, seed=1), numbers(6, seed=2)
    past = numbers(2, 3, 6, seed=3)
    want = theirs.causal_conv1d_fn(x.mT, weight, bias, activation=activation).mT
    torch.testing.assert_close(causal_conv(x, weight, bias, silu=silu), want)
    state = past.mT.clone()
    want = theirs.causal_conv1d_update(x.mT, state, weight, bias, activation=activation).mT
    got = causal_conv(x, weight, bias, past_BPC=past, silu=silu)
    torch.testing.assert_close(got, want)
    assert torch.equal(last_inputs(x, past), state.mT)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_runs_are_convolved_as_rows_of_their_own(name: str, device: str) -> None:
    x, weight = numbers(2, 11, 6).to(device), numbers(6, 4, seed=1).to(device)
    documents = torch.tensor([[3] * 4 + [7] * 2 + [3] * 5, [0] * 11], device=device)
    assert runs_of(documents).tolist() == [[0] * 4 + [1] * 2 + [2] * 5, [0] * 11]
    with use(name):
        got = causal_conv(x, weight, runs_BS=runs_of(documents))
        parts = [causal_conv(part, weight) for part in x[:1].split((4, 2, 5), 1)]
        whole = causal_conv(x[1:], weight)
    torch.testing.assert_close(got, torch.cat((torch.cat(parts, 1), whole)))


def test_the_next_past_is_of_the_tokens_that_count() -> None:
    x, past = numbers(3, 5, 2), numbers(3, 3, 2, seed=1)
    counts = torch.tensor([5, 0, 2])
    got = last_inputs(x, past, counts)
    assert torch.equal(got[0], x[0, 2:])
    assert torch.equal(got[1], past[1])
    assert torch.equal(got[2], torch.cat((past[2, 2:], x[2, :2])))
    assert torch.equal(last_inputs(x[:, :1], past), torch.cat((past[:, 1:], x[:, :1]), 1))


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("with_runs", [False, True])
def test_gradients_are_those_of_the_formula(silu: bool, with_past: bool, with_runs: bool) -> None:
    x, weight, bias = (numbers(*s).double() for s in ((2, 7, 3), (3, 4), (3,)))
    past = numbers(2, 3, 3, seed=4).double() if with_past else None
    runs = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0] * 7]) if with_runs and not with_past else None
    given = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda *t: causal_conv(*t, past_BPC=past, runs_BS=runs, silu=silu), given
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (2, 70, 130)], ids=str)
def test_triton_is_the_reference(
    agree: Agree, device: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, past = numbers(*shape).to(device, dtype), numbers(shape[0], 3, shape[2], seed=3)
    past = past.to(device, dtype)
    weight, bias = (numbers(*s, seed=1).to(device, dtype) for s in ((shape[2], 4), (shape[2],)))
    runs = (torch.arange(shape[1], device=device) // 5).expand(shape[:2])
    noise = 1e-5 if dtype == torch.float32 else 2e-3
    agree(lambda *t: causal_conv(*t), (x, weight, bias), noise=noise)
    agree(lambda *t: causal_conv(*t, runs_BS=runs), (x, weight, bias), noise=noise)
    agree(lambda *t: causal_conv(*t, past_BPC=past, silu=False), (x, weight), noise=noise)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_channels_may_be_columns_of_something_wider(name: str, device: str) -> None:
    wide, weight = numbers(2, 6, 20).to(device), numbers(8, 4, seed=1).to(device)
    with use(name):
        got = causal_conv(wide[:, :, 5:13], weight)
        want = causal_conv(wide[:, :, 5:13].contiguous(), weight)
    assert torch.equal(got, want)
