"""Data sets of consecutive numbers."""

from __future__ import annotations

import numpy as np

from megtool.data.packing import PackedRows

LENGTH, VOCABULARY = 16, 262


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
