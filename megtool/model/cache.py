"""Caches in storage that never moves, contiguous or paged: keys and values, states of mixers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.model.block_pool import BlockPool
from megtool.model.compressed_cache import CompressedKeys
from megtool.model.recurrent_state import Mixers, RecurrentStates, StateName
from megtool.model_config import ModelConfig
from megtool.parallel.process_groups import ALONE, Group, ProcessGroups

if TYPE_CHECKING:
    from megtool.model.source_cache import SourceCache


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


class KVCache(ABC):
    """What layers keep between passes; used without gradients.

    Attention keeps keys and values of every token, a recurrent mixer (Mamba-2, gated delta net) a
    state of one size (`recurrent_state`); keys that tokens are compressed to are kept besides
    (`compressed`). A pass calls `begin` once, `append` in every layer with
    attention, `read_state` and `write_state` in every layer with a recurrent mixer, and `advance`
    once. `sources` are keys and values of what a decoder attends to of an encoder.
    """

    states: RecurrentStates
    compressed: CompressedKeys
    sources: SourceCache | None = None
    cp: Group = ALONE  # its ranks keep every cp-th token of a row each

    @abstractmethod
    def begin(self, batch: Batch) -> KeySpan:
        """Take slots for the batch's tokens. Raises UsageError where there are too few."""

    @abstractmethod
    def append(self, layer: int, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; returns all that its queries may attend to.

        What is returned has shape [B, K, L, D] and may be a view of the storage.
        """

    @abstractmethod
    def advance(self) -> None:
        """The pass is over: its tokens are part of the past."""

    def read_state(self, layer: int, name: StateName) -> Tensor:
        """A state of a layer's recurrent mixer before this pass, [B, ...]; to be left unchanged."""
        return self.states.read(layer, name)

    def write_state(self, layer: int, name: StateName, value: Tensor) -> None:
        """Keep a layer's state after this pass, in the dtype of the cache."""
        self.states.write(layer, name, value)

    @property
    def is_revertible(self) -> bool:
        """Whether recurrent mixers have to `write_steps` of the states that this pass began from
        and went through."""
        return self.states.is_revertible

    def write_steps(self, layer: int, name: StateName, steps: Tensor) -> None:
        """Keep a layer's states before each token of this pass (`RecurrentStates.write_steps`)."""
        self.states.write_steps(layer, name, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySize:
    """The size of one token in one layer: heads (of this rank), and the sizes of key and value.

    Latent attention keeps the compressed latent as the key of one head, and the rotated part, which
    all heads share, as its value; behind it what an indexer ranks the token by. Where keys are
    compressed, a token's key is its value too, and kept once.
    """

    num_heads: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, config: ModelConfig, tp: int = 1) -> EntrySize:
        """A layer's, cut over `tp` ranks; ranks that share a head keep a copy each."""
        if config.kv_lora_rank:
            index = config.index_head_dim if config.index_num_heads else 0
            value_size = config.qk_rope_head_dim + index
            return cls(num_heads=1, key_size=config.kv_lora_rank, value_size=value_size)
        if config.is_compressed:
            return cls(num_heads=1, key_size=config.head_dim, value_size=0)
        heads = max(1, config.num_kv_heads // tp)
        return cls(num_heads=heads, key_size=config.head_dim, value_size=config.value_size)


def entry_sizes(config: ModelConfig, layers: Iterable[int], tp: int = 1) -> dict[int, EntrySize]:
    """The sizes of those of the layers that have attention to keys and values of their own."""
    own = config.attn_layers - config.shared_kv_layers
    return {n: EntrySize.of(config.at_layer(n), tp) for n in layers if n in own}


def num_cache_bytes(
    config: ModelConfig,
    num_tokens: int,
    *,
    dtype: torch.dtype,
    layers: Iterable[int] | None = None,
    tp: int = 1,
) -> int:
    """What a sequence of so many tokens takes in a cache of all layers, or of some of them on a
    rank: keys and values, the keys that tokens are compressed to, states of recurrent mixers."""
    cache = ContiguousCache(
        config,
        num_rows=1,
        max_tokens=num_tokens,
        layers=layers,
        tp=tp,
        dtype=dtype,
        device="meta",
    )
    tensors = (*cache.keys.values(), *cache.values.values())
    return sum(t.nbytes for t in (*tensors, *cache.states.tensors, *cache.compressed.tensors))


class ContiguousCache(KVCache):
    """One stretch of `max_tokens` slots for each row; all rows grow together.

    Rows of unequal length are padded on the left or the right; padding takes slots too, and is
    never attended to. A pass attends to the slots used so far, as a view. With `graphable` it
    attends to all slots under a mask and counts in device memory alone (`offset`, not `length`), so
    that a recorded decoding step may be replayed; keeping within `max_tokens` is then the caller's
    task. `state` is what a pass changes beside keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_rows: int,
        max_tokens: int,
        layers: Iterable[int] | None = None,
        tp: int = 1,
        graphable: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        numbers = tuple(range(config.num_layers) if layers is None else layers)
        sizes = entry_sizes(config, numbers, tp)

        def room(heads: int, size: int) -> Tensor:
            return torch.zeros(num_rows, heads, max_tokens, size, dtype=dtype, device=device)

        self.keys = {n: room(s.num_heads, s.key_size) for n, s in sizes.items()}
        self.values = {n: room(s.num_heads, s.value_size) for n, s in sizes.items()}
        mixers = Mixers.of(config, numbers, tp)
        self.states = RecurrentStates(mixers, num_rows, dtype=dtype, device=device)
        self.compressed = CompressedKeys(config, numbers, dtype=dtype, device=device)
        for ratio in set(self.compressed.ratios.values()):
            self.compressed.make_room(ratio, num_rows * (max_tokens // ratio))
        self.num_rows, self.max_tokens, self.graphable = num_rows, max_tokens, graphable
        self.length = 0
        self.has_padding, self.has_positions = graphable, False
        self.offset = torch.zeros((), dtype=torch.int64, device=device)
        self.counts_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.valid_BL = torch.zeros(num_rows, max_tokens, dtype=torch.bool, device=device)
        self.positions_BL = torch.zeros(num_rows, max_tokens, dtype=torch.int64, device=device)
        self.slots_L = torch.arange(max_tokens, device=device)
        self._slots_S: Tensor = self.slots_L[:0]
        self._valid_BS: Tensor | None = None

    def begin(self, batch: Batch) -> KeySpan:
        """Slots follow on for all rows at once."""
        rows, tokens = batch.shape
        if rows != self.num_rows:
            raise UsageError(f"{rows} rows do not fit into a cache of {self.num_rows}")
        if not self.graphable and self.length + tokens > self.max_tokens:
            raise UsageError(
                f"{tokens} tokens after {self.length} do not fit into a cache of {self.max_tokens}",
                hint="make the cache for prompt and answer together",
            )
        if batch.documents_BS is not None:
            raise UsageError(
                "packed documents cannot have a cache", hint="give every document a row of its own"
            )
        if self.graphable:
            slots_S = self.offset + self.slots_L[:tokens]
        else:
            slots_S = self.slots_L[self.length : self.length + tokens]
        valid_BS = batch.valid_BS
        self.has_padding = self.has_padding or valid_BS is not None
        if batch.positions_BS is not None:
            positions_BS, self.has_positions = batch.positions_BS, True
        elif not self.has_padding:
            positions_BS = slots_S[None]
        elif valid_BS is None:
            positions_BS = self.counts_B[:, None] + self.slots_L[None, :tokens]
        else:
            positions_BS = (self.counts_B[:, None] + valid_BS.cumsum(1) - 1).clamp_min(0)
        self.positions_BL.index_copy_(1, slots_S, positions_BS.expand(rows, tokens))
        fresh = torch.ones_like(batch.tokens_BS, dtype=torch.bool) if valid_BS is None else valid_BS
        self.valid_BL.index_copy_(1, slots_S, fresh)
        self._slots_S, self._valid_BS = slots_S, valid_BS
        last = self.max_tokens if self.graphable else self.length + tokens
        for ratio in set(self.compressed.ratios.values()):
            each = self.max_tokens // ratio
            rows_B1 = torch.arange(rows, device=slots_S.device)[:, None] * each
            self.compressed.begin(ratio, rows_B1 + self.slots_L[: last // ratio])
        return KeySpan(
            num_keys=last,
            start=None if self.graphable else self.length,
            queries_BS=slots_S[None],
            positions_BS=positions_BS,
            key_positions_BL=self.positions_BL[:, :last],
            valid_BL=self.valid_BL[:, :last] if self.has_padding else None,
            real_BS=valid_BS,
            is_counted=not self.has_positions,
            past_B=self.counts_B,
        )

    def append(self, layer: int, key_BKSD: Tensor, value_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """New slots are written in place; what is returned is a view."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, self._slots_S, key_BKSD)
        values.index_copy_(2, self._slots_S, value_BKSD)
        if self.graphable:
            return keys, values
        last = self.length + key_BKSD.shape[2]
        return keys[:, :, :last], values[:, :, :last]

    def advance(self) -> None:
        """Count the pass's tokens, and those among them that are no padding."""
        tokens = self._slots_S.shape[0]
        self.length += 0 if self.graphable else tokens
        self.offset.add_(tokens)
        self.counts_B.add_(tokens if self._valid_BS is None else self._valid_BS.sum(1))
        self._slots_S, self._valid_BS = self.slots_L[:0], None  # a graph's memory is not ours

    def reset(self) -> None:
        """Forget everything; the storage stays."""
        self.length, self.has_padding, self.has_positions = 0, self.graphable, False
        self.offset.zero_()
        self.counts_B.zero_()
        self.valid_BL.zero_()
        self.states.zero()

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors that a pass changes besides keys and values."""
        own = (self.offset, self.counts_B, self.valid_BL, self.positions_BL)
        return *own, *self.states.tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, and of states."""
        tensors = (*self.keys.values(), *self.values.values(), *self.states.tensors)
        tensors += self.compressed.tensors
        return sum(t.numel() * t.element_size() for t in tensors)


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
