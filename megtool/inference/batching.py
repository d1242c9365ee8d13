"""Continuous batching: which sequence is in which slot, and when the next one may enter.

Pure bookkeeping, the same on every rank. A sequence enters when a slot is free and the cache has
room for its prompt and every token it may generate, so none is ever thrown out half way; it leaves
as soon as it is finished, and the next in line enters at the following step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megtool.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A prompt to continue: its index in the input, its tokens, and the limit of new ones.

    Where an encoder reads the prompt it is the `source`, and `prompt` is what the decoder begins
    with.
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    source: tuple[int, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the text that is read before the first new token."""
        return len(self.source) if self.source else len(self.prompt)

    @property
    def num_positions(self) -> int:
        """The cache positions it may need; the last new token is never stored."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass(slots=True, kw_only=True)
class Running:
    """A request in a slot, and the tokens generated so far."""

    request: GenerateRequest
    slot: int
    num_pages: int
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of the prompt and new ones."""
        return len(self.request.prompt) + len(self.tokens)


class BatchScheduler:
    """Requests in line for `num_slots` slots and `num_pages` pages of `page_size` tokens each.

    Raises:
        UsageError: a request cannot fit even when it is alone.
    """

    def __init__(
        self, requests: Iterable[GenerateRequest], *, num_slots: int, num_pages: int, page_size: int
    ) -> None:
        self._waiting = deque(requests)
        self._page_size = page_size
        self._free_pages = num_pages
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self.running: dict[int, Running] = {}
        for request in self._waiting:
            if (need := self._pages(request)) > num_pages:
                raise UsageError(
                    f"prompt {request.number} needs {need} pages of {page_size} tokens, and the "
                    f"cache has {num_pages}",
                    hint="fewer --max-new-tokens, or a smaller --batch-size with longer sequences",
                )

    def _pages(self, request: GenerateRequest) -> int:
        return -(-request.num_positions // self._page_size)

    @property
    def is_busy(self) -> bool:
        """Something is running or in line."""
        return bool(self.running or self._waiting)

    def enter(self, *, most_tokens: int) -> list[Running]:
        """Let those at the head of the line in, as far as slots and pages reach.

        Their prompts, padded to the longest of them, are at most `most_tokens` tokens, unless a
        single one is longer. The order of the line is kept: nobody is overtaken.
        """
        entered: list[Running] = []
        longest = 0
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            need = self._pages(request)
            wider = max(longest, request.num_prompt_tokens)
            if need > self._free_pages or (entered and wider * (len(entered) + 1) > most_tokens):
                break
            longest = wider
            self._waiting.popleft()
            self._free_pages -= need
            running = Running(request=request, slot=self._free_slots.pop(), num_pages=need)
            self.running[running.slot] = running
            entered.append(running)
        return entered

    def leave(self, running: Running) -> None:
        """Free the slot and the pages of a finished sequence."""
        del self.running[running.slot]
        self._free_slots.append(running.slot)
        self._free_pages += running.num_pages


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
