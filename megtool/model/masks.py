"""Attention masks: causal, padding, documents, windows, chunks, keys of a cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.kernels.attention.mask import Mask, Segments, Slopes
from megtool.model.cache.key_span import KeySpan
from megtool.model.positions.alibi import slopes_of
from megtool.model.positions.rotary import has_rotation
from megtool.parallel.context_parallel import chunk_size, chunks_of
from megtool.parallel.process_groups import ALONE, Group
from megtool.spec.model_config import ModelConfig


def masks_of(
    config: ModelConfig,
    span: KeySpan,
    documents_BS: Tensor | None,
    cp: Group,
    heads: Group = ALONE,
    *,
    tp: Group = ALONE,
    run_starts_BM: Tensor | None = None,
) -> tuple[Masks, ...]:
    """The masks of each stretch of a rank's queries: of all, or of two (context parallelism).

    `tp` has the rank's heads, which slopes of scores depend on, and `heads` further parts of these.
    `run_starts_BM` are a batch's.
    """
    slopes_N = slopes_of(config, tp, span.queries_BS.device)
    if slopes_N is not None:
        slopes_N = slopes_N.chunk(heads.size)[heads.rank]
    if cp.size == 1:
        return (
            Masks(
                config,
                span,
                documents_BS=documents_BS,
                slopes_N=slopes_N,
                run_starts_BM=run_starts_BM,
            ),
        )
    size = chunk_size(span.num_keys, cp.size)
    ends = [(number + 1) * size for number in chunks_of(cp)]
    return tuple(
        Masks(
            config,
            span.part(end - size, end),
            documents_BS=None if documents_BS is None else documents_BS[:, :end],
            slopes_N=slopes_N,
        )
        for end in ends
    )


def has_chunks(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer attends within chunks, where the model has any."""
    chunked = config.window.chunk_layers
    return has_rotation(config, layer) if chunked is None else bool(chunked[layer])


class Masks:
    """The masks of one forward pass, each built when a layer first needs its kind.

    `documents_BS` are those of all keys; a document is a run of equal numbers. `slopes_N` are those
    of this rank's heads, where scores have them (ALiBi). `run_starts_BM` are a batch's.
    """

    def __init__(
        self,
        config: ModelConfig,
        span: KeySpan,
        *,
        documents_BS: Tensor | None = None,
        slopes_N: Tensor | None = None,
        run_starts_BM: Tensor | None = None,
    ) -> None:
        self.config, self.span, self.documents_BS = config, span, documents_BS
        self.slopes_N, self.run_starts_BM = slopes_N, run_starts_BM
        self._masks: dict[tuple[int, int], Mask] = {}

    def of(self, layer: int) -> Mask:
        """The mask of a layer."""
        config, span = self.config, self.span
        window = config.window.window_size if config.window.has_window(layer) else 0
        chunk = config.window.attn_chunk_size if has_chunks(config, layer) else 0
        if window >= span.num_keys:
            window = 0
        if chunk >= span.num_keys and span.is_counted:
            chunk = 0
        if (window, chunk) not in self._masks:
            mask = self._make(window, chunk)
            if self.slopes_N is not None:
                mask.bias = Slopes(self.slopes_N, span.positions_BS, span.key_positions_BL)
            self._masks[window, chunk] = mask
        return self._masks[window, chunk]

    def _make(self, window: int, chunk: int) -> Mask:
        span, config = self.span, self.config
        num_queries = span.queries_BS.shape[1]
        plain = not window and not chunk and span.valid_BL is None and self.documents_BS is None
        if plain and span.start is not None:
            if num_queries == 1 or config.bidirectional:
                return Mask()
            return Mask(is_causal=True)
        own_BS = span.queries_BS
        last_BS = torch.full_like(own_BS, span.num_keys - 1) if config.bidirectional else own_BS
        intervals = [(torch.zeros_like(own_BS), last_BS)]
        if window:
            intervals.append(self._near(window))
        if chunk:
            intervals.append(_run_of(own_BS, span.key_positions_BL // chunk))
        if self.documents_BS is not None:
            intervals.append(_run_of(own_BS, self.documents_BS))
        firsts, lasts = zip(*intervals, strict=True)
        first_BS, last_BS = firsts[0], lasts[0]
        for first, last in zip(firsts[1:], lasts[1:], strict=True):
            first_BS, last_BS = torch.maximum(first_BS, first), torch.minimum(last_BS, last)
        return Mask(
            first_BS=first_BS,
            last_BS=last_BS,
            valid_BL=span.valid_BL,
            own_BS=None if span.valid_BL is None else own_BS,
            start=None if config.bidirectional else span.start,
            segments=self._segments(window, chunk),
        )

    def _segments(self, window: int, chunk: int) -> Segments | None:
        """The same for kernels of sequences without padding: for whole rows that begin here, or a
        window that goes back into a cache.

        Padding attends to padding beside it, which nothing reads.
        """
        span, config = self.span, self.config
        num_queries = span.queries_BS.shape[1]
        behind = (window - 1 if window else -1) if config.bidirectional else 0
        around = window - 1 if window else -1, behind
        if span.start is None or (window and span.valid_BL is not None):
            return None  # padding takes no place in a window
        kinds = [x for x in (self.documents_BS, span.valid_BL) if x is not None]
        if chunk:
            kinds.append(span.key_positions_BL // chunk)
        if not kinds and span.start + num_queries == span.num_keys:
            return Segments(num_queries, around, num_keys=span.num_keys)
        if span.past_B is not None or span.start or num_queries != span.num_keys:
            return None
        changes_BS = torch.zeros_like(span.queries_BS)
        for kind in kinds:
            changed = F.pad((kind[:, 1:] != kind[:, :-1]).to(torch.int64), (1, 0))
            changes_BS = changes_BS + changed
        starts_BM = None if chunk else self.run_starts_BM
        return Segments(num_queries, around, changes_BS.cumsum(1), starts_BM)

    def _near(self, window: int) -> tuple[Tensor, Tensor]:
        """The first and the last key less than `window` tokens from each query: padding between
        them does not count. Those behind it count as near."""
        span, query_BS = self.span, self.span.queries_BS
        if span.valid_BL is None:
            return query_BS - window + 1, query_BS + window - 1
        count_BL = span.valid_BL.cumsum(1)
        query_BS = query_BS.expand(len(count_BL), -1)
        count_BS = count_BL.gather(1, query_BS)
        first_BS = torch.searchsorted(count_BL, count_BS - window, right=True)
        return first_BS, torch.searchsorted(count_BL, count_BS + window) - 1


def _run_of(own_BS: Tensor, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last key of the run of equal numbers that each query's own key is in."""
    places = torch.arange(ids_BL.shape[1], device=ids_BL.device)
    begins_BL = torch.ones_like(ids_BL, dtype=torch.bool)
    begins_BL[:, 1:] = ids_BL[:, 1:] != ids_BL[:, :-1]
    first_BL = (places * begins_BL).cummax(1).values
    ends_BL = torch.ones_like(begins_BL)
    ends_BL[:, :-1] = begins_BL[:, 1:]
    last = ids_BL.shape[1] - 1
    last_BL = last - ((last - places) * ends_BL).flip(1).cummax(1).values.flip(1)
    rows = max(len(own_BS), len(ids_BL))
    own_BS = own_BS.expand(rows, -1)
    return tuple(x.expand(rows, -1).gather(1, own_BS) for x in (first_BL, last_BL))  # type: ignore[return-value]
