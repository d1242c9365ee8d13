"""Shards of a catalogue, grouped to be read together: a weight's with those of its state."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megtool.audit.save_facts import FIRST_MOMENT, MAIN, SECOND_MOMENT, WEIGHT
from megtool.convert.megatron.names import split_state
from megtool.tensors.catalogue import Catalogue

_LAYERS = re.compile(r"(^|\.)layers\.(?!\d)")
_EXPERTS = re.compile(r"\.experts\.(experts\.|local_experts\.)?(?!\d|experts\.|local_experts\.)")
_ORDER = {WEIGHT: 0, MAIN: 1, FIRST_MOMENT: 2, SECOND_MOMENT: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """One shard, or a part of it: its state, its number in the catalogue, and its box.

    `shape`, `lo` and `hi` are those of the tensor of one layer and one expert. The box begins
    `skip` elements after the shard.
    """

    state: str
    tensor: int
    shard: int
    shape: tuple[int, ...]
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    skip: int = 0

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.hi[-1] - self.lo[-1] if self.hi else 1

    @property
    def num_rows(self) -> int:
        """Rows of the box."""
        rows = 1
        for a, b in zip(self.lo[:-1], self.hi[:-1], strict=True):
            rows *= b - a
        return rows

    @property
    def has_whole_rows(self) -> bool:
        """Whether its rows are those of the tensor."""
        return len(self.shape) > 1 and self.width == self.shape[-1]

    def first_row(self) -> int | None:
        """The row of the tensor that it begins with; None if its rows do not follow one another."""
        if len(self.shape) < 2:
            return self.lo[0] if self.lo else 0
        row = 0
        for lo, size in zip(self.lo[:-1], self.shape[:-1], strict=True):
            row = row * size + lo
        inner = self.shape[1:-1]
        is_whole = all(
            b - a == size for a, b, size in zip(self.lo[1:-1], self.hi[1:-1], inner, strict=True)
        )
        return row if is_whole or self.num_rows == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Shards of the same box of one name, the weight first: they are read side by side."""

    name: str
    rows: tuple[ShardRow, ...]


def group_rows(catalogue: Catalogue) -> Iterator[RowGroup]:
    """All shards of tensors that are stored as plain elements, tensor by tensor.

    Tensors that hold several layers or experts are taken apart: each is a tensor of its own.
    """
    families: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for number, t in enumerate(catalogue.tensors):
        if t.packing is None and t.numel:
            state, _, key = split_state(t.name)
            families[key].append((state, number))
    for key, members in families.items():
        groups: dict[tuple[object, ...], list[ShardRow]] = defaultdict(list)
        names: dict[tuple[object, ...], str] = {}
        for state, number in members:
            shape = catalogue.tensors[number].shape
            rows = catalogue.shards.of(number)
            boxes = catalogue.shards.boxes
            lows = boxes.lo[rows.start : rows.stop, : len(shape)].tolist()
            highs = boxes.hi[rows.start : rows.stop, : len(shape)].tolist()
            for shard, lo, hi in zip(range(rows.start, rows.stop), lows, highs, strict=True):
                for name, cut, skip in split_modules(key, shape, lo, hi):
                    row = ShardRow(
                        state=state,
                        tensor=number,
                        shard=shard,
                        shape=shape[cut:],
                        lo=tuple(lo[cut:]),
                        hi=tuple(hi[cut:]),
                        skip=skip,
                    )
                    group = (name, row.shape, row.lo, row.hi)
                    names[group] = name
                    groups[group].append(row)
        for box, same_box in sorted(groups.items(), key=lambda item: repr(item[0])):
            ordered = sorted(same_box, key=lambda r: _ORDER.get(r.state, 9))
            yield RowGroup(name=names[box], rows=tuple(ordered))


def split_modules(
    key: str, shape: Sequence[int], lo: Sequence[int], hi: Sequence[int]
) -> Iterator[tuple[str, int, int]]:
    """The layers and experts that a box has: their names, how many leading dimensions of the tensor
    those are, and the first element of each in the box. The key itself where a tensor has none."""
    layers, experts = _LAYERS.search(key), _EXPERTS.search(key)
    cut = int(layers is not None and len(shape) > 1)
    expert_dim = cut if experts is not None and len(shape) - cut > 2 else None
    sizes = [b - a for a, b in zip(lo, hi, strict=True)]
    inner = prod(sizes[cut + (expert_dim is not None) :])
    number = 0
    for layer in range(lo[0], hi[0]) if cut else (None,):
        name = key
        if layer is not None and layers is not None:
            name = f"{key[: layers.end()]}{layer}.{key[layers.end() :]}"
        if expert_dim is None:
            yield name, cut, number * inner
            number += 1
            continue
        match = _EXPERTS.search(name)
        end = match.end() if match else len(name)
        for expert in range(lo[expert_dim], hi[expert_dim]):
            yield f"{name[:end]}{expert}.{name[end:]}", cut + 1, number * inner
            number += 1
