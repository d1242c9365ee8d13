"""Which keys each query may attend to, said for every query and key instead of for every pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class ScoreBias(Protocol):
    """What is added to attention scores, computed for a part of all pairs at a time."""

    @property
    def positions_BS(self) -> Tensor:
        """Positions of queries."""

    @property
    def key_positions_BL(self) -> Tensor:
        """Positions of keys."""

    @property
    def table(self) -> Tensor | None:
        """The parameter that it comes from, if any, which gets gradients."""

    def part(self, rows: slice, keys: slice) -> Tensor:
        """Biases of some queries and keys, [B, N, R, C] (batch may be 1)."""

    def among(self, pick: Callable[[Tensor], Tensor]) -> ScoreBias:
        """The same for fewer keys: `pick` takes them from a tensor [B, L]."""


@dataclass(frozen=True, slots=True, eq=False)
class Slopes:
    """A slope for each head times the distance of a key from its query (ALiBi), 0 or less."""

    slopes_N: Tensor
    positions_BS: Tensor
    key_positions_BL: Tensor

    table: Tensor | None = None

    def part(self, rows: slice, keys: slice) -> Tensor:
        """Biases of some queries and keys, [B, N, R, C]."""
        query_BR1 = self.positions_BS[:, rows, None]
        distance = (self.key_positions_BL[:, None, keys] - query_BR1).to(self.slopes_N.dtype)
        return self.slopes_N[:, None, None] * distance[:, None]

    def among(self, pick: Callable[[Tensor], Tensor]) -> Slopes:
        """The same for fewer keys."""
        return replace(self, key_positions_BL=pick(self.key_positions_BL))

    def of_heads(self, heads: slice) -> Slopes:
        """Those of some heads."""
        return replace(self, slopes_N=self.slopes_N[heads])


@dataclass(frozen=True, slots=True, eq=False)
class BucketBias:
    """A bias for each head and bucket of distances (T5): `table` is [buckets, N], and `bucket`
    gives the bucket of each distance of a key from its query (int64)."""

    table: Tensor
    bucket: Callable[[Tensor], Tensor]
    positions_BS: Tensor
    key_positions_BL: Tensor

    def buckets(self, rows: slice, keys: slice) -> Tensor:
        """The bucket of every pair of some queries and keys, [B, R, C]."""
        query_BR1 = self.positions_BS[:, rows, None].to(torch.int64)
        return self.bucket(self.key_positions_BL[:, None, keys] - query_BR1)

    def part(self, rows: slice, keys: slice) -> Tensor:
        """Biases of some queries and keys, [B, N, R, C]."""
        return self.table[self.buckets(rows, keys)].permute(0, 3, 1, 2)

    def add_gradient(self, sums_CN: Tensor, grad_BNRC: Tensor, rows: slice, keys: slice) -> None:
        """Add the gradient of some pairs' scores to that of the table."""
        buckets = self.buckets(rows, keys)
        if buckets.shape[0] == 1:
            grad_BNRC = grad_BNRC.sum(0, keepdim=True)
        flat_PN = grad_BNRC.permute(0, 2, 3, 1).reshape(-1, sums_CN.shape[1])
        sums_CN.index_add_(0, buckets.flatten(), flat_PN.to(sums_CN.dtype))

    def among(self, pick: Callable[[Tensor], Tensor]) -> BucketBias:
        """The same for fewer keys."""
        return replace(self, key_positions_BL=pick(self.key_positions_BL))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Whole rows of S tokens as runs that attend to themselves alone: what kernels of sequences
    without padding (THD, varlen) are told.

    `ids_BS` are equal within a run (batch may be 1), and differ between neighbours; None where each
    row is one run. `starts_BM` (int32) says the same without the device being asked: the first
    tokens of each row's runs, in order, filled up with S. Queries see `window` keys to the left and
    to the right, -1 for all. Where rows are one run each, there may be more keys than queries,
    `num_keys` a row: then the last query's own key is the last one.
    """

    num_tokens: int
    window: tuple[int, int]
    ids_BS: Tensor | None = None
    starts_BM: Tensor | None = None
    num_keys: int | None = None
    _offsets: dict[int, Tensor] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """The host has to wait for the device to learn how many runs there are."""
        return self.ids_BS is not None and self.starts_BM is None

    def offsets(self, num_rows: int, device: torch.device) -> Tensor:
        """Where runs begin among the tokens of all rows, one after the other, and their number at
        the end: int32 [runs + 1], made once for all layers. Runs may be empty."""
        s = self.num_tokens
        if self.ids_BS is None:
            return _even_offsets(num_rows, s, device)
        if num_rows not in self._offsets:
            self._offsets[num_rows] = (
                self._searched_offsets(self.ids_BS, num_rows, device)
                if self.starts_BM is None
                else self._known_offsets(self.starts_BM, num_rows)
            )
        return self._offsets[num_rows]

    def key_offsets(self, num_rows: int, device: torch.device) -> Tensor:
        """Where keys of rows begin that have more keys than queries: int32 [rows + 1]."""
        return _even_offsets(num_rows, self.num_keys or self.num_tokens, device)

    def _known_offsets(self, starts_BM: Tensor, num_rows: int) -> Tensor:
        # What a row is filled up with is where the next one begins: runs without tokens.
        s = self.num_tokens
        rows = torch.arange(num_rows, dtype=torch.int32, device=starts_BM.device)
        starts = (starts_BM + s * rows[:, None]).flatten()
        return torch.cat((starts, starts.new_full((1,), num_rows * s)))

    def _searched_offsets(self, ids_BS: Tensor, num_rows: int, device: torch.device) -> Tensor:
        begins_BS = torch.ones(num_rows, self.num_tokens, dtype=torch.bool, device=device)
        begins_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
        starts = begins_BS.flatten().nonzero().flatten()
        end = starts.new_full((1,), num_rows * self.num_tokens)
        return torch.cat((starts, end)).to(torch.int32)


def _even_offsets(num_rows: int, size: int, device: torch.device) -> Tensor:
    return torch.arange(0, num_rows * size + 1, size, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """How many queries and keys there are, and their device."""

    num_queries: int
    num_keys: int
    device: torch.device

    @classmethod
    def of(cls, query_BNSD: Tensor, key_BKLD: Tensor) -> AttentionSizes:
        """Those of heads of queries and keys."""
        return cls(query_BNSD.shape[2], key_BKLD.shape[2], query_BNSD.device)

    @property
    def offset(self) -> int:
        """The key of the first query, where the last query's is the last key."""
        return self.num_keys - self.num_queries


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Mask:
    """The keys that queries may attend to; never a tensor of queries times keys.

    All of them, or, with `is_causal`, those up to the query's own, the last query's being the last
    key; or those from `first_BS` to `last_BS`, both included (int64, batch may be 1). Of these,
    keys that are not `valid_BL` are seen by none, but for a query's own key, number `own_BS`.
    Or those that `chosen_BSC` lists (int32; negative numbers are none). `bias` is added to scores.
    Keys from number `rest[0]` on are those of the mask `rest[1]`, which counts them from 0.

    With `start` the first query is that key, in all rows, and none attends to keys behind its own:
    so that a device need not be asked. `segments` say the same for whole rows, where they can.
    """

    is_causal: bool = False
    first_BS: Tensor | None = None
    last_BS: Tensor | None = None
    valid_BL: Tensor | None = None
    own_BS: Tensor | None = None
    chosen_BSC: Tensor | None = None
    bias: ScoreBias | None = None
    rest: tuple[int, Mask] | None = None
    start: int | None = None
    segments: Segments | None = None
    _reach: dict[tuple[int, int], tuple[int, int, int, int]] = field(default_factory=dict)
    _square: dict[torch.dtype, Tensor | None] = field(default_factory=dict)
    _parts: dict[tuple[int, int], Mask] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """All keys, or all up to the query's own, and nothing is added to scores."""
        return self.is_everything and self.bias is None

    @property
    def is_everything(self) -> bool:
        """All keys, or all up to the query's own."""
        others = self.first_BS, self.chosen_BSC, self.rest, self.valid_BL
        return all(x is None for x in others)

    def visible(self, rows: slice, keys: slice, sizes: AttentionSizes) -> Tensor | None:
        """Whether queries may attend to keys, bool [B, 1, R, C]; None where all may. Batch and rows
        may be 1."""
        if self.rest is not None:
            return self._visible_in_both(rows, keys, sizes)
        if self.chosen_BSC is not None:
            return _listed(self.chosen_BSC[:, rows], keys)
        if self.first_BS is None or self.last_BS is None:
            if self.valid_BL is not None:
                return self.valid_BL[:, None, None, keys]
            return _causal(rows, keys, sizes) if self.is_causal else None
        first, last = self.first_BS[:, rows, None], self.last_BS[:, rows, None]
        key_C = torch.arange(keys.start, keys.stop, device=first.device)
        seen = (key_C >= first) & (key_C <= last)
        if self.valid_BL is not None and self.own_BS is not None:
            seen = seen & self.valid_BL[:, None, keys] | (key_C == self.own_BS[:, rows, None])
        return seen[:, None]

    def _visible_in_both(self, rows: slice, keys: slice, sizes: AttentionSizes) -> Tensor | None:
        first, (split, second) = self._both(sizes)
        size, parts = rows.stop - rows.start, []
        if keys.start < split:
            part = slice(keys.start, min(keys.stop, split))
            parts.append((part, first[0].visible(rows, part, first[1])))
        if keys.stop > split:
            part = slice(max(keys.start, split) - split, keys.stop - split)
            parts.append((part, second[0].visible(rows, part, second[1])))
        if all(seen is None for _, seen in parts):
            return None
        masks = [
            torch.ones(1, 1, size, k.stop - k.start, dtype=torch.bool, device=sizes.device)
            if seen is None
            else seen
            for k, seen in parts
        ]
        batch = max(len(seen) for seen in masks)
        return torch.cat([seen.expand(batch, 1, -1, -1) for seen in masks], -1)

    def _both(
        self, sizes: AttentionSizes
    ) -> tuple[tuple[Mask, AttentionSizes], tuple[int, tuple[Mask, AttentionSizes]]]:
        """The masks of keys before and behind the split, each with its sizes."""
        split, rest = self.rest or (sizes.num_keys, Mask())
        own = replace(self, rest=None)
        return (own, replace(sizes, num_keys=split)), (
            split,
            (rest, replace(sizes, num_keys=sizes.num_keys - split)),
        )

    def square(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """Whether each query may attend to each key, bool [B, 1, S, L], at once: for few of them,
        kept for all layers."""
        if torch.bool not in self._square:
            sizes = AttentionSizes(num_queries, num_keys, device)
            rows, keys = slice(0, num_queries), slice(0, num_keys)
            self._square[torch.bool] = self.visible(rows, keys, sizes)
        return self._square[torch.bool]

    def square_bias(self, sizes: AttentionSizes, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of few queries and keys, minus infinity where there is no
        attention: [B, N, S, L]. It is kept for all layers, unless it learns."""
        if dtype in self._square:
            return self._square[dtype]
        rows, keys = slice(0, sizes.num_queries), slice(0, sizes.num_keys)
        seen = self.visible(rows, keys, sizes)
        added = None if self.bias is None else self.bias.part(rows, keys).to(dtype)
        if seen is not None:
            zero = torch.zeros((), dtype=dtype, device=seen.device)
            added = torch.where(seen, zero if added is None else added, float("-inf"))
        if self.bias is None or self.bias.table is None:
            self._square[dtype] = added
        return added

    def tiles(
        self, rows: slice, sizes: AttentionSizes, step: int
    ) -> Iterator[tuple[slice, Tensor | None]]:
        """The keys that some queries attend to, at most `step` at a time, and what is `visible` of
        them. Keys that none of these queries may see are left out, as far as that is known without
        waiting for a device."""
        if self.rest is not None:
            first, (split, second) = self._both(sizes)
            yield from first[0].tiles(rows, first[1], step)
            for keys, seen in second[0].tiles(rows, second[1], step):
                yield slice(keys.start + split, keys.stop + split), seen
            return
        start, stop, all_start, all_stop = self._reached(rows, sizes)
        for low in range(start, stop, step):
            keys = slice(low, min(low + step, stop))
            is_all = all_start <= keys.start and keys.stop <= all_stop
            yield keys, None if is_all else self.visible(rows, keys, sizes)

    def _reached(self, rows: slice, sizes: AttentionSizes) -> tuple[int, int, int, int]:
        """The keys that any of these queries attends to, from and to, and those that all do."""
        num_keys = sizes.num_keys
        if self.first_BS is None or self.last_BS is None:
            if self.chosen_BSC is not None:
                stop = num_keys if self.start is None else self.start + rows.stop
                return 0, min(stop, num_keys), 0, 0
            if not self.is_causal:
                return 0, num_keys, 0, num_keys if self.valid_BL is None else 0
            return 0, sizes.offset + rows.stop, 0, sizes.offset + rows.start + 1
        if not self.first_BS.is_cpu:
            stop = num_keys if self.start is None else self.start + rows.stop
            return 0, min(stop, num_keys), 0, 0
        if (key := (rows.start, rows.stop)) not in self._reach:
            firsts, lasts = self.first_BS[:, rows], self.last_BS[:, rows]
            low, high = int(firsts.min()), int(lasts.max()) + 1
            ends = int(firsts.max()), int(lasts.min()) + 1
            self._reach[key] = (max(low, 0), high, *((0, 0) if self.valid_BL is not None else ends))
        start, stop, all_start, all_stop = self._reach[key]
        return start, min(stop, num_keys), all_start, all_stop

    def beside(self, num_keys: int, more: Mask) -> Mask:
        """The mask of these keys, of which there are `num_keys`, and of others behind them."""
        return replace(self, rest=(num_keys, more), segments=None, _square={})

    def of_queries(self, rows: slice) -> Mask:
        """The mask of some of the queries, said by intervals or lists."""

        def some(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, rows]

        return Mask(
            first_BS=some(self.first_BS),
            last_BS=some(self.last_BS),
            chosen_BSC=some(self.chosen_BSC),
        )

    def among(self, start: int, stop: int, sizes: AttentionSizes) -> Mask:
        """The same queries' mask of the keys from `start` to `stop` alone; kept for all layers."""
        if (start, stop) in self._parts:
            return self._parts[start, stop]
        self._parts[start, stop] = part = self._among(start, stop, sizes)
        return part

    def _among(self, start: int, stop: int, sizes: AttentionSizes) -> Mask:
        if self.is_everything and self.bias is None and self.is_causal:
            if stop <= sizes.offset + 1:
                return Mask()
            if (start, stop) == (sizes.offset, sizes.num_keys):
                return self
        mask = self.intervals(sizes)

        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else x - start

        return mask._of_keys(
            lambda x: x[:, start:stop],
            first_BS=moved(mask.first_BS),
            last_BS=moved(mask.last_BS),
            own_BS=moved(mask.own_BS),
            chosen_BSC=moved(mask.chosen_BSC),
            start=None if mask.start is None else mask.start - start,
        )

    def every(self, rank: int, size: int, sizes: AttentionSizes) -> Mask:
        """The same queries' mask of every `size`-th key alone, from number `rank` on; kept for all
        layers."""
        if (-size, rank) in self._parts:
            return self._parts[-size, rank]
        self._parts[-size, rank] = part = self._every(rank, size, sizes)
        return part

    def _every(self, rank: int, size: int, sizes: AttentionSizes) -> Mask:
        mask = self.intervals(sizes)

        def place(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return torch.where((x >= 0) & (x % size == rank), x // size, -1).to(x.dtype)

        def least(x: Tensor | None, more: int) -> Tensor | None:
            return None if x is None else torch.div(x - rank + more, size, rounding_mode="floor")

        return mask._of_keys(
            lambda x: x[:, rank::size],
            first_BS=least(mask.first_BS, size - 1),
            last_BS=least(mask.last_BS, 0),
            own_BS=place(mask.own_BS),
            chosen_BSC=place(mask.chosen_BSC),
            start=None,
        )

    def _of_keys(self, pick: Callable[[Tensor], Tensor], **changed: Any) -> Mask:
        """The mask of fewer keys, which `pick` takes from tensors of all."""
        return replace(
            self,
            valid_BL=None if self.valid_BL is None else pick(self.valid_BL),
            bias=None if self.bias is None else self.bias.among(pick),
            segments=None,
            _reach={},
            _square={},
            _parts={},
            **changed,
        )

    def intervals(self, sizes: AttentionSizes) -> Mask:
        """The same, with tensors of intervals where it is causal."""
        if not self.is_causal or self.first_BS is not None:
            return self
        own = torch.arange(sizes.offset, sizes.num_keys, device=sizes.device)[None]
        zeros = torch.zeros_like(own)
        return replace(self, is_causal=False, first_BS=zeros, last_BS=own, start=sizes.offset)


def _causal(rows: slice, keys: slice, sizes: AttentionSizes) -> Tensor | None:
    first = sizes.offset + rows.start
    if keys.stop - 1 <= first:
        return None
    shape = rows.stop - rows.start, keys.stop - keys.start
    ones = torch.ones(shape, dtype=torch.bool, device=sizes.device)
    return ones.tril(first - keys.start)[None, None]


def _listed(chosen_BRC: Tensor, keys: slice) -> Tensor:
    """Which keys are in the lists of their queries, [B, 1, R, C]."""
    size = keys.stop - keys.start
    places = chosen_BRC.to(torch.int64) - keys.start
    places = torch.where((places >= 0) & (places < size), places, size)
    seen = torch.zeros(*places.shape[:2], size + 1, dtype=torch.bool, device=places.device)
    return seen.scatter_(2, places, True)[:, None, :, :size]
