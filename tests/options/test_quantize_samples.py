"""Samples of calibration: how many, and how long."""

from __future__ import annotations

import pytest

from megtool.errors import UsageError
from megtool.options.quantize import CalibrationData


def test_a_sample_may_be_as_long_as_the_model_has_positions() -> None:
    assert CalibrationData(samples=3, seq_length=64).sizes(64) == (3, 64)
    assert CalibrationData(samples=1).sizes(7) == (1, 7)
    with pytest.raises(UsageError, match="have 65 tokens, but the model has 64 positions") as told:
        CalibrationData(seq_length=65).sizes(64)
    assert told.value.hint == "use --seq-length 64 or less"
    with pytest.raises(UsageError, match="too few"):
        CalibrationData(seq_length=1).sizes(64)
    with pytest.raises(UsageError, match="--samples is 0"):
        CalibrationData(samples=0)
