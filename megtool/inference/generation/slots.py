"""Slots for sequences that are generated together, over a contiguous or a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.inference.cuda_graph import SPARE_SLOTS, GraphedBlockStep, GraphedStep
from megtool.inference.forward import Forward
from megtool.inference.generation.batching import (
    GenerateRequest,
    Reservation,
    Room,
    Running,
    left_padded,
)
from megtool.inference.generation.log_probs import rank_prompt
from megtool.inference.windows import pad_sources
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.cache.paged import PagedCache

BLOCK_SIZE = 16
MOST_PREFILL_TOKENS = 8192
"""Tokens of prompts in one pass, where nothing waits for it."""

_PAD = 0  # never attended to, so any token does


class Slots(Room, Protocol):
    """What the loop of generation needs of a cache and of the model that fills it.

    Logits are of the last token of every row, [B, V], and None on ranks that have none.
    """

    @property
    def num_graphed(self) -> int:
        """Steps that were replays of a graph."""

    def prefill(self, rows: Sequence[Running], counts: Sequence[int]) -> Tensor | None:
        """Read the next `counts` tokens of rows that have entered; logits of those whose tokens
        these end."""

    def step(self, rows: Sequence[Running]) -> Tensor | None:
        """Read the newest token of rows that are read."""


class RowSlots:
    """A row of one cache for every sequence, all entering together, padded on the left.

    Finished rows go on being computed and are not looked at: every step has the same shapes, which
    is what lets a CUDA graph replay it.
    """

    is_chunked = False

    def __init__(self, forward: Forward, requests: Sequence[GenerateRequest]) -> None:
        self._forward = forward
        self.num_slots = len(requests)
        width = max(len(r.prompt) for r in requests)
        most = width + max(r.max_new_tokens for r in requests) - 1
        self.prefill_tokens = self.num_slots * width  # nobody waits
        self._cache: ContiguousCache = forward.rows_cache(
            num_rows=self.num_slots, max_tokens=most + SPARE_SLOTS, graphable=True
        )
        self._step = GraphedStep(forward, self._cache)
        self._last_B1 = torch.full((self.num_slots, 1), _PAD, dtype=torch.int64)

    @property
    def num_graphed(self) -> int:
        """Steps that were replays of a graph."""
        return self._step.num_replays

    def check(self, request: GenerateRequest) -> None:
        """Every request that it was made for fits."""

    def enter(self, running: Running) -> bool:
        """Its row is there."""
        return True

    def grow(self, running: Running) -> bool:
        """Its row has the room."""
        return True

    def waits_for(self, running: Running, other: Running) -> bool:
        return False

    def prefill(self, rows: Sequence[Running], counts: Sequence[int]) -> Tensor | None:
        """All prompts at once."""
        if [r.slot for r in rows] != list(range(self.num_slots)):
            raise UsageError(
                f"{len(rows)} rows cannot enter the {self.num_slots} rows of the cache"
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
        logits_BV = self._step(self._last_B1.to(self._forward.device))
        if len(rows) == self.num_slots:
            return logits_BV
        return logits_BV[[r.slot for r in rows]]

    def leave(self, running: Running) -> None:
        """Nothing comes after it."""


class BlockSlots:
    """Blocks of a shared cache, taken as sequences grow and given back when they end.

    Sequences that begin with the same tokens share the blocks of these, with `shares_prefixes`.
    Recurrent mixers keep states of whole sequences: there nothing is shared. Where a token turns by
    the length of its sequence (`Rotary.depends_on_length`), prompts are read whole, nothing is
    shared, and room for all of a sequence is taken when it enters, so that none is read again.
    With `graphed`, steps are replayed as CUDA graphs where that is possible.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        num_slots: int,
        num_pages: int,
        prefill_tokens: int = MOST_PREFILL_TOKENS,
        shares_prefixes: bool = True,
        graphed: bool = False,
    ) -> None:
        self._forward = forward
        self.num_slots, self.prefill_tokens = num_slots, prefill_tokens
        self._cache: PagedCache = forward.blocks_cache(
            num_blocks=num_pages + 1, block_size=BLOCK_SIZE, num_sequences=num_slots
        )
        self._pages = Reservation(num_pages, BLOCK_SIZE)
        is_whole = forward.decoder.rotary.depends_on_length
        self._reserves, self.is_chunked = is_whole, not is_whole
        self.shares_prefixes = shares_prefixes and self._cache.can_share and not is_whole
        self.num_running = 0
        self.num_shared = 0
        can = graphed and forward.is_graphable
        self._step = GraphedBlockStep(forward, self._cache) if can else None

    @property
    def num_graphed(self) -> int:
        """Steps that were replays of a graph."""
        return 0 if self._step is None else self._step.num_replays

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request that needs more than the whole cache.

        Raises:
            UsageError: it does.
        """
        self._pages.check(request)

    def enter(self, running: Running) -> bool:
        """Its tokens so far get blocks, those that others have read among them."""
        cache, number = self._cache, running.number
        if self._reserves and not self._pages.enter(running):
            return False
        num_cached = cache.enter(number, running.known if self._may_share(running) else ())
        need = cache.needed(number, running.length - num_cached)
        spare = 0 if self._reserves else self.num_running  # for those that are there to grow
        if need + spare > cache.pool.num_free:
            cache.release(number)
            return False
        cache.reserve(number, running.length - num_cached)
        running.num_read = num_cached
        self.num_shared += num_cached
        self.num_running += 1
        return True

    def _may_share(self, running: Running) -> bool:
        """Whether it may begin with blocks of others: not if all of its prompt is to be scored."""
        return self.shares_prefixes and not running.request.text.prompt_log_probs

    def grow(self, running: Running) -> bool:
        """A block for its next token, if one is free or there is room in its last."""
        need = self._cache.needed(running.number, 1)
        if need > self._cache.pool.num_free:
            return False
        self._cache.reserve(running.number, 1)
        return True

    def waits_for(self, running: Running, other: Running) -> bool:
        """Whether another sequence is about to read blocks that this one begins with."""
        if not self._may_share(running):
            return False
        pairs = zip(running.known[:-1], other.known, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return common // BLOCK_SIZE * BLOCK_SIZE > other.num_read

    def prefill(self, rows: Sequence[Running], counts: Sequence[int]) -> Tensor | None:
        """Chunks of those who have entered, padded on the right."""
        width = max(counts)
        chunks = [
            [*r.known[r.num_read : r.num_read + n], *[_PAD] * (width - n)]
            for r, n in zip(rows, counts, strict=True)
        ]
        self._cache.choose([(r.number, n) for r, n in zip(rows, counts, strict=True)])
        device = self._forward.device
        valid = None
        if min(counts) < width:
            places_S = torch.arange(width, device=device)
            valid = places_S < torch.tensor(counts, device=device)[:, None]
        batch = Batch(tokens_BS=torch.tensor(chunks, device=device), valid_BS=valid)
        x_TH = self._forward.hidden(batch, self._cache)
        x_BSH = None if x_TH is None else x_TH.view(len(rows), width, -1)
        rank_prompt(self._forward, x_BSH, rows, counts)
        ended = [n for n, r in enumerate(rows) if counts[n] == r.num_unread]
        self._note_read(rows, counts)
        if x_BSH is None or not ended:
            return None
        return self._forward.logits(x_BSH[ended, [counts[n] - 1 for n in ended]])

    def step(self, rows: Sequence[Running]) -> Tensor | None:
        """One token for every running sequence."""
        numbers, newest = [r.number for r in rows], [r.tokens[-1] for r in rows]
        logits_BV: Tensor | None
        if self._step is not None:
            logits_BV = self._step(numbers, newest)
        else:
            self._cache.choose([(number, 1) for number in numbers])
            tokens_B1 = torch.tensor(newest, device=self._forward.device)[:, None]
            logits_BV = self._forward.last_logits(Batch(tokens_BS=tokens_B1), self._cache)
        self._note_read(rows, [1] * len(rows))
        return logits_BV

    def _note_read(self, rows: Sequence[Running], counts: Sequence[int]) -> None:
        """Count tokens that are in the cache now, and let others share them."""
        for running, count in zip(rows, counts, strict=True):
            before, running.num_read = running.num_read, running.num_read + count
            if self.shares_prefixes and before // BLOCK_SIZE < running.num_read // BLOCK_SIZE:
                self._cache.publish(running.number, running.known)

    def leave(self, running: Running) -> None:
        """Its blocks are free for the next."""
        self._cache.release(running.number)
        self.num_running -= 1
        if self._reserves:
            self._pages.leave(running)


class SourceSlots:
    """Blocks for what a decoder writes, and a slot for each source that it attends to.

    The encoder reads a source once, when its request enters; sources have at most
    `most_source_tokens`.
    """

    is_chunked = False
    num_graphed = 0

    def __init__(
        self, forward: Forward, *, num_slots: int, num_pages: int, most_source_tokens: int
    ) -> None:
        self._forward = forward
        self.num_slots, self.prefill_tokens = num_slots, MOST_PREFILL_TOKENS
        self._pages = Reservation(num_pages, BLOCK_SIZE)
        self._cache: PagedCache = forward.blocks_cache(
            num_blocks=num_pages + 1, block_size=BLOCK_SIZE, num_sequences=num_slots
        )
        self._most_source_tokens = most_source_tokens
        self._sources = forward.source_cache(num_slots=num_slots, max_tokens=most_source_tokens)
        self._cache.sources = self._sources

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request that is longer than the caches.

        Raises:
            UsageError: it is.
        """
        self._pages.check(request)
        if len(request.source) > self._most_source_tokens:
            raise UsageError(
                f"prompt {request.number} has {len(request.source)} tokens, and there is room for "
                f"sources of {self._most_source_tokens}",
                hint="shorten the prompt, or make the cache larger",
            )

    def enter(self, running: Running) -> bool:
        """Take all pages that it may need."""
        return self._pages.enter(running)

    def grow(self, running: Running) -> bool:
        """It has them."""
        return True

    def waits_for(self, running: Running, other: Running) -> bool:
        return False

    def prefill(self, rows: Sequence[Running], counts: Sequence[int]) -> Tensor | None:
        """The sources of those who enter, padded on the right, and what targets begin with.

        Raises:
            UsageError: targets begin with unequal numbers of tokens.
        """
        if len(set(counts)) != 1:
            raise UsageError("targets begin with unequal numbers of tokens")
        self._cache.choose([(r.number, n) for r, n in zip(rows, counts, strict=True)])
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
        self._cache.choose([(r.number, 1) for r in rows])
        tokens = torch.tensor([[r.tokens[-1]] for r in rows], device=self._forward.device)
        return self._forward.last_logits(Batch(tokens_BS=tokens), self._cache)

    def leave(self, running: Running) -> None:
        """Its pages are free for the next."""
        self._cache.release(running.number)
        self._pages.leave(running)
