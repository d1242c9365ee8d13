"""The gated delta rule: chunks are the recurrence, forward and backward, as transformers' are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megtool.kernels import chunked_triton, delta_rule, delta_rule_triton
from megtool.kernels.causal_conv import runs_of
from megtool.kernels.delta_rule import gated_delta_rule, gated_delta_step
from megtool.kernels.dispatch import Implementation, use

F64 = torch.float64


def inputs(
    tokens: int,
    *,
    rows: int = 2,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (6, 5),
    dtype: torch.dtype = F64,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """Queries, keys, values, decays, betas, and a state."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    (keys, values), (key_size, value_size) = heads, sizes
    return tuple(
        x.to(dtype)
        for x in (
            noise(rows, tokens, keys, key_size),
            noise(rows, tokens, keys, key_size),
            noise(rows, tokens, values, value_size),
            -noise(rows, tokens, values).exp(),
            noise(rows, tokens, values).sigmoid(),
            noise(rows, values, key_size, value_size),
        )
    )


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    groups = value.shape[2] // key.shape[2]
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(groups, 2)
        for x in (query, key)
    )
    outs = []
    for t in range(value.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        held = torch.einsum("bndp,bnd->bnp", state, key[:, t])
        change = beta[:, t].unsqueeze(-1) * (value[:, t] - held)
        state = state + torch.einsum("bnd,bnp->bndp", key[:, t], change)
        outs.append(torch.einsum("bndp,bnd->bnp", state, query[:, t]) / key.shape[-1] ** 0.5)
    return torch.stack(outs, 1), state


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "CHUNK", 4)


@pytest.mark.parametrize("heads", [(2, 4), (3, 3)], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 150])
def test_chunks_are_the_recurrence(tokens: int, heads: tuple[int, int]) -> None:
    *given, state = inputs(tokens, heads=heads)
    out, last = gated_delta_rule(*given, state_BNDP=state)
    want, want_last = recurrence(*given, state)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(last, want_last)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("has_runs", [False, True])
def test_gradients_are_those_of_finite_differences(has_runs: bool) -> None:
    given = [x.requires_grad_() for x in inputs(7, heads=(1, 2), sizes=(3, 2))]
    runs = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 2, 2]]) if has_runs else None
    assert torch.autograd.gradcheck(
        lambda *x: gated_delta_rule(*x[:5], state_BNDP=x[5], runs_BS=runs), given
    )


@pytest.mark.parametrize("tokens", [5, 130])
def test_values_and_gradients_are_transformers(tokens: int) -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    given = [x.requires_grad_() for x in inputs(tokens, sizes=(16, 8), dtype=torch.float32)]
    ours = gated_delta_rule(*given[:5], state_BNDP=given[5])
    wanted = theirs.torch_chunk_gated_delta_rule(
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
@given(portions=st.lists(st.integers(1, 6), min_size=1, max_size=4))
@settings(max_examples=15)
def test_portions_of_any_size_are_one_pass(portions: list[int]) -> None:
    *given, state = inputs(sum(portions))
    want, want_last = gated_delta_rule(*given, state_BNDP=state)
    outs = []
    for part in zip(*(x.split(portions, 1) for x in given), strict=True):
        if part[0].shape[1] == 1:
            out, state = gated_delta_step(*(x[:, 0] for x in part), state)
            out = out[:, None]
        else:
            out, state = gated_delta_rule(*part, state_BNDP=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), want)
    torch.testing.assert_close(state, want_last)


@pytest.mark.usefixtures("short_chunks")
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=15)
def test_every_run_begins_with_a_state_of_zeros(lengths: list[int]) -> None:
    *given, state = inputs(sum(lengths), rows=1)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    out, last = gated_delta_rule(*given, state_BNDP=state, runs_BS=runs_of(documents[None]))
    wanted: list[Tensor] = []
    for part in zip(*(x.split(lengths, 1) for x in given), strict=True):
        alone, behind = recurrence(*part, state)
        wanted.append(alone)
        state = torch.zeros_like(state)
    torch.testing.assert_close(out, torch.cat(wanted, 1))
    torch.testing.assert_close(last, behind)


def test_a_token_without_beta_and_decay_leaves_the_state() -> None:
    query, key, value, decay, beta, state = inputs(6)
    decay[:, 2:], beta[:, 2:] = 0, 0
    _, last = gated_delta_rule(query, key, value, decay, beta, state_BNDP=state)
    _, want = recurrence(query[:, :2], key[:, :2], value[:, :2], decay[:, :2], beta[:, :2], state)
    torch.testing.assert_close(last, want)


