"""Master weights that are compared with weights by sketches, where no elements were compared."""

from __future__ import annotations

import numpy as np
import pytest

from megtool.audit.element_sums import ElementSums
from megtool.audit.save_checks import check_save
from megtool.audit.save_facts import MAIN, WEIGHT, PairFacts, SaveFacts, TensorFacts


def save(masters: float, *, compared: int = 0) -> SaveFacts:
    """A save of one weight of bfloat16, whose masters are this many times as large."""
    tensors = {}
    for state, dtype, factor in ((WEIGHT, "bfloat16", 1.0), (MAIN, "float32", masters)):
        sketch = np.arange(16.0).reshape(4, 4) * factor
        sums = ElementSums(count=64, squares=float((sketch**2).sum()), sketch=sketch)
        made = TensorFacts(name="w", state=state, dtype=dtype, num_elements=64, sums=sums)
        tensors[made.key] = made
    pairs = {"w": PairFacts(compared_masters=compared)}
    return SaveFacts(step=3, path="run", tensors=tensors, pairs=pairs, is_open=True)


@pytest.mark.parametrize(
    ("masters", "compared", "found"),
    [
        (1.0 + 2.0**-8, 0, []),  # what rounding does
        (1.1, 0, [("foreign-masters", 3, "w")]),
        (1.1, 64, []),  # element by element they were the same
    ],
)
def test_masters_of_another_step_are_told(
    masters: float, compared: int, found: list[tuple[str, int, str]]
) -> None:
    told = list(check_save(save(masters, compared=compared)))
    assert [(f.id, f.step, f.tensor) for f in told] == found
