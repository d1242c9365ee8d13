"""The delta rule with a decay for each element of a key: chunks are the recurrence."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.kernels.recurrence import kimi_delta
from megtool.kernels.recurrence.delta_rule import gated_delta_rule, gated_delta_steps
from megtool.kernels.recurrence.kimi_delta import kimi_delta_rule
from tests.support.models.delta_rule_cases import (
    check_16_bits,
    check_equal_keys,
    check_finite_differences,
    check_runs,
    check_transformers,
    inputs,
    recurrence,
)

by_element = partial(inputs, heads=(3, 3), by_element=True)
"""Inputs with a decay for each element of a key, and as many heads of keys as of values."""


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kimi_delta, "CHUNK", 4)
    monkeypatch.setattr(kimi_delta, "_BLOCK", 2)


@pytest.mark.parametrize("tokens", [1, 7, 8, 64, 65, 150])
def test_chunks_are_the_recurrence(tokens: int) -> None:
    *given, state = by_element(tokens)
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
    given = by_element(7, heads=(2, 2), sizes=(3, 2))
    check_finite_differences(kimi_delta_rule, given, has_runs=has_runs)


def test_equal_decays_of_all_elements_are_a_gated_delta_net() -> None:
    query, key, value, decay, beta, state = by_element(130)
    one = decay[..., :1]
    ours = kimi_delta_rule(query, key, value, one.expand_as(decay), beta, state_BNDP=state)
    want = gated_delta_rule(query, key, value, one.squeeze(-1), beta, state_BNDP=state)
    for got, wanted in zip(ours, want, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("tokens", [5, 130])
def test_values_and_gradients_are_transformers(tokens: int) -> None:
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    given = by_element(tokens, sizes=(16, 8), dtype=torch.float32)
    check_transformers(kimi_delta_rule, theirs.chunk_kimi_delta_attention, given)


@pytest.mark.usefixtures("short_chunks")
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
@settings(max_examples=15)
def test_every_run_begins_with_a_state_of_zeros(lengths: list[int]) -> None:
    check_runs(kimi_delta_rule, by_element(sum(lengths), rows=1), lengths)


def test_equal_keys_and_strong_decays_stay_finite() -> None:
    """Systems whose powers would overflow, and decays whose inverses would."""
    check_equal_keys(kimi_delta_rule, by_element(192, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_computed_in_32(dtype: torch.dtype) -> None:
    check_16_bits(kimi_delta_rule, by_element(70, dtype=dtype))