def test_equal_keys_and_strong_decays_stay_finite() -> None:
    """Systems whose powers would overflow, and decays whose inverses would."""
    query, key, value, decay, _, _ = inputs(192, dtype=torch.float32)
    key = key[:, :1].expand_as(key).contiguous()
    for strong in (0.0, 200.0):
        given = [
            x.requires_grad_() for x in (query, key, value, decay * strong, torch.ones_like(decay))
        ]
        out, _ = gated_delta_rule(*given)
        exact = recurrence(*(x.detach().double() for x in given), torch.zeros(2, 4, 6, 5).double())
        torch.testing.assert_close(out.double(), exact[0], rtol=1e-4, atol=1e-4)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), given))
        for x in given:
            x.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_computed_in_32(dtype: torch.dtype) -> None:
    given: list[Any] = [x.requires_grad_() for x in inputs(70, dtype=dtype)[:5]]
    out, last = gated_delta_rule(*given)
    want, want_last = gated_delta_rule(*(x.detach().float() for x in given))
    assert out.dtype == dtype
    assert last.dtype == torch.float32
    assert torch.equal(out, want.to(dtype))
    assert torch.equal(last, want_last)
    assert all(g.dtype == dtype for g in torch.autograd.grad(out.sum(), given))


def test_nothing_to_differentiate_but_the_state() -> None:
    *given, state = inputs(9)
    state.requires_grad_()
    _, last = gated_delta_rule(*given, state_BNDP=state)
    (grad,) = torch.autograd.grad(last.sum(), state)
    _, want = recurrence(*given, state)
    torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), state)[0])


def by_both(
    given: tuple[Tensor, ...], device: str, runs_BS: Tensor | None = None
) -> list[list[Tensor]]:
    """Output, last state and all gradients: by Triton, and by the reference in fp64."""
    ways: tuple[tuple[Implementation, torch.dtype], ...] = (
        ("triton", given[2].dtype),
        ("torch", F64),
    )
    results = []
    for name, wide in ways:
        leaves = [
            x.to(device, wide if x.dtype == given[2].dtype else x.dtype).requires_grad_()
            for x in given
        ]
        with use(name):
            outs = gated_delta_rule(
                *leaves[:5], state_BNDP=leaves[5], runs_BS=None if runs_BS is None else runs_BS
            )
        pulls = [
            torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(given[2].dtype)
            for x in outs
        ]
        pulled = [p.to(x) for p, x in zip(pulls, outs, strict=True)]
        grads = torch.autograd.grad(outs, leaves, pulled)
        assert [g.dtype for g in grads] == [x.dtype for x in leaves]
        results.append([x.detach().cpu() for x in (*outs, *grads)])
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_triton_is_the_reference(
    tokens: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (6, 5)
    if tokens > 1 and dtype == torch.float32:
        sizes = (6, 40)
        monkeypatch.setattr(chunked_triton, "_MOST_STATE", 16 * 16)
        assert chunked_triton.num_cuts(40, 6) == 4
    given = inputs(tokens, rows=1, sizes=sizes, dtype=dtype)
    given = (*given[:3], *(x.float() for x in given[3:]))
    found, wanted = by_both(given, device)
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    ulp = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for got, want in zip(found, wanted, strict=True):
        scale = float(want.abs().max())
        torch.testing.assert_close(got.double(), want.double(), rtol=ulp, atol=ulp * max(1, scale))


def test_triton_begins_every_run_with_zeros(device: str) -> None:
    """A run that ends with a chunk, one of a single token, and several in a chunk."""
    sizes = [32, 5, 1, 30]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    given = inputs(sum(sizes), rows=1, heads=(1, 2), dtype=torch.float32)
    for got, want in zip(*by_both(given, device, runs_of(documents[None]).to(device)), strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-4)


def test_triton_without_a_state_and_with_equal_keys(device: str) -> None:
    """Systems whose powers would overflow are inverted row by row."""
    query, key, value, decay, _, state = inputs(64, rows=1, heads=(1, 1), dtype=torch.float32)
    given = [query, key[:, :1].expand_as(key), value, decay * 0, torch.ones_like(decay)]
    with use("triton"):
        out, _ = gated_delta_rule(*(x.to(device) for x in given))
    want, _ = recurrence(*(x.double() for x in given), torch.zeros_like(state).double())
    torch.testing.assert_close(out.double().cpu(), want, rtol=1e-4, atol=1e-4)


def test_what_triton_cannot_do_is_left_to_the_reference(device: str) -> None:
    given = [x.to(device) for x in inputs(5)[:5]]
    assert not delta_rule_triton.fits(given[1], given[2])  # float64
    with use("triton"):
        out, _ = gated_delta_rule(*given)
    assert torch.equal(out, gated_delta_rule(*given)[0])
    wide = torch.empty(1, 1, 1, 1024)
    assert not delta_rule_triton.fits(wide, wide[..., :64])
    assert delta_rule_triton.fits(wide[..., :128], wide[..., :128])
