"""Stores of fsspec and of NVIDIA's multi-storage-client: read like any other, never written."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megtool.cli.app import main
from megtool.errors import FormatError, MissingPackageError, StorageError, UsageError
from megtool.storage.stores.connect import connect
from megtool.storage.stores.memory import MemoryStore
from megtool.storage.stores.protocol import ObjectMissingError, Store
from megtool.storage.stores.third_party import FsspecStore, MscStore, find_install_command

DATA = bytes(range(200))
Put = Callable[[str, bytes], object]


@pytest.fixture(params=["fsspec", "msc"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Store, Put]]:
    """An empty store of a package, and what puts an object there past megtool."""
    name = f"bucket{secrets.token_hex(4)}"
    if request.param == "fsspec":
        fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
        memory = fsspec.filesystem("memory")
        yield (
            connect(f"fsspec+memory://{name}"),
            lambda key, data: memory.pipe_file(f"/{name}/{key}", data),
        )
        memory.store.clear()
        return
    pytest.importorskip("multistorageclient", reason="multi-storage-client is not installed")
    root = tmp_path / "msc"
    root.mkdir()
    profile = {"storage_provider": {"type": "file", "options": {"base_path": str(root)}}}
    settings = tmp_path / "msc.json"
    settings.write_text(json.dumps({"profiles": {name: profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(settings))

    def put(key: str, data: bytes) -> None:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(data)

    yield connect(f"msc://{name}"), put


def test_objects_are_listed_and_read(place: tuple[Store, Put]) -> None:
    store, put = place
    put("run/a b", DATA)
    put("run/sub/c", b"c")
    head = store.head("run/a b")
    assert head is not None
    assert (head.key, head.size, bool(head.version)) == ("run/a b", 200, True)
    assert head.modified_ns > 1.7e18
    listing = store.list("run")
    assert [(info.key, info.size) for info in listing.objects] == [("run/a b", 200)]
    assert listing.prefixes == ("run/sub",)
    every = store.list("run", recursive=True).objects
    assert {info.key for info in every} == {"run/a b", "run/sub/c"}
    assert store.list("").prefixes == ("run",)
    assert bytes(store.read("run/a b", 10, 20, version=head.version)) == DATA[10:30]
    assert store.read("run/a b", 10, 0).nbytes == 0


def test_what_is_missing_or_short_is_told(place: tuple[Store, Put]) -> None:
    store, put = place
    put("run/key", DATA)
    for key in ("missing", "run"):
        assert store.head(key) is None
    assert store.list("missing").objects == ()
    with pytest.raises(ObjectMissingError):
        store.read("missing", 0, 1)
    for start, size in ((190, 20), (200, 1)):
        with pytest.raises(FormatError) as caught:
            store.read("run/key", start, size)
        assert caught.value.id == "truncated-file"


def test_writing_is_refused(place: tuple[Store, Put]) -> None:
    store, _ = place
    assert not store.can_write
    for call in (
        lambda: store.put("key", b""),
        lambda: store.begin_upload("key"),
        lambda: store.delete(["key"]),
    ):
        with pytest.raises(StorageError, match="nothing is written to") as caught:
            call()
        assert "s3://" in str(caught.value.hint)
    assert store.list_uploads("") == ()


def test_a_checkpoint_is_inspected(
    place: tuple[Store, Put], checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    store, put = place
    folder = checkpoints["torch_dist"]
    for path in folder.rglob("*"):
        if path.is_file():
            put(f"run/{path.relative_to(folder).as_posix()}", path.read_bytes())
    assert main(["inspect", f"{store.url}/run", "--json"]) == 0
    remote = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(folder), "--json"]) == 0
    assert remote["tensors"] == json.loads(capsys.readouterr().out)["tensors"]


def test_our_schemes_win_over_those_of_fsspec() -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    assert isinstance(connect(f"memory://{secrets.token_hex(4)}"), MemoryStore)
    assert isinstance(connect(f"fsspec+memory://{secrets.token_hex(4)}"), FsspecStore)


def test_what_is_unknown_or_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(UsageError, match="no store has the scheme nothing://"):
        connect("nothing://bucket")
    with pytest.raises(UsageError, match="does not know nothing://"):
        connect("fsspec+nothing://bucket")
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(MissingPackageError, match="sftp") as missing:
        connect("sftp://host")
    assert missing.value.hint == "pip install paramiko"


@pytest.mark.parametrize(
    ("text", "missed", "command"),
    [
        ("Install adlfs to access Azure Blob Storage", "adlfs", "pip install adlfs"),
        ("Please install lakefs-spec to access LakeFS", "lakefs_spec", "pip install lakefs-spec"),
        (
            "Install 'morefs[asynclocalfs]' to use it",
            "morefs",
            "pip install 'morefs[asynclocalfs]'",
        ),
        ('needs "requests" and "aiohttp" to be installed', "x", "pip install requests aiohttp"),
        ('"smbprotocol" or "smbprotocol[kerberos]"', "smbclient", "pip install smbprotocol"),
        ("Install the requests package to use it", "requests", "pip install requests"),
        ("pyarrow and local java libraries required", "pyarrow.fs", "pip install pyarrow"),
        ("This only runs in a pyscript context", None, "see fsspec's documentation"),
    ],
)
def test_the_package_that_fsspec_names_is_to_be_installed(
    text: str, missed: str | None, command: str
) -> None:
    error = ImportError(text)
    error.__cause__ = ImportError(name=missed)
    assert find_install_command(error) == command


def test_an_unknown_profile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("multistorageclient", reason="multi-storage-client is not installed")
    settings = tmp_path / "msc.json"
    settings.write_text('{"profiles": {}}')
    monkeypatch.setenv("MSC_CONFIG", str(settings))
    with pytest.raises(UsageError, match="no such profile"):
        MscStore(f"msc://{secrets.token_hex(4)}")
