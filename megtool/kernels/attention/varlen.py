"""Attention of rows without padding (THD): torch's varlen kernels.

Documents, chunks and windows are runs of tokens one after the other, which kernels are told by
where they begin. They need a GPU and 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megtool.kernels.attention.mask import Mask, Segments
from megtool.kernels.attention.tiles import ScoreRule, equal_sizes

_MOST_SIZE = 256  # of a head
_CAUSAL = [-1, 0]


def is_able(states: tuple[Tensor, Tensor, Tensor], segments: Segments | None) -> bool:
    """Whether the kernels compute attention of whole rows within segments."""
    return (
        segments is not None
        and states[0].dtype in (torch.bfloat16, torch.float16)
        and max(x.shape[-1] for x in states) <= _MOST_SIZE
    )


def forward(
    query_BNSD: Tensor, key_BKLD: Tensor, value_BKLE: Tensor, mask: Mask, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """See `tiles.forward`; the mask has segments."""
    segments, (b, n, s, _) = _segments(mask), query_BNSD.shape
    offsets, window = segments.offsets(b, query_BNSD.device), list(segments.window)
    states = (_tokens(x) for x in equal_sizes(query_BNSD, key_BKLD, value_BKLE))
    out_TNE, lse_NT, *_ = torch.ops.torch_attn._varlen_attn(
        *states, offsets, offsets, s, s, window == _CAUSAL, rule.scale, window, True
    )
    out_BSNE = out_TNE.view(b, s, n, -1)[..., : value_BKLE.shape[-1]]
    return out_BSNE.transpose(1, 2), lse_NT.view(n, b, s).transpose(0, 1)


def backward(
    grad_BNSE: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    mask: Mask,
    rule: ScoreRule,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """See `tiles.backward`.

    Weights are those that the log-sum-exp gives, so that sinks take their part of them.
    """
    segments, (b, n, s, _) = _segments(mask), states[0].shape
    offsets, window = segments.offsets(b, grad_BNSE.device), list(segments.window)
    grad, out, *padded = (_tokens(x) for x in equal_sizes(grad_BNSE, results[0], *states))
    lse_NT = results[1].transpose(0, 1).reshape(n, b * s).contiguous()
    random = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # there is no dropout
    grads = torch.ops.torch_attn._varlen_attn_backward(
        grad,
        *padded,
        out,
        lse_NT,
        offsets,
        offsets,
        s,
        s,
        window == _CAUSAL,
        random,
        rule.scale,
        window,
    )
    d_query, d_key, d_value = (
        g.view(b, s, x.shape[1], -1)[..., : x.shape[-1]].transpose(1, 2)
        for g, x in zip(grads, states, strict=True)
    )
    return d_query, d_key, d_value, None


def _segments(mask: Mask) -> Segments:
    if mask.segments is None:
        raise ValueError("the mask has no segments")
    return mask.segments


def _tokens(x_BNSD: Tensor) -> Tensor:
    """All rows' tokens one after the other, [T, N, D]."""
    return x_BNSD.transpose(1, 2).flatten(0, 1).contiguous()
