"""Global tensors and how they are cut into shards: names, shapes and boxes, no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.tensors.box import Boxes, Ints, numel


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalTensor:
    """One tensor of the entire model, independent of how it is sharded.

    `dtype` is the type of its elements; `packing` names a number format (`number_formats`) if
    the bytes on disk are encoded (`gguf:Q4_1`), and is None when they are plain row-major elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    packing: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the decoded row-major tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shards:
    """The boxes that global tensors are cut into, in columns, grouped by tensor.

    `tensor[i]` is the index of shard `i`'s tensor (ascending), `boxes` its box, padded to the
    widest tensor with `[0, 1)`, `owner[i]` the rank (for a source: the file) it belongs to.
    """

    tensor: NDArray[np.int32]
    boxes: Boxes
    owner: NDArray[np.int32]
    first: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.tensor) and (np.diff(self.tensor) < 0).any():
            raise ValueError("shards must be grouped by tensor, in ascending order")
        last = int(self.tensor[-1]) if len(self.tensor) else -1
        first = np.searchsorted(self.tensor, np.arange(last + 2)).astype(np.int64)
        object.__setattr__(self, "first", first)

    def __len__(self) -> int:
        return len(self.tensor)

    def of(self, tensor: int) -> slice:
        """The rows of one tensor's shards."""
        if tensor + 1 >= len(self.first):
            return slice(len(self), len(self))
        return slice(int(self.first[tensor]), int(self.first[tensor + 1]))

    @classmethod
    def build(
        cls, rows: Iterable[tuple[int, Sequence[int], Sequence[int], int]], ndim: int
    ) -> Shards:
        """Shards from `(tensor, lo, hi, owner)` rows, in any order of tensors."""
        table = sorted(rows, key=lambda r: r[0])
        pad = [
            ([*r[1], *[0] * (ndim - len(r[1]))], [*r[2], *[1] * (ndim - len(r[2]))]) for r in table
        ]
        return cls(
            np.array([r[0] for r in table], np.int32),
            Boxes.of(pad, ndim),
            np.array([r[3] for r in table], np.int32),
        )


def padded_shapes(tensors: Sequence[GlobalTensor], ndim: int) -> Ints:
    """Shapes of all tensors, int64 `[t, ndim]`, padded with 1."""
    out = np.ones((len(tensors), ndim), np.int64)
    for row, t in enumerate(tensors):
        out[row, : len(t.shape)] = t.shape
    return out


def widest(tensors: Sequence[GlobalTensor]) -> int:
    """The largest number of dimensions among the tensors."""
    return max((len(t.shape) for t in tensors), default=0)
