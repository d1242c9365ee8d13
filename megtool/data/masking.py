"""Masks tokens, for models that learn to predict them from those around: BERT and its successors.

Of all tokens but special ones a share is to be predicted. Most of these are replaced by the mask
token, some by a random one, and some stay (80, 10 and 10 of 100, as in BERT).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megtool.data.packing import IGNORED
from megtool.errors import UsageError

if TYPE_CHECKING:
    from megtool.data.tokenizer import Tokenizer

SHARE = 0.15
"""The share of tokens to predict that BERT was trained with."""
_MASKED, _RANDOM = 0.8, 0.1

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """Which tokens of a row are to be predicted: drawn by `seed` and the row's number alone.

    Args:
        mask_id: the token that stands for those that are masked.
        vocab_size: random tokens are below it.
        special_ids: tokens that are never to be predicted.
        share: how many of the others are.
        seed: together with a row's number it says which.

    Raises:
        UsageError: the share is no part of the tokens.
    """

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...] = ()
    share: float = SHARE
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"a share of {self.share} of the tokens to predict", hint="0 to 1")

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, vocab_size: int, *, share: float = SHARE, seed: int = 1234
    ) -> Masking:
        """The masking of a model, with the mask token of its tokenizer.

        Raises:
            UsageError: there is none that the model has.
        """
        mask_id = None if tokenizer is None else tokenizer.mask_id
        if tokenizer is None or mask_id is None or mask_id >= vocab_size:
            raise UsageError(
                "the model predicts masked tokens, and there is no tokenizer with a mask token",
                hint="a folder with the model's own tokenizer has one: --tokenizer FOLDER",
            )
        return cls(
            mask_id=mask_id,
            vocab_size=vocab_size,
            special_ids=tokenizer.special_ids,
            share=share,
            seed=seed,
        )

    def masked(self, tokens_S: Int, row: int) -> tuple[Int, Int]:
        """Tokens as the model sees them, and their labels: the tokens to predict, else IGNORED."""
        words = np.frombuffer(hashlib.sha256(f"{self.seed} {row}".encode()).digest(), np.uint32)
        random = np.random.Generator(np.random.PCG64(words.tolist()))
        is_label = random.random(len(tokens_S)) < self.share
        is_label &= ~np.isin(tokens_S, self.special_ids)
        fate, others = (
            random.random(len(tokens_S)),
            random.integers(self.vocab_size, size=len(tokens_S)),
        )
        inputs = np.where(is_label & (fate < _MASKED), self.mask_id, tokens_S)
        is_random = is_label & (fate >= _MASKED) & (fate < _MASKED + _RANDOM)
        inputs = np.where(is_random, others, inputs)
        return inputs, np.where(is_label, tokens_S, IGNORED)
