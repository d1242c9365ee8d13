"""Checkpoints on a web server: read by ranges, and refused where a server has none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool.checkpoint.storage.connect import connect
from megtool.checkpoint.storage.store import ConditionError, ObjectMissingError
from megtool.cli.app import main
from megtool.errors import FormatError, StorageError
from tests.support.stores.http_files import HttpFiles

pytest.importorskip("obstore", reason="obstore is not installed")
safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

DATA = bytes(range(200))


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main([*words, "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out or captured.err)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of two tensors, 3 MiB."""
    path = tmp_path / "model.safetensors"
    tensors = {"a": np.arange(1 << 18, dtype=np.float32), "b": np.ones((2, 1 << 18), np.float32)}
    safetensors.save_file(tensors, path)
    return path


def test_ranges_and_versions(http_files: HttpFiles) -> None:
    (http_files.root / "key").write_bytes(DATA)
    store = connect(http_files.url().rstrip("/"))
    assert not store.can_write
    head = store.head("key")
    assert head is not None
    assert (head.size, bool(head.version)) == (200, True)
    assert bytes(store.read("key", 10, 20, version=head.version)) == DATA[10:30]
    assert store.head("missing") is None
    with pytest.raises(ObjectMissingError):
        store.read("missing", 0, 1)
    with pytest.raises(FormatError):
        store.read("key", 190, 20)
    with pytest.raises(FormatError):
        store.read("key", 200, 1)
    (http_files.root / "key").write_bytes(DATA[::-1])
    with pytest.raises(ConditionError):
        store.read("key", 10, 20, version=head.version)


def test_a_server_without_ranges_is_refused(http_files_without_ranges: HttpFiles) -> None:
    (http_files_without_ranges.root / "key").write_bytes(DATA)
    store = connect(http_files_without_ranges.url().rstrip("/"))
    with pytest.raises(StorageError) as caught:
        store.read("key", 10, 20)
    assert caught.value.file == http_files_without_ranges.url("key")
    assert "ignores ranges" in caught.value.message
    assert caught.value.hint


def test_inspect_reads_headers_only(
    http_files: HttpFiles, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(weights, http_files.root)
    status, remote = run_json(capsys, "inspect", http_files.url("model.safetensors"))
    assert status == 0
    _, local = run_json(capsys, "inspect", str(weights))
    assert remote["tensors"] == local["tensors"]
    assert sum(request.size for request in http_files.requests) < 1000


@pytest.mark.parametrize("name", ["missing.safetensors", "folder"])
def test_what_is_not_there_is_told_at_once(
    http_files: HttpFiles, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (http_files.root / "folder").mkdir()
    status, error = run_json(capsys, "inspect", http_files.url(name))
    assert (status, error["error"]["id"]) == (3, "source-not-found")
    assert {request.method for request in http_files.requests} == {"HEAD"}


def test_no_folder_is_listed(http_files: HttpFiles) -> None:
    (http_files.root / "key").write_bytes(DATA)
    assert connect(http_files.url().rstrip("/")).list("").objects == ()
    assert http_files.requests == []
