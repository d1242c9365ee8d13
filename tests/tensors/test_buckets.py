"""The distributed optimizer's buckets: what is laid out is found again, and nothing else fits."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megtool.tensors.buckets import fit, lay_out, local_ranges, padded, split_coalesced

SIZES = st.lists(st.integers(1, 300), max_size=12)
BUCKETS = st.sampled_from([None, 1, 100, 500, 10**9])


@given(numels=SIZES, bucket_size=BUCKETS, aligned=st.booleans())
def test_slots_are_found_from_the_sizes_alone(
    numels: list[int], bucket_size: int | None, aligned: bool
) -> None:
    alignment = 64 if aligned else 1
    slots, sizes = lay_out(
        numels, [False] * len(numels), bucket_size=bucket_size, alignment=alignment
    )
    assert fit(numels, sizes, alignment=alignment) == slots


@given(numels=SIZES, bucket_size=BUCKETS, data=st.data())
def test_coalesced_buckets_are_parted(
    numels: list[int], bucket_size: int | None, data: st.DataObject
) -> None:
    shared = [data.draw(st.booleans()) and i == len(numels) - 1 for i in range(len(numels))]
    slots, sizes = lay_out(numels, shared, bucket_size=bucket_size)
    found = split_coalesced(numels, shared, sum(sizes), (bucket_size,))
    assert found is not None
    starts = [sum(sizes[: s.bucket]) + s.start for s in slots]
    assert [(s.bucket, s.start, s.numel) for s in found] == [
        (s.bucket, start, n) for s, start, n in zip(slots, starts, numels, strict=True)
    ]
    covered = sorted((s.start, s.start + s.numel) for s in found)
    assert all(a[1] <= b[0] for a, b in pairwise(covered))
    assert not covered or covered[-1][1] <= sum(sizes)


@given(numels=st.lists(st.integers(1, 300), min_size=1, max_size=6), more=st.integers(1, 10**6))
def test_a_total_that_no_size_gives(numels: list[int], more: int) -> None:
    largest = sum(-(-n // 64) * 64 for n in numels)
    assert split_coalesced(numels, [False] * len(numels), largest + more, (None, 100)) is None
    assert split_coalesced(numels, [False] * len(numels), sum(numels) - 1, (None, 100)) is None


def test_candidates_are_tried_in_turn() -> None:
    numels, shared = [100, 100, 100], [False] * 3
    whole = split_coalesced(numels, shared, 356, (None, 100))  # 100 + 28 + 100 + 28 + 100
    assert whole is not None
    assert [s.start for s in whole] == [256, 128, 0]
    parted = split_coalesced(numels, shared, 300, (None, 100))
    assert parted is not None
    assert [s.start for s in parted] == [200, 100, 0]
    assert [s.bucket for s in parted] == [2, 1, 0]


@given(numel=st.integers(0, 10_000), dp=st.integers(1, 9))
def test_ranks_share_a_bucket(numel: int, dp: int) -> None:
    ranges = local_ranges(numel, dp)
    assert [a for a, _ in ranges[1:]] == [b for _, b in ranges[:-1]]
    assert (ranges[0][0], ranges[-1][1]) == (0, numel)
    assert padded(numel, dp) % dp == 0
