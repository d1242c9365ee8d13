"""Attention by torch's flex_attention, compiled: soft caps, slopes and biases of scores on a GPU.

Which blocks of queries and keys are computed follows from the mask's intervals, block by block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from megtool.kernels.attention.mask import AttentionSizes, BucketBias, Mask, Slopes
from megtool.kernels.attention.tiles import ScoreRule

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128
_LEAST_SIZE = 16  # of a head

Call = Callable[..., Any]
Kind = tuple[object, ...]

_numbers = itertools.count()


def is_able(states: tuple[Tensor, Tensor, Tensor], mask: Mask, rule: ScoreRule) -> bool:
    """Whether it computes attention: no dropout, no lists of keys, no second set of keys."""
    return (
        not rule.share
        and mask.chosen_BSC is None
        and mask.rest is None
        and (mask.valid_BL is None or mask.first_BS is not None)
        and min(x.shape[-1] for x in states) >= _LEAST_SIZE
        and states[0].dtype != torch.float64
    )


def attention(
    query_BNSD: Tensor,
    key_BKLD: Tensor,
    value_BKLE: Tensor,
    mask: Mask,
    rule: ScoreRule,
    sinks_N: Tensor | None = None,
    *,
    run: Call | None = None,
) -> Tensor:
    """The output, [B, N, S, E]; `run` stands for the compiled `flex_attention`."""
    sizes = AttentionSizes.of(query_BNSD, key_BKLD)
    out, more = (compiled(_kind(query_BNSD, mask, rule)) if run is None else run)(
        query_BNSD,
        key_BKLD,
        value_BKLE,
        score_mod=_score_rule(mask, rule),
        block_mask=block_mask(mask, sizes),
        scale=rule.scale,
        enable_gqa=query_BNSD.shape[1] != key_BKLD.shape[1],
        **_with_lse(),
    )
    lse_BNS = cast(Tensor, getattr(more, "lse", more))
    if sinks_N is not None:
        # A sink takes its part of the weights afterwards; the log-sum-exp has a gradient.
        out = (out * torch.sigmoid(lse_BNS - sinks_N[:, None]).unsqueeze(-1)).to(out.dtype)
    return cast(Tensor, out)


@cache
def _with_lse() -> dict[str, Any]:
    """The argument that asks for the log-sum-exp, which is another before torch 2.9."""
    from torch.nn.attention import flex_attention

    if hasattr(flex_attention, "AuxRequest"):
        return {"return_aux": flex_attention.AuxRequest(lse=True)}
    return {"return_lse": True}


@cache
def compiled(kind: Kind, backend: str | Call = "inductor") -> Call:
    """The kernel for rules of one kind, compiled at its first call.

    Lengths and numbers of rows are no constants of it, for prompts have many: torch compiles one
    function 8 times, then goes on without a compiler, which stores all scores. It counts by code
    object, so that each kind has one of its own.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def run(*args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    name = f"flex_attention_{next(_numbers)}"
    code = run.__code__.replace(co_name=name)
    own = FunctionType(code, run.__globals__, name, None, run.__closure__)
    return torch.compile(own, dynamic=True, backend=backend)


def _kind(query_BNSD: Tensor, mask: Mask, rule: ScoreRule) -> Kind:
    """What decides how a kernel is compiled, apart from lengths and numbers of rows above 1."""
    parts = (mask.first_BS, mask.valid_BL, mask.own_BS)
    few = tuple(None if x is None else len(x) > 1 for x in (query_BNSD, *parts))
    is_short = query_BNSD.shape[2] <= _BLOCK
    return *few, is_short, type(mask.bias), mask.is_causal, rule.softcap, query_BNSD.dtype


def block_mask(mask: Mask, sizes: AttentionSizes) -> BlockMask | None:
    """The blocks that are computed, in part or as a whole, from the intervals of queries."""
    from torch.nn.attention.flex_attention import BlockMask

    mask = mask.intervals(sizes)
    if mask.first_BS is None or mask.last_BS is None:
        return None
    first_BS, last_BS, valid_BL, own_BS = mask.first_BS, mask.last_BS, mask.valid_BL, mask.own_BS
    starts = torch.arange(-(-sizes.num_keys // _BLOCK), device=sizes.device) * _BLOCK
    stops = (starts + _BLOCK).clamp_max(sizes.num_keys)

    def ends(x_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest of each block of queries, [B, 1, blocks, 1]."""
        more = -x_BS.shape[1] % _BLOCK
        x_BS = torch.cat((x_BS, x_BS[:, -1:].expand(-1, more)), 1)
        blocks = x_BS.view(len(x_BS), 1, -1, 1, _BLOCK)
        return blocks.amin(-1), blocks.amax(-1)

    low_first, high_first = ends(first_BS)
    low_last, high_last = ends(last_BS)
    touched = (starts <= high_last) & (stops > low_first)
    whole = (starts >= high_first) & (stops - 1 <= low_last)
    if valid_BL is not None:
        whole = torch.zeros_like(whole)

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = b if len(first_BS) > 1 else b * 0
        seen = (k >= first_BS[row, q]) & (k <= last_BS[row, q])
        if valid_BL is not None and own_BS is not None:
            own_row = b if len(own_BS) > 1 else b * 0
            seen = seen & valid_BL[b if len(valid_BL) > 1 else b * 0, k] | (k == own_BS[own_row, q])
        return seen

    return BlockMask.from_kv_blocks(
        *_ordered(touched & ~whole),
        *_ordered(touched & whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=is_visible,
        seq_lengths=(sizes.num_queries, sizes.num_keys),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are marked, and their numbers, marked ones first."""
    order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32), order.to(torch.int32)


def _score_rule(mask: Mask, rule: ScoreRule) -> Callable[..., Tensor] | None:
    """How the kernel bends scores and what it adds to them."""
    bias, softcap = mask.bias, rule.softcap
    if bias is None and not softcap:
        return None

    def added(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor | float:
        if bias is None:
            return 0.0
        rows = b if len(bias.positions_BS) > 1 else b * 0
        key_rows = b if len(bias.key_positions_BL) > 1 else b * 0
        distance = bias.key_positions_BL[key_rows, k] - bias.positions_BS[rows, q]
        if isinstance(bias, BucketBias):
            return bias.table[bias.bucket(distance.to(torch.int64)), h]
        return cast(Slopes, bias).slopes_N[h] * distance

    def bent(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if softcap:
            score = torch.tanh(score / softcap) * softcap
        return score + added(b, h, q, k)

    return bent
