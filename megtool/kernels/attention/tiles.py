"""Attention by tiles of some queries and keys, with a running log-sum-exp: forward and backward.

Scores exist of one tile at a time, and are computed again in the backward pass, which needs the
output and the log-sum-exp of each query alone. So both take memory for queries and keys, and none
for their pairs. On a CPU a tile is torch's fused kernel, where that has the operation.

Sources: Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax"; Dao et al.,
2022, "FlashAttention".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

from megtool.kernels.attention.mask import AttentionSizes, BucketBias, Mask
from megtool.kernels.elementwise.dropout_add import drop

NUM_SCORES = 1 << 20
"""Scores of all rows and heads that are in memory at a time."""
_LEAST_SIDE, _MOST_ROWS, _MOST_KEYS = 128, 512, 4096
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """How scores are made of products: `scale * q k`, bent by `softcap` (0: not at all), and which
    weights dropout leaves out (`share` of them, by `seed`)."""

    scale: float
    softcap: float = 0.0
    share: float = 0.0
    seed: int = 0


def forward(
    query_BNSD: Tensor, key_BKLD: Tensor, value_BKLE: Tensor, mask: Mask, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """The output, [B, N, S, E] in the queries' dtype (E: size of values), and the log-sum-exp of
    each query's scores, [B, N, S] in fp32 or wider: minus infinity and zeros where there are no
    keys."""
    sizes = AttentionSizes.of(query_BNSD, key_BKLD)
    is_fused = _is_fused(query_BNSD, mask, rule)
    run = _fused_forward if is_fused else _forward
    kind = torch.promote_types(query_BNSD.dtype, torch.float32)
    b, n, s, _ = query_BNSD.shape
    out_BSNE = query_BNSD.new_empty(b, s, n, value_BKLE.shape[-1])
    lse_BNS = query_BNSD.new_empty(b, n, s, dtype=kind)
    for rows, step in _rows(query_BNSD, mask, sizes, is_fused=is_fused):
        merged: tuple[Tensor, Tensor] | None = None
        query = query_BNSD[:, :, rows]
        for keys, seen in mask.tiles(rows, sizes, step):
            tile = _Tile(rows, keys, seen, mask, sizes)
            part = run(query, key_BKLD[:, :, keys], value_BKLE[:, :, keys], tile, rule)
            merged = part if merged is None else merge(*merged, *part)
        target = out_BSNE.transpose(1, 2)[:, :, rows]
        if merged is None:
            target.zero_()
            lse_BNS[:, :, rows] = float("-inf")
        else:
            target.copy_(merged[0])
            lse_BNS[:, :, rows] = merged[1]
    return out_BSNE.transpose(1, 2), lse_BNS


def backward(
    grad_BNSE: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    mask: Mask,
    rule: ScoreRule,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of queries, keys and values (`states`), and of the table of the mask's bias.

    `results` are the output and the log-sum-exp of all of a query's keys, also where those here are
    only a part of them.
    """
    query_BNSD, key_BKLD, value_BKLE = states
    out_BNSE, lse_BNS = results
    sizes = AttentionSizes.of(query_BNSD, key_BKLD)
    is_fused = _is_fused(query_BNSD, mask, rule)
    kind = torch.promote_types(query_BNSD.dtype, torch.float32)
    # Of a query without keys, so that no weight is infinite.
    lse_BNS = torch.where(lse_BNS.isinf(), 0.0, lse_BNS)
    d_query, d_key, d_value = (torch.zeros_like(x, dtype=kind) for x in states)
    bias = mask.bias if isinstance(mask.bias, BucketBias) else None
    d_table = None if bias is None else torch.zeros_like(bias.table, dtype=kind)
    for rows, step in _rows(query_BNSD, mask, sizes, is_fused=is_fused):
        grad, out, lse = grad_BNSE[:, :, rows], out_BNSE[:, :, rows], lse_BNS[:, :, rows]
        query = query_BNSD[:, :, rows]
        delta = None if is_fused else (grad.to(kind) * out.to(kind)).sum(-1, keepdim=True)
        for keys, seen in mask.tiles(rows, sizes, step):
            key, value = key_BKLD[:, :, keys], value_BKLE[:, :, keys]
            tile = _Tile(rows, keys, seen, mask, sizes)
            if delta is None:
                parts = _fused_backward(grad, (query, key, value), (out, lse), tile, rule)
            else:
                *parts, d_scores = _backward(grad, (query, key, value), (delta, lse), tile, rule)
                if bias is not None and d_table is not None:
                    bias.add_gradient(d_table, d_scores, rows, keys)
            d_query[:, :, rows] += parts[0]
            d_key[:, :, keys] += parts[1]
            d_value[:, :, keys] += parts[2]
    of_table = None if bias is None or d_table is None else d_table.to(bias.table.dtype)
    return (
        d_query.to(query_BNSD.dtype),
        d_key.to(key_BKLD.dtype),
        d_value.to(value_BKLE.dtype),
        of_table,
    )


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both, from the outputs and log-sum-exps of each, in their dtype of
    log-sum-exps."""
    lse = torch.logaddexp(lse_a, lse_b)
    whole = torch.where(lse.isinf(), 0.0, lse)
    shares = [(part - whole).exp().unsqueeze(-1) for part in (lse_a, lse_b)]
    return out_a.to(lse.dtype) * shares[0] + out_b * shares[1], lse


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """Some queries, some keys, and which may be attended to (None: all)."""

    rows: slice
    keys: slice
    seen: Tensor | None
    mask: Mask
    sizes: AttentionSizes

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores."""
        bias = self.mask.bias
        return None if bias is None else bias.part(self.rows, self.keys).to(dtype)

    def dropout_factors(self, weights: Tensor, rule: ScoreRule) -> Tensor | None:
        """What dropout multiplies weights by."""
        if not rule.share:
            return None
        place = self.rows.start * self.sizes.num_keys + self.keys.start
        seed = (rule.seed + 0x9E3779B97F4A7C15 * place) % (1 << 62)
        return drop(torch.ones_like(weights), rule.share, seed)


