"""Caches in storage that never moves: keys and values, states of mixers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.model.cache.compressed import CompressedKeys
from megtool.model.cache.key_span import KeySpan
from megtool.model.cache.recurrent_state import Mixers, RecurrentStates, StateName
from megtool.parallel.process_groups import ALONE, Group
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

if TYPE_CHECKING:
    from megtool.model.cache.source import SourceCache


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
        if config.latent.kv_lora_rank:
            index = config.indexer.index_head_dim if config.indexer.index_num_heads else 0
            value_size = config.latent.qk_rope_head_dim + index
            return cls(num_heads=1, key_size=config.latent.kv_lora_rank, value_size=value_size)
        if config.compression.is_compressed:
            return cls(num_heads=1, key_size=config.attention.head_dim, value_size=0)
        heads = max(1, config.attention.num_kv_heads // tp)
        return cls(
            num_heads=heads,
            key_size=config.attention.head_dim,
            value_size=config.attention.value_size,
        )


def entry_sizes(config: ModelConfig, layers: Iterable[int], tp: int = 1) -> dict[int, EntrySize]:
    """The sizes of those of the layers that have attention to keys and values of their own."""
    own = layer_sets.attn_layers(config) - layer_sets.shared_kv_layers(config)
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
