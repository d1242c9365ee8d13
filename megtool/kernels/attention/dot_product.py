"""Attention of queries to the keys that a mask leaves them, in memory that grows with tokens alone.

One function for training, evaluation, reading prompts and calibration. torch's
`scaled_dot_product_attention` computes what it has a kernel without scores for, and few pairs are
computed at once; all else goes by tiles (`tiles`), or on a GPU through kernels of
sequences without padding (`varlen`) or compiled ones (`flex`).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.kernels import launch
from megtool.kernels.attention import flash_attention
from megtool.kernels.attention import flex as attention_flex
from megtool.kernels.attention import tiles as attention_tiles
from megtool.kernels.attention import transformer_engine as te_attention
from megtool.kernels.attention import varlen as attention_varlen
from megtool.kernels.attention.mask import AttentionSizes, Mask
from megtool.kernels.attention.softmax import masked_softmax
from megtool.kernels.attention.tiles import ScoreRule, equal_sizes
from megtool.kernels.dispatch import requested_implementation
from megtool.kernels.elementwise.dropout_add import drawn_by, drop

NUM_PAIRS = 1 << 20
"""Scores, or masks, of so many queries and keys of all rows and heads are made at once."""
_FEW_QUERIES = 8

Way = Literal["fused", "few", "te", "flash", "varlen", "flex", "tiles"]


def attention(
    query_BNSD: Tensor,
    key_BKLD: Tensor,
    value_BKLE: Tensor,
    mask: Mask,
    rule: ScoreRule,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """The attention output of every query: [B, S, N, E].

    N is a multiple of K: query head n attends to the keys of head `n // (N / K)`. Scores are made
    by `rule`; a sink takes a part of each row's weight and gives nothing. A query that attends to
    no key gets zeros. The same seed leaves out the same weights, also where the pass is computed
    again.
    """
    states = query_BNSD, key_BKLD, value_BKLE
    way = choose_way(states, mask, rule, has_sinks=sinks_N is not None)
    if way == "fused" or (way == "few" and not rule.softcap and sinks_N is None):
        return _fused(*states, mask, rule)
    if way == "few":
        return _few(*states, mask, rule, sinks_N)
    if way == "te":
        return te_attention.attention(*states, mask, rule.scale, sinks_N)
    if way == "flash":
        name = flash_attention.chosen() or "flash-attn"
        return flash_attention.attention(name, *states, mask, rule)
    if way == "flex":
        return attention_flex.attention(*states, mask, rule, sinks_N).transpose(1, 2)
    table = None if mask.bias is None else mask.bias.table
    _MASKS[id(mask)] = mask
    out, _ = torch.ops.megtool.attention(
        *states,
        sinks_N,
        table,
        [rule.scale, rule.softcap, rule.share],
        [id(mask), rule.seed, int(way == "varlen")],
    )
    return out.transpose(1, 2)  # type: ignore[no-any-return]


def choose_way(
    states: tuple[Tensor, Tensor, Tensor], mask: Mask, rule: ScoreRule, *, has_sinks: bool
) -> Way:
    """What computes attention of queries, keys and values.

    "fused" is torch's, of which no score is stored; "few" stores them, of at most `NUM_PAIRS` pairs
    or of single tokens; "te" is Transformer Engine's, where it was asked for and can. What is
    captured goes the way that it went in the warm-up before (`launch.is_for_graph`).
    """
    query, key, _ = states
    (b, n, s, _), keys, kind = query.shape, key.shape[2], query.device.type
    is_te = requested_implementation() == "te" and te_attention.is_able(
        states, mask, rule, has_sinks=has_sinks
    )
    if is_te and mask.is_plain:
        return "te"
    if flash_attention.chosen() and flash_attention.is_able(
        states, mask, rule, has_sinks=has_sinks
    ):
        return "flash"
    makes_scores = bool(rule.softcap) or has_sinks
    bends = bool(rule.softcap or rule.share) or mask.bias is not None
    segments = None if bends or kind != "cuda" else attention_varlen.segments_of(mask, s, keys)
    has_varlen = attention_varlen.is_able(states, segments)
    has_kernel = kind != "cpu" or (not rule.share and (not mask.is_causal or s == keys))
    if mask.is_plain and not makes_scores and has_kernel:
        # Behind a cache torch's own would copy keys for every head that shares them.
        return "varlen" if has_varlen and mask.is_causal and 1 < s < keys else "fused"
    has_heads = makes_scores or rule.share > 0 or mask.bias is not None
    if b * (n if has_heads else 1) * s * keys <= NUM_PAIRS or s <= _FEW_QUERIES:
        return "few"
    if kind != "cuda":
        return "tiles"
    if segments is not None and segments.waits and launch.is_for_graph():
        return "tiles"  # where runs begin would be asked of the device
    if is_te and segments is not None:
        return "te"
    if has_varlen:
        return "varlen"
    if launch.is_installed() and attention_flex.is_able(states, mask, rule):
        return "flex"
    return "tiles"


def _fused(
    query_BNSD: Tensor, key_BKLD: Tensor, value_BKLE: Tensor, mask: Mask, rule: ScoreRule
) -> Tensor:
    """By torch's `scaled_dot_product_attention`."""
    sizes, query = AttentionSizes.of(query_BNSD, key_BKLD), query_BNSD
    is_causal = mask.is_causal and mask.is_plain
    bias = None if mask.is_plain else mask.square_bias(sizes, query.dtype)
    if query.is_cuda and query.shape[1] != key_BKLD.shape[1]:
        # Kernels that share keys among heads take neither masks nor fp32 (torch to 2.13).
        is_wide = query.dtype == torch.float32
        if not is_causal and (bias is not None or is_wide or query.shape[2] == 1):
            query, bias = _as_rows(query, key_BKLD.shape[1], bias)
        elif is_wide:
            key_BKLD, value_BKLE = _for_each_head(query, key_BKLD, value_BKLE)
    if is_causal and sizes.offset:
        # What SDPA itself calls causal lets the first query see the first key alone.
        from torch.nn.attention.bias import causal_lower_right  # which imports Triton

        bias, is_causal = causal_lower_right(sizes.num_queries, sizes.num_keys), False
    size = value_BKLE.shape[-1]
    if query.device.type == "cpu" and not rule.share:
        # Its kernel without scores takes heads of one size.
        query, key_BKLD, value_BKLE = equal_sizes(query, key_BKLD, value_BKLE)
    with drawn_by(rule.seed, query.device) if rule.share else nullcontext():
        out = F.scaled_dot_product_attention(
            query,
            key_BKLD,
            value_BKLE,
            attn_mask=bias,
            dropout_p=rule.share,
            is_causal=is_causal,
            scale=rule.scale,
            enable_gqa=query.shape[1] != key_BKLD.shape[1],
        )
    out = out[..., :size].reshape(*query_BNSD.shape[:3], size)
    return out.transpose(1, 2)


