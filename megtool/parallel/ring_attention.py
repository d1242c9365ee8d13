"""Attention of a rank's tokens to those of all ranks, whose keys and values go round in a ring.

Each rank has two chunks of every row (`context_parallel`), and keys and values of one other rank at
a time: what they add to its output is merged by the log-sum-exp of scores. The backward pass sends
them round again, with the sums of their gradients. Source: Liu et al., 2023, "Ring Attention with
Blockwise Transformers"; chunks and their order are Megatron-Core's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megtool.kernels.attention.dot_product import (
    attention_part,
    attention_part_gradients,
    sinks_gradient,
    with_sinks,
)
from megtool.kernels.attention.mask import AttentionSizes, Mask
from megtool.kernels.attention.tiles import ScoreRule, merge
from megtool.parallel.collectives import start_shift
from megtool.parallel.process_groups import Group

_ODD = 0x5851F42D4C957F2D


def ring_attention(
    states: tuple[Tensor, Tensor, Tensor],
    stretches: Sequence[tuple[int, Mask]],
    rules: Sequence[ScoreRule],
    group: Group,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """The output for this rank's queries, [B, N, S / ranks, E].

    `states` are queries, keys and values of this rank's tokens, [B, heads, S / ranks, size]. For
    each of its two chunks there is the number of keys up to the chunk's end with the mask of these,
    and a rule, by which dropout differs from that of the other chunk.
    """
    ring = _Ring(group, tuple(stretches), tuple(rules))
    out: Tensor = _RingAttention.apply(*states, sinks_N, ring)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Ring:
    group: Group
    stretches: tuple[tuple[int, Mask], ...]
    rules: tuple[ScoreRule, ...]

    def blocks(
        self, step: int, size: int, device: torch.device
    ) -> Iterator[tuple[slice, slice, Mask, ScoreRule]]:
        """What is computed with the keys that a rank has in a step: its queries, the keys, what
        queries see of them, and how scores are made. Chunks have `size` tokens."""
        n = self.group.size
        source = (self.group.rank - step) % n
        for half, chunk in enumerate((source, 2 * n - 1 - source)):
            keys = slice(half * size, (half + 1) * size)
            for number, (num_keys, mask) in enumerate(self.stretches):
                if chunk * size >= num_keys:
                    continue  # behind all queries
                sizes = AttentionSizes(size, num_keys, device)
                part = mask.among(chunk * size, (chunk + 1) * size, sizes)
                rule = self.rules[number]
                if rule.share:
                    rule = replace(rule, seed=(rule.seed + _ODD * (chunk + 1)) % (1 << 62))
                yield slice(number * size, (number + 1) * size), keys, part, rule


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ring: _Ring
    ) -> Tensor:
        size, n = query.shape[2] // 2, ring.group.size
        results: dict[int, tuple[Tensor, Tensor]] = {}
        moving = _packed(key, value)
        for step in range(n):
            coming = None if step == n - 1 else start_shift(moving, ring.group)
            k, v = _unpacked(moving, key, value)
            for rows, keys, mask, rule in ring.blocks(step, size, query.device):
                part = attention_part(query[:, :, rows], k[:, :, keys], v[:, :, keys], mask, rule)
                before = results.get(rows.start)
                results[rows.start] = part if before is None else merge(*before, *part)
            if coming is not None:
                moving = _arrived(*coming)
        parts = [results[start] for start in sorted(results)]
        lse = torch.cat([part[1] for part in parts], 2)
        out = torch.cat([part[0] for part in parts], 2)
        out, lse = with_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        grad, size, n = grads[0], query.shape[2] // 2, ring.group.size
        kind = lse.dtype
        d_query = torch.zeros_like(query, dtype=kind)
        moving = _packed(key, value)
        sums = torch.zeros_like(moving, dtype=kind)
        for step in range(n):
            coming = None if step == n - 1 else start_shift(moving, ring.group)
            k, v = _unpacked(moving, key, value)
            d_key, d_value = _unpacked(sums, key, value)
            for rows, keys, mask, rule in ring.blocks(step, size, query.device):
                given = query[:, :, rows], k[:, :, keys], v[:, :, keys]
                whole = out[:, :, rows], lse[:, :, rows]
                parts = attention_part_gradients(grad[:, :, rows], given, whole, mask, rule)
                d_query[:, :, rows] += parts[0]
                d_key[:, :, keys] += parts[1]
                d_value[:, :, keys] += parts[2]
            # After as many steps as ranks the sums are at home.
            sums = _arrived(*start_shift(sums, ring.group))
            if coming is not None:
                moving = _arrived(*coming)
        d_key, d_value = _unpacked(sums, key, value)
        d_sinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, None


def _packed(*tensors: Tensor) -> Tensor:
    """Tensors in one, to be sent at once."""
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpacked(flat: Tensor, *shapes: Tensor) -> list[Tensor]:
    """The parts of it, as views in the shapes of others."""
    parts = torch.split(flat, [x.numel() for x in shapes])
    return [part.view(x.shape) for part, x in zip(parts, shapes, strict=True)]


def _arrived(coming: Tensor, works: list[Any]) -> Tensor:
    for work in works:
        work.wait()
    return coming
