"""Attention by tiles, lists and runs of tokens against its definition, forward and backward."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from megtool.errors import UsageError
from megtool.kernels.attention import dot_product
from megtool.kernels.attention import flex as attention_flex
from megtool.kernels.attention import tiles as attention_tiles
from megtool.kernels.attention import transformer_engine as te_attention
from megtool.kernels.attention import varlen as attention_varlen
from megtool.kernels.attention.dot_product import attention, attention_part, choose_way
from megtool.kernels.attention.mask import AttentionSizes, BucketBias, Mask, Slopes
from megtool.kernels.attention.tiles import ScoreRule, merge
from megtool.kernels.transformer_engine import library as transformer_engine
from megtool.model.attention.relative_bias import RelativeBias
from megtool.model.batch import LEAST_RUNS, Batch, run_starts
from megtool.model.cache.key_span import KeySpan
from megtool.model.masks import Masks
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.emulated.flash import on_cpu

ROWS, HEADS, GROUPS, LENGTH, SIZE = 2, 4, 2, 23, 16
States = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles of few tokens, also where all pairs would do."""
    monkeypatch.setattr(dot_product, "NUM_PAIRS", 0)
    monkeypatch.setattr(dot_product, "_FEW_QUERIES", 0)
    monkeypatch.setattr(attention_tiles, "NUM_SCORES", 300)


def states(
    *, groups: int = GROUPS, value_size: int = SIZE, dtype: torch.dtype = torch.float64
) -> States:
    """Random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(ROWS, heads, LENGTH, size, generator=generator, dtype=torch.float64)
        for heads, size in ((HEADS, SIZE), (groups, SIZE), (groups, value_size))
    )
    return tuple(x.to(dtype).requires_grad_() for x in (query, key, value))  # type: ignore[return-value]


def config(**more: Any) -> ModelConfig:
    sizes = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "head_dim": 8}
    return ModelConfig.from_fields(
        **sizes, num_heads=HEADS, num_kv_heads=HEADS, vocab_size=9, **more
    )


def mask_of(kind: str) -> Mask:
    """A mask as models have it, by its kind."""
    tokens = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    documents = torch.tensor([[0] * 9 + [1] * 3 + [2] * 11, [0] * 2 + [4] * 21])
    sizes_B1 = torch.tensor([[LENGTH - 6], [LENGTH]])
    valid = torch.arange(LENGTH) < sizes_B1
    made: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
        "causal": ({}, {}),
        "both ways": ({"bidirectional": True}, {}),
        "window": ({"window_size": 5}, {}),
        "window both ways": ({"window_size": 4, "bidirectional": True}, {}),
        "chunks": ({"attn_chunk_size": 6}, {}),
        "documents": ({}, {"documents_BS": documents}),
        "windows in documents": ({"window_size": 5}, {"documents_BS": documents}),
        "documents both ways": ({"bidirectional": True}, {"documents_BS": documents}),
        "padding": ({}, {"valid_BS": valid}),
        "padding left": ({"window_size": 5}, {"valid_BS": valid.flip(1)}),
    }
    settings, parts = made[kind]
    span = KeySpan.fresh(Batch(tokens_BS=tokens, **parts))
    return Masks(config(**settings), span, documents_BS=parts.get("documents_BS")).of(0)


KINDS = (
    *("causal", "both ways", "window", "window both ways", "chunks", "documents"),
    *("windows in documents", "documents both ways", "padding", "padding left"),
)


def whole(mask: Mask) -> Tensor:
    """All pairs of a mask."""
    seen = mask.square(LENGTH, LENGTH, torch.device("cpu"))
    if seen is None:
        seen = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    return seen.expand(ROWS, 1, LENGTH, LENGTH)


def defined(
    given: States,
    seen: Tensor,
    rule: ScoreRule,
    sinks: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Attention with all scores, in float64."""
    query, key, value = (x.double() for x in given)
    key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if added is not None:
        scores = scores + added
    powers = scores.exp() * seen
    total = powers.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None, None]
    return (powers / total @ value).transpose(1, 2)