def _as_rows(
    query_BNSD: Tensor, num_groups: int, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Queries of heads that share keys as so many more queries of one head, [B, K, N/K*S, D], and
    the bias of them: nothing is copied but the bias, if heads have one in common."""
    b, n, s, d = query_BNSD.shape
    if bias is not None:
        bias = bias.expand(-1, n, s, -1).reshape(bias.shape[0], num_groups, -1, bias.shape[3])
    return query_BNSD.reshape(b, num_groups, n // num_groups * s, d), bias


def _for_each_head(query: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """Keys and values copied for every head of their group; all scores would take more memory."""
    return tuple(x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in states)


def _few(
    query_BNSD: Tensor,
    key_BKLD: Tensor,
    value_BKLE: Tensor,
    mask: Mask,
    rule: ScoreRule,
    sinks_N: Tensor | None,
) -> Tensor:
    """With all scores at once, bent or beside sinks."""
    b, n, s, d = query_BNSD.shape
    k, keys = key_BKLD.shape[1:3]
    # The queries of one group are so many more rows before its keys.
    grouped = query_BNSD.reshape(b, k, n // k * s, d)
    scores = (grouped @ key_BKLD.transpose(-1, -2)).view(b, n, s, keys)
    weights = masked_softmax(
        scores,
        mask.square(s, keys, scores.device),
        scale=rule.scale,
        softcap=rule.softcap,
        sinks_N=sinks_N,
    )
    if rule.share:
        weights = drop(weights, rule.share, rule.seed)
    out = weights.view(b, k, n // k * s, keys) @ value_BKLE
    return out.view(b, n, s, -1).transpose(1, 2)


def attention_part(
    query_BNSD: Tensor, key_BKLD: Tensor, value_BKLE: Tensor, mask: Mask, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Attention to a part of the keys, without gradients: the output, [B, N, S, E], and the
    log-sum-exp of each query's scores, [B, N, S] (see `tiles.merge`)."""
    states = query_BNSD, key_BKLD, value_BKLE
    if _is_varlen_part(states, mask, rule):
        return attention_varlen.forward(*states, mask, rule)
    return attention_tiles.forward(*states, mask, rule)


def attention_part_gradients(
    grad_BNSE: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    mask: Mask,
    rule: ScoreRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values by a part of the keys; `results` are the output and
    the log-sum-exp of all of them."""
    if _is_varlen_part(states, mask, rule):
        return attention_varlen.backward(grad_BNSE, states, results, mask, rule)[:3]
    return attention_tiles.backward(grad_BNSE, states, results, mask, rule)[:3]


def _is_varlen_part(states: tuple[Tensor, Tensor, Tensor], mask: Mask, rule: ScoreRule) -> bool:
    """Return whether a GPU's kernel computes a part of the keys, each row as one run of tokens."""
    query, key, _ = states
    if not (query.is_cuda and mask.is_plain) or rule.softcap or rule.share:
        return False
    segments = attention_varlen.segments_of(mask, query.shape[2], key.shape[2])
    return attention_varlen.is_able(states, segments)


def with_sinks(out_BNSE: Tensor, lse_BNS: Tensor, sinks_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both after each head's sink has taken its part of the weights."""
    if sinks_N is None:
        return out_BNSE, lse_BNS
    lse = torch.logaddexp(lse_BNS, sinks_N.to(lse_BNS.dtype)[:, None])
    share_BNS1 = (lse_BNS - lse).exp().unsqueeze(-1)
    return (out_BNSE * share_BNS1).to(out_BNSE.dtype), lse


def sinks_gradient(grad_BNSE: Tensor, out_BNSE: Tensor, lse_BNS: Tensor, sinks_N: Tensor) -> Tensor:
    """The gradient of sinks, whose weights are no part of the output."""
    delta_BNS = (grad_BNSE.to(lse_BNS.dtype) * out_BNSE.to(lse_BNS.dtype)).sum(-1)
    weights_BNS = (sinks_N.to(lse_BNS.dtype)[:, None] - lse_BNS).exp()
    return -(weights_BNS * delta_BNS).sum((0, 2)).to(sinks_N.dtype)


# An operation of its own, so that what recomputes a layer may keep its result (`model.recompute`).
# It names its mask by a number, since operations take no objects.
_MASKS: WeakValueDictionary[int, Mask] = WeakValueDictionary()


@torch.library.custom_op(
    "megtool::attention",
    mutates_args=(),
    # Spelled out: torch 2.6 reads no annotation such as list[float].
    schema="(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? table, "
    "float[] factors, int[] numbers) -> (Tensor, Tensor)",
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    table: Tensor | None,
    factors: list[float],
    numbers: list[int],
) -> tuple[Tensor, Tensor]:
    run = attention_varlen.forward if numbers[2] else attention_tiles.forward
    out, lse = run(query, key, value, _MASKS[numbers[0]], _rule(factors, numbers[1]))
    return with_sinks(out, lse, sinks)


@_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    table: Tensor | None,
    factors: list[float],
    numbers: list[int],
) -> tuple[Tensor, Tensor]:
    b, n, s, _ = query.shape
    kind = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(b, s, n, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(b, n, s, dtype=kind)


def _rule(factors: list[float], seed: int) -> ScoreRule:
    scale, softcap, share = factors
    return ScoreRule(scale=scale, softcap=softcap, share=share, seed=seed)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, factors, numbers = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mask, ctx.rule = _MASKS[numbers[0]], _rule(factors, numbers[1])
    ctx.is_varlen = bool(numbers[2])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, sinks, _, out, lse = ctx.saved_tensors
    run = attention_varlen.backward if ctx.is_varlen else attention_tiles.backward
    with torch.no_grad():
        *grads, d_table = run(grad, (query, key, value), (out, lse), ctx.mask, ctx.rule)
        d_sinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
    return *grads, d_sinks, d_table, None, None


_attention.register_autograd(_backward, setup_context=_keep)

OPERATION = torch.ops.megtool.attention.default
"""The operation that computes attention by tiles, or by kernels of sequences without padding."""
