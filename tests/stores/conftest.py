"""Checkpoints to upload, and stores other than S3."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from megtool.storage.stores.protocol import Store
from tests.support.checkpoints.damage import save_formats
from tests.support.stores import cloud_servers
from tests.support.stores.gcs_server import GcsServer


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model in every format, on the local disk, with digests where it is a folder."""
    return save_formats(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A connection string of azurite, an emulator of Azure Blob Storage."""
    pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed")
    with cloud_servers.start_azurite(tmp_path_factory.mktemp("azurite")) as text:
        yield text


@pytest.fixture
def azure_store(azurite: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A fresh container; the variables of this test lead there."""
    from azure.storage.blob import BlobServiceClient

    from megtool.storage.stores.azure import AzureStore

    name = f"test-{secrets.token_hex(8)}"
    BlobServiceClient.from_connection_string(azurite).create_container(name)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite)
    return AzureStore(f"az://{name}")


@pytest.fixture
def gcs_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """A server like Google's with one empty bucket; the variables of this test lead there."""
    pytest.importorskip("requests", reason="requests is not installed")
    with GcsServer(f"test-{secrets.token_hex(8)}") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server


@pytest.fixture
def gcs_store(gcs_server: GcsServer) -> Store:
    """The bucket of `gcs_server`."""
    from megtool.storage.stores.gcs import GcsStore

    return GcsStore(f"gs://{gcs_server.bucket}")
