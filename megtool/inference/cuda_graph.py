"""Forward passes of a fixed shape, replayed as one CUDA graph instead of hundreds of launches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megtool.errors import GraphRuleError
from megtool.inference.forward import Forward
from megtool.kernels.graphs import cuda_graphs
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.cache.paged import BlockTables, PagedCache

_LOG = logging.getLogger(__name__)

SPARE_SLOTS = 8
"""Slots that a cache needs beyond its tokens: a graph's warm-up writes there, and is undone."""


class ReplayedForward:
    """Calls of a function, replayed as graphs, or run eagerly once a capture has failed.

    That it failed is logged, once: the result is the same, and slower.
    """

    def __init__(self, function: cuda_graphs.Function, graphs: cuda_graphs.CudaGraphs) -> None:
        self._function = function
        self._graphs: cuda_graphs.CudaGraphs | None = graphs
        self.num_replays = 0

    def __call__(self, *inputs: Tensor) -> Any:
        """The function's result; a graph's own holds until the next call."""
        if self._graphs is not None:
            captured = len(self._graphs.captured)
            try:
                result = self._graphs(*inputs)
            except GraphRuleError as error:
                if len(self._graphs.captured) > captured:
                    raise  # captured, and replayed otherwise: the results could be wrong
                self._graphs = None
                _LOG.info("without CUDA graphs: %s", error.message)
            else:
                self.num_replays += 1
                return result
        return self._function(*inputs)


class GraphedStep:
    """One more token for all rows of a graphable cache, with `SPARE_SLOTS` more than needed."""

    def __init__(self, forward: Forward, cache: ContiguousCache) -> None:
        self._forward, self._cache = forward, cache
        graphs = cuda_graphs.CudaGraphs(self._step, state=cache.state, copies=False)
        self._replayed = ReplayedForward(self._step, graphs)

    @property
    def num_replays(self) -> int:
        """Steps that were a graph's."""
        return self._replayed.num_replays

    def _step(self, tokens_B1: Tensor) -> Tensor | None:
        """What is recorded; it leaves none of its tensors behind in the model."""
        logits_BV = self._forward.last_logits(Batch(tokens_BS=tokens_B1), self._cache)
        self._forward.decoder.rotary.forget()
        return logits_BV

    def __call__(self, tokens_B1: Tensor) -> Tensor:
        """Logits [B, V] after the rows' newest tokens; they hold until the next call."""
        length = self._cache.length
        logits_BV: Tensor = self._replayed(tokens_B1)
        self._cache.length = length + 1  # a replay does not count, and a warm-up counts too often
        return logits_BV


class GraphedBlockStep:
    """One more token for some sequences of a paged cache.

    There is a graph for each number of rows and of blocks in the longest row, both rounded up to
    powers of two, so that there are few graphs. Rows are not added where the cache has states of
    recurrent mixers. The added rows write to block 0, and keys in added blocks are masked.
    """

    def __init__(self, forward: Forward, cache: PagedCache) -> None:
        self._forward, self._cache = forward, cache
        graphs = cuda_graphs.CudaGraphs(self._step, state=cache.states.tensors, copies=False)
        self._replayed = ReplayedForward(self._step, graphs)

    @property
    def num_replays(self) -> int:
        """Steps that were a graph's."""
        return self._replayed.num_replays

    def _step(
        self, tokens_B1: Tensor, table_BM: Tensor, past_B: Tensor, states_B: Tensor
    ) -> Tensor | None:
        self._cache.tables = BlockTables(table_BM=table_BM, past_B=past_B, states_B=states_B)
        try:
            logits_BV = self._forward.last_logits(Batch(tokens_BS=tokens_B1), self._cache)
        finally:
            self._cache.tables = None
        self._forward.decoder.rotary.forget()
        return logits_BV

    def __call__(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Logits [B, V] after a token of each sequence; they hold until the next call."""
        self._cache.choose([(sequence, 1) for sequence in rows])
        num_rows, longest = len(rows), max(len(self._cache.blocks[s]) for s in rows)
        filled = num_rows if self._cache.states.tensors else _power_of_two(num_rows)
        tables = self._cache.make_tables(num_rows=filled, num_blocks=_power_of_two(longest))
        column = [[t] for t in tokens] + [[0]] * (filled - num_rows)
        tokens_B1 = torch.tensor(column, device=self._forward.device)
        logits_BV: Tensor = self._replayed(
            tokens_B1, tables.table_BM, tables.past_B, tables.states_B
        )
        self._cache.advance()
        return logits_BV[:num_rows]


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


class GraphedHidden:
    """Hidden states of full rows without a cache: text windows, all of one shape except the
    last.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._replayed = ReplayedForward(
            self._hidden, cuda_graphs.CudaGraphs(self._hidden, copies=False)
        )

    @property
    def num_replays(self) -> int:
        """Windows that were a graph's."""
        return self._replayed.num_replays

    def _hidden(self, tokens_BS: Tensor) -> Tensor | None:
        x_TH = self._forward.hidden(Batch(tokens_BS=tokens_BS))
        self._forward.decoder.rotary.forget()
        return x_TH

    def __call__(self, batch: Batch) -> Tensor | None:
        """As `Forward.hidden`; what comes back holds until the next call. Padded rows go without a
        graph."""
        if any(x is not None for x in (batch.valid_BS, batch.positions_BS, batch.documents_BS)):
            return self._forward.hidden(batch)
        x_TH: Tensor | None = self._replayed(batch.tokens_BS)
        return x_TH
