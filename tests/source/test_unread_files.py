"""What a trainer saves beside the weights is named, and strict jobs refuse to leave it out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megtool import reshard
from megtool.errors import CoverageError
from megtool.formats import open_checkpoint
from megtool.source.unread_files import find_unread_files
from tests.support.models import tiny_llama


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A folder as transformers' Trainer writes it, with weights in a second format."""
    folder = tmp_path / "checkpoint-4"
    tiny_llama.save(folder)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"step": 4}, folder / name)
    (folder / "global_step4").mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    (folder / "README.md").write_text("words")
    return folder


def test_state_and_weights_are_told_apart(trainer: Path) -> None:
    found = {f.name: f.is_state for f in find_unread_files(open_checkpoint(trainer))}
    assert found == {
        "optimizer.pt": True,
        "scheduler.pt": True,
        "rng_state.pth": True,
        "global_step4": True,
        "pytorch_model.bin": False,
    }


def test_a_job_lists_them_and_a_strict_one_refuses(
    trainer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = reshard(trainer, tmp_path / "out", to="torch_dist", dry_run=True).to_json()
    dropped = {d["name"]: d["is_lost"] for d in report["dropped"]}
    assert dropped["optimizer.pt"] is True
    assert dropped["pytorch_model.bin"] is False
    assert "not read: global_step4, optimizer.pt, rng_state.pth and 1 more" in caplog.text
    with pytest.raises(CoverageError):
        reshard(trainer, tmp_path / "out", to="torch_dist", strict=True)