def compare(
    ours: Tensor, theirs: Tensor, leaves: tuple[Tensor, ...], *, least: float = 1e-9
) -> None:
    """Outputs and all gradients are close."""
    weight = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    assert ours.shape == theirs.shape
    assert float((ours - theirs).detach().abs().max()) < least
    grads = torch.autograd.grad((ours * weight).sum(), leaves)
    wanted = torch.autograd.grad((theirs * weight).sum(), leaves)
    for got, want in zip(grads, wanted, strict=True):
        assert got.dtype == want.dtype
        assert float((got - want).abs().max()) < least


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("softcap", [0.0, 1.5], ids=["fused tiles", "tiles of scores"])
def test_tiles_are_attention(kind: str, softcap: float) -> None:
    given, mask = states(), mask_of(kind)
    rule = ScoreRule(scale=0.3, softcap=softcap)
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    way = choose_way(given, mask, rule, has_sinks=True)
    assert way == "tiles"
    ours = attention(*given, mask, rule, sinks)
    compare(ours, defined(given, whole(mask), rule, sinks), (*given, sinks))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("value_size", [8, 24])
def test_heads_of_other_sizes_and_groups(groups: int, value_size: int) -> None:
    given, rule = states(groups=groups, value_size=value_size), ScoreRule(scale=0.2)
    for kind in ("causal", "documents"):
        mask = mask_of(kind)
        compare(attention(*given, mask, rule), defined(given, whole(mask), rule), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_types(dtype: torch.dtype) -> None:
    given, mask, rule = states(dtype=dtype), mask_of("windows in documents"), ScoreRule(scale=0.3)
    for softcap in (0.0, 2.0):
        rule = ScoreRule(scale=0.3, softcap=softcap)
        least = 1e-5 if dtype == torch.float32 else 0.15
        ours = attention(*given, mask, rule)
        assert ours.dtype == dtype
        compare(ours, defined(given, whole(mask), rule), given, least=least)


def bucketed(table: Tensor | None = None) -> tuple[Mask, BucketBias]:
    """T5's mask and bias."""
    settings = config(bidirectional=True, relative_num_buckets=8, relative_max_distance=10)
    bias = RelativeBias(settings, ProcessGroups.alone(), device="cpu", dtype=torch.float64)
    places = torch.arange(LENGTH)[None]
    weight = torch.randn(8, HEADS, dtype=torch.float64, requires_grad=True)
    made = BucketBias(weight, bias.bucket, places, places)
    valid = torch.arange(LENGTH) < torch.tensor([[LENGTH - 4], [LENGTH]])
    return Mask(valid_BL=valid, bias=made), made


def test_slopes_and_relative_biases() -> None:
    given, rule = states(groups=HEADS), ScoreRule(scale=0.3)
    places, everything = torch.arange(LENGTH)[None], slice(0, LENGTH)
    slopes = Slopes(torch.tensor([0.5, 0.25, 0.1, 0.01], dtype=torch.float64), places, places)
    mask = Mask(is_causal=True, bias=slopes)
    added = slopes.part(everything, everything)
    compare(attention(*given, mask, rule), defined(given, whole(mask), rule, None, added), given)
    mask, bias = bucketed()
    added = bias.part(everything, everything)
    seen = mask.valid_BL[:, None, None].expand(ROWS, 1, LENGTH, LENGTH)  # type: ignore[index]
    want = defined(given, seen, rule, None, added)
    compare(attention(*given, mask, rule), want, (*given, bias.table))


def test_lists_of_keys_and_keys_beside_them() -> None:
    """As indexers choose them, and as compressed keys stand beside a window."""
    given, rule = states(groups=1), ScoreRule(scale=0.3)
    lists = torch.full((ROWS, LENGTH, 3), -1, dtype=torch.int32)
    lists[..., 0] = torch.arange(LENGTH)
    lists[1, 5:, 1] = 2
    mask, seen = Mask(chosen_BSC=lists), torch.eye(LENGTH, dtype=torch.bool).repeat(ROWS, 1, 1)
    seen[1, 5:, 2] = True
    compare(attention(*given, mask, rule), defined(given, seen[:, None], rule), given)
    query = given[0]
    more = torch.randn(ROWS, 1, 7, SIZE, dtype=torch.float64, requires_grad=True)
    limits = (torch.arange(LENGTH)[None] + 1) // 4
    ready = Mask(first_BS=torch.zeros_like(limits), last_BS=limits - 1)
    both = mask_of("window").beside(LENGTH, ready)
    keys = torch.cat((given[1], more), 2)
    allowed = torch.arange(7) < limits[0, :, None]
    seen = torch.cat((whole(mask_of("window")), allowed.expand(ROWS, 1, -1, -1)), -1)
    sinks = torch.zeros(HEADS, dtype=torch.float64, requires_grad=True)
    leaves = (query, given[1], more, sinks)
    ours = attention(query, keys, keys, both, rule, sinks)
    compare(ours, defined((query, keys, keys), seen, rule, sinks), leaves)


def test_queries_without_keys_get_zeros() -> None:
    given = states()
    last = torch.full((1, LENGTH), -1)
    last[:, 5:] = 3
    mask = Mask(first_BS=torch.zeros_like(last), last_BS=last)
    for softcap in (0.0, 2.0):
        out = attention(*given, mask, ScoreRule(scale=0.3, softcap=softcap))
        assert not out[:, :5].any()
        assert out[:, 5:].all()
        grads = torch.autograd.grad(out.sum(), given)
        assert all(bool(g.isfinite().all()) for g in grads)
        assert not grads[0][:, :, :5].any()


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_parts_of_the_keys_are_merged(softcap: float) -> None:
    given, mask, rule = states(), mask_of("documents"), ScoreRule(scale=0.3, softcap=softcap)
    sizes = AttentionSizes.of(*given[:2])
    want = defined(given, whole(mask), rule)
    with torch.no_grad():
        for parts in (
            [(slice(0, 10), mask.among(0, 10, sizes)), (slice(10, 23), mask.among(10, 23, sizes))],
            [(slice(n, None, 3), mask.every(n, 3, sizes)) for n in range(3)],
        ):
            found = [
                attention_part(given[0], given[1][:, :, k], given[2][:, :, k], part, rule)
                for k, part in parts
            ]
            merged = found[0]
            for other in found[1:]:
                merged = merge(*merged, *other)
            assert float((merged[0].transpose(1, 2) - want).detach().abs().max()) < 1e-9


def test_dropout_of_tiles() -> None:
    """Values are unit vectors, so that the output is the weights, of which some are left out."""
    query, key, _ = states(groups=HEADS)
    value = torch.eye(LENGTH, dtype=torch.float64).expand(ROWS, HEADS, -1, -1).clone()
    value.requires_grad_()
    given, mask = (query, key, value), mask_of("documents")
    rule = ScoreRule(scale=0.3, share=0.3, seed=7)
    out, plain = attention(*given, mask, rule), attention(*given, mask, ScoreRule(scale=0.3))
    assert torch.equal(out, attention(*given, mask, rule))
    other = ScoreRule(scale=0.3, share=0.3, seed=8)
    assert not torch.equal(out, attention(*given, mask, other))
    kept = (out != 0) & (plain != 0)
    torch.testing.assert_close(out[kept], plain[kept] / 0.7)
    assert float(kept.sum() / (plain != 0).sum()) == pytest.approx(0.7, abs=0.05)
    keep = (kept.double() / 0.7).transpose(1, 2)
    seen = whole(mask)
    scores = (query @ key.mT * 0.3).masked_fill(~seen, float("-inf"))
    want = ((scores.softmax(-1) * keep) @ value).transpose(1, 2)
    compare(out, want, given)


def test_a_recomputed_layer_keeps_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from megtool.model.stacks.recompute import _kept_products

    given, mask, rule = states(), mask_of("documents"), ScoreRule(scale=0.3, softcap=2.0)
    calls = []
    run = attention_tiles.forward
    monkeypatch.setattr(attention_tiles, "forward", lambda *given: calls.append(1) or run(*given))
    out = checkpoint(
        lambda *x: attention(*x, mask, rule),
        *given,
        use_reentrant=False,
        context_fn=_kept_products,
    )
    compare(out, defined(given, whole(mask), rule), given)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_is_told_the_same(kind: str) -> None:
    given = tuple(x.detach() for x in states(dtype=torch.float32))
    mask = mask_of(kind)
    rule = ScoreRule(scale=0.3, softcap=1.5)
    assert attention_flex.is_able(given, mask, rule)
    sinks = torch.randn(HEADS)
    with torch.no_grad():  # it has no backward pass on a CPU
        ours = attention_flex.attention(*given, mask, rule, sinks, run=flex_attention)
    want = defined(given, whole(mask), rule, sinks)
    assert float((ours.transpose(1, 2) - want).detach().abs().max()) < 1e-5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_attention_adds_biases() -> None:
    given = tuple(x.detach() for x in states(groups=HEADS, dtype=torch.float32))
    rule = ScoreRule(scale=0.3)
    places, everything = torch.arange(LENGTH)[None], slice(0, LENGTH)
    slopes = Slopes(torch.tensor([0.5, 0.25, 0.1, 0.01]), places, places)
    mask = Mask(is_causal=True, bias=slopes)
    with torch.no_grad():
        ours = attention_flex.attention(*given, mask, rule, run=flex_attention)
    want = defined(given, whole(mask), rule, None, slopes.part(everything, everything))
    assert float((ours.transpose(1, 2) - want).detach().abs().max()) < 1e-5


@pytest.mark.parametrize("length", [100, 300, 400])
def test_blocks_that_are_computed_hold_what_is_visible(length: int) -> None:
    """Blocks of 128 are left out where nothing is, and whole where everything is."""
    documents = torch.tensor([[0] * 90 + [1] * (length - 90), [0] * length])
    batch = Batch(tokens_BS=torch.ones(2, length, dtype=torch.int64))
    masks = Masks(config(window_size=70), KeySpan.fresh(batch), documents_BS=documents)
    sizes = AttentionSizes(length, length, torch.device("cpu"))
    made, more = attention_flex.block_mask(masks.of(0), sizes), -length % 128
    assert made is not None
    seen = masks.of(0).square(length, length, sizes.device)
    assert seen is not None
    grown = torch.nn.functional.pad(seen, (0, more, 0, more))
    blocks = grown.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).any(3).any(-1)
    assert made.to_dense().bool().equal(blocks)


