"""Global tensors and shards."""

from __future__ import annotations

import numpy as np
import pytest

from megtool.dtypes import dtype
from megtool.tensors.box import Boxes
from megtool.tensors.sharded import GlobalTensor, Shards, padded_shapes, widest


def tensor(name: str, *shape: int) -> GlobalTensor:
    return GlobalTensor(name=name, shape=shape, dtype=dtype("bf16"))


def test_sizes_count_elements_and_decoded_bytes():
    assert (tensor("a").numel, tensor("a").num_bytes) == (1, 2)
    assert (tensor("b", 3, 0).numel, tensor("b", 3, 0).num_bytes) == (0, 0)
    huge = tensor("c", 1 << 40, 1 << 40)
    assert (huge.numel, huge.num_bytes) == (1 << 80, 1 << 81)


def test_shards_are_grouped_by_tensor_and_padded():
    shards = Shards.build([(2, [0, 1], [4, 2], 7), (0, [], [], 1), (2, [0, 0], [4, 1], 6)], 2)
    assert len(shards) == 3
    assert shards.tensor.tolist() == [0, 2, 2]
    assert shards.owner.tolist() == [1, 7, 6]
    assert shards.boxes.lo.tolist() == [[0, 0], [0, 1], [0, 0]]
    assert shards.boxes.hi.tolist() == [[1, 1], [4, 2], [4, 1]]
    rows = [shards.of(t) for t in range(5)]
    assert [(r.start, r.stop) for r in rows] == [(0, 1), (1, 1), (1, 3), (3, 3), (3, 3)]


def test_no_shards_have_no_rows():
    shards = Shards.build([], 3)
    assert len(shards) == 0
    assert shards.of(0) == slice(0, 0)


def test_shards_out_of_order_are_refused():
    with pytest.raises(ValueError, match="ascending"):
        Shards(np.array([1, 0], np.int32), Boxes.of([], 1), np.zeros(2, np.int32))


def test_shapes_are_padded_with_ones():
    tensors = [tensor("a"), tensor("b", 2, 3), tensor("c", 0)]
    assert widest(tensors) == 2
    assert widest([]) == 0
    assert padded_shapes(tensors, 3).tolist() == [[1, 1, 1], [2, 3, 1], [0, 1, 1]]
