"""A location is tried by what megtool does there, and nothing is left."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megtool.errors import StorageError
from megtool.storage.location.path import StorePath
from megtool.storage.location_probe import FolderProbe, StoreProbe, probe_location
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.memory import MemoryStore
from megtool.storage.stores.protocol import ObjectInfo
from tests.support.errors import raises

URL = "memory://doctor"


class CarelessStore(MemoryStore):
    """Replaces objects that must only be created, or that have another version."""

    def put(self, key: str, data: bytes | memoryview, **conditions: Any) -> ObjectInfo:
        return super().put(key, data)


def test_a_folder_is_described_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    probe = probe_location(tmp_path)
    assert isinstance(probe, FolderProbe)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    df = subprocess.run(
        ["df", "--output=fstype", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert probe.kind == df.stdout.split()[-1]
    assert probe.is_writable
    assert probe.copies in ("shared blocks", "kernel", "buffer")
    assert probe.free_bytes > 0


def test_a_folder_that_takes_no_files() -> None:
    probe = probe_location(Path("/proc"))
    assert isinstance(probe, FolderProbe)
    assert (probe.kind, probe.is_writable, probe.copies) == ("proc", False, "")


@pytest.mark.parametrize("name", ["file", "missing"])
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with raises(StorageError, "no folder", file=tmp_path / name):
        probe_location(tmp_path / name)


@pytest.mark.parametrize(("kind", "num_faults"), [(MemoryStore, 0), (CarelessStore, 2)])
def test_a_store_is_asked_what_it_keeps(kind: type[MemoryStore], num_faults: int) -> None:
    store = kind(URL)
    register_store(store)
    probe = probe_location(StorePath(f"{URL}/run"))
    assert isinstance(probe, StoreProbe)
    assert len(probe.faults) == num_faults
    assert [fault.partition(":")[0] for fault in probe.faults] == [
        *("ignores If-None-Match", "ignores If-Match")
    ][:num_faults]
    assert not store.list("", recursive=True).objects
    assert not store.list_uploads("")
