"""Google Cloud Storage and Azure beside what every store promises: refusals, composing, blocks."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from megtool.errors import StorageError
from megtool.storage.stores.azure import AzureStore
from megtool.storage.stores.gcs import GcsStore
from megtool.storage.stores.protocol import ConditionError, ObjectMissingError, Store
from tests.support.stores import cloud_servers
from tests.support.stores.gcs_server import GcsServer


def numbered(store: Store, key: str, count: int) -> tuple[str, list[object], bytes]:
    upload = store.begin_upload(key)
    data = [b"%d," % number for number in range(1, count + 1)]
    parts = [store.upload_part(key, upload, n, text) for n, text in enumerate(data, 1)]
    return upload, list(parts), b"".join(data)


# ---- Google Cloud Storage


@pytest.mark.parametrize("count", [1, 32, 33, 1100])
def test_any_number_of_parts_is_composed_in_order(
    gcs_store: Store, gcs_server: GcsServer, count: int
) -> None:
    upload, parts, data = numbered(gcs_store, "run/key", count)
    info = gcs_store.complete_upload("run/key", upload, parts, create=True)
    assert bytes(gcs_store.read("run/key", 0, info.size, version=info.version)) == data
    assert list(gcs_server.objects) == ["run/key"]


def test_parts_are_in_no_listing(gcs_store: Store) -> None:
    numbered(gcs_store, "run/key", 3)
    for recursive in (False, True):
        for prefix in ("", "run"):
            listing = gcs_store.list(prefix, recursive=recursive)
            assert (listing.objects, listing.prefixes) == (
                (),
                ("run",) if not (prefix or recursive) else (),
            )


def test_of_two_that_compose_one_wins(gcs_store: Store, gcs_server: GcsServer) -> None:
    """The service compares, not the client: between its look and its request another may win."""
    upload, parts, _ = numbered(gcs_store, "key", 2)
    real = gcs_store.head

    def head(key: str) -> None:
        assert real(key) is None
        gcs_store.put("key", b"other")

    gcs_store.head = head  # type: ignore[method-assign]
    with pytest.raises(ConditionError):
        gcs_store.complete_upload("key", upload, parts, create=True)
    assert gcs_server.objects["key"].data == b"other"


def test_refusals_of_google(gcs_server: GcsServer) -> None:
    gcs_server.token = "secret"
    with pytest.raises(StorageError) as caught:
        GcsStore(f"gs://{gcs_server.bucket}").list("")
    assert caught.value.id == "no-credentials"
    gcs_server.token = ""
    for call in (lambda s: s.list(""), lambda s: s.put("key", b""), lambda s: s.read("key", 0, 1)):
        with pytest.raises(ObjectMissingError, match="no bucket"):
            call(GcsStore("gs://missing"))


def test_a_bucket_of_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """That an object is missing is told with the names of its bucket and itself."""
    with GcsServer("my-bucket") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        store = GcsStore("gs://my-bucket")
        assert store.head("the specified bucket") is None
        with pytest.raises(ObjectMissingError, match="no such object"):
            store.read("bucket", 0, 1)
        store.put("key", b"data")
        assert bytes(store.read("key", 0, 4)) == b"data"


def test_default_credentials_of_google(
    gcs_server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has none is told; a token that google-auth has goes with every request."""
    auth = pytest.importorskip("google.auth", reason="google-auth is not installed")
    from google.auth.exceptions import DefaultCredentialsError
    from google.oauth2.credentials import Credentials

    endpoint = gcs_server.endpoint
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    with pytest.raises(DefaultCredentialsError):
        auth.default()
    with pytest.raises(StorageError, match="no credentials") as caught:
        GcsStore("gs://bucket")
    assert "gcloud auth" in str(caught.value.hint)
    token = secrets.token_hex(8)
    monkeypatch.setattr(auth, "default", lambda **_: (Credentials(token), None))
    gcs_server.token = token
    store = GcsStore(f"gs://{gcs_server.bucket}")
    store._host = endpoint
    store.put("key", b"data")
    assert bytes(store.read("key", 0, 4)) == b"data"


def test_the_dialect_of_an_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's reading of Google's documents. It heeds no conditions."""
    with cloud_servers.start_gcs_emulator(tmp_path) as (url, bucket):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        store = GcsStore(f"gs://{bucket}")
        upload, parts, data = numbered(store, "run/a b%20ü", 40)
        assert [u.key for u in store.list_uploads("run")] == ["run/a b%20ü"]
        info = store.complete_upload("run/a b%20ü", upload, parts)
        assert store.head("run/a b%20ü") == info
        assert bytes(store.read("run/a b%20ü", 3, 50)) == data[3:53]
        assert [i.key for i in store.list("", recursive=True).objects] == ["run/a b%20ü"]
        store.delete(["run/a b%20ü", "missing"])
        assert store.list("").prefixes == ()


# ---- Azure


def test_blocks_are_parts(azure_store: Store) -> None:
    upload, parts, data = numbered(azure_store, "run/key", 40)
    other, _, _ = numbered(azure_store, "run/other", 1)
    assert list(azure_store.list_parts("run/key", upload)) == parts
    assert {u.upload_id for u in azure_store.list_uploads("run")} == {upload, other}
    assert azure_store.list("run", recursive=True).objects == ()
    info = azure_store.complete_upload("run/key", upload, parts, create=True)
    assert bytes(azure_store.read("run/key", 0, info.size, version=info.version)) == data
    with pytest.raises(ObjectMissingError):
        azure_store.list_parts("run/key", upload)
    azure_store.abort_upload("run/other", other)
    azure_store.abort_upload("run/other", other)
    assert azure_store.list_uploads("run") == []
    assert azure_store.head("run/other") is None


def test_an_abort_leaves_an_object_as_it_is(azure_store: Store) -> None:
    before = azure_store.put("key", b"data")
    upload, _, _ = numbered(azure_store, "key", 2)
    azure_store.abort_upload("key", upload)
    assert azure_store.head("key").version == before.version  # type: ignore[union-attr]


def test_refusals_of_azure(azure_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (lambda s: s.list(""), lambda s: s.put("key", b""), lambda s: s.read("key", 0, 1)):
        with pytest.raises(ObjectMissingError, match="no container"):
            call(AzureStore("az://missing"))
    key = cloud_servers.AZURITE_KEY
    wrong = "A" + key[1:] if key[0] != "A" else "B" + key[1:]
    text = os.environ["AZURE_STORAGE_CONNECTION_STRING"].replace(key, wrong)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    with pytest.raises(StorageError) as caught:
        AzureStore(azure_store.url).list("")
    assert caught.value.id == "no-credentials"
    assert wrong not in f"{caught.value} {caught.value.hint}"


def test_an_account_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed")
    for name in ("CONNECTION_STRING", "ACCOUNT", "ACCOUNT_NAME"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    with pytest.raises(StorageError, match="names no account"):
        AzureStore("az://container")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=verysecret")
    with pytest.raises(StorageError, match="no use") as caught:
        AzureStore("az://container")
    assert "verysecret" not in f"{caught.value} {caught.value.hint}"
