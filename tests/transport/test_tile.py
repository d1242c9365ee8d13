"""Tiles against numpy: cutting boxes, and moving them between memory and strided files."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.storage.files import Files
from megtool.storage.open_files import OpenFiles
from megtool.transport.shard_locator import FileView
from megtool.transport.strided import Buffers, PeakMemory, choose_assign
from megtool.transport.tile import TileIO, choose_tile_bytes, halve_box, split_box


@given(
    shape=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    most=st.integers(1, 200),
    depth=st.integers(0, 4),
)
def test_cut_gives_consecutive_boxes(shape, most, depth):
    depth = min(depth, len(shape))
    flat = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    inner = int(np.prod(shape[depth:], dtype=int))
    seen = []
    for lo, hi in split_box((0,) * len(shape), shape, 2, most, depth=depth):
        part = flat[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))].reshape(-1)
        assert len(part) <= max(most // 2, inner, 1)
        seen += part.tolist()
    assert seen == list(range(flat.size))


@given(shape=st.lists(st.integers(1, 7), max_size=4).map(tuple), most=st.integers(1, 40))
def test_halved_boxes_cover_once(shape, most):
    count = np.zeros(shape, int)
    for lo, hi in halve_box((0,) * len(shape), shape, most):
        box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        assert count[box].size <= most
        count[box] += 1
    assert (count == 1).all()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of 64 KiB in which every 2-byte element holds its own position."""
    path = tmp_path_factory.mktemp("tile") / "data"
    path.write_bytes(np.arange(1 << 15, dtype="<u2").tobytes())
    return path


def strided(file, shape, order, gaps, start, scale=2):
    """One piece that holds all of a view, with its dimensions nested in `order` in the file."""
    step, reach = [0] * len(shape), 1
    for d, gap in zip(order, gaps, strict=False):
        step[d] = reach * gap
        reach = step[d] * shape[d]
    shape_row = np.array([shape], np.int64).reshape(1, -1)
    return FileView(
        paths=[file],
        start=np.array([start * scale]),
        step=np.array([step], np.int64).reshape(1, -1) * scale,
        lo=np.zeros_like(shape_row),
        hi=shape_row,
        cell_bytes=scale,
    ), [s for s in step]


LATTICES = st.lists(st.integers(1, 5), max_size=4).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)),
        st.permutations(range(len(shape))),
        st.lists(st.integers(1, 2), min_size=4, max_size=4),
        st.integers(0, 100),
        st.integers(1, 300),
        st.integers(8, 200),
        st.booleans(),
    )
)


@given(LATTICES)
def test_reading_any_lattice(file, lattice):
    shape, order, gaps, start, most, room, sieve = lattice
    side, step = strided(file, shape, order, gaps, start)
    buffers, files = Buffers(PeakMemory()), Files()
    with OpenFiles(files) as opened:
        traffic = TileIO(side, files, opened, buffers.take("scratch", room), buffers, sieve=sieve)
        tiles = {}
        with traffic:
            for lo, hi in split_box((0,) * len(shape), shape, 2, most):
                size = tuple(b - a for a, b in zip(lo, hi, strict=True))
                tile = tiles.setdefault(size, np.zeros(size, "<u2"))
                traffic.read(lo, tile)
                index = np.indices(size).reshape(len(size), tile.size)
                want = start + sum(
                    ((i + a) * s for i, a, s in zip(index, lo, step, strict=True)),
                    start=np.zeros(tile.size, int),
                )
                np.testing.assert_array_equal(tile.reshape(-1), want)


@given(LATTICES)
def test_writing_any_lattice_leaves_the_rest_alone(tmp_path_factory, lattice):
    shape, order, gaps, start, most, room, sieve = lattice
    path = tmp_path_factory.getbasetemp() / "written"
    before = np.arange(1 << 14, dtype="<u2")
    path.write_bytes(before.tobytes())
    side, step = strided(path, shape, order, gaps, start)
    buffers, files = Buffers(), Files()
    new = np.random.default_rng(0).integers(0, 1 << 16, shape, "<u2")
    want = before.copy()
    for index in itertools.product(*(range(n) for n in shape)):
        want[start + sum(i * s for i, s in zip(index, step, strict=True))] = new[index]
    with OpenFiles(files, writing=True) as opened:
        traffic = TileIO(side, files, opened, buffers.take("scratch", room), buffers, sieve=sieve)
        with traffic:
            for repaired in (None, False, True):
                if repaired:  # damage one element of what was written
                    where = start
                    damaged = want.copy()
                    damaged[where] ^= 1
                    path.write_bytes(damaged.tobytes())
                found = False
                for lo, hi in split_box((0,) * len(shape), shape, 2, most):
                    box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
                    tile = np.array(new[box], order="C")
                    if repaired is None:
                        traffic.write(lo, tile)
                    else:
                        found |= traffic.repair(lo, tile)
                assert found is bool(repaired)
                np.testing.assert_array_equal(np.frombuffer(path.read_bytes(), "<u2"), want)


@given(
    shape=st.lists(st.integers(1, 150), min_size=2, max_size=3).map(tuple),
    data=st.data(),
)
def test_assigning_in_squares_is_assigning(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    what = np.random.default_rng(0).integers(0, 1 << 16, shape, "<u2")
    to = np.zeros([shape[d] for d in order], "<u2").transpose(np.argsort(order))
    choose_assign(to, what)(to, what)
    np.testing.assert_array_equal(to, what)


def test_tiles_grow_until_both_sides_have_decent_runs(file):
    shape = (2048, 4096)
    rows, _ = strided(file, shape, (1, 0), (1, 1), 0)
    turned, _ = strided(file, shape, (0, 1), (1, 1), 0)
    whole = (0, 0), shape
    assert choose_tile_bytes([rows, rows], *whole, 2, 1 << 18, 1 << 24) == 1 << 18
    assert choose_tile_bytes([rows, turned], *whole, 2, 1 << 18, 1 << 23) == 1 << 23
    assert choose_tile_bytes([rows, turned], *whole, 2, 1 << 18, 1 << 18) == 1 << 18
