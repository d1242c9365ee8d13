"""Splits tensors into parts that threads read, each in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megtool.process.threads import MOST_THREADS, count_threads
from megtool.storage.location.path import is_remote
from megtool.tensors.box import strides
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.shard_locator import count_cuttable_dims
from megtool.transport.tile import split_box

PART_BYTES = 32 << 20
"""The part of a tensor that one thread reads; several threads read a larger tensor."""

TILE_BYTES = 512 << 10
"""The bytes processed at a time: small enough for a core's L2 cache."""


def split_placement(
    placement: Placement, cell_bytes: int, depth: int | None = None
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Split a view into boxes `lo:hi` that are contiguous in row-major order.

    Yields the flat index of the first element, `lo` and `hi`. Dimensions from `depth` on stay
    whole.
    """
    step = strides(placement.shape)
    zero = (0,) * len(placement.shape)
    for lo, hi in split_box(zero, placement.shape, cell_bytes, PART_BYTES, depth=depth):
        yield sum(i * s for i, s in zip(lo, step, strict=True)), lo, hi


def packed_row_depth(placement: Placement, stored: GlobalTensor) -> int | None:
    """The `depth` for `split_placement`: packed rows stay whole, other tensors may be cut."""
    return None if stored.packing is None else count_cuttable_dims(placement, stored)


STORE_TILE_BYTES = 4 << 20
"""What a thread asks a store for at a time: several requests, whose latency is shared."""


def default_threads(threads: int | None, *sources: Path) -> int:
    """The requested number of threads, or one per core, at most eight; eight for sources in stores,
    because threads wait for these."""
    if any(map(is_remote, sources)):
        return threads or MOST_THREADS
    return threads or count_threads()
