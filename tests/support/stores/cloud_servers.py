"""Emulators of Azure Blob Storage and Google Cloud Storage, each in a process of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.stores.server_process import ServerProcess, find_executable, find_free_ports

AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""What azurite's documentation says; it is no secret."""


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@contextmanager
def start_azurite(folder: Path) -> Iterator[str]:
    """A connection string of azurite (`npm install -g azurite`, or AZURITE names its program)."""
    program = os.environ.get("AZURITE") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite is not installed")
    (port,) = find_free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    environment = {"PATH": os.environ["PATH"]}
    with ServerProcess(command, folder, lambda: _answers(url), environment):
        yield (
            f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};"
            f"AccountKey={AZURITE_KEY};BlobEndpoint={url}/{AZURITE_ACCOUNT};"
        )


@contextmanager
def start_gcs_emulator(folder: Path) -> Iterator[tuple[str, str]]:
    """The address of `gcp-storage-emulator`, and the name of its bucket. It heeds no conditions."""
    program = find_executable("gcp-storage-emulator")
    if not program.is_file():
        pytest.skip("gcp-storage-emulator is not installed")
    (port,) = find_free_ports(1)
    bucket = f"test-{secrets.token_hex(8)}"
    url = f"http://127.0.0.1:{port}"
    command = [program, "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
    command.append(f"--default-bucket={bucket}")
    with ServerProcess(command, folder, lambda: _answers(f"{url}/storage/v1/b/{bucket}")):
        yield url, bucket
