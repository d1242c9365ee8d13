"""Numbers that float16 is too narrow for are counted, warned of and reported, in every verb."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import export, reshard
from megtool.digests.crc32c import Digests
from megtool.inference.load import load
from megtool.plan.execute import CopyReport
from tests.support.models import tiny_llama
from tests.support.runs.loading import source_of

UP, Q = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of bfloat16 with three numbers that are too large, and two that were infinite."""
    folder = tiny_llama.save(tmp_path / "hf")
    held = load_file(folder / "model.safetensors")
    held[UP][0, :2] = torch.tensor([1e5, -7e4])
    held[UP][1, 0] = float("inf")
    held[Q][3, 3] = 3e38
    held[Q][3, 4] = float("nan")
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "layout", [{"to": "hf"}, {"to": "torch_dist", "tp": 2, "pp": 2}, {"to": "megatron", "tp": 2}]
)
def test_reshard_warns(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING):
        report = reshard(source, tmp_path / "out", dtype="float16", fsync=False, **layout)
    assert report.overflowed == {Q: 1, UP: 2}
    (told,) = report.warnings
    assert told.startswith("3 numbers of 2 tensors beyond 65504")
    assert f"{Q} (1), {UP} (2)" in told
    assert told in caplog.text
    assert report.to_json()["overflowed"] == report.overflowed
    assert not reshard(source, tmp_path / "wide", dtype="fp32", fsync=False, **layout).warnings


def test_mean_and_export(source: Path, tmp_path: Path) -> None:
    """Sums are rounded once; what a plain export does is a reshard's."""
    found = reshard(source, tmp_path / "mean", average=[source], dtype="float16", fsync=False)
    assert found.overflowed == {Q: 1, UP: 2}
    report = export(source, tmp_path / "out", to="hf", dtype="float16", fsync=False)
    assert report.overflowed == {Q: 1, UP: 2}
    assert report.warnings == found.warnings


def test_load_warns(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(source_of(source), dtype="float16")
    assert "3 numbers of 2 tensors beyond 65504" in caplog.text


def test_few_tensors_are_named() -> None:
    report = CopyReport(
        num_bytes={},
        kernel_bytes=0,
        kernel_files=(),
        seconds=0,
        peak_buffer_bytes=0,
        digests=Digests({}),
        num_units=0,
        verified=0,
        repaired=0,
        overflowed={f"w{i}": 1000 for i in range(6)},
    )
    assert report.overflows.endswith("w0 (1000), w1 (1000), w2 (1000), w3 (1000) and 2 more")
    assert "6,000 numbers of 6 tensors" in report.overflows
