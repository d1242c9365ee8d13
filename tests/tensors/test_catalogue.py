"""The catalogue's checks: what must be refused, and that the message says where."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from megtool.dtypes import dtype
from megtool.errors import CoverageError, FormatError, SourceChangedError
from megtool.tensors.catalogue import (
    Catalogue,
    Destination,
    Extents,
    Replica,
    ShardOffsets,
    StoredFile,
)
from megtool.tensors.sharded import GlobalTensor, Shards
from tests.support.errors import raises

TOP = (1 << 63) - 1


def tensor(name, *shape, kind="uint8", packing=None) -> GlobalTensor:
    return GlobalTensor(name=name, shape=shape, dtype=dtype(kind), packing=packing)


def catalogue(tensors, rows, sizes=(100,), ndim=2, **more) -> Catalogue:
    """Rows are `(tensor, lo, hi, file, offset, length)`."""
    rows = sorted(rows, key=lambda r: r[0])
    return Catalogue(
        format="raw",
        root=more.pop("root", Path("somewhere")),
        files=[StoredFile(path=f"f{k}", size=n) for k, n in enumerate(sizes)],
        tensors=list(tensors),
        shards=Shards.build([r[:4] for r in rows], ndim),
        extents=Extents(
            file=np.array([r[3] for r in rows], np.int32),
            offset=np.array([r[4] for r in rows], np.int64),
            length=np.array([r[5] for r in rows], np.int64),
            contained=more.pop("contained", False),
        ),
        **more,
    )


A = tensor("a", 4, 3)
TOP_HALF = (0, [0, 0], [2, 3], 0, 0, 6)
LOW_HALF = (0, [2, 0], [4, 3], 0, 6, 6)


def test_a_whole_checkpoint_passes():
    good = catalogue(
        [A, tensor("scalar"), tensor("empty", 0, 5), tensor("flat", 7, kind="float32")],
        [
            TOP_HALF,
            LOW_HALF,
            (1, [], [], 0, 12, 1),
            (3, [0], [3], 1, 0, 12),
            (3, [3], [3], 1, 12, 0),
            (3, [3], [7], 1, 12, 16),
        ],
        sizes=(13, 28),
    )
    good.check()
    assert good.num_bytes == 12 + 1 + 0 + 28
    assert "flat" in good
    assert "b" not in good
    assert good["flat"].shape == (7,)
    assert good.index["empty"] == 2
    assert good.path(1).name == "f1"
    catalogue([], []).check()
    catalogue([tensor("s")], [(0, [], [], 0, 0, 1)], ndim=0).check()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([TOP_HALF], r"no shard holds element \[2, 0\] \(hole\)"),
        ([], r"no shard holds element \[0, 0\]"),
        (
            [TOP_HALF, LOW_HALF, (0, [1, 1], [2, 2], 0, 20, 1)],
            r"element \[1, 1\] is stored 2 times \(overlap\)",
        ),
        (
            [TOP_HALF, (*TOP_HALF[:4], 20, 6), LOW_HALF],
            r"element \[0, 0\] is stored 2 times",
        ),
        ([TOP_HALF, (0, [2, 0], [4, 4], 0, 6, 8)], r"shard \[2:4, 0:4\] is outside.*\[4, 3\]"),
        ([TOP_HALF, (0, [2, -1], [4, 3], 0, 6, 8)], r"\[2:4, -1:3\] is outside"),
        ([TOP_HALF, (0, [4, 0], [2, 3], 0, 6, 6)], r"\[4:2, 0:3\] is outside"),
    ],
)
def test_shards_that_do_not_tile_are_refused(rows, says):
    with raises(CoverageError, match=says, tensor="a"):
        catalogue([A], rows).check()


@pytest.mark.parametrize(
    ("offset", "length"),
    [(95, 6), (-1, 6), (6, -1), (101, 6), (TOP, 6), (6, TOP), (TOP, TOP), (TOP - 5, 6)],
)
def test_bytes_outside_their_file_are_refused(offset, length):
    """Sums near 2**63 wrap around; the check must not."""
    with pytest.raises(FormatError, match=f"bytes {offset}\\+{length} are outside a file of 100"):
        catalogue([A], [TOP_HALF, (*LOW_HALF[:4], offset, length)]).check()


def test_too_few_bytes_are_refused_unless_encoded():
    short = [TOP_HALF, (*LOW_HALF[:5], 5)]
    with raises(FormatError, "5 bytes", "[2:4, 0:3]", "6"):
        catalogue([A], short).check()
    catalogue([tensor("a", 4, 3, packing="gguf:Q4_1")], short).check()


def test_bytes_shared_by_two_shards_are_refused():
    b = tensor("b", 6)
    with raises(FormatError, match="shares bytes with 'a'", tensor="b"):
        catalogue([A, b], [TOP_HALF, LOW_HALF, (1, [0], [6], 0, 11, 6)]).check()
    apart = [TOP_HALF, LOW_HALF, (1, [0], [6], 1, 11, 6)]
    catalogue([A, b], apart, sizes=(100, 100)).check()


@pytest.mark.parametrize(
    "bad", [tensor("x", -1), tensor("x", 1 << 32, 1 << 31), tensor("x", *[1] * 17)]
)
def test_shapes_no_file_can_hold_are_refused(bad):
    with pytest.raises(FormatError, match="no checkpoint can hold"):
        catalogue([bad], [], ndim=17).check()


def test_a_name_given_twice_is_refused():
    with pytest.raises(FormatError, match="two tensors"):
        catalogue([tensor("z", 0), tensor("z", 0)], []).check()


def test_huge_shapes_do_not_wrap_to_nothing():
    """2**62 elements in halves, and 2**62 less one row: a hole at the very end."""
    n = 1 << 31
    big = tensor("big", n, n)
    halves = [(0, [0, 0], [n // 2, n], 0, 0, 1 << 61), (0, [n // 2, 0], [n, n], 1, 0, 1 << 61)]
    catalogue([big], halves, sizes=(1 << 61, 1 << 61)).check()
    halves[1] = (0, [n // 2, 0], [n - 1, n], 1, 0, 1 << 61)
    with pytest.raises(CoverageError, match=rf"no shard holds element \[{n - 1}, 0\]"):
        catalogue([big], halves, sizes=(1 << 61, 1 << 61)).check()


def test_a_selection_keeps_places_and_renumbers_the_rest():
    whole = catalogue(
        [A, tensor("b", 2), tensor("c", 5)],
        [TOP_HALF, LOW_HALF, (1, [0], [2], 0, 12, 2), (2, [0], [2], 0, 20, 2),
         (2, [2], [5], 1, 30, 3)],
        sizes=(100, 100),
        replicas=[Replica(shard=1, file=1, offset=0, length=6),
                  Replica(shard=4, file=0, offset=50, length=3)],
        locate_contained=lambda ids: ShardOffsets(offset=ids * 10),
        contained=True,
        metadata={"iteration": 3},
    )  # fmt: skip
    part = whole.select(lambda name: name in "bc")
    part.check()
    assert [t.name for t in part.tensors] == ["b", "c"]
    assert part.shards.tensor.tolist() == [0, 1, 1]
    assert part.shards.of(1) == slice(1, 3)
    assert part.extents.offset.tolist() == [12, 20, 30]
    assert part.extents.file.tolist() == [0, 0, 1]
    assert part.replicas == [Replica(shard=2, file=0, offset=50, length=3)]
    assert part.metadata == {"iteration": 3}
    assert part.locate(np.array([2, 0])).offset.tolist() == [40, 20]
    assert part.select(lambda name: name == "c").locate(np.array([1])).offset.tolist() == [40]
    assert len(whole.select(lambda name: False).shards) == 0


def test_plain_shards_lie_where_extents_say():
    plain = catalogue([A], [TOP_HALF, LOW_HALF])
    assert plain.locate(np.array([1, 0])).offset.tolist() == [6, 0]
    lost = catalogue([A], [TOP_HALF, LOW_HALF], contained=True)
    with pytest.raises(ValueError, match="'raw'"):
        lost.locate(np.array([0]))


def test_a_file_is_what_it_was_or_the_source_changed(tmp_path):
    for name in ("f0", "f1"):
        (tmp_path / name).write_bytes(b"12345")
    held = catalogue([], [], root=tmp_path)
    held.files = [StoredFile.stat(tmp_path, n) for n in ("f0", "f1")]
    held.check_unchanged()
    os.utime(tmp_path / "f1", ns=(1, 1))
    held.check_unchanged([0])
    with raises(SourceChangedError, match="changed", file=tmp_path / "f1"):
        held.check_unchanged()
    (tmp_path / "f0").unlink()
    with pytest.raises(SourceChangedError, match="disappeared"):
        held.check_unchanged([0])


def test_a_replaced_or_longer_file_is_noticed(tmp_path):
    f = tmp_path / "f"
    f.write_bytes(b"12345")
    held = catalogue([], [], root=f)
    held.files = [StoredFile.stat(f, "")]
    assert held.path(0) == f
    was = held.files[0]
    for change in ({"size": 6}, {"inode": was.inode + 1}):
        held.files = [dataclasses.replace(was, **change)]
        with pytest.raises(SourceChangedError):
            held.check_unchanged()


def test_only_regular_files_can_be_stored(tmp_path):
    with pytest.raises(FormatError, match="cannot open 'none'"):
        StoredFile.stat(tmp_path, "none")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FormatError, match="not a regular file"):
        StoredFile.stat(tmp_path, "folder")


def test_commit_markers_come_after_all_other_small_files():
    laid = Destination(
        catalogue=catalogue([], []), fragments=[], small_files={"b": b"1"}, final_files={"a": b"2"}
    )
    assert list(laid.iter_small_files()) == [("b", b"1"), ("a", b"2")]
