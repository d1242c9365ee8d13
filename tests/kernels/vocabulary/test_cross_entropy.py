"""Cross entropy in blocks against F.cross_entropy in fp64, alone, by Triton and on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megtool.errors import LayoutError
from megtool.kernels.dispatch import use
from megtool.kernels.vocabulary.cross_entropy import cross_entropy, linear_cross_entropy
from megtool.kernels.vocabulary.token_statistics import (
    OutputHead,
    divergence,
    log_softmax_block,
    token_log_probs,
)
from tests.support.errors import raises
from tests.support.worlds.gloo_world import run_world

T, H, V, PADDED = 13, 8, 37, 48


def numbers(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x_TH, a padded weight_VH and bias_V."""
    made = torch.Generator().manual_seed(seed)
    shapes = ((T, H), (PADDED, H), (PADDED,))
    x, weight, bias = (torch.randn(s, generator=made, dtype=torch.float64) for s in shapes)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def some_labels(seed: int = 1) -> Tensor:
    labels = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(seed))
    labels[[2, 7]] = -100
    return labels


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None, cap: float, scale: float) -> Tensor:
    """All logits at once."""
    z = scale * F.linear(x, weight[:V], None if bias is None else bias[:V])
    return cap * torch.tanh(z / cap) if cap else z


@pytest.mark.parametrize("by", ["torch", "triton"])
@pytest.mark.parametrize(("cap", "scale", "biased"), [(0.0, 1.0, False), (3.0, 0.7, True)])
@pytest.mark.parametrize("chunk", [None, 4, 5, 16])
def test_it_is_cross_entropy(
    by: Any, cap: float, scale: float, biased: bool, chunk: int | None
) -> None:
    x, weight, bias = (t.requires_grad_() for t in numbers())
    labels, given_bias = some_labels(), bias if biased else None
    pull = torch.randn(T, dtype=torch.float64)
    settings: dict[str, Any] = {"vocab_size": V, "softcap": cap, "scale": scale, "chunk": chunk}
    with use(by):
        losses = linear_cross_entropy(x, weight, labels, bias=given_bias, **settings)
        raw = F.linear(x, weight, given_bias).detach().requires_grad_()
        again = cross_entropy(raw, labels, **settings)
        wanted = [x, weight, bias] if biased else [x, weight]
        found = torch.autograd.grad(losses, wanted, pull)
        (found_raw,) = torch.autograd.grad(again, raw, pull)
    logits = oracle(x, weight, given_bias, cap, scale)
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(again, expected)
    for got, right in zip(found, torch.autograd.grad(expected, wanted, pull), strict=True):
        torch.testing.assert_close(got, right)
    torch.testing.assert_close(found_raw.t() @ x, found[1])
    assert not found[1][V:].any(), "padding has no gradient"
    assert not losses[[2, 7]].any()


def test_gradients_pass_gradcheck() -> None:
    tensors = [t.requires_grad_() for t in numbers()]

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(
            x, weight, some_labels(), vocab_size=V, bias=bias, softcap=5.0, scale=1.5, chunk=10
        )

    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("by", ["torch", "triton"])
def test_gradients_have_the_inputs_dtype_and_precision(dtype: torch.dtype, by: Any) -> None:
    x, weight, _ = (t.requires_grad_() for t in numbers(dtype))
    labels = some_labels()
    with use(by):
        losses = linear_cross_entropy(x, weight, labels, vocab_size=V, chunk=11)
        found = torch.autograd.grad(losses.sum(), (x, weight))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    # Logits are rounded to the inputs' dtype, as everywhere.
    rounded = F.linear(x, weight[:V]).double() - F.linear(wide[0], wide[1][:V]).detach()
    logits = F.linear(wide[0], wide[1][:V]) + rounded.detach()
    expected = F.cross_entropy(logits, labels, reduction="none")
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    room = 4 * torch.finfo(dtype).eps
    right = torch.autograd.grad(expected.sum(), wide)
    for got, exact in zip(found, right, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, rtol=room, atol=room * float(exact.max()))


def test_frozen_tensors_get_no_gradient() -> None:
    x, weight, _ = numbers(torch.float32)
    linear_cross_entropy(x.requires_grad_(), weight, some_labels(), vocab_size=V).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@given(labels=st.lists(st.integers(-3, PADDED + 3), min_size=T, max_size=T))
@settings(max_examples=20)
def test_an_impossible_label_is_never_a_number(labels: list[int]) -> None:
    x, weight, _ = numbers(torch.float32)
    given_labels = torch.tensor(labels)
    losses = linear_cross_entropy(x, weight, given_labels, vocab_size=V, ignore_index=-2)
    wrong = (given_labels != -2) & ((given_labels < 0) | (given_labels >= V))
    assert torch.equal(losses.isnan(), wrong)


def test_a_vocabulary_larger_than_the_weight_is_refused() -> None:
    x, weight, _ = numbers()
    with raises(LayoutError, "48 rows", "49"):
        linear_cross_entropy(x, weight, some_labels(), vocab_size=49)


