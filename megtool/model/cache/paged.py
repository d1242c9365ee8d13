"""A cache of blocks, of which sequences take more as they grow, and which they may share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.model.cache.block_pool import BlockPool
from megtool.model.cache.compressed import CompressedKeys
from megtool.model.cache.key_span import KeySpan
from megtool.model.cache.kv_cache import KVCache, entry_sizes
from megtool.model.cache.recurrent_state import Mixers, RecurrentStates
from megtool.parallel.process_groups import ALONE, ProcessGroups
from megtool.spec.model_config import ModelConfig

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTables:
    """Where the sequences of a pass of one token each are stored, as tensors on the device.

    `table_BM`: the blocks of each row, 0 beyond its last; `past_B`: how many tokens are in them;
    `states_B`: its row among the states of recurrent mixers.
    """

    table_BM: Tensor
    past_B: Tensor
    states_B: Tensor


class PagedCache(KVCache):
    """Blocks of `block_size` slots, allocated as sequences grow and freed when they end.

    A sequence is named by an int. `choose` says which sequences are the rows of the next pass, and
    how many tokens of each are real (padding on the right takes no slot). Block 0 is scratch: what
    is padding is written there. Keys come back gathered, row by row. Recurrent mixers have room for
    `num_sequences` sequences at once (by default as many as there are blocks). Of `groups`, ranks
    of tp keep their heads, and those of cp every cp-th token each. Sequences may share the full
    blocks that they begin with (`enter`, `publish`), unless there are recurrent mixers,
    whose states are of a whole sequence.

    While `tables` are set, a pass is of one token for each of their rows and reads nothing on the
    host, so that a CUDA graph can record it. The caller calls `choose` before, and `advance` after
    it has removed the tables.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        num_sequences: int | None = None,
        layers: Iterable[int] | None = None,
        groups: ProcessGroups | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        tp, cp = (1, ALONE) if groups is None else (groups.tp.size, groups.cp)
        if num_blocks < 2 or block_size < 1:
            raise UsageError(f"a cache cannot have {num_blocks} blocks of {block_size} slots")
        if block_size % cp.size:
            raise UsageError(
                f"blocks of {block_size} tokens cannot be shared out over cp={cp.size}",
                hint="a number of ranks that divides the block",
            )
        numbers = tuple(range(config.num_layers) if layers is None else layers)
        sizes = entry_sizes(config, numbers, tp)

        def room(heads: int, size: int) -> Tensor:
            slots = num_blocks * block_size // cp.size
            return torch.zeros(slots, heads, size, dtype=dtype, device=device)

        self.keys = {n: room(s.num_heads, s.key_size) for n, s in sizes.items()}
        self.values = {n: room(s.num_heads, s.value_size) for n, s in sizes.items()}
        rows = num_blocks - 1 if num_sequences is None else num_sequences
        mixers = Mixers.of(config, numbers, tp)
        self.states = RecurrentStates(mixers, rows, dtype=dtype, device=device)
        self.compressed = CompressedKeys(config, numbers, dtype=dtype, device=device)
        for ratio in set(self.compressed.ratios.values()):
            self.compressed.make_room(ratio, num_blocks * -(-block_size // ratio))
        self.free_rows = list(range(rows - 1, -1, -1))
        self.state_rows: dict[int, int] = {}
        self.block_size, self.num_blocks, self.device = block_size, num_blocks, device
        self.cp = cp
        self.pool = BlockPool(num_blocks, block_size)
        self.blocks: dict[int, list[int]] = {}
        self._published: dict[int, tuple[int, int]] = {}  # blocks, and the last one's serial number
        self.lengths: dict[int, int] = {}
        self._rows: list[tuple[int, int]] = []
        self._is_revertible = False
        self._begins: dict[int, tuple[int, int]] = {}  # place in the last pass, and length before
        self._empty = torch.zeros(0, dtype=torch.int64, device=device)
        self._write_T, self._read_BL = self._empty, self._empty[None]
        self.tables: BlockTables | None = None

    @property
    def can_share(self) -> bool:
        """Whether sequences may share blocks: all that is kept of a token is in its block."""
        return not self.states.tensors

    def enter(self, sequence: int, tokens: Sequence[int]) -> int:
        """Begin a sequence with the blocks that others have published of its tokens.

        Returns:
            How many tokens these hold: a multiple of the block size, and not all of them, since a
            pass needs one at least.
        """
        blocks = self.pool.find(tokens[:-1]) if self.can_share else []
        self.pool.share(blocks)
        self.blocks[sequence], self.lengths[sequence] = blocks, len(blocks) * self.block_size
        return self.lengths[sequence]

    def reserve(self, sequence: int, tokens: int) -> None:
        """Take the blocks for so many more tokens of a sequence.

        Raises:
            UsageError: there are not enough; then none is taken.
        """
        self.blocks[sequence].extend(self.pool.take(self.needed(sequence, tokens)))

    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        """Let others share the full blocks of a sequence, whose tokens these are from the first."""
        if not self.can_share:
            return
        size = self.block_size
        count, serial = self._published.get(sequence, (0, 0))
        for n in range(count, self.lengths[sequence] // size):
            part = tokens[n * size : (n + 1) * size]
            serial = self.pool.publish(self.blocks[sequence][n], serial, part)
            self._published[sequence] = n + 1, serial

    def needed(self, sequence: int, tokens: int) -> int:
        """How many more blocks a sequence takes for so many more tokens."""
        length = self.lengths.get(sequence, 0) + tokens
        return max(0, -(-length // self.block_size) - len(self.blocks.get(sequence, ())))

    def choose(self, rows: Sequence[tuple[int, int]], *, revertible: bool = False) -> None:
        """Set the rows of the next pass, (sequence, real tokens), and allocate their blocks.

        With `revertible` the sequences can be truncated to any length from the one before it on,
        also where there are recurrent mixers, which then keep their states of every token.

        Raises:
            UsageError: there are not enough free blocks or states, or a sequence stands there
                twice; then nothing was taken.
        """
        if len({sequence for sequence, _ in rows}) != len(rows):
            raise UsageError("a sequence is in two rows of one pass")
        missing = sum(self.needed(*row) for row in rows)
        if missing > self.pool.num_free:
            self.pool.take(missing)  # which refuses
        entering = [sequence for sequence, _ in rows if sequence not in self.state_rows]
        if len(entering) > len(self.free_rows):
            raise UsageError(
                f"{len(entering)} sequences begin, and there is room for the states of "
                f"{len(self.free_rows)}",
                hint="make the cache for more sequences at once (num_sequences)",
            )
        for sequence in entering:
            self.state_rows[sequence] = self.free_rows.pop()
        self.states.zero([self.state_rows[sequence] for sequence in entering])
        for sequence, tokens in rows:
            count = self.needed(sequence, tokens)
            self.lengths.setdefault(sequence, 0)
            self.blocks.setdefault(sequence, []).extend(self.pool.take(count))
        self._rows, self._is_revertible = list(rows), revertible
        self._begins = {s: (n, self.lengths[s]) for n, (s, _) in enumerate(rows)}

    def release(self, sequence: int) -> None:
        """Leave a sequence's blocks, and free its states."""
        self.pool.release(self.blocks.pop(sequence, []))
        self._published.pop(sequence, None)
        self.lengths.pop(sequence, None)
        self._begins.pop(sequence, None)
        if (row := self.state_rows.pop(sequence, None)) is not None:
            self.free_rows.append(row)

    def begin(self, batch: Batch) -> KeySpan:
        """Slots by the rows' block tables."""
        if self.tables is not None:
            return self._begin_by(self.tables, batch)
        rows, tokens = batch.shape
        if rows != len(self._rows):
            raise UsageError(
                f"there are {rows} rows, but {len(self._rows)} sequences are chosen",
                hint="call choose() first",
            )
        if max(real for _, real in self._rows) > tokens:
            raise UsageError(f"{self._rows} were chosen for rows of {tokens} tokens")
        if batch.documents_BS is not None:
            raise UsageError(
                "packed documents cannot have a cache", hint="give every document a row of its own"
            )
        size, device = self.block_size, self.device
        tables = [self.blocks[sequence] for sequence, _ in self._rows]
        longest = max(map(len, tables))
        table_BM = torch.tensor([t + [0] * (longest - len(t)) for t in tables], device=device)
        past_B = torch.tensor([self.lengths[s] for s, _ in self._rows], device=device)
        real_B = torch.tensor([real for _, real in self._rows], device=device)
        new_S = torch.arange(tokens, device=device)
        queries_BS = past_B[:, None] + new_S
        num_keys = max(self.lengths[s] + real for s, real in self._rows)
        slots_BL = (table_BM[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
        places = queries_BS.clamp_max(slots_BL.shape[1] - 1)
        # Padding goes to block 0, which no sequence reads.
        written = torch.where(new_S < real_B[:, None], slots_BL.gather(1, places), 0)
        self._write_T, self._read_BL = self._of_rank(written.flatten(), slots_BL[:, :num_keys])
        rows_of_states = [self.state_rows[sequence] for sequence, _ in self._rows]
        self.states.choose(rows_of_states, revertible=self._is_revertible)
        # Padding stands where the row's last token does, so that no place is beyond the row's own.
        last_B1 = (past_B + real_B - 1).clamp_min(0)[:, None]
        for ratio in set(self.compressed.ratios.values()):
            self.compressed.begin(ratio, self._window_slots(ratio, num_keys, table_BM))
        positions = batch.positions_BS
        positions = torch.minimum(queries_BS, last_B1) if positions is None else positions
        keys_L = torch.arange(num_keys, device=device)
        return KeySpan(
            num_keys=num_keys,
            start=num_keys - tokens if self._is_even(tokens) else None,
            queries_BS=places.clamp_max(num_keys - 1),
            positions_BS=positions,
            key_positions_BL=keys_L[None],
            real_BS=None if self._is_full(tokens) else new_S < real_B[:, None],
            is_counted=batch.positions_BS is None,
            past_B=past_B,
        )

    def make_tables(self, *, num_rows: int, num_blocks: int) -> BlockTables:
        """The tables of the chosen rows, padded to `num_rows` rows of `num_blocks` blocks.

        A row of padding is an empty sequence in block 0. It has the state row 0, so only a cache
        without states may be padded.
        """
        chosen = [s for s, _ in self._rows]
        tables = [self.blocks[s] for s in chosen]
        more = num_rows - len(chosen)
        table = [[*t, *[0] * (num_blocks - len(t))] for t in tables] + [[0] * num_blocks] * more
        lengths = [self.lengths[s] for s in chosen] + [0] * more
        states = [self.state_rows[s] for s in chosen] + [0] * more
        return BlockTables(
            table_BM=torch.tensor(table, dtype=torch.int64, device=self.device),
            past_B=torch.tensor(lengths, dtype=torch.int64, device=self.device),
            states_B=torch.tensor(states, dtype=torch.int64, device=self.device),
        )

    def _begin_by(self, tables: BlockTables, batch: Batch) -> KeySpan:
        """As `begin`, by tables alone."""
        table_BM, size, device = tables.table_BM, self.block_size, self.device
        slots_BL = (table_BM[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
        past_B1 = tables.past_B[:, None]
        written = slots_BL.gather(1, past_B1)
        self._write_T, self._read_BL = self._of_rank(written.flatten(), slots_BL)
        self.states.choose_by(tables.states_B)
        num_keys = slots_BL.shape[1]
        for ratio in set(self.compressed.ratios.values()):
            self.compressed.begin(ratio, self._window_slots(ratio, num_keys, table_BM))
        return KeySpan(
            num_keys=num_keys,
            start=None,
            queries_BS=past_B1,
            positions_BS=past_B1 if batch.positions_BS is None else batch.positions_BS,
            key_positions_BL=torch.arange(num_keys, device=device)[None],
            is_counted=batch.positions_BS is None,
            past_B=tables.past_B,
        )

    def _of_rank(self, written_T: Tensor, read_BL: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's slots among those that are written (elsewhere block 0) and read."""
        rank, size = self.cp.rank, self.cp.size
        written_T = torch.where(written_T % size == rank, written_T // size, 0)
        return written_T, read_BL[:, rank::size] // size

    def _window_slots(self, ratio: int, num_keys: int, table_BM: Tensor) -> Tensor:
        """The slots of windows, [B, L]: each in the block of its last token, which has room for as
        many as can end in it."""
        ends_L = torch.arange(1, num_keys // ratio + 1, device=self.device) * ratio - 1
        blocks_L = (ends_L // self.block_size).clamp_max(table_BM.shape[1] - 1)
        of_block = -(-self.block_size // ratio)
        return table_BM[:, blocks_L] * of_block + ends_L % self.block_size // ratio

    def _is_even(self, tokens: int) -> bool:
        """All rows have the same past, and no padding."""
        pasts = {self.lengths[sequence] for sequence, _ in self._rows}
        return len(pasts) == 1 and self._is_full(tokens)

    def _is_full(self, tokens: int) -> bool:
        """There is no padding."""
        return all(real == tokens for _, real in self._rows)

    def append(self, layer: int, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """New slots are written in place; what is returned is gathered."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, self._write_T, key_BKSD.transpose(1, 2).flatten(0, 1))
        values.index_copy_(0, self._write_T, value_BKSD.transpose(1, 2).flatten(0, 1))
        return self._gather(keys), self._gather(values)

    def _gather(self, slots: Tensor) -> Tensor:
        """The slots of all rows, [B, K, L, D]; on a CPU several times faster than by an index."""
        rows = slots.index_select(0, self._read_BL.flatten())
        return rows.view(*self._read_BL.shape, *slots.shape[1:]).transpose(1, 2)

    def truncate(self, lengths: Mapping[int, int]) -> None:
        """Forget tokens of sequences from these lengths on; their blocks stay their own.

        Raises:
            UsageError: there are recurrent mixers, and a length is not one that the last pass
                began with or went through, or that pass was not revertible; then nothing is
                forgotten.
        """
        shorter = {s: n for s, n in lengths.items() if n < self.lengths[s]}
        if self.states.tensors:
            counts: dict[int, int] = {}
            for sequence, length in shorter.items():
                place, begin = self._begins.get(sequence, (0, self.lengths[sequence]))
                if not self._is_revertible or length < begin:
                    raise UsageError(
                        f"states of recurrent mixers cannot go back to before token {length}",
                        hint="choose(..., revertible=True), and truncate to a length in that pass",
                    )
                counts[place] = length - begin
            self.states.revert(counts)
        self.lengths.update(shorter)

    def advance(self) -> None:
        """Every chosen sequence is longer by its real tokens, unless `tables` are set."""
        self._write_T, self._read_BL = self._empty, self._empty[None]  # a graph's do not last
        if self.tables is not None:
            return
        for sequence, real in self._rows:
            self.lengths[sequence] += real
        self._rows = []
