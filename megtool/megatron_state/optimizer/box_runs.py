"""Runs of a rank's parameter as boxes of the model's tensor, collected for a regrouping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megtool.convert.megatron.rank_parameters import Parameter
from megtool.tensors.box import Boxes, from_flat, numel
from megtool.tensors.sharded import GlobalTensor, widest
from megtool.transport.rechunk import Rechunking

_Box = tuple[Sequence[int], Sequence[int]]


def split_into_boxes(parameter: Parameter, start: int, stop: int) -> Iterator[tuple[_Box, int]]:
    """The rank's elements `start` to `stop` as boxes of the model's tensor, in order.

    Each comes with the position of its first element, counted from `start`.
    """
    offset = 0
    for lo, hi in parameter.boxes:
        shape = [h - x for x, h in zip(lo, hi, strict=True)]
        size = numel(shape)
        a, b = max(start - offset, 0), min(stop - offset, size)
        if a < b:
            position = offset + a - start
            inner = from_flat(shape, a, b)
            volumes = inner.volume().tolist()
            for box_lo, box_hi, volume in zip(
                inner.lo.tolist(), inner.hi.tolist(), volumes, strict=True
            ):
                yield (
                    (
                        [x + y for x, y in zip(lo, box_lo, strict=True)],
                        [x + y for x, y in zip(lo, box_hi, strict=True)],
                    ),
                    position,
                )
                position += volume
        offset += size


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The box `lo` to `hi` of a tensor, stored once more as a tensor called `name`."""

    name: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]


@dataclass(slots=True)
class BoxRunCollector:
    """Collects boxes, to become a `Rechunking`.

    A box that is added again is a copy. With `repeat`, it becomes part of another tensor instead,
    as a checkpoint to be written needs it: `names` then lists all names of each tensor. Where ranks
    hold some boxes more often than others, the surplus boxes are tensors of their own, `parts`.
    """

    repeat: bool = False
    tensors: dict[str, GlobalTensor] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    parts: dict[str, list[TensorPart]] = field(default_factory=dict)
    _rows: list[tuple[str, _Box, int, int, bool]] = field(default_factory=list)
    _counts: dict[tuple[object, ...], int] = field(default_factory=dict)

    def add(self, tensor: GlobalTensor, box: _Box, shard: int, start: int) -> None:
        """Record that the elements of an old shard from `start` on are `box` of `tensor`."""
        lo, hi = box
        key = (tensor.name, *lo, *hi)
        count = self._counts[key] = self._counts.get(key, -1) + 1
        name = tensor.name
        if count and self.repeat:
            name = f"{tensor.name}#{count}"
        if name not in self.tensors:
            self.tensors[name] = GlobalTensor(name=name, shape=tensor.shape, dtype=tensor.dtype)
            self.names.setdefault(tensor.name, []).append(name)
        self._rows.append((name, box, shard, start, bool(count) and not self.repeat))

    def regrouping(self) -> Rechunking:
        """The regrouping of all boxes; `names` and `parts` are complete then."""
        self._split_incomplete()
        tensors = list(self.tensors.values())
        number = {t.name: i for i, t in enumerate(tensors)}
        ndim = widest(tensors)
        pairs = [
            ([*lo, *[0] * (ndim - len(lo))], [*hi, *[1] * (ndim - len(hi))])
            for _, (lo, hi), _, _, _ in self._rows
        ]
        return Rechunking(
            tensors,
            np.array([number[r[0]] for r in self._rows], np.int64),
            Boxes.of(pairs, ndim),
            np.array([r[2] for r in self._rows], np.int64),
            np.array([r[3] for r in self._rows], np.int64),
            np.array([r[4] for r in self._rows], bool),
        )

    def _split_incomplete(self) -> None:
        """Make each box of a further name that lacks others a tensor of its own."""
        volumes: dict[str, int] = {}
        for name, (lo, hi), _, _, is_copy in self._rows:
            if not is_copy:
                size = numel([y - x for x, y in zip(lo, hi, strict=True)])
                volumes[name] = volumes.get(name, 0) + size
        whole_of = {name: whole for whole, names in self.names.items() for name in names[1:]}
        incomplete = {
            n: whole
            for n, whole in whole_of.items()
            if volumes.get(n, 0) < numel(self.tensors[n].shape)
        }
        for number, (name, (lo, hi), shard, start, is_copy) in enumerate(self._rows):
            if name not in incomplete:
                continue
            parts = self.parts.setdefault(incomplete[name], [])
            part = TensorPart(f"{incomplete[name]}#part{len(parts)}", tuple(lo), tuple(hi))
            parts.append(part)
            shape = tuple(y - x for x, y in zip(lo, hi, strict=True))
            self.tensors[part.name] = replace(self.tensors[name], name=part.name, shape=shape)
            self._rows[number] = (part.name, ([0] * len(shape), shape), shard, start, is_copy)
        for name, whole in incomplete.items():
            del self.tensors[name]
            self.names[whole].remove(name)