@pytest.mark.parametrize("by", ["torch", "triton"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_log_probabilities_and_hits(by: Any, chunk: int | None) -> None:
    x, weight, bias = numbers(torch.float32)
    weight[20], bias[20] = weight[3], bias[3]  # equal logits: the first is the guess
    x[:4] = weight[3]
    labels = some_labels()
    labels[:2] = torch.tensor([3, 20])
    logits = oracle(x, weight, bias, 4.0, 1.0)
    labels[8:] = logits.argmax(1)[8:]
    with use(by):
        log_probs, hits = token_log_probs(
            x, weight, labels, vocab_size=V, bias=bias, softcap=4.0, chunk=chunk
        )
    expected = logits.log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(log_probs, torch.where(labels == -100, 0.0, expected))
    assert torch.equal(hits, logits.argmax(1) == labels)
    assert hits[8:].all()


@pytest.mark.parametrize("chunk", [None, 4])
def test_divergence_is_that_of_the_distributions(chunk: int | None) -> None:
    (x, weight, bias), (other_x, other_weight, _) = numbers(), numbers(seed=5)
    heads = (
        OutputHead(weight_VH=weight, vocab_size=V, bias=bias),
        OutputHead(weight_VH=other_weight[:40], vocab_size=V, softcap=2.0),
    )
    kl, agrees = divergence(x, heads[0], other_x, heads[1], chunk=chunk)
    first = oracle(x, weight, bias, 0.0, 1.0).log_softmax(1)
    second = oracle(other_x, other_weight, None, 2.0, 1.0).log_softmax(1)
    expected = F.kl_div(second, first, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(kl, expected)
    assert torch.equal(agrees, first.argmax(1) == second.argmax(1))
    torch.testing.assert_close(log_softmax_block(x, heads[0])[0], first)
    assert not divergence(x, heads[0], x, heads[0])[0].any()
    with pytest.raises(LayoutError, match="cannot be compared"):
        divergence(x, heads[0], x, OutputHead(weight_VH=weight, vocab_size=V - 1))


def on_a_rank(rank: int, size: int, padded: int) -> list[Tensor]:
    """Everything once on `size` ranks, each with its rows."""
    dist.init_process_group("gloo", rank=rank, world_size=size)
    calls: list[Any] = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda *args: (calls.append(args[1]), reduce(*args))[1]
    group = dist.group.WORLD
    rows = slice(rank * padded // size, (rank + 1) * padded // size)
    x, weight, bias = numbers()
    x, weight, bias = x.requires_grad_(), weight[rows].requires_grad_(), bias[rows]
    labels, pull = some_labels(), torch.arange(T, dtype=torch.float64)
    losses = linear_cross_entropy(
        x, weight, labels, vocab_size=V, bias=bias, softcap=6.0, chunk=5, group=group
    )
    g_x, g_weight = torch.autograd.grad(losses, (x, weight), pull)
    assert calls == [dist.ReduceOp.MAX, dist.ReduceOp.SUM], "and none backward"
    dist.all_reduce = reduce
    dist.all_reduce(g_x)
    hits = token_log_probs(x, weight, labels, vocab_size=V, bias=bias, group=group)
    head = OutputHead(weight_VH=weight, vocab_size=V, bias=bias, group=group)
    plain = OutputHead(weight_VH=weight, vocab_size=V, group=group)
    results = [losses, g_x, g_weight, *hits, *divergence(x, head, x, plain, chunk=6)]
    dist.destroy_process_group()
    return [r.detach() for r in results]


@pytest.mark.parametrize("padded", [40, 48])
def test_two_ranks_are_one(padded: int) -> None:
    ranks = run_world(on_a_rank, 2, padded)
    x, weight, bias = numbers()
    weight, bias = weight[:padded], bias[:padded]
    x.requires_grad_()
    weight.requires_grad_()
    labels, pull = some_labels(), torch.arange(T, dtype=torch.float64)
    losses = linear_cross_entropy(x, weight, labels, vocab_size=V, bias=bias, softcap=6.0)
    g_x, g_weight = torch.autograd.grad(losses, (x, weight), pull)
    hits = token_log_probs(x, weight, labels, vocab_size=V, bias=bias)
    head = OutputHead(weight_VH=weight, vocab_size=V, bias=bias)
    expected = [losses, g_x, *hits]
    expected += divergence(x, head, x, OutputHead(weight_VH=weight, vocab_size=V))
    for rank in ranks:
        for got, right in zip((*rank[:2], *rank[3:]), expected, strict=True):
            torch.testing.assert_close(got, right.detach())
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks]), g_weight)


def test_a_rank_of_padding_alone_takes_part() -> None:
    ranks = run_world(on_a_rank_of_padding, 2)
    x, weight, _ = numbers()
    expected = linear_cross_entropy(x, weight, some_labels() % 20, vocab_size=20)
    for losses in ranks:
        torch.testing.assert_close(losses, expected)


def on_a_rank_of_padding(rank: int, size: int) -> Tensor:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    x, weight, _ = numbers()
    rows = weight[rank * 24 : rank * 24 + 24].requires_grad_()
    losses = linear_cross_entropy(
        x, rows, some_labels() % 20, vocab_size=20, group=dist.group.WORLD
    )
    losses.sum().backward()
    assert rows.grad is not None
    assert bool(rows.grad.any()) == (rank == 0)
    dist.destroy_process_group()
    return losses.detach()