# ---- Kernels of a GPU, by what they are defined to be


def by_segments(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, scale: float, window: list[int]
) -> tuple[Tensor, Tensor]:
    """Attention within runs of tokens, [T, N, D], and log-sum-exps, [N, T]."""
    outs, sums = [], []
    for start, stop in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        distance = torch.arange(stop - start) - torch.arange(stop - start)[:, None]
        left, right = (float("inf") if w < 0 else w for w in window)
        scores = (q @ k.mT * scale).masked_fill(
            (distance < -left) | (distance > right), float("-inf")
        )
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


@pytest.fixture
def flash() -> Iterator[None]:
    """torch's kernels of flash-attention, which a CPU has not, by their definition."""
    library = on_cpu()
    yield
    library._destroy()


SEGMENTED = tuple(k for k in KINDS if "padding" not in k)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kind", SEGMENTED)
def test_runs_of_tokens_are_what_varlen_kernels_are_told(
    kind: str, has_sinks: bool, flash: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not attention_varlen.refuse()
    given, mask, rule = states(value_size=10), mask_of(kind), ScoreRule(scale=0.3)
    assert attention_varlen.segments_of(mask, LENGTH, LENGTH) is not None
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True) if has_sinks else None
    monkeypatch.setattr(dot_product, "choose_way", lambda *_, **__: "varlen")
    leaves = given if sinks is None else (*given, sinks)
    ours = attention(*given, mask, rule, sinks)
    compare(ours, defined(given, whole(mask), rule, sinks), leaves)


