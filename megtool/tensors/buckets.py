"""The distributed optimizer's flat buffers: the offset of each parameter in its bucket.

Parameters follow in reverse registration order, each start is a multiple of 64 elements, a bucket
closes when it holds `bucket_size` elements, and a shared embedding has one for itself; the end of
a bucket is padded, which no checkpoint stores. Source: megatron-core 0.16.1,
`distributed/param_and_grad_buffer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megtool.tensors.registration_order import Order

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    """The settings of a run that decide how it cuts its buckets.

    `param_dtype` and `grad_dtype` are torch's names; `bucket_size` (elements) is None unless
    gradient reduction overlaps with the backward pass, as then only the first chunk of the first
    stage is cut into several buckets. `for_bandwidth`: see `padded`.
    """

    order: Order
    param_dtype: str
    grad_dtype: str
    bucket_size: int | None = None
    for_bandwidth: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of a parameter: elements `start` to `start + numel` of bucket number
    `bucket`.
    """

    bucket: int
    start: int
    numel: int


def lay_out(
    numels: Sequence[int],
    shared: Sequence[bool],
    *,
    bucket_size: int | None = None,
    alignment: int = ALIGNMENT,
) -> tuple[list[Slot], list[int]]:
    """Place parameters, given in registration order, into buckets: their slots and the bucket
    sizes.

    `numels` are elements, `shared` marks shared embeddings, sizes are unpadded elements. Slots are
    in the order of `numels`.
    """
    slots: list[Slot] = []
    sizes: list[int] = []
    start = begun = 0
    for numel, alone in zip(reversed(numels), reversed(shared), strict=True):
        start = -(-start // alignment) * alignment
        if alone and begun:
            sizes.append(start)
            start = begun = 0
        slots.append(Slot(len(sizes), start, numel))
        start, begun = start + numel, begun + 1
        if alone or (bucket_size is not None and start >= bucket_size):
            sizes.append(start)
            start = begun = 0
    if begun:
        sizes.append(start)
    return slots[::-1], sizes


def fit(
    numels: Sequence[int], sizes: Sequence[int], *, alignment: int = ALIGNMENT
) -> list[Slot] | None:
    """Slots of parameters (in registration order) in buckets of known unpadded sizes.

    None when they do not fill the buckets exactly.
    """
    slots: list[Slot] = []
    bucket = start = 0
    for numel in reversed(numels):
        start = -(-start // alignment) * alignment
        if bucket < len(sizes) and start + numel > sizes[bucket] and start:
            if not _is_full(start, slots, sizes[bucket]):
                return None
            bucket, start = bucket + 1, 0
        if bucket >= len(sizes) or start + numel > sizes[bucket]:
            return None
        slots.append(Slot(bucket, start, numel))
        start += numel
    if bucket != len(sizes) - 1 or start != sizes[bucket]:
        return None if numels or sizes else []
    return slots[::-1]


def _is_full(aligned: int, slots: Sequence[Slot], size: int) -> bool:
    """A bucket ends with its last parameter, or at the next aligned element."""
    last = slots[-1]
    return size in (last.start + last.numel, aligned)


def default_bucket_size(dp: int) -> int:
    """Megatron's bucket size (elements) where communication overlaps, for `dp` replicas."""
    return max(40_000_000, 1_000_000 * dp)


def padded(numel: int, dp: int, *, for_bandwidth: bool = False) -> int:
    """Elements of a bucket of `numel` unpadded elements for `dp` replicas, padding included.

    With `for_bandwidth` a multiple of 2^16, too: Megatron-Core's `pad_buckets_for_high_nccl_busbw`.
    """
    unit = math.lcm(dp, 128, 1 << 16 if for_bandwidth else 1)
    return -(-numel // unit) * unit


def local_ranges(numel: int, dp: int, *, for_bandwidth: bool = False) -> list[tuple[int, int]]:
    """The range of each data-parallel rank in a bucket of `numel` unpadded elements.

    Ranges are cut to the unpadded size, so the last ones may be empty.
    """
    each = padded(numel, dp, for_bandwidth=for_bandwidth) // dp
    return [(min(r * each, numel), min((r + 1) * each, numel)) for r in range(dp)]


def split_coalesced(
    numels: Sequence[int],
    shared: Sequence[bool],
    total: int,
    bucket_sizes: Sequence[int | None] = (None,),
) -> list[Slot] | None:
    """Slots in a buffer whose buckets were stored one after the other, without their padding.

    Parameters are in registration order. Tries each of `bucket_sizes`, aligned and (as older cores
    were) not; starts count from the buffer's beginning. None when nothing gives `total` elements.
    """
    for alignment in (ALIGNMENT, 1):
        for bucket_size in bucket_sizes:
            slots, sizes = lay_out(numels, shared, bucket_size=bucket_size, alignment=alignment)
            if sum(sizes) == total:
                first = [0, *accumulate(sizes)]
                return [Slot(s.bucket, first[s.bucket] + s.start, s.numel) for s in slots]
    return None
