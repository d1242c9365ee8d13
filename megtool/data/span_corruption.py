"""Leaves spans out of texts, for models of an encoder and a decoder to write: T5's objective.

Of a text's tokens a share is left out, in spans. A sentinel (`<extra_id_0>`, `<extra_id_1>`, ...)
stands for each span; the target has every sentinel followed by the tokens that it stands for. Spans
are drawn as T5 draws them: their number is that of the left-out tokens over the mean span, all ways
to divide these tokens into so many spans are as likely, and so are all ways to divide the others
into the parts before them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.errors import UsageError

SHARE, MEAN_SPAN = 0.15, 3.0
"""The share of tokens left out, and the tokens of a span, that T5 was trained with."""

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanCorruption:
    """Which spans of a row are left out: drawn by `seed` and the row's number alone.

    Args:
        sentinel_ids: tokens that stand for spans, in order.
        share: how many of the tokens are left out.
        mean_span: tokens of a span, on average.
        seed: together with a row's number it says which.

    Raises:
        UsageError: the share is no part of the tokens, or spans have no token.
    """

    sentinel_ids: tuple[int, ...]
    share: float = SHARE
    mean_span: float = MEAN_SPAN
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UsageError(
                f"a share of {self.share} of the tokens to leave out", hint="between 0 and 1"
            )
        if not self.mean_span >= 1:
            raise UsageError(f"spans of {self.mean_span} tokens on average", hint="1 or more")

    def counts(self, length: int) -> tuple[int, int]:
        """How many tokens of a text of `length` are left out, in how many spans."""
        if length < 2:
            return length, length
        left_out = min(max(round(length * self.share), 1), length - 1)
        spans = max(round(left_out / self.mean_span), 1)
        return left_out, min(spans, left_out, length - left_out)

    def sizes(self, length: int) -> tuple[int, int]:
        """Tokens of source and target of a text of `length`, without what ends them."""
        left_out, spans = self.counts(length)
        return length - left_out + spans, left_out + spans

    def text_length(self, source_length: int) -> int:
        """Tokens of the longest text whose source, without what ends it, has at most so many.

        Raises:
            UsageError: there is none, or it has more spans than there are sentinels.
        """
        length = source_length
        while self.sizes(length + 1)[0] <= source_length:
            length += 1
        if length < 1:
            raise UsageError(
                f"a source of {source_length} tokens has no room for a text", hint="1 or more"
            )
        spans = self.counts(length)[1]
        if spans > len(self.sentinel_ids):
            raise UsageError(
                f"{length} tokens have {spans} spans, and the tokenizer has "
                f"{len(self.sentinel_ids)} sentinels (<extra_id_0> and so on)",
                hint="T5's tokenizers have 100; shorter rows (--seq-length) and longer spans "
                "(--mean-noise-span-length) need fewer",
            )
        return length

    def split(self, tokens_S: Int, row: int) -> tuple[Int, Int]:
        """Source and target of a text, without what ends them."""
        words = np.frombuffer(hashlib.sha256(f"{self.seed} {row}".encode()).digest(), np.uint32)
        random = np.random.Generator(np.random.PCG64(words.tolist()))
        left_out, spans = self.counts(len(tokens_S))
        lengths_out = _divide(random, left_out, spans)
        lengths_in = _divide(random, len(tokens_S) - left_out, spans)
        source: list[Int] = []
        target: list[Int] = []
        begin = 0
        for number in range(spans):
            sentinel = np.asarray([self.sentinel_ids[number]], np.int64)
            middle = begin + int(lengths_in[number])
            end = middle + int(lengths_out[number])
            source += [tokens_S[begin:middle], sentinel]
            target += [sentinel, tokens_S[middle:end]]
            begin = end
        return np.concatenate(source).astype(np.int64), np.concatenate(target).astype(np.int64)


def _divide(random: np.random.Generator, total: int, parts: int) -> Int:
    """So many tokens in parts of at least one (or of none, if there are none)."""
    if parts < 2 or total < parts:
        return np.asarray([total] + [0] * (parts - 1), np.int64)
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)
