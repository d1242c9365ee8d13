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
