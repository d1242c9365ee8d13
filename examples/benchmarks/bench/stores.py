"""An S3 server on loopback, what is in its bucket, and processes that use it."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megtool.storage.stores.memory import MemoryStore
from megtool.storage.stores.protocol import ObjectInfo, UploadedPart

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # the servers and the proxy are those of the tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A bucket, how to reach it, and what is measured in it."""

    given: argparse.Namespace
    root: Path
    server: object
    bucket: object

    def url(self, key: str) -> str:
        """The URL of a key."""
        return f"s3://{self.bucket.name}/{key}"  # type: ignore[attr-defined]

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """Variables with which a process finds the store, perhaps through a proxy."""
        found = dict(os.environ) | self.server.environment  # type: ignore[attr-defined]
        return found | ({"AWS_ENDPOINT_URL": endpoint} if endpoint else {})

    def empty(self, prefix: str) -> None:
        """Delete what an earlier round wrote."""
        client = self.bucket.client  # type: ignore[attr-defined]
        name = self.bucket.name  # type: ignore[attr-defined]
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name, Prefix=prefix):
            for entry in page.get("Contents", ()):
                client.delete_object(Bucket=name, Key=entry["Key"])


def upload(bench: Bench, folder: Path, prefix: str) -> int:
    """Put a folder into the bucket; its bytes."""
    total = 0
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        key = f"{prefix}/{path.relative_to(folder)}"
        bench.bucket.client.upload_file(str(path), bench.bucket.name, key)  # type: ignore[attr-defined]
        total += path.stat().st_size
    return total


def run(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Seconds of a process.

    Raises:
        RuntimeError: it failed.
    """
    return run_together([command], environment)


def run_together(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> float:
    """Seconds until all of some processes have ended.

    Raises:
        RuntimeError: one failed.
    """
    began = time.perf_counter()
    processes = [
        subprocess.Popen(
            c, env=dict(environment), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for c in commands
    ]
    for process in processes:
        _, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{process.args!r} failed:\n{errors[-4000:]}")
    return time.perf_counter() - began


def reshard(source: str, target: str, *options: str) -> list[str]:
    """The command of a reshard."""
    command = [sys.executable, "-m", "megtool", "reshard", source, target]
    return [*command, "--quiet", "--overwrite", *options]


def run_watched(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, int]:
    """Seconds of a process, and its largest anonymous memory in bytes.

    Raises:
        RuntimeError: it failed.
    """
    began, peak = time.perf_counter(), 0
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            text = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(text.split("RssAnon:")[1].split()[0]) << 10)
        time.sleep(0.02)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"{command!r} failed:\n{(process.stderr or sys.stderr).read()[-4000:]}")
    return seconds, peak


@contextlib.contextmanager
def start(given: argparse.Namespace, root: Path) -> Iterator[Bench]:
    """A server with an empty bucket."""
    from tests.support.stores.s3_bucket import S3Bucket
    from tests.support.stores.s3_servers import start_seaweedfs

    with start_seaweedfs(root / "server-data") as server:
        yield Bench(given=given, root=root, server=server, bucket=S3Bucket(server))


class SizedStore(MemoryStore):
    """Has the files of a folder below `source/`; of what is uploaded it keeps sizes and headers.

    `read_bytes` and `uploaded_bytes` pass through the host, `copied_bytes` do not. So a checkpoint
    of any size costs nothing, if its files are sparse.
    """

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url)
        self.read_bytes = self.uploaded_bytes = self.copied_bytes = 0
        self._folder = folder
        self._sized: dict[str, dict[int, UploadedPart]] = {}
        self._heads: dict[str, bytes] = {}
        for path in folder.iterdir():
            key, size = f"source/{path.name}", path.stat().st_size
            info = ObjectInfo(key=key, size=size, version='"1"', modified_ns=1)
            self._objects[key] = info, b""

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        if key.startswith("source/"):
            self.read_bytes += num_bytes
            with (self._folder / key.removeprefix("source/")).open("rb") as file:
                return memoryview(os.pread(file.fileno(), num_bytes, offset))
        if key in self._heads:
            return memoryview(self._heads[key][offset : offset + num_bytes].ljust(num_bytes, b"\0"))
        return super().read(key, offset, num_bytes, version=version)

    def upload_part(
        self, key: str, upload_id: str, number: int, data: bytes | memoryview
    ) -> UploadedPart:
        """See `Store.upload_part`."""
        if ".megtool/" in key:  # a probe
            return super().upload_part(key, upload_id, number, data)
        self.uploaded_bytes += len(data)
        if number == 1:
            self._heads[key] = bytes(data)
        return self._add(upload_id, number, len(data))

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        source: ObjectInfo,
        offset: int,
        num_bytes: int,
    ) -> UploadedPart:
        """See `Store.copy_part`."""
        if ".megtool/" in key:
            return super().copy_part(key, upload_id, number, source, offset, num_bytes)
        self.copied_bytes += num_bytes
        self._heads.setdefault(key, b"")
        return self._add(upload_id, number, num_bytes)

    def _add(self, upload_id: str, number: int, num_bytes: int) -> UploadedPart:
        part = UploadedPart(number=number, size=num_bytes, tag="")
        self._sized.setdefault(upload_id, {})[number] = part
        return part

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], *, create: bool = False
    ) -> ObjectInfo:
        """See `Store.complete_upload`."""
        if upload_id not in self._sized:
            return super().complete_upload(key, upload_id, parts, create=create)
        del self._uploads[upload_id]
        size = sum(part.size for part in parts)
        info = ObjectInfo(key=key, size=size, version='"1"', modified_ns=1)
        self._objects[key] = info, b""
        return info
