"""Digests of a reshard: computed, carried over, and proof against a flipped bit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megtool import reshard
from megtool.commands.reshard import ReshardReport
from megtool.errors import (
    DigestError,
)
from megtool.formats import open_checkpoint
from tests.support.errors import raises
from tests.support.folders import stored_tensors
from tests.support.models import tiny_llama


def one_dtype(report: ReshardReport) -> set[str]:
    """Names of the dtypes of the tensors at a destination."""
    return {t.dtype.name for t in open_checkpoint(report.destination).tensors}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny_llama.save(tmp_path / "hf")


def flip(file: Path, at: int) -> None:
    """Flip one bit, leaving the file's times as they were."""
    found = file.stat()
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def payload(root: Path, pattern: str) -> tuple[Path, int]:
    """The file and the offset of some bytes of a tensor."""
    catalogue = open_checkpoint(root)
    tensor = next(i for i, t in enumerate(catalogue.tensors) if pattern in t.name)
    row = np.flatnonzero(catalogue.shards.tensor == tensor)[:1]
    at = int(catalogue.locate(row).offset[0])
    return catalogue.path(int(catalogue.extents.file[row[0]])), at + 5


@pytest.mark.parametrize("to", ["hf", "torch_dist", "dcp"])
def test_digests_are_inherited_and_catch_a_flipped_bit(tmp_path: Path, hf: Path, to: str) -> None:
    first = reshard(hf, tmp_path / "a", to=to, digest="all")
    assert (first.digested, first.unverified) == (len(stored_tensors(hf)), 0)
    second = reshard(tmp_path / "a", tmp_path / "b", digest="none")
    assert (second.digested, second.inherited, second.unverified) == (0, len(stored_tensors(hf)), 0)
    flip(*payload(tmp_path / "b", "norm"))
    with raises(DigestError, hint="bit") as e:
        reshard(tmp_path / "b", tmp_path / "c", digest="all")
    assert "norm" in (e.value.tensor or "")
    assert str(tmp_path / "b") in (e.value.file or "")
    assert not (tmp_path / "c").exists()


def test_buffered_bytes_are_compared_too(tmp_path: Path, hf: Path) -> None:
    reshard(hf, tmp_path / "a", to="torch_dist", digest="all")
    flip(*payload(tmp_path / "a", "linear_proj.weight"))
    with pytest.raises(DigestError) as e:
        reshard(tmp_path / "a", tmp_path / "b", tp=4)
    assert "attn.o.weight" in (e.value.tensor or "")


def test_cast_tensors_have_digests_of_their_own(tmp_path: Path, hf: Path) -> None:
    reshard(hf, tmp_path / "a", digest="all")
    report = reshard(tmp_path / "a", tmp_path / "b", dtype="float32", digest="none")
    assert (report.inherited, report.unverified) == (0, len(stored_tensors(hf)))
    report = reshard(tmp_path / "a", tmp_path / "c", dtype="float32")
    assert report.digested == len(stored_tensors(hf))
    assert one_dtype(report) == {"float32"}
    reshard(tmp_path / "c", tmp_path / "d", digest="all")
