"""Positions of the queries of one pass among the keys that they may attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megtool.model.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpan:
    """The positions of one pass's queries among the keys they may attend to.

    `start` is the index of the first query among `num_keys` keys, the same in all rows, or None
    where only `queries_BS` (int64, batch may be 1) says it. `valid_BL` is false for keys that are
    padding, and `real_BS` for queries that are. `positions_BS` and `key_positions_BL` are the
    places of queries and keys (batch may be 1); with `is_counted` they are numbers from 0, less
    than `num_keys`. `past_B` is how many tokens of each row are in a cache, if there is one.
    """

    num_keys: int
    start: int | None
    queries_BS: Tensor
    positions_BS: Tensor
    key_positions_BL: Tensor
    valid_BL: Tensor | None = None
    real_BS: Tensor | None = None
    is_counted: bool = True
    past_B: Tensor | None = None

    @classmethod
    def fresh(cls, batch: Batch) -> KeySpan:
        """A pass without a cache: the queries' own keys are all there are."""
        tokens = batch.shape[1]
        slots_BS = torch.arange(tokens, device=batch.tokens_BS.device)[None]
        positions_BS = slots_BS if batch.positions_BS is None else batch.positions_BS
        if batch.positions_BS is None and batch.valid_BS is not None:
            positions_BS = (batch.valid_BS.cumsum(1) - 1).clamp_min(0)
        return cls(
            num_keys=tokens,
            start=0,
            queries_BS=slots_BS,
            positions_BS=positions_BS,
            key_positions_BL=positions_BS,
            valid_BL=batch.valid_BS,
            real_BS=batch.valid_BS,
            is_counted=batch.positions_BS is None,
        )

    def part(self, start: int, stop: int) -> KeySpan:
        """The queries from `start` to `stop` of a pass without a cache, and the keys up to them."""
        valid_BL, real_BS = self.valid_BL, self.real_BS
        return KeySpan(
            num_keys=stop,
            start=start,
            queries_BS=self.queries_BS[:, start:stop],
            positions_BS=self.positions_BS[:, start:stop],
            key_positions_BL=self.key_positions_BL[:, :stop],
            valid_BL=None if valid_BL is None else valid_BL[:, :stop],
            real_BS=None if real_BS is None else real_BS[:, start:stop],
            is_counted=self.is_counted,
        )
