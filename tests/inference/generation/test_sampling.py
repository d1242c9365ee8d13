"""Sampling: transformers' own filters, exact frequencies, and draws that no neighbor changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import UsageError
from megtool.inference.generation.sampling import NO_NUMBER, choose, filter_logits
from megtool.options.sampling import Sampling


@given(st.integers(0, 999), st.floats(0.05, 1.0), st.integers(1, 40), st.floats(0.2, 3.0))
@settings(max_examples=40, deadline=None)
def test_filters_keep_what_transformers_keeps(
    seed: int, top_p: float, top_k: int, temperature: float
) -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits_BV = torch.randn(3, 30, generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    probs_BK, ids_BK = filter_logits(logits_BV, sampling)
    ours_BV = torch.zeros(3, 30).scatter(1, ids_BK, probs_BK / probs_BK.sum(-1, keepdim=True))
    theirs_BV = warpers.TemperatureLogitsWarper(temperature)(None, logits_BV)
    theirs_BV = warpers.TopKLogitsWarper(top_k)(None, theirs_BV)
    theirs_BV = warpers.TopPLogitsWarper(top_p)(None, theirs_BV).softmax(-1)
    assert torch.allclose(ours_BV, theirs_BV, atol=1e-6)


def test_draws_follow_the_probabilities() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    sampling = Sampling(temperature=1.0, seed=7)
    generator = sampling.generator(0)
    rows = 4000
    drawn = choose(logits_BV.expand(rows, -1), sampling, [generator] * rows)
    shares = torch.bincount(drawn, minlength=4) / rows
    assert torch.allclose(shares, logits_BV[0].softmax(-1), atol=0.03)


def test_a_draw_is_the_same_alone_and_in_a_batch() -> None:
    logits_BV = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=0.9, top_p=0.8, seed=3)
    together = choose(logits_BV, sampling, [sampling.generator(n) for n in range(5)])
    for n in range(5):
        assert choose(logits_BV[n : n + 1], sampling, [sampling.generator(n)])[0] == together[n]


def test_greedy_takes_the_likeliest_and_says_where_a_nan_is() -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 1.0], [torch.nan, 0.0, 0.0]])
    assert choose(logits_BV, Sampling()).tolist() == [1, NO_NUMBER]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0"),
        ({"top_p": 0.5}, "top_p with temperature 0"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Sampling(**values)
