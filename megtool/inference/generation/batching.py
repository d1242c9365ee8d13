"""Continuous batching: which sequence is in which slot, what it reads next, and who has to wait.

Pure bookkeeping, the same on every rank. A sequence enters when a slot is free and the cache has
room for it; it leaves as soon as it is finished. Where the cache ends while sequences grow, the
least important one is thrown out, waits, and is read again from its first token. Important are
those with a higher priority, then those that came earlier.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from megtool.errors import UsageError
from megtool.options.sampling import Sampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScope:
    """How the tokens of a text are chosen, what ends it, and what is said of them.

    A text ends at a token of `eos_ids` or before a `stop` string. With `num_log_probs` every token
    has its log-probability, and those of so many likeliest tokens; with `prompt_log_probs` the
    prompt's tokens have them, too.
    """

    sampling: Sampling = field(default_factory=Sampling)
    eos_ids: frozenset[int] = frozenset()
    stop: Sequence[str] = ()
    num_log_probs: int | None = None
    prompt_log_probs: bool = False

    def __post_init__(self) -> None:
        if self.num_log_probs is not None and self.num_log_probs < 0:
            raise UsageError(f"logprobs is {self.num_log_probs}", hint="0 or more")
        if self.prompt_log_probs and self.num_log_probs is None:
            raise UsageError(
                "log-probabilities of the prompt are asked for, and none of new tokens",
                hint="give logprobs, too: 0 is the chosen tokens alone",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A prompt to continue: its index in the input, its tokens, and the limit of new ones.

    Where an encoder reads the prompt it is the `source`, and `prompt` is what the decoder begins
    with. `draw` is the number that makes its draws with the seed; by default `number`.
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    source: tuple[int, ...] = ()
    text: TextScope = field(default_factory=TextScope)
    priority: int = 0
    draw: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the text that is read before the first new token."""
        return len(self.source) if self.source else len(self.prompt)

    @property
    def num_positions(self) -> int:
        """The cache positions it may need; the last new token is never stored."""
        return len(self.prompt) + self.max_new_tokens - 1

    def make_generator(self) -> torch.Generator:
        """The source of its draws."""
        return self.text.sampling.generator(self.number if self.draw is None else self.draw)


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A request that waits or is in a slot, the tokens generated so far, and how many are read.

    `num_read` tokens, of the prompt and then of the new ones, are in the cache. `is_started`: all
    that it had when it entered is read, so that it grows token by token.
    """

    request: GenerateRequest
    generator: torch.Generator
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    num_read: int = 0
    is_started: bool = False
    prompt_log_probs: list[TokenLogProb] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The number of its request."""
        return self.request.number

    @property
    def length(self) -> int:
        """Tokens of the prompt and new ones."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def num_unread(self) -> int:
        """Tokens that are not in the cache."""
        return self.length - self.num_read

    @property
    def known(self) -> list[int]:
        """Tokens of the prompt and new ones."""
        return [*self.request.prompt, *self.tokens]

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in the line: least is first."""
        return -self.request.priority, self.request.number


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """The log-probability (nats) of a token that came, and the likeliest ones with theirs.

    They are the model's own: of the logits before temperature, `top_k` and `top_p`.
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """The next token of a sequence, or `NO_NUMBER`."""

    id: int
    log_prob: TokenLogProb | None = None


class Room(Protocol):
    """Where sequences run: slots, and the cache behind them.

    Prompts are read in chunks of `prefill_tokens` if they `is_chunked`, else whole, and as many of
    them together as have so many tokens with their padding.
    """

    num_slots: int
    prefill_tokens: int
    is_chunked: bool

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request that cannot fit even when it is alone."""

    def enter(self, running: Running) -> bool:
        """Take what a sequence needs to begin, if there is room; set the `num_read` tokens that the
        cache has already."""

    def grow(self, running: Running) -> bool:
        """Take what a sequence needs for its next token, if there is room."""

    def leave(self, running: Running) -> None:
        """Give back what a sequence has."""

    def waits_for(self, running: Running, other: Running) -> bool:
        """Whether a sequence would find more of its tokens in the cache once the other is read."""


