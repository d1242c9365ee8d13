"""What drafts tokens for speculative decoding: the interface, and what its kinds share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megtool.inference.forward import Forward
from megtool.inference.generation.batching import Running
from megtool.inference.generation.sampling import draw, probabilities
from megtool.model.batch import Batch
from megtool.model.cache.paged import PagedCache
from megtool.options.sampling import Sampling

_PAD = 0  # never attended to, so any token does


@dataclass(slots=True, kw_only=True)
class DraftRow:
    """A sequence, and the tokens that are drafted behind it.

    With sampling, `probs` are the probabilities [V] that each of the `drafts` was drawn from.
    """

    running: Running
    drafts: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The number of its request."""
        return self.running.number

    @property
    def sampling(self) -> Sampling:
        """How its tokens are chosen."""
        return self.running.request.text.sampling

    @property
    def is_begun(self) -> bool:
        """Whether there was a step before, and so all but the newest tokens are read."""
        return len(self.running.tokens) > 1

    @property
    def num_wanted(self) -> int:
        """Drafts that may still follow: one token comes after them."""
        return self.running.request.max_new_tokens - len(self.running.tokens) - 1


class Drafter(Protocol):
    """Drafts tokens from the states of a model, on every rank of it.

    A pass of the model runs `within` it, and `read_pass` says what drafts are made from. Of this,
    the slots `keep` what belongs to tokens that stay, and `draft` reads it.
    """

    num_drafts: int
    """The most drafts in a step."""

    def within(self) -> AbstractContextManager[None]:
        """What passes of the model run in."""

    def read_pass(self, x_BSH: Tensor) -> Tensor:
        """What drafts are made from of a pass with these states after the final norm, [B, S, C]."""

    def enter(self, number: int) -> None:
        """Begin a sequence, under its request's number."""

    def keep(self, number: int, read_SC: Tensor) -> None:
        """Keep what `read_pass` gave for the next tokens of a sequence, which are certain."""

    def draft(self, rows: Sequence[DraftRow]) -> None:
        """Add drafts to rows that have none; as many as may still follow, less the token after
        them."""

    def leave(self, number: int) -> None:
        """Forget a sequence."""


def pad_rows(
    cache: PagedCache,
    numbers: Sequence[int],
    tokens: Sequence[Sequence[int]],
    *,
    revertible: bool = False,
) -> Batch:
    """Rows padded on the right, for which the cache has taken slots."""
    counts = [len(row) for row in tokens]
    width, device = max(counts), cache.device
    cache.choose(list(zip(numbers, counts, strict=True)), revertible=revertible)
    valid_BS = None
    if min(counts) < width:
        places_S = torch.arange(width, device=device)
        valid_BS = places_S < torch.tensor(counts, device=device)[:, None]
    padded = [[*row, *[_PAD] * (width - len(row))] for row in tokens]
    return Batch(tokens_BS=torch.tensor(padded, device=device), valid_BS=valid_BS)


def propose(rows: Sequence[DraftRow], logits_BV: Tensor) -> Tensor:
    """The next draft of each row, of the drafter's logits; `probs` of sampled rows grow."""
    if all(row.sampling.is_greedy for row in rows):
        return logits_BV.argmax(-1)
    drafts = []
    for row, logits_V in zip(rows, logits_BV, strict=True):
        logits_V = logits_V.nan_to_num(neginf=float("-inf"))
        if row.sampling.is_greedy:
            drafts.append(int(logits_V.argmax()))
            continue
        probs_V = probabilities(logits_V[None], row.sampling)[0]
        row.probs.append(probs_V)
        drafts.append(draw(probs_V, row.running.generator))
    return torch.tensor(drafts, device=logits_BV.device)


def add_drafts(forward: Forward, rows: Sequence[DraftRow], tokens_B: Tensor | None) -> None:
    """Add a draft to each row: the tokens of the first rank that has some, on all ranks."""
    for row, token in zip(rows, forward.agree(tokens_B, len(rows)).tolist(), strict=True):
        row.drafts.append(token)
