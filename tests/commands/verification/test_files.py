"""`verify` of a folder that megtool writes and does not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megtool import verify
from megtool.digests.crc32c import SIDECAR
from megtool.errors import MegtoolError, UsageError
from tests.support.errors import raises
from tests.support.models import tiny_llama
from tests.support.runs.exports import export_trtllm_legacy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama.save(tmp_path / "hf")
    export_trtllm_legacy(tmp_path / "hf", tmp_path / "out", tp=2)
    return tmp_path / "out"


def test_files_are_compared_with_their_digests(folder: Path) -> None:
    report = verify(folder)
    assert (report.verdict, report.exit_status, report.a_format) == ("ok", 0, "trtllm-legacy")
    assert report.digests[0].matching_files == 3
    assert report.digests[0].matching == report.num_tensors > 0


@pytest.mark.parametrize("name", ["config.json", "rank0.safetensors", "rank1.safetensors"])
@pytest.mark.parametrize("place", [0, 100, -1])
def test_every_flipped_bit_is_told(folder: Path, name: str, place: int) -> None:
    data = bytearray((folder / name).read_bytes())
    data[place] ^= 4
    (folder / name).write_bytes(data)
    try:
        report = verify(folder)
    except MegtoolError:
        assert (name, place) in (("config.json", 0), ("config.json", -1))  # no JSON
        return
    assert report.exit_status == 7
    assert [d.stored for d in report.differences] == [name]


def test_without_digests_it_cannot_be_read(folder: Path) -> None:
    (folder / SIDECAR).unlink()
    with raises(UsageError, hint=True):
        verify(folder)
