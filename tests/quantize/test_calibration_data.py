"""Samples of calibration: how many, and how long."""

from __future__ import annotations

import pytest

from megtool.errors import UsageError
from megtool.quantize.calibration_data import CalibrationDataOptions


def test_a_sample_may_be_as_long_as_the_model_has_positions() -> None:
    assert CalibrationDataOptions(samples=3, length=64).sizes(64) == (3, 64)
    assert CalibrationDataOptions(samples=1).sizes(7) == (1, 7)
    with pytest.raises(UsageError, match="have 65 tokens, but the model has 64 positions") as told:
        CalibrationDataOptions(length=65).sizes(64)
    assert told.value.hint == "use --seq-length 64 or less"
    for few in ({"samples": 0}, {"length": 1}):
        with pytest.raises(UsageError, match="too few"):
            CalibrationDataOptions(**few).sizes(64)
