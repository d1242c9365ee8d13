"""Destinations that cannot be written: one sentence each, with the place that was given."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

import megtool
from megtool.cli.app import main
from megtool.commands.verbs import VERBS
from megtool.errors import DestinationError, StorageError, UsageError
from megtool.options.field import all_fields
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.memory import MemoryStore
from megtool.storage.stores.protocol import BucketMissingError, Listing, ObjectInfo
from megtool.storage.stores.third_party import FsspecStore
from tests.support.errors import raises
from tests.support.models import tiny_llama


class LockedStore(MemoryStore):
    """A store that does not accept the key of the user."""

    def _refuse(self, key: str) -> Any:
        raise StorageError("the key is wrong", file=f"{self.url}/{key}")

    def head(self, key: str) -> ObjectInfo | None:
        self._refuse(key)

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        self._refuse(prefix)


class EmptyStore(LockedStore):
    """A bucket that does not exist."""

    def _refuse(self, key: str) -> Any:
        raise BucketMissingError("there is no bucket of this name", file=self.url)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("made") / "hf")


def test_what_needs_a_disk_is_refused_in_a_store(hf: Path) -> None:
    with raises(UsageError, "--work-dir", "cannot be in a store", file="memory://refused/x"):
        megtool.quantize(hf, hf.parent / "q", "fp8", work_dir="memory://refused/x")


@pytest.mark.parametrize("place", ["hf://org/name", "hf://org/name/a", "https://localhost/a"])
def test_a_store_that_is_only_read(hf: Path, place: str) -> None:
    with raises(DestinationError, "this kind of store is only read", file=place):
        megtool.reshard(hf, place, to="torch_dist")


WRITING = {
    "inspect --report=DST": ("SRC",),
    "reshard --report=DST": ("SRC", "out"),
    "verify --report=DST": ("SRC",),
    "audit --report=DST": ("SRC",),
    "lint --report=DST": ("SRC",),
    "finetune --report=DST": ("SRC", "out", "--data=x"),
    "evaluate --report=DST": ("SRC", "--data=x"),
    "evaluate --predictions=DST": ("SRC", "--data=x"),
    "evaluate --pruning-scores=DST": ("SRC", "--data=x"),
    "export --save-imatrix=DST": ("SRC", "out", "--to=gguf", "--imatrix=x"),
    "reshard": ("SRC", "DST"),
    "export": ("SRC", "DST", "--to=vllm"),
    "quantize": ("SRC", "DST", "--recipe=fp8"),
    "quantize --calibrate-only": ("SRC", "DST", "--recipe=fp8", "--data=x"),
    "quantize --save-calibration=DST": ("SRC", "out", "--recipe=fp8", "--data=x"),
    "quantize --report=DST": ("SRC", "out", "--recipe=fp8"),
    "adapter convert": ("SRC", "DST", "--to=peft", "--base=x"),
    "amax fix": ("SRC", "DST"),
    "amax strip": ("SRC", "DST"),
    "amax derive": ("SRC", "DST"),
    "finetune": ("SRC", "DST", "--data=x"),
    "tokenize": ("SRC", "DST", "--tokenizer=x"),
}
"""Every verb that writes, with too little to do anything else."""


def test_every_location_that_is_written_is_among_them() -> None:
    flags = {
        (verb.command, e.name if e.spec.is_argument else e.flag)
        for verb in VERBS
        for e in all_fields(verb.options)
        if e.spec.is_written
    }
    tried = {
        (words.partition(" --")[0], "destination" if "DST" in more else flag_of(words))
        for words, more in WRITING.items()
    }
    assert flags == tried


def flag_of(words: str) -> str:
    return "--" + words.partition(" --")[2].partition("=")[0]


@pytest.mark.parametrize("words", WRITING)
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("memory://nothing/out.html", "there is no bucket of this name"),
        ("memory://full.html", "a whole bucket cannot be a destination"),
        ("hf://org/name.html", "this kind of store is only read"),
        ("FILE/out.html", "a folder of the destination is a file"),
    ],
)
def test_a_destination_is_looked_at_before_anything_else(
    words: str,
    place: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    register_store(EmptyStore("memory://nothing"))
    register_store(MemoryStore("memory://full.html"))
    command = [w.replace("DST", place) for w in (*words.split(), *WRITING[words])]
    status = main([*command, "--json"])
    said = capsys.readouterr()
    assert status in (2, 3), said
    assert message in said.out + said.err
    assert [p.name for p in tmp_path.iterdir()] == ["FILE"]


@pytest.mark.parametrize("key", ["run", "runs/7/run"])
def test_an_error_of_the_first_request_names_the_place_that_was_given(hf: Path, key: str) -> None:
    place = f"memory://locked/{key}"
    register_store(LockedStore("memory://locked"))
    with raises(StorageError, "the key is wrong", file=place):
        megtool.reshard(hf, place, to="torch_dist")
    with raises(StorageError, "the key is wrong", file=place):
        megtool.inspect(place)


def test_nothing_is_written_below_a_file(hf: Path) -> None:
    store = MemoryStore("memory://file-above")
    register_store(store)
    store.put("run/model.safetensors", b"data")
    store.put("folder", b"")  # as some tools make folders
    place = f"{store.url}/run/model.safetensors/out"
    with raises(DestinationError, "is a file, so nothing is written below it", file=place):
        megtool.reshard(hf, place, to="torch_dist")
    assert [info.key for info in store.list("run", recursive=True).objects] == [
        "run/model.safetensors"
    ]
    megtool.reshard(hf, f"{store.url}/folder/out", to="torch_dist")


@pytest.mark.parametrize(
    ("place", "endpoint", "message"),
    [
        ("s3://Bad_Bucket!/m", "http://127.0.0.1:9", "this is no name that a bucket can have"),
        ("s3://bucket/m", "nonsense", "a setting of S3 is no use: Invalid endpoint: nonsense"),
    ],
)
def test_settings_that_no_store_can_have_are_said(
    place: str, endpoint: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with raises(StorageError, message, file=place) as caught:
        megtool.inspect(place)
    assert caught.value.hint


def test_an_unknown_host_is_said(tmp_path: Path) -> None:
    store = FsspecStore(f"fsspec+file://{tmp_path}")
    with raises(StorageError, "did not find the host", file=f"{store.url}/a"):
        store._raise(socket.gaierror(-2, "unknown"), "a")
