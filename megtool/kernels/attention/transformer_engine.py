"""Attention by Transformer Engine's `DotProductAttention`: of whole rows, and within segments.

Held against the sources of Transformer Engine 2.20
(`pytorch/attention/dot_product_attention/dot_product_attention.py`). It chooses among cuDNN's and
flash-attn's kernels and its own of torch's operations, which stores scores where no other is there
(`NVTE_FUSED_ATTN`, `NVTE_FLASH_ATTN`, `NVTE_UNFUSED_ATTN`). Scale, groups of heads, sizes of values
other than of keys, causal masks, windows, rows without padding and, in whole rows, sinks are its
own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from megtool.kernels import launch
from megtool.kernels.attention.mask import Mask, Segments
from megtool.kernels.attention.tiles import ScoreRule
from megtool.kernels.transformer_engine import library as transformer_engine
from megtool.kernels.transformer_engine.linear import outside_region

MOST_SIZE = 256
"""Of a head."""


def refuse(
    dtype: torch.dtype,
    head_sizes: tuple[int, ...],
    *,
    has_softcap: bool = False,
    has_dropout: bool = False,
    has_bias: bool = False,
    has_window_sinks: bool = False,
) -> str:
    """Why attention of a model is left to our own kernels; empty if it is not.

    Its soft caps need flash-attn, its sinks within segments a cuDNN that releases do not bring, and
    its dropout has a generator of its own, which leaves out other weights in a resumed run.
    """
    reasons = (
        (dtype not in (torch.bfloat16, torch.float16), "it has no kernels for float32"),
        (max(head_sizes) > MOST_SIZE, f"heads of more than {MOST_SIZE}"),
        (has_softcap, "a soft cap"),
        (has_window_sinks, "sinks in a window"),
        (has_bias, "biases of scores"),
        (has_dropout, "dropout of weights, which a seed decides"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def is_able(
    states: tuple[Tensor, Tensor, Tensor], mask: Mask, rule: ScoreRule, *, has_sinks: bool
) -> bool:
    """Whether it computes attention of these queries, keys and values: of all tokens of rows to
    each other, without padding."""
    query, key, value = states
    if query.device.type != "cuda":
        return False
    if mask.segments is not None and mask.segments.waits and launch.is_for_graph():
        return False  # where runs begin would be asked of the device
    is_whole = query.shape[2] == key.shape[2] > 1
    if has_sinks and not (mask.is_plain and mask.is_causal):
        return False
    return (
        is_whole
        and (mask.is_plain or mask.segments is not None)
        and not refuse(
            query.dtype,
            (query.shape[-1], value.shape[-1]),
            has_softcap=bool(rule.softcap),
            has_dropout=bool(rule.share),
            has_bias=mask.bias is not None,
        )
    )


def attention(
    query_BNSD: Tensor,
    key_BKSD: Tensor,
    value_BKSE: Tensor,
    mask: Mask,
    scale: float,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """The output, [B, S, N, E], where `is_able`."""
    states = query_BNSD, key_BKSD, value_BKSE
    with outside_region():
        if mask.segments is not None:
            return _within(states, mask.segments, scale)
        return _of_rows(states, mask, scale, sinks_N)


def _of_rows(
    states: tuple[Tensor, Tensor, Tensor], mask: Mask, scale: float, sinks_N: Tensor | None
) -> Tensor:
    b, n, s, _ = states[0].shape
    module = _of(states, scale, has_sinks=sinks_N is not None)
    if sinks_N is not None:  # lent for this call, in place of its own parameter
        module._parameters.pop("softmax_offset", None)
        module.softmax_offset = sinks_N
    out_BSC: Tensor = module(
        *(x.transpose(1, 2).contiguous() for x in states),
        qkv_format="bshd",
        attn_mask_type="causal" if mask.is_causal else "no_mask",
        window_size=(-1, 0) if mask.is_causal else (-1, -1),
    )
    return out_BSC.view(b, s, n, -1)


def _within(states: tuple[Tensor, Tensor, Tensor], segments: Segments, scale: float) -> Tensor:
    """Within runs of tokens, of which all rows' are one after the other (THD)."""
    b, n, s, _ = states[0].shape
    offsets = segments.offsets(b, states[0].device)
    out_TC: Tensor = _of(states, scale)(
        *(x.transpose(1, 2).flatten(0, 1).contiguous() for x in states),
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=s,
        max_seqlen_kv=s,
        attn_mask_type="padding_causal" if segments.window[1] == 0 else "padding",
        window_size=segments.window,
    )
    return out_TC.view(b, s, n, -1)


def _of(states: tuple[Tensor, Tensor, Tensor], scale: float, *, has_sinks: bool = False) -> Any:
    query, key, value = states
    sizes = query.shape[-1], value.shape[-1]
    return _module(query.shape[1], key.shape[1], sizes, scale, has_sinks)


@cache
def _module(heads: int, groups: int, sizes: tuple[int, int], scale: float, has_sinks: bool) -> Any:
    """Transformer Engine's attention, without parameters of its own."""
    return transformer_engine.load().pytorch.DotProductAttention(
        num_attention_heads=heads,
        kv_channels=sizes,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        softmax_scale=scale,
        softmax_type="learnable" if has_sinks else "vanilla",
    )
