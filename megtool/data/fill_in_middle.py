"""Fill-in-the-middle: texts rearranged so that a causal model learns to fill in.

Of a text, two places are drawn, which part it into prefix, middle and suffix; the middle goes to
the end (Bavarian et al. 2022). Draws and tokens are those of `GPTFIMDataset` of Megatron-LM, for a
generator in the same state; here each row has a generator of its own, so a run resumes exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megtool.errors import UsageError

if TYPE_CHECKING:
    from megtool.data.tokenizer import Tokenizer

Int = NDArray[np.int64]

_KNOWN = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>"),
    ("<PRE>", "<MID>", "<SUF>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>", "<\uff5cfim\u2581hole\uff5c>"),
)
"""Tokens before prefix, middle and suffix: StarCoder's, Qwen's, SantaCoder's, Code Llama's and
DeepSeek's (whose hole is where the middle is missing, behind the prefix)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FimTokens:
    """The tokens before a prefix, a middle and a suffix, by name; None: those of the tokenizer."""

    prefix: str | None = None
    middle: str | None = None
    suffix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FillInMiddle:
    """How texts are rearranged: drawn by `seed` and a row's number alone.

    Args:
        tokenizer: turns tokens into text, and parts of it into tokens.
        prefix_id: the token before a prefix; `middle_id` and `suffix_id` likewise.
        eod_id: the token that ends a document, which stays at the end; None if there is none.
        rate: the probability that a text is rearranged.
        spm_rate: the probability that its suffix comes before its prefix.
        split_id: a token that separates files, each of which is rearranged by itself.
        fragment_rate: the probability for each file.
        no_prefix: texts that begin so stay as they are.
        seed: together with a row's number it determines what is drawn.
    """

    tokenizer: Tokenizer = field(repr=False, compare=False)
    prefix_id: int
    middle_id: int
    suffix_id: int
    eod_id: int | None = None
    rate: float = 0.5
    spm_rate: float = 0.5
    split_id: int | None = None
    fragment_rate: float | None = None
    no_prefix: str | None = None
    seed: int = 1234

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        tokens: FimTokens,
        *,
        split_token: str | None = None,
        **options: float | str | int | None,
    ) -> FillInMiddle:
        """The rearrangement with a tokenizer's own tokens; `options` are those of the class.

        Raises:
            UsageError: the tokenizer, or the model, has no such token, or two of them are one.
        """
        if tokenizer is None:
            raise UsageError(
                "fill-in-the-middle needs the tokenizer of the data",
                hint="a folder with it: --tokenizer FOLDER",
            )
        find = _token_finder(tokenizer, vocab_size)
        given = (tokens.prefix, tokens.middle, tokens.suffix)
        known = next((n for n in _KNOWN if all(tokenizer.token_id(t) is not None for t in n)), None)
        if known is None and None in given:
            raise UsageError(
                "the tokenizer has no tokens for fill-in-the-middle that megtool knows",
                hint="--fim-prefix-token, --fim-middle-token and --fim-suffix-token name them; a "
                "base model without such tokens cannot learn it without new ones",
            )
        names = [g or k for g, k in zip(given, known or ("", "", ""), strict=True)]
        ids = [find(name) for name in names]
        if len(set(ids)) < len(ids):
            raise UsageError(
                f"the tokens before prefix, middle and suffix are {', '.join(map(repr, names))}",
                hint="--fim-prefix-token, --fim-middle-token and --fim-suffix-token: one for each",
            )
        return cls(
            tokenizer=tokenizer,
            prefix_id=ids[0],
            middle_id=ids[1],
            suffix_id=ids[2],
            eod_id=tokenizer.eos_id,
            split_id=None if split_token is None else find(split_token),
            **options,  # type: ignore[arg-type]
        )

    def generator(self, row: int) -> np.random.RandomState:
        """The generator of a row."""
        words = np.frombuffer(hashlib.sha256(f"{self.seed} fim {row}".encode()).digest(), np.uint32)
        return np.random.RandomState(words)

    def rearrange(self, tokens: Int, random: np.random.RandomState) -> Int:
        """One document, or a part of one, rearranged; the token that ends it stays at its end."""
        ends = bool(self.eod_id is not None and len(tokens) and tokens[-1] == self.eod_id)
        text = tokens[: len(tokens) - ends]
        if not len(text):
            return tokens
        return np.concatenate([self._rearrange_files(text, random), tokens[len(text) :]])

    def _rearrange_files(self, tokens: Int, random: np.random.RandomState) -> Int:
        """A text, or each of the files in it."""
        if self.split_id is None or self.fragment_rate is None:
            return self._permute(tokens, self.rate, random)
        breaks = np.flatnonzero(tokens == self.split_id)
        if not len(breaks):
            return self._permute(tokens, self.rate, random)
        if not random.binomial(1, self.rate):
            return tokens
        parts: list[Int] = []
        begin = 0
        for end in breaks.tolist():
            if end > begin:
                permuted = self._permute(tokens[begin:end], self.fragment_rate, random)
                parts += [permuted, tokens[end : end + 1]]
            begin = end + 1
        parts.append(self._permute(tokens[begin:], self.fragment_rate, random))
        return np.concatenate(parts)

    def _permute(self, tokens: Int, rate: float, random: np.random.RandomState) -> Int:
        if not random.binomial(1, rate):
            return tokens
        text = self.tokenizer.decode(tokens.tolist())
        if self.no_prefix is not None and text.startswith(self.no_prefix):
            return tokens
        first, second = sorted(random.randint(low=0, high=len(text) + 1, size=2).tolist())
        prefix, middle, suffix = self.tokenizer.encode_batch(
            [text[:first], text[first:second], text[second:]], add_special=False
        )
        if random.binomial(1, self.spm_rate):
            head = [self.prefix_id, self.suffix_id, *suffix, self.middle_id, *prefix]
        else:
            head = [self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id]
        return np.array([*head, *middle], np.int64)


def _token_finder(tokenizer: Tokenizer, vocab_size: int) -> Callable[[str], int]:
    def find(token: str) -> int:
        number = tokenizer.token_id(token)
        if number is None or number >= vocab_size:
            raise UsageError(
                f"the model has no token {token!r}",
                hint="fill-in-the-middle needs tokens of their own; see the tokenizer's vocabulary",
            )
        return number

    return find
