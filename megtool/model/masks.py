"""Attention masks: causal, padding, documents, windows, chunks, keys of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megtool.model.alibi import biases, slopes_of
from megtool.model.cache import KeySpan
from megtool.model.rotary import has_rotation, has_window
from megtool.model_config import ModelConfig
from megtool.parallel.context_parallel import chunk_size, chunks_of
from megtool.parallel.process_groups import ALONE, Group


@dataclass(slots=True)
class Mask:
    """The keys that queries may attend to, in the cheapest form that expresses it.

    All of them where `allowed` is None, or, with `is_causal`, those up to the query's own, the last
    query's being the last key; else `allowed` is true for them, bool [B, 1, S, L] (batch may be
    1). A query always may attend to its own key, so that no row is empty. Padding takes no place in
    a window. `scores` are added to those of attention, [B, N, S, L] (batch may be 1).
    """

    allowed: Tensor | None = None
    is_causal: bool = False
    scores: Tensor | None = None
    _bias: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """`allowed` as an additive bias of scores, `scores` (or 0) or minus infinity; built once
        for all layers.
        """
        if self.allowed is None:
            return None if self.scores is None else self.scores.to(dtype)
        if dtype not in self._bias:
            added = self.scores
            if added is None:
                added = torch.zeros((), dtype=dtype, device=self.allowed.device)
            self._bias[dtype] = torch.where(self.allowed, added.to(dtype), float("-inf"))
        return self._bias[dtype]

    def square(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """`allowed`, also where it is causal: for kernels that know no other form."""
        if self.is_causal:
            ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
            return ones.tril(num_keys - num_queries)[None, None]
        return self.allowed


def masks_of(
    config: ModelConfig, span: KeySpan, documents_BS: Tensor | None, cp: Group, tp: Group = ALONE
) -> tuple[Masks, ...]:
    """The masks of each stretch of a rank's queries: of all, or of two (context parallelism).

    `tp` has the rank's heads, which slopes of scores depend on.
    """
    slopes_N = slopes_of(config, tp, span.queries_BS.device)
    if cp.size == 1:
        return (Masks(config, span, documents_BS=documents_BS, slopes_N=slopes_N),)
    size = chunk_size(span.num_keys, cp.size)
    ends = [(number + 1) * size for number in chunks_of(cp)]
    return tuple(
        Masks(
            config,
            span.part(end - size, end),
            documents_BS=None if documents_BS is None else documents_BS[:, :end],
            is_part=True,
            slopes_N=slopes_N,
        )
        for end in ends
    )


class Masks:
    """The masks of one forward pass, each built when a layer first needs its kind.

    `documents_BS` are those of all keys. With `is_part` the queries are the last of the keys' own
    tokens, and others of the same pass are not here (context parallelism). `slopes_N` are those of
    this rank's heads, where scores have them (ALiBi).
    """

    def __init__(
        self,
        config: ModelConfig,
        span: KeySpan,
        *,
        documents_BS: Tensor | None = None,
        is_part: bool = False,
        slopes_N: Tensor | None = None,
    ) -> None:
        self.config, self.span, self.documents_BS = config, span, documents_BS
        self.is_part, self.slopes_N = is_part, slopes_N
        self._masks: dict[tuple[int, int], Mask] = {}

    def of(self, layer: int) -> Mask:
        """The mask of a layer."""
        config, span = self.config, self.span
        window = config.window_size if has_window(config, layer) else 0
        chunk = config.attn_chunk_size if has_rotation(config, layer) else 0
        if window >= span.num_keys:
            window = 0
        if chunk >= span.num_keys and span.is_counted:
            chunk = 0
        if (window, chunk) not in self._masks:
            self._masks[window, chunk] = self._sloped(self._make(window, chunk))
        return self._masks[window, chunk]

    def _sloped(self, mask: Mask) -> Mask:
        """The mask with the slopes of scores, if there are any."""
        if self.slopes_N is None:
            return mask
        num_queries, num_keys = self.span.queries_BS.shape[1], self.span.num_keys
        allowed = mask.square(num_queries, num_keys, self.slopes_N.device)
        return Mask(allowed=allowed, scores=biases(self.slopes_N, self.span))

    def _make(self, window: int, chunk: int) -> Mask:
        span = self.span
        num_queries = span.queries_BS.shape[1]
        plain = not window and not chunk and span.valid_BL is None and self.documents_BS is None
        if plain and span.start is not None:
            if num_queries == 1 or self.config.bidirectional:
                return Mask()
            if span.start == 0 and num_queries == span.num_keys:
                return Mask(is_causal=True)
            if self.is_part and span.queries_BS.is_cuda:
                return Mask(is_causal=True)  # kernels there skip what is not attended to
        query = span.queries_BS[:, :, None]
        key = torch.arange(span.num_keys, device=query.device)
        allowed = key <= query
        if self.config.bidirectional:
            allowed = torch.ones_like(allowed)
        if window:
            allowed = allowed & self._near(window)
        if chunk:
            allowed = allowed & (
                span.positions_BS[:, :, None] // chunk == span.key_positions_BL[:, None] // chunk
            )
        if self.documents_BS is not None:
            own_BS = self.documents_BS[:, span.num_keys - num_queries :]
            allowed = allowed & (own_BS[:, :, None] == self.documents_BS[:, None])
        if span.valid_BL is not None:
            allowed = allowed & span.valid_BL[:, None]
            allowed |= key == query
        return Mask(allowed[:, None])

    def _near(self, window: int) -> Tensor:
        """Keys less than `window` tokens before a query, or behind it, [B, S, L]: padding between
        them does not count. In a bidirectional model those behind are as near."""
        span, query_BS = self.span, self.span.queries_BS
        key_BL = torch.arange(span.num_keys, device=query_BS.device)[None]
        if span.valid_BL is not None:
            key_BL = span.valid_BL.cumsum(1)
            query_BS = key_BL.gather(1, query_BS.expand(key_BL.shape[0], -1))
        near = key_BL[:, None] > query_BS[:, :, None] - window
        if self.config.bidirectional:
            near = near & (key_BL[:, None] < query_BS[:, :, None] + window)
        return near