def _rows(
    query_BNSD: Tensor, mask: Mask, sizes: AttentionSizes, *, is_fused: bool
) -> Iterator[tuple[slice, int]]:
    """Queries and the number of keys that are computed with each other."""
    b, n, s, _ = query_BNSD.shape
    # The fused kernel makes no scores; what is added to them is made for it.
    each = b if is_fused and mask.bias is None else b * n
    room = max(1, NUM_SCORES // each)
    side = _LEAST_SIDE if NUM_SCORES >= _LEAST_SIDE**2 else 1
    num_rows = min(s, _MOST_ROWS, max(side, int(room**0.5)))
    step = min(_MOST_KEYS, max(side, room // num_rows))
    for start in range(0, s, num_rows):
        yield slice(start, min(start + num_rows, s)), step


def _is_fused(query_BNSD: Tensor, mask: Mask, rule: ScoreRule) -> bool:
    """Whether torch's fused kernel of the CPU computes a tile."""
    learns = mask.bias is not None and mask.bias.table is not None
    return (
        query_BNSD.device.type == "cpu"
        and query_BNSD.dtype in _FLOATS
        and not (rule.softcap or rule.share or learns)
    )


def _fused_mask(tile: _Tile, dtype: torch.dtype) -> Tensor | None:
    added = tile.added(dtype)
    if tile.seen is None:
        return added
    zero = torch.zeros((), dtype=dtype) if added is None else added
    whole = torch.where(tile.seen, zero, float("-inf"))
    return whole.expand(-1, -1, tile.rows.stop - tile.rows.start, -1)


def equal_sizes(*states: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Heads filled up with zeros to the size of the largest, rounded up to a multiple, which
    changes no product."""
    size = max(x.shape[-1] for x in states)
    size += -size % multiple
    return tuple(x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in states)


@cache
def _shares_heads() -> bool:
    """Whether torch's kernel of a CPU lets heads share keys: that of 2.6 reads past their end."""
    return Version(torch.__version__) >= Version("2.9")


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values as the kernel takes them for so many heads of queries."""
    shares = x.shape[1] == heads or _shares_heads()
    return x if shares else x.repeat_interleave(heads // x.shape[1], 1)


def _fused_forward(
    query: Tensor, key: Tensor, value: Tensor, tile: _Tile, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    added = _fused_mask(tile, query.dtype)
    states = (query, *(_for_heads(x, query.shape[1]) for x in (key, value)))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *equal_sizes(*states), 0.0, False, attn_mask=added, scale=rule.scale
    )
    if tile.seen is not None:
        lse = lse.masked_fill(~tile.seen.any(-1), float("-inf"))
    return out[..., : value.shape[-1]], lse


def _fused_backward(
    grad: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    tile: _Tile,
    rule: ScoreRule,
) -> list[Tensor]:
    added = _fused_mask(tile, states[0].dtype)
    wide = [_for_heads(x, states[0].shape[1]) for x in states]
    grad, out, *padded = equal_sizes(grad, results[0], *wide)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *padded, out, results[1], 0.0, False, attn_mask=added, scale=rule.scale
    )
    shared = (
        g if g.shape[1] == x.shape[1] else g.unflatten(1, (x.shape[1], -1)).sum(2)
        for g, x in zip(grads, states, strict=True)
    )
    return [g[..., : x.shape[-1]] for g, x in zip(shared, states, strict=True)]


def _scores(
    query: Tensor, key: Tensor, tile: _Tile, rule: ScoreRule
) -> tuple[Tensor, Tensor | None]:
    """Scores in fp32 or wider, [B, N, R, C], and the tanh that bent them."""
    kind = torch.promote_types(query.dtype, torch.float32)
    b, n, r, d = query.shape
    k, c = key.shape[1:3]
    # The queries of one group are so many more rows before its keys.
    products = query.reshape(b, k, n // k * r, d) @ key.transpose(-1, -2)
    scores, bent = products.view(b, n, r, c).to(kind), None
    if rule.softcap:
        bent = torch.tanh(scores * (rule.scale / rule.softcap))
        scores = bent * rule.softcap
    else:
        scores = scores * rule.scale
    if (added := tile.added(kind)) is not None:
        scores = scores + added
    if tile.seen is not None:
        scores = scores.masked_fill(~tile.seen, float("-inf"))
    return scores, bent


def _forward(
    query: Tensor, key: Tensor, value: Tensor, tile: _Tile, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(query, key, tile, rule)
    b, n, r, c = scores.shape
    k, e = value.shape[1], value.shape[3]
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)
    weights = (scores - top).exp_()
    total = weights.sum(-1, keepdim=True)
    if (factors := tile.dropout_factors(weights, rule)) is not None:
        weights = weights * factors
    grouped = weights.to(value.dtype).view(b, k, n // k * r, c) @ value
    out = grouped.view(b, n, r, e).to(scores.dtype) / torch.where(total == 0, 1.0, total)
    return out, (top + total.log()).squeeze(-1)


def _backward(
    grad: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    tile: _Tile,
    rule: ScoreRule,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the tile's queries, keys and values, and of what was added to scores."""
    query, key, value = states
    delta, lse = results
    scores, bent = _scores(query, key, tile, rule)
    b, n, r, c = scores.shape
    k = key.shape[1]
    rows = (b, k, n // k * r)
    weights = (scores - lse.unsqueeze(-1)).exp_()
    grad_rows = grad.reshape(*rows, -1).to(value.dtype)
    d_weights = (grad_rows @ value.transpose(-1, -2)).view(b, n, r, c).to(scores.dtype)
    used = weights
    if (factors := tile.dropout_factors(weights, rule)) is not None:
        used, d_weights = weights * factors, d_weights * factors
    d_value = used.to(value.dtype).view(*rows, c).transpose(-1, -2) @ grad_rows
    d_scores = weights * (d_weights - delta)
    d_products = d_scores * rule.scale
    if bent is not None:
        d_products = d_products * (1 - bent.square())
    d_products = d_products.to(query.dtype).view(*rows, c)
    d_query = (d_products @ key).view(query.shape)
    d_key = d_products.transpose(-1, -2) @ query.reshape(*rows, -1)
    return d_query, d_key, d_value, d_scores
