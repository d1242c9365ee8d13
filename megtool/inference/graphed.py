"""Graphed: decoding steps replayed as one CUDA graph instead of hundreds of launches."""

from __future__ import annotations

from torch import Tensor

from megtool.inference.forward import Forward
from megtool.model.batch import Batch
from megtool.model.cache import ContiguousCache


class GraphedStep:
    """One more token for all rows of a graphable cache."""

    def __init__(self, forward: Forward, cache: ContiguousCache) -> None:
        self._forward, self._cache = forward, cache
        self.num_replays = 0

    def __call__(self, tokens_B1: Tensor) -> Tensor | None:
        """Logits [B, V] after the rows' newest tokens; they hold until the next call."""
        return self._forward.last_logits(Batch(tokens_BS=tokens_B1), self._cache)
