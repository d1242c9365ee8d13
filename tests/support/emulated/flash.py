"""flash-attention's operations of torch on a CPU: what they compute, and what they refuse.

`register` gives them to a dispatch key that a CPU build of torch leaves without them. What is
refused is what torch 2.13 refuses (`native/transformers/cuda/flash_attn/flash_api.cpp` of ATen).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAMES = ("_flash_attention_forward", "_flash_attention_backward")
Call = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs of tokens: where queries and keys of each begin, and what queries see."""

    queries: Tensor
    keys: Tensor
    is_causal: bool
    left: int
    right: int
    scale: float

    def spans(self) -> list[tuple[slice, slice]]:
        """The queries and keys of every run that has queries."""
        q, k = self.queries.tolist(), self.keys.tolist()
        pairs = zip(q, q[1:], k, k[1:], strict=False)
        return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs if b > a]

    def visible(self, num_queries: int, num_keys: int) -> Tensor:
        """Whether queries see keys; the last query's own key is the last one."""
        own = torch.arange(num_queries)[:, None] + (num_keys - num_queries)
        key = torch.arange(num_keys)
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
        if self.left >= 0:
            seen &= key >= own - self.left
        right = 0 if self.is_causal else self.right
        if right >= 0:
            seen &= key <= own + right
        return seen


def check(
    states: tuple[Tensor, ...], runs: Runs, most: tuple[int, int], *, is_narrow: bool = True
) -> None:
    """Refuse what flash-attention's kernels refuse."""
    query, key, value = states[:3]
    for x in states:
        assert x.dim() == 3
        assert x.stride(-1) == 1, "the last dimension has to be contiguous"
        assert x.dtype == query.dtype
        assert not is_narrow or x.dtype in (torch.float16, torch.bfloat16), f"it takes no {x.dtype}"
        assert x.shape[-1] == query.shape[-1], "heads of one size"
    assert query.shape[-1] % 8 == 0, "head_size must be a multiple of 8"
    assert query.shape[-1] <= 256, "heads of at most 256"
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == 0
    for offsets, x, longest in ((runs.queries, query, most[0]), (runs.keys, key, most[1])):
        assert offsets.dtype == torch.int32
        assert offsets.dim() == 1
        assert offsets.is_contiguous()
        sizes = offsets.diff()
        assert offsets[0] == 0
        assert offsets[-1] == len(x)
        assert 0 <= int(sizes.min()) <= int(sizes.max()) <= longest
    assert len(runs.queries) == len(runs.keys) > 1


def _grouped(x: Tensor, heads: int) -> Tensor:
    """A run's keys of every head, [N, L, D], in fp32 or wider."""
    x = x.transpose(0, 1).to(torch.promote_types(x.dtype, torch.float32))
    return x.repeat_interleave(heads // len(x), 0)


def forward(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """The output, [T, N, D], and the log-sum-exp, [N, T] in fp32 or wider."""
    kind = torch.promote_types(query.dtype, torch.float32)
    heads = query.shape[1]
    out, lse = torch.zeros_like(query), query.new_zeros(heads, len(query), dtype=kind)
    for rows, keys in runs.spans():
        q, k, v = (
            _grouped(query[rows], heads),
            _grouped(key[keys], heads),
            _grouped(value[keys], heads),
        )
        seen = runs.visible(q.shape[1], k.shape[1])
        scores = (q @ k.mT * runs.scale).masked_fill(~seen, float("-inf"))
        total = scores.logsumexp(-1)
        empty = total.isneginf()
        weights = (scores - total.masked_fill(empty, 0.0)[..., None]).exp()
        out[rows] = (weights @ v).transpose(0, 1).to(query.dtype)
        lse[:, rows] = total.masked_fill(empty, float("inf"))  # as the kernel has it
    return out, lse


def backward(
    grad: Tensor, states: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    """By the weights that log-sum-exps give, as the kernel computes them."""
    query, key, value = states
    heads, groups = query.shape[1], key.shape[1]
    d_query, d_key, d_value = (torch.zeros_like(x) for x in states)
    for rows, keys in runs.spans():
        q, k, v = (
            _grouped(query[rows], heads),
            _grouped(key[keys], heads),
            _grouped(value[keys], heads),
        )
        g, o = _grouped(grad[rows], heads), _grouped(out[rows], heads)
        seen = runs.visible(q.shape[1], k.shape[1])
        scores = (q @ k.mT * runs.scale).masked_fill(~seen, float("-inf"))
        weights = (scores - lse[:, rows, None]).exp()
        d_scores = weights * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * runs.scale
        d_query[rows] = (d_scores @ k).transpose(0, 1).to(query.dtype)
        for sums, part in ((d_key, d_scores.mT @ q), (d_value, weights.mT @ g)):
            shared = part.unflatten(0, (groups, heads // groups)).sum(1)
            sums[keys] += shared.transpose(0, 1).to(sums.dtype)
    return d_query, d_key, d_value


def register(
    dispatch_key: str, *, run: Callable[[Call, tuple[Tensor, ...]], Any], is_narrow: bool = True
) -> torch.library.Library:
    """Give the operations to a dispatch key, for as long as the library lives.

    `run` is told what computes on tensors of the host, and the tensors, and returns results that
    are where the tensors are. Results are a fixed number of tensors of known shapes.
    """
    library = torch.library.Library("aten", "IMPL")

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        queries: Tensor,
        keys: Tensor,
        max_q: int,
        max_k: int,
        dropout: float,
        is_causal: bool,
        debug: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **more: Any,
    ) -> tuple[Tensor, ...]:
        assert not dropout
        assert not debug
        assert not any(x is not None for x in more.values())
        assert scale is not None

        def compute(*given: Tensor) -> tuple[Tensor, ...]:
            runs = Runs(
                queries=given[3],
                keys=given[4],
                is_causal=is_causal,
                left=-1 if window_size_left is None else window_size_left,
                right=-1 if window_size_right is None else window_size_right,
                scale=scale,
            )
            check(given[:3], runs, (max_q, max_k), is_narrow=is_narrow)
            out, lse = forward(*given[:3], runs)
            return out, lse, *(torch.zeros(n, dtype=torch.uint64) for n in (2, 1)), out.new_empty(0)

        found: tuple[Tensor, ...] = run(compute, (query, key, value, queries, keys))
        return found

    def differentiate(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        queries: Tensor,
        keys: Tensor,
        max_q: int,
        max_k: int,
        dropout: float,
        is_causal: bool,
        seed: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:
        assert not dropout
        assert scale is not None

        def compute(*given: Tensor) -> tuple[Tensor, ...]:
            runs = Runs(
                queries=given[6],
                keys=given[7],
                is_causal=is_causal,
                left=-1 if window_size_left is None else window_size_left,
                right=-1 if window_size_right is None else window_size_right,
                scale=scale,
            )
            grad, *states, out, lse = given[:6]
            check((*states, grad, out), runs, (max_q, max_k), is_narrow=is_narrow)
            assert lse.shape == (out.shape[1], len(out))
            assert lse.is_contiguous()
            return backward(grad, (states[0], states[1], states[2]), out, lse, runs)

        given = (grad, query, key, value, out, lse, queries, keys)
        found: tuple[Tensor, ...] = run(compute, given)
        return found

    library.impl(NAMES[0], attend, dispatch_key)
    library.impl(NAMES[1], differentiate, dispatch_key)
    return library


def on_cpu() -> torch.library.Library:
    """The operations for tensors of the CPU, of any type, for as long as the library lives."""
    return register("CPU", run=lambda compute, given: compute(*given), is_narrow=False)
