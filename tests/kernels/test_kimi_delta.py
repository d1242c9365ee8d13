"""The delta rule with a decay for each element of a key: chunks are the recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megtool.kernels import kimi_delta
from megtool.kernels.causal_conv import runs_of
from megtool.kernels.delta_rule import gated_delta_rule, gated_delta_steps
from megtool.kernels.kimi_delta import kimi_delta_rule

F64 = torch.float64


def inputs(
    tokens: int,
    *,
    rows: int = 2,
    heads: int = 3,
    sizes: tuple[int, int] = (6, 5),
    dtype: torch.dtype = F64,
    seed: int = 0,
) -> list[Tensor]:
    """Queries, keys, values, decays, betas, and a state."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    key_size, value_size = sizes
    made = (
        noise(rows, tokens, heads, key_size),
        noise(rows, tokens, heads, key_size),
        noise(rows, tokens, heads, value_size),
        -noise(rows, tokens, heads, key_size).exp(),
        noise(rows, tokens, heads).sigmoid(),
        noise(rows, heads, key_size, value_size),
    )
    return [x.to(dtype) for x in made]


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    outs = []
    for t in range(value.shape[1]):
        state = state * decay[:, t].exp()[..., None]
        held = torch.einsum("bndp,bnd->bnp", state, key[:, t])
        change = beta[:, t].unsqueeze(-1) * (value[:, t] - held)
        state = state + torch.einsum("bnd,bnp->bndp", key[:, t], change)
        outs.append(torch.einsum("bndp,bnd->bnp", state, query[:, t]) / key.shape[-1] ** 0.5)
    return torch.stack(outs, 1), state


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kimi_delta, "CHUNK", 4)
    monkeypatch.setattr(kimi_delta, "_BLOCK", 2)


@pytest.mark.parametrize("tokens", [1, 7, 8, 64, 65, 150])
def test_chunks_are_the_recurrence(tokens: int) -> None:
    *given, state = inputs(tokens)
    want, want_last = recurrence(*given, state)
    out, last = kimi_delta_rule(*given, state_BNDP=state)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(last, want_last)
    out, _, last = gated_delta_steps(*given, state)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(last, want_last)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("has_runs", [False, True])
def test_gradients_are_those_of_finite_differences(has_runs: bool) -> None:
    given = [x.requires_grad_() for x in inputs(7, heads=2, sizes=(3, 2))]
    runs = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 2, 2]]) if has_runs else None
    assert torch.autograd.gradcheck(
        lambda *x: kimi_delta_rule(*x[:5], state_BNDP=x[5], runs_BS=runs), given
    )


def test_equal_decays_of_all_elements_are_a_gated_delta_net() -> None:
    query, key, value, decay, beta, state = inputs(130)
    one = decay[..., :1]
    ours = kimi_delta_rule(query, key, value, one.expand_as(decay), beta, state_BNDP=state)
    want = gated_delta_rule(query, key, value, one.squeeze(-1), beta, state_BNDP=state)
    for got, wanted in zip(ours, want, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("tokens", [5, 130])
def test_values_and_gradients_are_transformers(tokens: int) -> None:
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    given = [x.requires_grad_() for x in inputs(tokens, sizes=(16, 8), dtype=torch.float32)]
    ours = kimi_delta_rule(*given[:5], state_BNDP=given[5])
    wanted = theirs.chunk_kimi_delta_attention(
        *given[:5],
        initial_state=given[5],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    pulls = [torch.ones_like(x).cumsum(1) / x.shape[1] for x in ours]
    grads = [torch.autograd.grad(outs, given, pulls) for outs in (ours, wanted)]
    for got, want in zip((*ours, *grads[0]), (*wanted, *grads[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("short_chunks")
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=15)
def test_every_run_begins_with_a_state_of_zeros(lengths: list[int]) -> None:
    *given, state = inputs(sum(lengths), rows=1)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    out, last = kimi_delta_rule(*given, state_BNDP=state, runs_BS=runs_of(documents[None]))
    wanted: list[Tensor] = []
    for part in zip(*(x.split(lengths, 1) for x in given), strict=True):
        alone, behind = recurrence(*part, state)
        wanted.append(alone)
        state = torch.zeros_like(state)
    torch.testing.assert_close(out, torch.cat(wanted, 1))
    torch.testing.assert_close(last, behind)


def test_equal_keys_and_strong_decays_stay_finite() -> None:
    """Systems whose powers would overflow, and decays whose inverses would."""
    query, key, value, decay, beta, state = inputs(192, dtype=torch.float32)
    key = key[:, :1].expand_as(key).contiguous()
    for strong in (0.0, 200.0):
        given = [x.clone().requires_grad_() for x in (query, key, value, decay * strong)]
        given.append(torch.ones_like(beta).requires_grad_())
        out, _ = kimi_delta_rule(*given)
        zeros = torch.zeros_like(state).double()
        exact, _ = recurrence(*(x.detach().double() for x in given), zeros)
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_computed_in_32(dtype: torch.dtype) -> None:
    given: list[Any] = [x.requires_grad_() for x in inputs(70, dtype=dtype)[:5]]
    out, last = kimi_delta_rule(*given)
    want, want_last = kimi_delta_rule(*(x.detach().float() for x in given))
    assert (out.dtype, last.dtype) == (dtype, torch.float32)
    assert torch.equal(out, want.to(dtype))
    assert torch.equal(last, want_last)
    assert all(g.dtype == dtype for g in torch.autograd.grad(out.sum(), given))
