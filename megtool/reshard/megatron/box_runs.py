"""Pieces: runs of a rank's parameter as boxes of the model's tensor, collected for a regrouping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megtool.checkpoint.rechunk import Regrouping
from megtool.convert.rank_parameters import Parameter
from megtool.tensors.box import Boxes, from_flat, numel
from megtool.tensors.sharded import GlobalTensor, widest

_Box = tuple[Sequence[int], Sequence[int]]


def boxes_of(parameter: Parameter, start: int, stop: int) -> Iterator[tuple[_Box, int]]:
    """The rank's elements `start` to `stop` as boxes of the model's tensor, in order.

    With each comes the position of its first element, counted from `start`.
    """
    at = 0
    for lo, hi in parameter.boxes:
        shape = [h - x for x, h in zip(lo, hi, strict=True)]
        size = numel(shape)
        a, b = max(start - at, 0), min(stop - at, size)
        if a < b:
            position = at + a - start
            found = from_flat(shape, a, b)
            volumes = found.volume().tolist()
            for box_lo, box_hi, volume in zip(
                found.lo.tolist(), found.hi.tolist(), volumes, strict=True
            ):
                yield (
                    (
                        [x + y for x, y in zip(lo, box_lo, strict=True)],
                        [x + y for x, y in zip(lo, box_hi, strict=True)],
                    ),
                    position,
                )
                position += volume
        at += size


@dataclass(slots=True)
class Collected:
    """Pieces as they are found, to become a `Regrouping`.

    A box that came before is a copy. With `repeat`, it is a piece of a tensor of its own instead,
    as a checkpoint to be written needs it: `names` then lists the names each tensor goes by.
    """

    repeat: bool = False
    tensors: dict[str, GlobalTensor] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    _rows: list[tuple[str, _Box, int, int, bool]] = field(default_factory=list)
    _seen: dict[tuple[object, ...], int] = field(default_factory=dict)

    def add(self, tensor: GlobalTensor, box: _Box, shard: int, start: int) -> None:
        """Element `start` on of an old shard is `box` of `tensor`."""
        lo, hi = box
        key = (tensor.name, *lo, *hi)
        times = self._seen[key] = self._seen.get(key, -1) + 1
        name = tensor.name
        if times and self.repeat:
            name = f"{tensor.name}#{times}"
        if name not in self.tensors:
            self.tensors[name] = GlobalTensor(name=name, shape=tensor.shape, dtype=tensor.dtype)
            self.names.setdefault(tensor.name, []).append(name)
        self._rows.append((name, box, shard, start, bool(times) and not self.repeat))

    def regrouping(self) -> Regrouping:
        """All pieces."""
        tensors = list(self.tensors.values())
        number = {t.name: i for i, t in enumerate(tensors)}
        ndim = widest(tensors)
        pairs = [
            ([*lo, *[0] * (ndim - len(lo))], [*hi, *[1] * (ndim - len(hi))])
            for _, (lo, hi), _, _, _ in self._rows
        ]
        return Regrouping(
            tensors,
            np.array([number[r[0]] for r in self._rows], np.int64),
            Boxes.of(pairs, ndim),
            np.array([r[2] for r in self._rows], np.int64),
            np.array([r[3] for r in self._rows], np.int64),
            np.array([r[4] for r in self._rows], bool),
        )
