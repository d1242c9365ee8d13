"""Data sets of consecutive numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megtool.data.masking import Masking
from megtool.data.packing import PackedRows

LENGTH, VOCABULARY = 16, 262


MASKING = Masking(mask_id=60, vocab_size=100, share=0.4)


class Numbers:
    """Rows of random tokens, the same for the same number."""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def rows(self, first: int, count: int) -> PackedRows:
        rows = [self._row(n % self.size) for n in range(first, first + count)]
        tokens = np.stack(rows)
        return PackedRows(
            tokens_BS=tokens[:, :-1],
            labels_BS=tokens[:, 1:],
            positions_BS=np.tile(np.arange(LENGTH), (count, 1)),
            documents_BS=np.arange(count)[:, None].repeat(LENGTH, 1),
        )

    def _row(self, n: int) -> np.ndarray:
        return np.random.default_rng(n).integers(0, 50, LENGTH + 1)


class MaskedNumbers(Numbers):
    """The same rows, of which some tokens are masked and to be predicted; none is number 1, that of
    padding."""

    def rows(self, first: int, count: int) -> PackedRows:
        rows = super().rows(first, count)
        pairs = [MASKING.masked(row, first + n) for n, row in enumerate(rows.tokens_BS)]
        tokens, labels = (np.stack(x) for x in zip(*pairs, strict=True))
        tokens = np.where(tokens == 1, 2, tokens)
        return replace(rows, tokens_BS=tokens, labels_BS=labels, both_ways=True)
