"""flash-attn's functions get what they document, and their output is put back in place.

Stand-ins with their arguments compute attention plainly: whether the real kernels agree is shown on
a GPU alone.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.kernels import peers
from megtool.kernels.attention import flash_attention
from megtool.kernels.attention.dot_product import attention, choose_way
from megtool.kernels.attention.mask import Mask, Segments
from megtool.kernels.attention.tiles import ScoreRule
from megtool.kernels.dispatch import use

ROWS, TOKENS, HEADS, GROUPS = 2, 24, 4, 2


def plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Any, softcap: float
) -> Tensor:
    """Attention of one row [S, N, D], by its definition in flash-attn's docstring."""
    s, keys = q.shape[0], k.shape[0]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("snd,lnd->nsl", q.float(), k.float()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(s)[:, None] + keys - s
    key = torch.arange(keys)[None]
    right = 0 if causal else window[1]
    seen = torch.ones(s, keys, dtype=torch.bool)
    if window[0] >= 0:
        seen &= key >= place - window[0]
    if right >= 0:
        seen &= key <= place + right
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("nsl,lnd->snd", weights, v.float()).to(q.dtype)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float = 0.0,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    rows = zip(q, k, v, strict=True)
    return torch.stack([plain(*row, softmax_scale, causal, window_size, softcap) for row in rows])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float = 0.0,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    assert cu_seqlens_q.dtype == torch.int32
    assert int(cu_seqlens_q[-1]) == len(q)
    stops = cu_seqlens_q.tolist()
    parts = [
        plain(q[i:j], k[i:j], v[i:j], softmax_scale, causal, window_size, softcap)
        for i, j in itertools.pairwise(stops)
    ]
    return torch.cat(parts), None


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {f.__name__: f for f in (flash_attn_func, flash_attn_varlen_func)}
    for path, arguments in peers.PACKAGES["flash-attn"].functions.items():
        name = path.partition(":")[2]
        assert arguments <= set(inspect.signature(made[name]).parameters)
    monkeypatch.setattr(peers, "load", lambda name: made)


def states(keys: int = TOKENS, value_size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(ROWS, HEADS, TOKENS, 16).bfloat16(),
        torch.randn(ROWS, GROUPS, keys, 16).bfloat16(),
        torch.randn(ROWS, GROUPS, keys, value_size).bfloat16(),
    )


def documents() -> Tensor:
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    ids[0, 9:], ids[1, 20:] = 1, 1
    return ids


def packed(window: int) -> Mask:
    """Causal within documents, and within a window."""
    ids, places = documents(), torch.arange(TOKENS)
    first = torch.stack([torch.searchsorted(row, row) for row in ids])
    if window >= 0:
        first = torch.maximum(first, places - window)
    return Mask(
        first_BS=first,
        last_BS=places.expand(ROWS, -1),
        segments=Segments(TOKENS, (window, 0), ids),
    )


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(
    "mask",
    [Mask(is_causal=True), Mask(), packed(-1), packed(5)],
    ids=["causal", "all", "documents", "window"],
)
def test_outputs_are_those_of_megtools_attention(mask: Mask, softcap: float) -> None:
    given, rule = states(), ScoreRule(scale=0.3, softcap=softcap)
    with use("flash-attn"):
        assert choose_way(given, mask, rule, has_sinks=False) == "flash"
        got = attention(*given, mask, rule)
    with use("torch"):
        want = attention(*(x.float() for x in given), mask, rule)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_queries_behind_a_cache_and_values_of_another_size() -> None:
    given, rule = states(keys=40, value_size=8), ScoreRule(scale=0.3)
    with use("flash-attn-3"):
        got = attention(*given, Mask(is_causal=True), rule)
    with use("torch"):
        want = attention(*(x.float() for x in given), Mask(is_causal=True), rule)
    assert got.shape == (ROWS, TOKENS, HEADS, 8)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_what_they_cannot_do_goes_another_way() -> None:
    given, mask, rule = states(), Mask(is_causal=True), ScoreRule(scale=0.3)
    with use("flash-attn"):
        assert choose_way(given, mask, rule, has_sinks=True) != "flash"
        wide = tuple(x.float() for x in given)
        assert choose_way(wide, mask, rule, has_sinks=False) != "flash"  # type: ignore[arg-type]
        one = (given[0][:, :, -1:], *given[1:])
        assert choose_way(one, mask, rule, has_sinks=False) != "flash"
    for other in ("auto", "torch"):
        with use(other):  # type: ignore[arg-type]
            assert choose_way(given, mask, rule, has_sinks=False) != "flash"
    assert flash_attention.chosen() is None