class BatchScheduler:
    """Requests in line for the slots of a room.

    Every pass is of what `rows_to_grow` or `rows_to_read` gives. `num_preempted` counts the times
    that a sequence was thrown out.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._waiting: list[Running] = []
        self._free_slots = list(range(room.num_slots - 1, -1, -1))
        self.running: dict[int, Running] = {}
        self.num_preempted = 0
        self._is_turn_of_short = False

    @property
    def is_busy(self) -> bool:
        """Something is running or in line."""
        return bool(self.running or self._waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences in line."""
        return len(self._waiting)

    def add(self, request: GenerateRequest) -> Running:
        """Let a request stand in line, which the room does not refuse."""
        running = Running(request=request, generator=request.make_generator())
        insort(self._waiting, running, key=lambda r: r.rank)
        return running

    def enter(self) -> list[Running]:
        """Let those at the head of the line in, as far as slots and the cache reach.

        Nobody is overtaken, but by those that need nothing of what another one is about to read.
        """
        entered: list[Running] = []
        num_deferred = 0
        for running in list(self._waiting):
            if num_deferred >= len(self._free_slots):
                break
            unread = [r for r in self.running.values() if not r.is_started]
            if any(self._room.waits_for(running, other) for other in unread):
                num_deferred += 1
                continue
            if not self._room.enter(running):
                break
            self._waiting.remove(running)
            running.slot = self._free_slots.pop()
            self.running[running.slot] = running
            entered.append(running)
        return entered

    def rows_to_grow(self) -> list[Running]:
        """The sequences whose newest token is to be read; room for the next one is taken.

        Where there is none, the least important sequences are thrown out.
        """
        rows = []
        for running in self._in_order(r for r in self.running.values() if r.is_started):
            while running.slot >= 0 and not self._room.grow(running):
                self._preempt(self._in_order(self.running.values())[-1])
            if running.slot >= 0:
                rows.append(running)
        return sorted((r for r in rows if r.slot >= 0), key=lambda r: r.slot)

    def rows_to_read(self) -> list[tuple[Running, int]]:
        """Sequences that are not read yet, each with the number of tokens that come next.

        All together are at most `prefill_tokens`, padded to the longest, unless a single one that
        is not cut is longer. Every other time those with the least to read come first, so that a
        short prompt does not wait for a long one, nor a long one for all short ones.
        """
        room, rows = self._room, list[tuple[Running, int]]()
        width = 0
        unstarted = self._in_order(r for r in self.running.values() if not r.is_started)
        if unstarted and room.is_chunked:
            if self._is_turn_of_short:
                unstarted.sort(key=lambda r: (-r.request.priority, r.num_unread))
            self._is_turn_of_short = not self._is_turn_of_short
        for running in unstarted:
            unread = running.num_unread or 1  # of a source, before which nothing is written
            count = min(unread, room.prefill_tokens) if room.is_chunked else unread
            wider = max(width, count, len(running.request.source))
            if rows and wider * (len(rows) + 1) > room.prefill_tokens:
                break
            rows.append((running, count))
            width = wider
        return rows

    def leave(self, running: Running) -> None:
        """Take a sequence out: a finished one, or one that is not wanted any more."""
        if running.slot < 0:
            self._waiting.remove(running)
            return
        self._room.leave(running)
        del self.running[running.slot]
        self._free_slots.append(running.slot)
        running.slot = -1

    def _preempt(self, running: Running) -> None:
        self.leave(running)
        self.num_preempted += 1
        running.num_read, running.is_started = 0, False
        insort(self._waiting, running, key=lambda r: r.rank)

    @staticmethod
    def _in_order(rows: Iterable[Running]) -> list[Running]:
        return sorted(rows, key=lambda r: r.rank)


class Reservation:
    """Pages for all tokens that a sequence may ever have, counted when it enters.

    So none is thrown out half way.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = num_pages
        self._of: dict[int, int] = {}

    def count(self, request: GenerateRequest) -> int:
        """The pages of a request."""
        return -(-request.num_positions // self.page_size)

    def check(self, request: GenerateRequest) -> None:
        """Refuse a request that has no room even when it is alone.

        Raises:
            UsageError: it has none.
        """
        if (need := self.count(request)) > self.num_pages:
            raise UsageError(
                f"prompt {request.number} needs {need} pages of {self.page_size} tokens, and the "
                f"cache has {self.num_pages}",
                hint="fewer new tokens, or a larger cache",
            )

    def enter(self, running: Running) -> bool:
        """Take its pages, if they are free."""
        if (need := self.count(running.request)) > self._free:
            return False
        self._free -= need
        self._of[running.number] = need
        return True

    def leave(self, running: Running) -> None:
        """Give them back."""
        self._free += self._of.pop(running.number)


class InOrder(Generic[T]):
    """Reorders results that arrive in any order into the order of their numbers (from 0)."""

    def __init__(self) -> None:
        self._early: dict[int, T] = {}
        self._next = 0

    def add(self, number: int, result: T) -> Iterator[T]:
        """Add one result; returns all results that are now in order."""
        self._early[number] = result
        while self._next in self._early:
            yield self._early.pop(self._next)
            self._next += 1


def left_padded(
    rows: Sequence[Sequence[int]], pad: int
) -> tuple[list[list[int]], list[list[bool]]]:
    """Rows of tokens made equally long by padding on the left, and which places hold tokens."""
    width = max(map(len, rows))
    tokens = [[pad] * (width - len(row)) + list(row) for row in rows]
    valid = [[False] * (width - len(row)) + [True] * len(row) for row in rows]
    return tokens, valid
