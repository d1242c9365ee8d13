"""Attention by Transformer Engine on a GPU, held against our own; and what is left to our own.

Off a GPU it runs on the emulated one (`tests/emulated`), by Transformer Engine's own Python part.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.kernels.attention import dot_product
from megtool.kernels.attention.dot_product import attention, choose_way
from megtool.kernels.attention.mask import Mask, Segments
from megtool.kernels.attention.tiles import ScoreRule
from megtool.kernels.attention.transformer_engine import is_able, refuse
from megtool.kernels.dispatch import use

ROWS, LENGTH, SIZE = 2, 24, 16
WINDOWS = {"causal": (-1, 0), "window": (5, 0), "both ways": (-1, -1), "window both ways": (4, 4)}
without_te = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)


def states(
    heads: int = 4, groups: int = 2, value_size: int = SIZE, *, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, SIZE), (groups, SIZE), (groups, value_size))
    made = [torch.randn(ROWS, n, LENGTH, d, generator=generator) for n, d in shapes]
    query, key, value = (x.bfloat16().to(device).requires_grad_() for x in made)
    return query, key, value


def mask_of(kind: str, *, in_documents: bool, device: str = "cuda") -> Mask:
    """A mask by its kind: of whole rows, or of documents of 9, 4 and 11, and of 24 tokens."""
    window = WINDOWS[kind]
    if not in_documents and kind in ("causal", "both ways"):
        return Mask(is_causal=kind == "causal")
    ids = torch.tensor([[0] * 9 + [1] * 4 + [2] * 11, [0] * 24]) * in_documents
    place = torch.arange(LENGTH)
    same = ids[:, :, None] == ids[:, None, :]
    first = torch.where(same, place, LENGTH).amin(2)
    last = torch.where(same, place, -1).amax(2)
    if window[0] >= 0:
        first = torch.maximum(first, place - window[0])
    if window[1] >= 0:
        last = torch.minimum(last, place + window[1])
    segments = Segments(LENGTH, window, ids.to(device) if in_documents else None)
    return Mask(first_BS=first.to(device), last_BS=last.to(device), segments=segments)


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("in_documents", [False, True])
@pytest.mark.parametrize(("heads", "groups", "value_size"), [(4, 4, 16), (4, 2, 16), (4, 1, 8)])
@pytest.mark.gpu
@without_te
def test_it_is_attention(
    kind: str,
    in_documents: bool,
    heads: int,
    groups: int,
    value_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dot_product, "NUM_PAIRS", 0)
    monkeypatch.setattr(dot_product, "_FEW_QUERIES", 0)
    given, mask = states(heads, groups, value_size), mask_of(kind, in_documents=in_documents)
    rule = ScoreRule(scale=0.3)
    with use("te"):
        assert choose_way(given, mask, rule, has_sinks=False) == "te"
        theirs = attention(*given, mask, rule)
    wide = [x.detach().float().cpu().requires_grad_() for x in given]
    near = mask_of(kind, in_documents=in_documents, device="cpu")
    ours = attention(wide[0], wide[1], wide[2], near, rule)
    assert theirs.shape == ours.shape == (ROWS, LENGTH, heads, value_size)
    pull = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = torch.autograd.grad(theirs, given, pull.cuda())
    want = torch.autograd.grad(ours, wide, pull.float())
    for one, other in zip((theirs, *got), (ours, *want), strict=True):
        torch.testing.assert_close(one.float().cpu(), other, rtol=3e-2, atol=5e-2)


@pytest.mark.gpu
@without_te
def test_sinks_take_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """And have gradients; two layers share its module."""
    monkeypatch.setattr(dot_product, "NUM_PAIRS", 0)
    monkeypatch.setattr(dot_product, "_FEW_QUERIES", 0)
    given, mask, rule = states(), mask_of("causal", in_documents=False), ScoreRule(scale=0.3)
    sinks = [torch.tensor([2.0, -1.0, 0.5, 3.0]) + i for i in range(2)]
    theirs = [s.bfloat16().cuda().requires_grad_() for s in sinks]
    ours = [s.bfloat16().float().requires_grad_() for s in sinks]
    wide = [x.detach().float().cpu().requires_grad_() for x in given]
    with use("te"):
        assert choose_way(given, mask, rule, has_sinks=True) == "te"
        outs = [attention(*given, mask, rule, s) for s in theirs]
    wants = [attention(wide[0], wide[1], wide[2], mask, rule, s) for s in ours]
    got = torch.autograd.grad(sum(o.float().square().sum() for o in outs), [*given, *theirs])  # type: ignore[arg-type]
    want = torch.autograd.grad(sum(o.square().sum() for o in wants), [*wide, *ours])  # type: ignore[arg-type]
    for one, other in zip((*outs, *got), (*wants, *want), strict=True):
        torch.testing.assert_close(one.float().cpu(), other, rtol=3e-2, atol=5e-2)
    assert not torch.equal(outs[0], outs[1])


def test_what_is_left_to_our_own_kernels_has_a_reason() -> None:
    kind, sizes = torch.bfloat16, (128, 128)
    assert refuse(kind, sizes) == ""
    assert refuse(torch.float16, (192, 128)) == ""
    assert "float32" in refuse(torch.float32, sizes)
    assert "256" in refuse(kind, (512, 128))
    for name, word in (
        ("has_softcap", "soft cap"),
        ("has_window_sinks", "sinks in a window"),
        ("has_bias", "biases"),
        ("has_dropout", "dropout"),
    ):
        assert word in refuse(kind, sizes, **{name: True})


def test_tokens_of_a_cache_and_of_a_cpu_are_not_its(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    rule = ScoreRule(scale=1.0)
    given = states(device="cpu")
    assert not is_able(given, Mask(is_causal=True), rule, has_sinks=False)
    on_meta = tuple(x.detach().to("meta") for x in given)
    query, key, value = (x.as_subclass(_OnGpu) for x in on_meta)
    whole = query, key, value
    assert is_able(whole, Mask(is_causal=True), rule, has_sinks=False)
    assert not is_able((query[:, :, -1:], key, value), Mask(), rule, has_sinks=False)
    assert is_able(whole, Mask(is_causal=True), rule, has_sinks=True)
    near = mask_of("window", in_documents=False, device="cpu")
    assert is_able(whole, near, rule, has_sinks=False)
    assert not is_able(whole, near, rule, has_sinks=True)
    capped = ScoreRule(scale=1.0, softcap=30.0)
    assert not is_able(whole, Mask(is_causal=True), capped, has_sinks=False)
    padded = Mask(first_BS=torch.zeros(1, LENGTH), last_BS=torch.zeros(1, LENGTH))
    assert not is_able(whole, padded, rule, has_sinks=False)


class _OnGpu(Tensor):
    """A tensor without memory that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.gpu
@without_te
def test_its_signature_is_the_one_that_is_called() -> None:
    te: Any = pytest.importorskip("transformer_engine.pytorch")
    made = set(inspect.signature(te.DotProductAttention).parameters)
    assert {
        *("num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout"),
        "softmax_scale",
    } <= made
    called = set(inspect.signature(te.DotProductAttention.forward).parameters)
    assert {
        *("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
        *("attn_mask_type", "window_size"),
    } <= called
