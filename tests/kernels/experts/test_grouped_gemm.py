"""Tokens to experts and back against the dense loop over all experts, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megtool.kernels.dispatch import use
from megtool.kernels.experts.grouped_gemm import grouped_linear, invert, permute, unpermute


def routed(num_tokens: int, num: int, num_experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Different experts for each token, some experts perhaps never, and their probabilities."""
    made = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=made)
    scores[:, 1] = -1  # an expert that gets nothing, unless all are asked for
    return scores.topk(num, 1).indices, torch.rand(num_tokens, num, generator=made)


def dense(x: Tensor, weight: Tensor, bias: Tensor, experts: Tensor, probs: Tensor) -> Tensor:
    """Every expert for every token, then the weighted choice."""
    everything = torch.einsum("th,efh->tef", x, weight) + bias
    chosen = everything.gather(1, experts.unsqueeze(2).expand(-1, -1, weight.shape[1]))
    return (chosen * probs.unsqueeze(2)).sum(1)


@pytest.mark.parametrize("by", ["torch", "triton"])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float64, (11, 3, 5, 6, 7)),
        (torch.float32, (11, 2, 5, 8, 12)),  # F.grouped_mm
        (torch.float32, (3, 1, 8, 7, 5)),  # the loop
        (torch.bfloat16, (9, 2, 4, 16, 24)),
        (torch.float32, (0, 2, 4, 8, 8)),
    ],
    ids=str,
)
def test_it_is_the_dense_sum(by: Any, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    num_tokens, num, num_experts, hidden, width = sizes
    experts, probs = routed(num_tokens, num, num_experts)
    made = torch.Generator().manual_seed(3)
    shapes = ((num_tokens, hidden), (num_experts, width, hidden), (num_experts, width))
    tensors = [torch.randn(s, generator=made).to(dtype).requires_grad_() for s in shapes]
    tensors.append(probs.to(torch.promote_types(dtype, torch.float32)).requires_grad_())
    x, weight, bias, probs = tensors
    with use(by):
        rows, row_ids, counts = permute(x, experts, num_experts)
        out = unpermute(grouped_linear(rows, weight, counts, bias), row_ids, probs)
        pull = torch.randn(out.shape, generator=made).to(dtype)
        found = torch.autograd.grad(out, tensors, pull)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = dense(wide[0], wide[1], wide[2], experts, wide[3])
    right = torch.autograd.grad(expected, wide, pull.double())
    assert torch.equal(counts, torch.bincount(experts.flatten(), minlength=num_experts))
    room = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    for tensor, got, exact in zip((x, *tensors), (out, *found), (expected, *right), strict=True):
        assert got.dtype == tensor.dtype
        torch.testing.assert_close(got.double(), exact, rtol=room, atol=room)


@given(st.integers(0, 12), st.integers(1, 4), st.integers(4, 6), st.integers(0, 99))
@settings(max_examples=30)
def test_rows_are_sorted_and_come_back(tokens: int, num: int, num_experts: int, seed: int) -> None:
    experts, _ = routed(tokens, num, num_experts, seed)
    x = torch.arange(tokens, dtype=torch.float32).unsqueeze(1).expand(-1, 3)
    rows, row_ids, counts = permute(x, experts, num_experts)
    order = experts.flatten()[row_ids]
    assert torch.equal(order, order.sort().values)
    assert torch.equal(
        counts.cumsum(0), torch.searchsorted(order, torch.arange(1, num_experts + 1))
    )
    assert torch.equal(rows[:, 0], (row_ids // num).float())
    same = (row_ids[1:] > row_ids[:-1]) | (order[1:] != order[:-1])
    assert same.all(), "tokens of an expert stay in order"
    assert torch.equal(row_ids[invert(row_ids)], torch.arange(tokens * num))
    back = unpermute(rows, row_ids, torch.full((tokens, num), 1 / num))
    torch.testing.assert_close(back, x)


def test_gradients_pass_gradcheck() -> None:
    experts, probs = routed(4, 2, 3)
    x, weight = torch.randn(4, 3).double(), torch.randn(3, 2, 3).double()
    tensors = [t.double().requires_grad_() for t in (x, weight, probs)]

    def run(x: Tensor, weight: Tensor, probs: Tensor) -> Tensor:
        rows, row_ids, counts = permute(x, experts, 3)
        return unpermute(grouped_linear(rows, weight, counts).sin(), row_ids, probs)

    assert torch.autograd.gradcheck(run, tensors)
