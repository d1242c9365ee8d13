"""`export_legacy` as a job: atomic, resumed with the same bytes, in little memory, told in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megtool.errors import DestinationError, StorageError
from megtool.storage.files import Files
from tests.support.checkpoints.quantized_folder import make_quantized
from tests.support.folders import contents, file_states, staging_folders
from tests.support.models import trtllm_models
from tests.support.runs.exports import export_trtllm_legacy


class Failing(Files):
    """Storage that is full after some writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.left = writes

    def pwrite_all(self, *args: Any, **more: Any) -> Any:
        """See `Files`."""
        self.left -= 1
        if self.left < 0:
            raise StorageError("no space left")
        return super().pwrite_all(*args, **more)


def test_killed_and_resumed(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf", vocab_size=100, num_hidden_layers=2)
    made = make_quantized(source, tmp_path / "q", algos="FP8")
    before = file_states(made.path)
    export_trtllm_legacy(made.path, tmp_path / "whole", tp=2, pp=2, fsync=False)
    for writes in (3, 25):
        with pytest.raises(StorageError):
            export_trtllm_legacy(
                made.path,
                tmp_path / "out",
                tp=2,
                pp=2,
                files=Failing(writes),
                threads=1,
                fsync=False,
            )
        assert not (tmp_path / "out").exists()
    export_trtllm_legacy(made.path, tmp_path / "out", tp=2, pp=2, fsync=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list(staging_folders(tmp_path))
    assert file_states(made.path) == before


def test_destination(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf")
    export_trtllm_legacy(source, tmp_path / "out", fsync=False)
    old = contents(tmp_path / "out")
    with pytest.raises(DestinationError):
        export_trtllm_legacy(source, tmp_path / "out", tp=2, fsync=False)
    assert contents(tmp_path / "out") == old
    export_trtllm_legacy(source, tmp_path / "out", tp=2, overwrite=True, fsync=False)
    assert set(contents(tmp_path / "out") or ()) == {
        "config.json",
        "megtool.json",
        "rank0.safetensors",
        "rank1.safetensors",
    }


def test_threads_make_no_difference(tmp_path: Path) -> None:
    source = trtllm_models.llama(tmp_path / "hf", num_hidden_layers=2)
    for threads in (1, 3):
        export_trtllm_legacy(
            source, tmp_path / str(threads), tp=2, threads=threads, memory="4MiB", fsync=False
        )
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