def test_padding_is_a_run_of_its_own(flash: None) -> None:
    given, mask, rule = states(), mask_of("padding"), ScoreRule(scale=0.3)
    out, _ = attention_varlen.forward(*given, mask, rule)
    want = defined(given, whole(mask), rule)
    assert (
        float((out.transpose(1, 2)[0, : LENGTH - 6] - want[0, : LENGTH - 6]).detach().abs().max())
        < 1e-9
    )
    assert float((out.transpose(1, 2)[1] - want[1]).detach().abs().max()) < 1e-9


@pytest.mark.parametrize("window", [0, 5])
def test_varlen_kernels_go_back_into_a_cache(
    window: int, flash: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts behind a cache: fewer queries than keys, which no head has a copy of."""
    past, rule = 9, ScoreRule(scale=0.3)
    (query, key, value), seen = states(), whole(mask_of("window" if window else "causal"))
    batch = Batch(tokens_BS=torch.ones(ROWS, LENGTH, dtype=torch.int64))
    span = KeySpan.fresh(batch).part(past, LENGTH)
    mask = Masks(config(window_size=window), span).of(0)
    monkeypatch.setattr(dot_product, "choose_way", lambda *_, **__: "varlen")
    ours = attention(query[:, :, past:], key, value, mask, rule)
    want = defined((query, key, value), seen, rule)[:, past:]
    compare(ours, want, (query, key, value))


def test_where_runs_begin_is_known_without_the_device() -> None:
    documents = torch.tensor([[0] * 9 + [1] * 3 + [2] * 11, [0] * 2 + [4] * 21])
    valid = torch.arange(LENGTH) < torch.tensor([[LENGTH - 6], [LENGTH]])
    for kinds in ((documents, None), (None, valid), (documents, valid)):
        starts = run_starts(*kinds)
        batch = Batch(
            tokens_BS=torch.ones(ROWS, LENGTH, dtype=torch.int64),
            documents_BS=kinds[0],
            valid_BS=kinds[1],
            run_starts_BM=starts,
        )
        found = []
        for given in (None, batch.run_starts_BM):
            masks = Masks(
                config(), KeySpan.fresh(batch), documents_BS=kinds[0], run_starts_BM=given
            )
            segments = masks.of(0).segments
            assert segments is not None
            assert segments.waits == (given is None)
            found.append(segments.offsets(ROWS, torch.device("cpu")))
        assert len(found[1]) == ROWS * LEAST_RUNS + 1
        assert found[1].dtype == torch.int32
        assert found[0].tolist() == found[1].unique_consecutive().tolist()
    assert run_starts(None, None) is None
    many = run_starts(torch.arange(2 * LENGTH).view(2, -1))
    assert many is not None
    assert many.tolist() == [[*range(LENGTH), *[LENGTH] * (32 - LENGTH)]] * 2
    with pytest.raises(UsageError, match="run_starts_BM"):
        Batch(tokens_BS=batch.tokens_BS, documents_BS=documents, run_starts_BM=many[:1])


def test_operations_of_another_torch_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = attention_varlen._ARGUMENTS["_varlen_attn_backward"] | {"bias"}
    for name, arguments, said in (
        ("_varlen_attn_backward", wanted, r"another torch_attn::_varlen_attn_backward \(bias\)"),
        ("_varlen_attn_backward", wanted - {"bias", "scale"}, r"\(scale\)"),
        ("_varlen_attn_forward", wanted, "has no torch_attn::_varlen_attn_forward"),
    ):
        monkeypatch.setitem(attention_varlen._ARGUMENTS, name, arguments)
        attention_varlen.refuse.cache_clear()
        assert re.search(said, attention_varlen.refuse())
        given = states(dtype=torch.bfloat16)
        assert not attention_varlen.is_able(given, mask_of("documents").segments)
        monkeypatch.undo()
        attention_varlen.refuse.cache_clear()
    assert attention_varlen.is_able(given, mask_of("documents").segments)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_attention_is_compiled_for_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 8 compilations of a function torch runs it as it is, with all scores."""
    made: list[object] = []

    def note(graph: Any, _: object) -> Any:
        made.append(graph)
        return graph.forward

    kinds = functools.cache(functools.partial(attention_flex.compiled.__wrapped__, backend=note))
    monkeypatch.setattr(attention_flex, "compiled", kinds)
    counts = []
    for length in (40, 50, 150, 160, 300, 310, 400, 520, 530, 600, 640):
        for window in (0, 30):
            batch = Batch(tokens_BS=torch.ones(2, length, dtype=torch.int64))
            mask = Masks(config(window_size=window), KeySpan.fresh(batch)).of(0)
            query, key = (torch.randn(2, heads, length, SIZE) for heads in (HEADS, GROUPS))
            with torch.no_grad():
                attention_flex.attention(query, key, key, mask, ScoreRule(scale=0.3, softcap=2.0))
        counts.append(len(made))
    assert counts[0] == 2  # a causal mask and a window
    assert counts[-1] == counts[4] <= 8


@pytest.mark.parametrize("kind", ["windows in documents", "documents both ways"])
def test_transformer_engine_is_told_in_thd(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class DotProductAttention:
        """What Transformer Engine's module computes in THD."""

        def __init__(self, **how: Any) -> None:
            made.append(how)

        def __call__(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
            assert how["qkv_format"] == "thd"
            assert (how["attn_mask_type"] == "padding_causal") == (how["window_size"][1] == 0)
            scale = made[0]["softmax_scale"]
            offsets = how["cu_seqlens_q"]
            out, _ = by_segments(query, key, value, offsets, scale, list(how["window_size"]))
            return out.flatten(1)

    package = SimpleNamespace(pytorch=SimpleNamespace(DotProductAttention=DotProductAttention))
    monkeypatch.setattr(transformer_engine, "load", lambda: package)
    te_attention._module.cache_clear()
    given, mask = states(value_size=8), mask_of(kind)
    assert mask.segments is not None
    ours = te_attention.attention(*given, mask, 0.3)
    te_attention._module.cache_clear()
    compare(ours, defined(given, whole(mask), ScoreRule(scale=0.3)), given)
    assert made[0]["kv_channels"] == (SIZE, 8)
    assert (made[0]["num_attention_heads"], made[0]["num_gqa_groups"]) == (HEADS, GROUPS)
