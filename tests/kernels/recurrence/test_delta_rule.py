"""The gated delta rule: chunks are the recurrence, forward and backward, as transformers' are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megtool.kernels.dispatch import use
from megtool.kernels.recurrence import delta_rule, delta_rule_triton
from megtool.kernels.recurrence.causal_conv import runs_of
from megtool.kernels.recurrence.delta_rule import gated_delta_rule, gated_delta_step
from megtool.options.kernels import Implementation
from tests.support.models.delta_rule_cases import (
    F64,
    check_16_bits,
    check_equal_keys,
    check_finite_differences,
    check_runs,
    check_transformers,
    inputs,
    recurrence,
)


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
    given = inputs(7, heads=(1, 2), sizes=(3, 2))
    check_finite_differences(gated_delta_rule, given, has_runs=has_runs)


@pytest.mark.parametrize("tokens", [5, 130])
def test_values_and_gradients_are_transformers(tokens: int) -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    given = inputs(tokens, sizes=(16, 8), dtype=torch.float32)
    check_transformers(gated_delta_rule, theirs.torch_chunk_gated_delta_rule, given)


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
    check_runs(gated_delta_rule, inputs(sum(lengths), rows=1), lengths)


def test_a_token_without_beta_and_decay_leaves_the_state() -> None:
    query, key, value, decay, beta, state = inputs(6)
    decay[:, 2:], beta[:, 2:] = 0, 0
    _, last = gated_delta_rule(query, key, value, decay, beta, state_BNDP=state)
    _, want = recurrence(query[:, :2], key[:, :2], value[:, :2], decay[:, :2], beta[:, :2], state)
    torch.testing.assert_close(last, want)


def test_equal_keys_and_strong_decays_stay_finite() -> None:
    """Systems whose powers would overflow, and decays whose inverses would."""
    check_equal_keys(gated_delta_rule, inputs(192, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_computed_in_32(dtype: torch.dtype) -> None:
    check_16_bits(gated_delta_rule, inputs(70, dtype=dtype))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 150])
def test_triton_is_the_reference(
    tokens: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_rule_triton, "_STATE", 16 * 16)  # values are cut into parts of 16
    given = inputs(tokens, rows=1, heads=(1, 2), sizes=(6, 20), dtype=dtype)
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
    assert delta_rule_triton.fits(wide[..., :256], wide)
