"""One-number scales of every shape, and values that nothing is divided by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megtool.errors import FormatError
from megtool.export.hf.engine_arithmetic import _ScaleReader
from megtool.formats.safetensors.reader import open_checkpoint
from tests.support.errors import raises


def reader(folder: Path, value: torch.Tensor) -> _ScaleReader:
    save_file({"k_scale": value}, folder / "a.safetensors")
    return _ScaleReader(open_checkpoint(folder / "a.safetensors"))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_number_of_every_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with reader(tmp_path, torch.full(shape, 0.25)) as scales:
        assert scales.read_one("k_scale") == 0.25
        assert scales.read_number("k_scale").shape == ()


@pytest.mark.parametrize(
    ("value", "says"),
    [([0.0], "is 0"), ([float("nan")], "is nan"), ([-1.0], "is -1"), ([1.0, 2.0], "2 numbers")],
    ids=str,
)
def test_what_is_no_scale_is_refused(tmp_path: Path, value: list[float], says: str) -> None:
    scales = reader(tmp_path, torch.tensor(value))
    with scales, raises(FormatError, match=says, hint=True):
        scales.read_one("k_scale")
