"""Attention by the packages flash-attn (2) and flash-attn-3, where one was asked for by name.

`auto` takes torch's own attention, which has flash-attention 2 (and cuDNN's) inside. Held against
the sources of flash-attn 2.8.3 (`flash_attn/flash_attn_interface.py`) and of flash-attn-3
(`hopper/flash_attn_interface.py`): their public functions, which have gradients. Causal masks are
aligned to the last key, windows count keys to the left and to the right, -1 for all, and a soft cap
bends scores after their scale.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megtool.kernels import launch, peers
from megtool.kernels.attention.mask import Mask
from megtool.kernels.attention.tiles import ScoreRule, equal_sizes
from megtool.kernels.dispatch import requested_implementation

Name = Literal["flash-attn", "flash-attn-3"]
_MOST_SIZE = 256  # of a head
_FEW_QUERIES = 8  # tokens after a cache are one query or a few: torch computes those


def chosen() -> Name | None:
    """Return which of the packages is asked for; None if neither is."""
    name = requested_implementation()
    return name if name in ("flash-attn", "flash-attn-3") else None


def is_able(
    states: tuple[Tensor, Tensor, Tensor], mask: Mask, rule: ScoreRule, *, has_sinks: bool
) -> bool:
    """Return whether their kernels compute attention: in 16 bits, of whole rows, or within runs of
    tokens, without biases, sinks and dropout."""
    query = states[0]
    if query.dtype not in (torch.bfloat16, torch.float16) or query.shape[2] <= _FEW_QUERIES:
        return False
    if has_sinks or rule.share or mask.bias is not None:
        return False
    if max(x.shape[-1] for x in states) > _MOST_SIZE:
        return False
    if mask.is_plain:
        return True
    segments = mask.segments
    if segments is None or query.shape[2] != states[1].shape[2]:
        return False
    # Where runs begin would be asked of the device.
    return not (segments.waits and launch.is_for_graph())


def attention(
    name: Name,
    query_BNSD: Tensor,
    key_BKLD: Tensor,
    value_BKLE: Tensor,
    mask: Mask,
    rule: ScoreRule,
) -> Tensor:
    """Return the output of every query: [B, S, N, E]."""
    b, n, s, _ = query_BNSD.shape
    states = equal_sizes(query_BNSD, key_BKLD, value_BKLE)
    query, key, value = (x.transpose(1, 2).contiguous() for x in states)
    options = {"softmax_scale": rule.scale, "softcap": rule.softcap}
    if mask.is_plain or mask.segments is None:
        run = peers.call(name, "flash_attn_func")
        out = run(query, key, value, causal=mask.is_causal, window_size=(-1, -1), **options)
    else:
        offsets = mask.segments.offsets(b, query.device)
        window = tuple(mask.segments.window)
        out = peers.call(name, "flash_attn_varlen_func")(
            *(x.flatten(0, 1) for x in (query, key, value)),
            offsets,
            offsets,
            s,
            s,
            causal=window == (-1, 0),
            window_size=window,
            **options,
        )
    # flash-attn-3 returned the log-sum-exp beside it in its first betas.
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result.reshape(b, s, n, -1)[..., : value_BKLE.shape[-1]]
