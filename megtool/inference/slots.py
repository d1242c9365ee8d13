"""Slots for sequences that are generated together, over a contiguous or a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.inference.batching import GenerateRequest, Running, left_padded
from megtool.inference.cuda_graph import SPARE_SLOTS, GraphedStep
from megtool.inference.forward import Forward
from megtool.inference.windows import pad_sources
from megtool.model.batch import Batch
from megtool.model.cache import ContiguousCache, PagedCache

BLOCK_SIZE = 16
_PAD = 0  # never attended to, so any token does


class Slots(Protocol):
    """What the loop of generation needs of a cache and of the model that fills it.

    Logits are of the last token of every row, [B, V], and None on ranks that have none. A request
    needs pages of `page_size` tokens out of `num_pages`.
    """

    num_pages: int
    page_size: int
    most_prefill_tokens: int | None

    @property
    def num_graphed(self) -> int:
        """Steps that were replays of a graph."""

    def prefill(self, rows: Sequence[Running]) -> Tensor | None:
        """Read the prompts of rows that have just entered."""

    def step(self, rows: Sequence[Running]) -> Tensor | None:
        """Read the newest token of every running row."""

    def leave(self, running: Running) -> None:
        """A row is finished."""


class RowSlots:
    """A row of one cache for every sequence, all entering together, padded on the left.

    Finished rows go on being computed and are not looked at: every step has the same shapes, which
    is what lets a CUDA graph replay it.
    """

    def __init__(
        self, forward: Forward, requests: Sequence[GenerateRequest], *, graphed: bool
    ) -> None:
        self._forward = forward
        self._num_rows = len(requests)
        width = max(len(r.prompt) for r in requests)
        most = width + max(r.max_new_tokens for r in requests) - 1
        self.num_pages, self.page_size = sum(r.num_positions for r in requests), 1
        self.most_prefill_tokens: int | None = self._num_rows * width  # nobody waits
        graphed = graphed and forward.is_graphable
        self._cache: ContiguousCache = forward.rows_cache(
            num_rows=self._num_rows,
            max_tokens=most + SPARE_SLOTS * graphed,
            graphable=graphed,
        )
        self._step = GraphedStep(forward, self._cache) if graphed else None
        self._last_B1 = torch.full((self._num_rows, 1), _PAD, dtype=torch.int64)

    @property
    def num_graphed(self) -> int:
        """Steps that were replays of a graph."""
        return 0 if self._step is None else self._step.num_replays

    def prefill(self, rows: Sequence[Running]) -> Tensor | None:
        """All prompts at once; slots are numbered in the order of entering."""
        if len(rows) != self._num_rows:
            raise UsageError(
                f"{len(rows)} rows cannot enter the {self._num_rows} rows of the cache"
            )
        tokens, valid = left_padded([r.request.prompt for r in rows], _PAD)
        device = self._forward.device
        ragged = not all(map(all, valid))
        batch = Batch(
            tokens_BS=torch.tensor(tokens, device=device),
            valid_BS=torch.tensor(valid, device=device) if ragged else None,
        )
        return self._forward.last_logits(batch, self._cache)

    def step(self, rows: Sequence[Running]) -> Tensor | None:
        """One more token for all rows; logits of the running ones."""
        self._last_B1[[r.slot for r in rows], 0] = torch.tensor([r.tokens[-1] for r in rows])
        tokens_B1 = self._last_B1.to(self._forward.device)
        if self._step is not None:
            logits_BV: Tensor | None = self._step(tokens_B1)
        else:
            logits_BV = self._forward.last_logits(Batch(tokens_BS=tokens_B1), self._cache)
        if logits_BV is None or len(rows) == self._num_rows:
            return logits_BV
        return logits_BV[[r.slot for r in rows]]

    def leave(self, running: Running) -> None:
        """Nothing comes after it."""


class BlockSlots:
    """Blocks of a shared cache, taken as sequences grow and given back when they end."""

    num_graphed = 0  # shapes change as sequences grow

    def __init__(
        self, forward: Forward, requests: Sequence[GenerateRequest], *, num_slots: int
    ) -> None:
        self._forward = forward
        self.page_size = BLOCK_SIZE
        self.most_prefill_tokens: int | None = None
        needs = sorted((-(-r.num_positions // BLOCK_SIZE) for r in requests), reverse=True)
        self.num_pages = sum(needs[:num_slots])  # so that blocks never are what a slot waits for
        self._cache: PagedCache = forward.blocks_cache(
            num_blocks=self.num_pages + 1, block_size=BLOCK_SIZE, num_sequences=num_slots
        )

    def prefill(self, rows: Sequence[Running]) -> Tensor | None:
        """The prompts of those who enter, padded on the right."""
        counts = [len(r.request.prompt) for r in rows]
        width = max(counts)
        padded = [[*r.request.prompt, *[_PAD] * (width - len(r.request.prompt))] for r in rows]
        self._cache.choose([(r.request.number, len(r.request.prompt)) for r in rows])
        device = self._forward.device
        valid = None
        if min(counts) < width:
            places_S = torch.arange(width, device=device)
            valid = places_S < torch.tensor(counts, device=device)[:, None]
        batch = Batch(tokens_BS=torch.tensor(padded, device=device), valid_BS=valid)
        return self._forward.last_logits(batch, self._cache, counts)

    def step(self, rows: Sequence[Running]) -> Tensor | None:
        """One token for every running sequence."""
        self._cache.choose([(r.request.number, 1) for r in rows])
        tokens = torch.tensor([[r.tokens[-1]] for r in rows], device=self._forward.device)
        return self._forward.last_logits(Batch(tokens_BS=tokens), self._cache)

    def leave(self, running: Running) -> None:
        """Its blocks are free for the next."""
        self._cache.release(running.request.number)


class SourceSlots(BlockSlots):
    """Blocks for what a decoder writes, and a slot for each source that it attends to.

    The encoder reads a source once, when its request enters.
    """

    def __init__(
        self, forward: Forward, requests: Sequence[GenerateRequest], *, num_slots: int
    ) -> None:
        super().__init__(forward, requests, num_slots=num_slots)
        longest = max(len(r.source) for r in requests)
        self._sources = forward.source_cache(num_slots=num_slots, max_tokens=longest)
        self._cache.sources = self._sources

    def prefill(self, rows: Sequence[Running]) -> Tensor | None:
        """The sources of those who enter, padded on the right, and what targets begin with.

        Raises:
            UsageError: targets begin with unequal numbers of tokens.
        """
        if len({len(r.request.prompt) for r in rows}) != 1:
            raise UsageError("targets begin with unequal numbers of tokens")
        self._cache.choose([(r.request.number, len(r.request.prompt)) for r in rows])
        self._sources.choose([r.slot for r in rows])
        device = self._forward.device
        source_BE, valid_BE = pad_sources([r.request.source for r in rows], device)
        batch = Batch(
            tokens_BS=torch.tensor([r.request.prompt for r in rows], device=device),
            source_BE=source_BE,
            source_valid_BE=valid_BE,
        )
        return self._forward.last_logits(batch, self._cache)

    def step(self, rows: Sequence[Running]) -> Tensor | None:
        """One token for every running sequence."""
        self._sources.choose([r.slot for r in rows])
        return super().step(rows)
