"""Checkpoints on a web server: read by ranges, and refused where a server has none."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import reshard
from megtool.cli.app import main
from megtool.errors import FormatError, StorageError
from megtool.storage.location.path import location
from megtool.storage.stores import http as http_store
from megtool.storage.stores.connect import connect
from megtool.storage.stores.protocol import ConditionError, ObjectMissingError
from tests.support.folders import contents
from tests.support.stores.http_files import HttpFiles

pytest.importorskip("requests", reason="requests is not installed")
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
    assert sum(request.size for request in http_files.requests) <= 1 << 16  # of 3 MiB


@pytest.mark.parametrize(
    ("name", "methods"), [("missing.safetensors", {"HEAD"}), ("folder", {"HEAD", "GET"})]
)
def test_what_is_not_there_is_told(
    http_files: HttpFiles, capsys: pytest.CaptureFixture[str], name: str, methods: set[str]
) -> None:
    (http_files.root / "folder").mkdir()
    status, error = run_json(capsys, "inspect", http_files.url(name))
    assert (status, error["error"]["id"]) == (3, "source-not-found")
    assert {request.method for request in http_files.requests} == methods


def test_known_names_are_found_in_a_folder_that_is_not_listed(
    http_files: HttpFiles, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = http_files.root / "run 1"
    folder.mkdir()
    tensors = safetensors.load_file(weights)
    names = {}
    for number, name in enumerate(tensors):
        names[name] = f"part-{number}.safetensors"
        safetensors.save_file({name: tensors[name]}, folder / names[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "unknown.dat").write_bytes(b"unknown")
    store = connect(http_files.url().rstrip("/"))
    listed = {info.key: info.size for info in store.list("run 1").objects}
    expected = {path.name for path in folder.iterdir()} - {"unknown.dat"}
    assert listed == {f"run 1/{name}": (folder / name).stat().st_size for name in expected}
    status, remote = run_json(capsys, "inspect", http_files.url("run 1"))
    assert status == 0
    _, local = run_json(capsys, "inspect", str(folder))
    assert remote["tensors"] == local["tensors"]
    # Names that are not known are still asked for one by one.
    assert location(http_files.url("run 1/unknown.dat")).read_bytes() == b"unknown"


def test_ranks_and_the_last_iteration_are_found(http_files: HttpFiles) -> None:
    save = http_files.root / "run"
    (save / "iter_0000020").mkdir(parents=True)
    (save / "latest_checkpointed_iteration.txt").write_text("20\n")
    names = {".metadata", "common.pt", "metadata.json"}
    names |= {f"__{rank}_{n}.distcp" for rank in range(17) for n in range(3 if rank else 1)}
    for name in names:
        (save / "iter_0000020" / name).write_bytes(DATA)
    stored = " ".join(sorted(n for n in names if n.endswith(".distcp")))
    (save / "iter_0000020" / ".metadata").write_bytes(DATA + stored.encode() + DATA)
    store = connect(http_files.url().rstrip("/"))
    assert store.list("run").prefixes == ("run/iter_0000020",)
    found = {info.key.rpartition("/")[2] for info in store.list("run", recursive=True).objects}
    assert found == names | {"latest_checkpointed_iteration.txt"}


@pytest.fixture
def listing_server(tmp_path: Path) -> Iterator[str]:
    """Python's own web server, which lists folders in HTML."""
    handler = functools.partial(_QuietHandler, directory=str(tmp_path / "site"))
    (tmp_path / "site").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_folders_are_listed_where_the_server_lists(listing_server: str, tmp_path: Path) -> None:
    folder = tmp_path / "site" / "run 1"
    (folder / "more #1").mkdir(parents=True)
    names = {"a b.bin", "100% ü.bin", "x?y.bin", "more #1/c"}
    for name in names:
        (folder / name).write_bytes(DATA)
    store = connect(listing_server)
    assert store.head("run 1") is None
    listing = store.list("run 1")
    assert {info.key for info in listing.objects} == {f"run 1/{n}" for n in names if "/" not in n}
    assert listing.prefixes == ("run 1/more #1",)
    everything = store.list("run 1", recursive=True).objects
    assert {info.key for info in everything} == {f"run 1/{name}" for name in names}
    assert all(info.size == 200 for info in everything)
    # It has no ranges, but a read of the whole file needs none.
    assert bytes(store.read("run 1/a b.bin", 0, 200)) == DATA
    with pytest.raises(StorageError, match="ignores ranges"):
        store.read("run 1/a b.bin", 0, 100)


@pytest.mark.parametrize(
    "listing",
    [
        [{"name": "a", "type": "file", "size": 3}, {"name": "sub", "type": "directory"}],
        [{"name": "a", "is_dir": False}, {"name": "sub/", "is_dir": True}],
    ],
    ids=["nginx", "caddy"],
)
def test_listings_in_json(listing: list[dict[str, Any]]) -> None:
    assert http_store._names_in_json(listing) == ["a", "sub/"]


@pytest.mark.parametrize("listing", [{}, ["a"], [{"name": 1}], [{"size": 1}], None])
def test_other_json_is_no_listing(listing: object) -> None:
    assert http_store._names_in_json(listing) is None


def test_links_that_lead_elsewhere_are_no_files() -> None:
    page = """<a href="../">up</a><a href="?C=N;O=D">sort</a><a href="/other/x">x</a>
    <a href="https://elsewhere/run/y">y</a><a href="./a.bin">a</a><a href="sub/">sub</a>
    <a href="/run/b%20c.bin">b</a><a href="sub/deep">deep</a><a href="#top">top</a><a>none</a>"""
    names = http_store._names_in_html(page, "https://host/run/")
    assert names == ("a.bin", "sub/", "b c.bin")


@pytest.mark.parametrize("has_versions", [True, False])
def test_workers_of_a_source_that_tells_no_changes_say_so(
    http_files: HttpFiles, weights: Path, tmp_path: Path, has_versions: bool
) -> None:
    shutil.copy(weights, http_files.root)
    http_files.has_versions = has_versions
    url = http_files.url(weights.name)
    for n in range(2):
        report = reshard(url, tmp_path / "out", to="dcp", worker=f"{n}/2")
        said = [w for w in report.warnings if "tells neither versions nor times" in w]
        assert len(said) == (not has_versions)
    reshard(weights, tmp_path / "one", to="dcp")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    assert not reshard(url, tmp_path / "alone", to="dcp").warnings
