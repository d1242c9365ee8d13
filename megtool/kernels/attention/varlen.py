"""Attention of rows without padding (THD): torch's varlen kernels.

Documents, chunks and windows are runs of tokens one after the other, which kernels are told by
where they begin. The kernels are flash-attention's: they need 16 bits and a GPU of compute
capability 8.0 or later.

torch's public `torch.nn.attention.varlen.varlen_attn` has no gradient of the log-sum-exp and takes
none from outside, which sinks and parts of keys need. So its two operations are called themselves.
They are private: `refuse` compares their arguments with what is passed here, and where torch has
others, `flex` and `tiles` compute attention.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megtool.kernels.attention.mask import Mask, Segments
from megtool.kernels.attention.tiles import ScoreRule, equal_sizes

_MOST_SIZE, _SIZE_MULTIPLE = 256, 8  # of a head
_LEAST_CAPABILITY = (8, 0)
_CAUSAL = [-1, 0]
_RUNS = {"cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size"}
_ARGUMENTS = {
    "_varlen_attn": {"query", "key", "value", *_RUNS},
    "_varlen_attn_backward": {
        *("grad_out", "query", "key", "value", "out", "lse", "rng_state"),
        *_RUNS,
    },
}
_OPTIONAL = {"enable_gqa", "seqused_k", "block_table", "num_splits"}

_logger = logging.getLogger(__name__)


@cache
def refuse() -> str:
    """Return why the kernels of this torch are not used; empty if they are.

    torch 2.10 is the first that has them, without window and scale, and 2.11 the first with both.
    """
    try:
        import_module("torch.nn.attention.varlen")  # which registers the operations
    except ImportError:
        return _told(f"torch {torch.__version__} has no torch.nn.attention.varlen")
    for name, expected in _ARGUMENTS.items():
        operation = getattr(torch.ops.torch_attn, name, None)
        if operation is None:
            return _told(f"torch {torch.__version__} has no torch_attn::{name}")
        schema = operation.default._schema
        actual = {argument.name for argument in schema.arguments}
        missing, unknown = expected - actual, actual - expected - _OPTIONAL
        if missing or unknown or len(schema.returns) != 3:
            parts = ", ".join(sorted(missing | unknown)) or f"{len(schema.returns)} results"
            return _told(f"torch {torch.__version__} has another torch_attn::{name} ({parts})")
    return ""


def _told(reason: str) -> str:
    _logger.info("%s: flex_attention computes packed and windowed rows", reason)
    return reason


@cache
def _sharing() -> dict[str, Any]:
    """Arguments that let heads share keys; without such an argument the kernel does by itself."""
    arguments = torch.ops.torch_attn._varlen_attn.default._schema.arguments
    return {"enable_gqa": True} if any(x.name == "enable_gqa" for x in arguments) else {}


def is_able(states: tuple[Tensor, Tensor, Tensor], segments: Segments | None) -> bool:
    """Return whether the kernels compute attention of whole rows within segments."""
    query = states[0]
    return (
        segments is not None
        and query.dtype in (torch.bfloat16, torch.float16)
        and max(x.shape[-1] for x in states) <= _MOST_SIZE
        and (not query.is_cuda or _capability(query.device) >= _LEAST_CAPABILITY)
        and not refuse()
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def segments_of(mask: Mask, num_queries: int, num_keys: int) -> Segments | None:
    """Return the mask as runs of tokens, where it can be said so: a plain mask makes a run of each
    row."""
    if mask.segments is not None or not mask.is_plain:
        return mask.segments
    if mask.is_causal and num_queries > num_keys:
        return None  # of queries without keys the kernel's log-sum-exp is plus infinity
    return Segments(num_queries, (-1, 0 if mask.is_causal else -1), num_keys=num_keys)


def forward(
    query_BNSD: Tensor, key_BKLD: Tensor, value_BKLE: Tensor, mask: Mask, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Compute what `tiles.forward` does, for a mask that is plain or has segments."""
    b, n, s, _ = query_BNSD.shape
    runs = _runs(query_BNSD, key_BKLD, mask, rule)
    states = _equal(query_BNSD, key_BKLD, value_BKLE)
    query, key, value = (_tokens(x) for x in states)
    out_TNE, lse_NT, *_ = torch.ops.torch_attn._varlen_attn(
        query=query, key=key, value=value, **runs, **_sharing()
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
    """Compute what `tiles.backward` does, for a mask that is plain or has segments.

    Weights are those that the log-sum-exp gives, so that sinks take their part of them.
    """
    b, n, s, _ = states[0].shape
    runs = _runs(states[0], states[1], mask, rule)
    grad, out, *padded = (_tokens(x) for x in _equal(grad_BNSE, results[0], *states))
    lse_NT = results[1].transpose(0, 1).reshape(n, b * s).contiguous()
    random = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # there is no dropout
    grads = torch.ops.torch_attn._varlen_attn_backward(
        grad_out=grad,
        query=padded[0],
        key=padded[1],
        value=padded[2],
        out=out,
        lse=lse_NT,
        rng_state=random,
        **runs,
    )
    d_query, d_key, d_value = (
        g.view(b, x.shape[2], x.shape[1], -1)[..., : x.shape[-1]].transpose(1, 2)
        for g, x in zip(grads, states, strict=True)
    )
    return d_query, d_key, d_value, None


def _runs(query_BNSD: Tensor, key_BKLD: Tensor, mask: Mask, rule: ScoreRule) -> dict[str, Any]:
    """Arguments of both operations: where runs begin, and what their queries see.

    Of a run with more keys than queries the last query's own key is the last one.
    """
    b, _, s, _ = query_BNSD.shape
    keys = key_BKLD.shape[2]
    segments = segments_of(mask, s, keys)
    if segments is None:
        raise ValueError("the mask has no segments")
    window, device = list(segments.window), query_BNSD.device
    offsets = segments.offsets(b, device)
    return {
        "cu_seq_q": offsets,
        "cu_seq_k": offsets if keys == s else segments.key_offsets(b, device),
        "max_q": s,
        "max_k": keys,
        "is_causal": window == _CAUSAL,
        "scale": rule.scale,
        "window_size": window,
    }


def _equal(*states: Tensor) -> tuple[Tensor, ...]:
    """Heads filled up with zeros to one size that the kernels take."""
    return equal_sizes(*states, multiple=_SIZE_MULTIPLE)


def _tokens(x_BNSD: Tensor) -> Tensor:
    """All rows' tokens one after the other, [T, N, D]."""
    return x_BNSD.transpose(1, 2).flatten(0, 1).contiguous()
