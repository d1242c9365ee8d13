"""Ranges of a parameter's elements as boxes of its tensor."""

from __future__ import annotations

import numpy as np
import pytest

from megtool.train.checkpointing.shard_ownership import split_into_boxes

CELLS = [(((0, 0, 0), (2, 3, 4)), 0, 0), (((2, 1, 0), (4, 3, 4)), 24, 0)]
"""Two cells of a tensor of 4 x 3 x 4: 24 elements, then 16."""


@pytest.mark.parametrize("start", [0, 1, 5, 11, 24, 29])
@pytest.mark.parametrize("stop", [6, 23, 25, 40])
def test_boxes_hold_the_elements_of_a_range_in_their_order(start: int, stop: int) -> None:
    tensor = np.full((4, 3, 4), -1)
    tensor[:2], tensor[2:, 1:] = np.arange(24).reshape(2, 3, 4), np.arange(24, 40).reshape(2, 2, 4)
    found: list[int] = []
    for lo, hi, offset in split_into_boxes(CELLS, start, stop):
        box = tensor[tuple(map(slice, lo, hi))].ravel()
        assert box[0] == offset
        found += box.tolist()
    assert found == list(range(start, stop))
