"""Repositories of the Hugging Face Hub, on a server that replays its API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megtool.cli.app import main
from megtool.errors import FormatError, StorageError, UsageError
from megtool.storage.stores.hub import HubStore
from megtool.storage.stores.protocol import ConditionError, ObjectMissingError
from tests.support.stores.hub_server import HubServer

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
pytest.importorskip("requests", reason="requests is not installed")

LARGE = bytes(range(256)) * 8
TOKEN = "hf_" + "t" * 34


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A repository with a small, a large and a nested file; the process looks for the Hub there."""
    with HubServer() as server:
        server.commit("main", {"config.json": b"{}", "a b.bin": LARGE, "sub/x": b"nested"})
        import huggingface_hub.constants as constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def store_of(suffix: str = "") -> HubStore:
    return HubStore(f"hf://org/model{suffix}")


def test_files_are_listed_and_read(hub: HubServer) -> None:
    store = store_of()
    listing = store.list("")
    assert [(i.key, i.size) for i in listing.objects] == [("a b.bin", 2048), ("config.json", 2)]
    assert listing.prefixes == ("sub",)
    every = store.list("", recursive=True)
    assert [i.key for i in every.objects] == ["a b.bin", "config.json", "sub/x"]
    assert store.list("nothing").objects == ()
    assert store.head("missing") is None
    assert store.head("sub") is None
    info = store_of().head("a b.bin")
    assert info is not None
    assert info in listing.objects
    assert bytes(store.read("a b.bin", 100, 50, version=info.version)) == LARGE[100:150]
    assert bytes(store.read("config.json", 0, 2)) == b"{}"
    with pytest.raises(ConditionError):
        store.read("a b.bin", 0, 1, version='"other"')
    for start, size in ((2000, 100), (3000, 1)):
        with pytest.raises(FormatError) as caught:
            store.read("a b.bin", start, size)
        assert caught.value.id == "truncated-file"
    with pytest.raises(ObjectMissingError):
        store.read("missing", 0, 1)


def test_a_revision_is_resolved_once(hub: HubServer) -> None:
    hub.commit("refs/pr/1", {"config.json": b"of the pull request"})
    store = store_of()
    first = store.commit
    hub.commit("main", {"config.json": b"[]", "other": b"new"})
    assert bytes(store.read("config.json", 0, 2)) == b"{}"
    assert [i.key for i in store.list("sub").objects] == ["sub/x"]
    assert bytes(store_of().read("config.json", 0, 2)) == b"[]"
    assert bytes(store_of(f"@{first}").read("config.json", 0, 2)) == b"{}"
    assert bytes(store_of("@refs%2Fpr%2F1").read("config.json", 0, 2)) == b"of"
    with pytest.raises(ObjectMissingError, match="no revision 'nothing'"):
        store_of("@nothing").list("")


def test_the_token_goes_to_the_hub_alone(hub: HubServer) -> None:
    hub.token = TOKEN
    store = store_of()
    for start in range(0, 1000, 100):
        assert bytes(store.read("a b.bin", start, 100)) == LARGE[start : start + 100]
    tokens = {(server, token) for server, _, _, token in hub.requests}
    assert tokens == {("hub", f"Bearer {TOKEN}"), ("cdn", None)}
    # The Hub is asked where the file is once, not for every range.
    assert sum(server == "hub" and "resolve" in path for server, _, path, _ in hub.requests) == 1
    hub.epoch += 1  # the signed address expires
    assert bytes(store.read("a b.bin", 5, 5)) == LARGE[5:10]


@pytest.mark.parametrize("is_gated", [True, False])
def test_repositories_that_this_token_may_not_read(hub: HubServer, is_gated: bool) -> None:
    hub.token, hub.is_gated = "another", is_gated
    with pytest.raises(StorageError) as caught:
        store_of().list("")
    assert ("gated" in caught.value.message) == is_gated
    assert TOKEN not in str(caught.value)
    assert "hf auth login" in str(caught.value.hint)


def test_other_repositories_and_writing_are_refused(hub: HubServer) -> None:
    with pytest.raises(ObjectMissingError, match="no such repository"):
        HubStore("hf://org/missing").list("")
    with pytest.raises(UsageError, match="models"):
        HubStore("hf://datasets/org")
    with pytest.raises(StorageError, match="nothing is written to hf://"):
        store_of().put("key", b"")


def test_a_signed_address_is_in_no_error(hub: HubServer) -> None:
    store = store_of()
    store.read("a b.bin", 0, 1)
    store._direct._attempts = store._client._attempts = 1
    hub.cdn.shutdown()
    hub.cdn.server_close()
    with pytest.raises(StorageError) as caught:
        store.read("a b.bin", 0, 1)
    assert "Signature" not in str(caught.value)
    assert caught.value.file == "hf://org/model/a b.bin"


def test_inspect_reads_a_repository(
    hub: HubServer, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints["hf"]
    files = {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }
    hub.commit("v1", files)
    assert main(["inspect", "hf://org/model@v1", "--json"]) == 0
    remote = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(folder), "--json"]) == 0
    assert remote["tensors"] == json.loads(capsys.readouterr().out)["tensors"]
