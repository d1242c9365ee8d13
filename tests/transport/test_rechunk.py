"""Regrouped checkpoints: the same bytes under other names and boxes, copies compared."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool.dtypes import dtype
from megtool.tensors.box import Boxes
from megtool.tensors.catalogue import Replica
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.rechunk import Rechunking, rechunk
from megtool.transport.replicas import pair_replicas
from tests.support.checkpoints.reads import contents

FLOAT = dtype("float32")


def flat_pieces(rng: random.Random, shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Boxes that tile a shape, cut at random places of every dimension."""
    boxes = [([0] * len(shape), list(shape))]
    for dim, n in enumerate(shape):
        at = rng.randint(0, n)
        boxes = [
            (
                [*lo[:dim], a, *lo[dim + 1 :]],
                [*hi[:dim], b, *hi[dim + 1 :]],
            )
            for lo, hi in boxes
            for a, b in ((0, at), (at, n))
            if a < b
        ]
    rng.shuffle(boxes)
    return boxes


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), num_copies=st.integers(0, 3))
def test_pieces_of_flat_tensors_are_the_new_ones(
    seed: int, num_copies: int, tmp_path_factory: pytest.TempPathFactory, raw: SimpleNamespace
) -> None:
    """New tensors are cut into boxes, whose elements lie one after the other in flat ones."""
    rng = random.Random(seed)
    root = tmp_path_factory.mktemp("regroup")
    shapes = [
        tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 3))
    ]
    new = [GlobalTensor(name=f"new{i}", shape=s, dtype=FLOAT) for i, s in enumerate(shapes)]
    values = {t.name: np.random.default_rng(seed).random(t.shape, np.float32) for t in new}
    pieces = [(i, lo, hi) for i, t in enumerate(new) for lo, hi in flat_pieces(rng, t.shape)]
    copies = [rng.choice(pieces) for _ in range(num_copies)]
    kept = GlobalTensor(name="kept", shape=(3, 2), dtype=FLOAT)
    buffers: list[list[np.ndarray[Any, Any]]] = [[], []]
    rows = []
    for k, (i, lo, hi) in enumerate([*pieces, *copies]):
        buffer = rng.randrange(2)
        gap = np.full(rng.randint(0, 2), np.nan, np.float32)
        start = sum(a.size for a in buffers[buffer]) + gap.size
        part = values[new[i].name][tuple(map(slice, lo, hi))].reshape(-1)
        buffers[buffer] += [gap, part]
        rows.append((i, lo, hi, buffer, start, k >= len(pieces)))
    for held in buffers:
        held.append(np.zeros(1, np.float32))
    arrays = {f"flat{k}": np.concatenate(held) for k, held in enumerate(buffers)}
    arrays["kept"] = np.arange(6, dtype=np.float32).reshape(3, 2)
    flat = [GlobalTensor(name=n, shape=arrays[n].shape, dtype=FLOAT) for n in ("flat0", "flat1")]
    tensors = [flat[0], kept, flat[1]]
    grids = [[([0] * len(t.shape), list(t.shape), k % 2)] for k, t in enumerate(tensors)]
    grids[1] = [([0, 0], [2, 2], 0), ([2, 0], [3, 2], 1)]
    catalogue = raw.lay_out(root, tensors, grids)
    raw.write(catalogue, arrays)
    where = {0: catalogue.shards.of(0).start, 1: catalogue.shards.of(2).start}
    again = int(catalogue.extents.offset[catalogue.shards.of(1).start])
    catalogue.replicas.append(
        Replica(shard=catalogue.shards.of(1).start, file=0, offset=again, length=16)
    )
    ndim = max(len(s) for s in shapes)
    grouping = Rechunking(
        new,
        np.array([r[0] for r in rows], np.int64),
        Boxes.of(
            [
                ([*r[1], *[0] * (ndim - len(r[1]))], [*r[2], *[1] * (ndim - len(r[2]))])
                for r in rows
            ],
            ndim,
        ),
        np.array([where[r[3]] for r in rows], np.int64),
        np.array([r[4] for r in rows], np.int64),
        np.array([r[5] for r in rows], bool),
    )
    out = rechunk(catalogue, lambda n: n == "kept", grouping)
    out.check()
    found = contents(out)
    assert found.keys() == {"kept", *values}
    for name, value in {**values, "kept": arrays["kept"]}.items():
        np.testing.assert_array_equal(found[name].view(np.float32), value)
    assert len(out.replicas) == num_copies + 1
    one, other = map(contents, pair_replicas(out))
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])
    assert any(name.startswith("kept [0:2, 0:2]") for name in one)


def test_nothing_changes_where_nothing_is_regrouped(tmp_path: Path, raw: SimpleNamespace) -> None:
    t = GlobalTensor(name="t", shape=(4, 3), dtype=FLOAT)
    catalogue = raw.lay_out(tmp_path, [t], [[([0, 0], [2, 3], 0), ([2, 0], [4, 3], 1)]])
    value = np.arange(12, dtype=np.float32).reshape(4, 3)
    raw.write(catalogue, {"t": value})
    none = np.zeros(0, np.int64)
    empty = Rechunking([], none, Boxes.of([], 0), none, none, np.zeros(0, bool))
    out = rechunk(catalogue, lambda _: True, empty)
    np.testing.assert_array_equal(contents(out)["t"], value)
    np.testing.assert_array_equal(out.extents.offset, catalogue.extents.offset)
    np.testing.assert_array_equal(out.shards.owner, catalogue.shards.owner)
