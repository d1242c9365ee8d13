"""Settings and fixtures that every test shares."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from megtool.plan import work_units
from tests.support.audit import Audit
from tests.support.checkpoints import raw_checkpoints
from tests.support.runs.worker_runs import UNIT_BYTES
from tests.support.stores import s3_servers
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.http_files import HttpFiles
from tests.support.stores.s3_bucket import S3Bucket
from tests.support.stores.s3_servers import S3Server

# Several workers share few cores, and no test may reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton's kernels run in Python where there is no GPU; it looks once, when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Time limits per example say more about the machine than about the code.
settings.register_profile("megtool", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("megtool")


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A command run in this process sends the log to stderr; the next test finds it as before."""
    logger = logging.getLogger("megtool")
    before = logger.level, list(logger.handlers), logger.propagate
    yield
    level, logger.handlers[:], logger.propagate = before
    logger.setLevel(level)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parent.parent


LONGEST = ("test_readme.py",)
"""Files that would keep one process busy at the end while the others wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest; skip, and say why, what needs a GPU where there is none."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def carry() -> Callable[..., dict[str, Any]]:
    """Move arrays from a read side to a written one, element by element through placements."""
    from tests.support.checkpoints import arrays

    return arrays.carry


@pytest.fixture(scope="session")
def materialize() -> Callable[[Any, Path, dict[str, Any]], None]:
    """Write a destination and the tensors (numpy, in the dtype's view) that belong into it."""
    from tests.support.checkpoints import arrays

    return arrays.materialize


@pytest.fixture(scope="session")
def audit() -> Audit:
    """The audit hook of this process; set `watching`, then look at `seen`."""
    hook = Audit()
    sys.addaudithook(hook)
    return hook


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS: one server for the tests of this process, started by the first that needs it."""
    with s3_servers.start_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The server of moto: Amazon's semantics, slow."""
    with s3_servers.start_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def nanio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that is no place for a checkpoint; see `start_nanio`."""
    with s3_servers.start_nanio(tmp_path_factory.mktemp("nanio")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that is no place for a checkpoint; see `start_rclone`."""
    with s3_servers.start_rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture
def use_s3(monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Server], S3Bucket]:
    """Lead this process and its children to a server, and return a fresh bucket there."""

    for package in ("boto3", "obstore"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")

    def use(server: S3Server) -> S3Bucket:
        for name in s3_servers.UNSET:
            monkeypatch.delenv(name, raising=False)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return S3Bucket(server)

    return use


@pytest.fixture
def s3_bucket(seaweedfs: S3Server, use_s3: Callable[[S3Server], S3Bucket]) -> S3Bucket:
    """A fresh bucket of SeaweedFS; the AWS_* variables of this test lead there."""
    return use_s3(seaweedfs)


@pytest.fixture
def moto_bucket(moto: S3Server, use_s3: Callable[[S3Server], S3Bucket]) -> S3Bucket:
    """A fresh bucket of moto; the AWS_* variables of this test lead there."""
    return use_s3(moto)


@pytest.fixture
def fault_proxy(s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before `s3_bucket`, to which the AWS_* variables lead; `s3_bucket` goes past it."""
    with FaultProxy(s3_bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def http_files(tmp_path: Path) -> Iterator[HttpFiles]:
    """A web server over the new folder `root`, with ranges."""
    root = tmp_path / "http"
    root.mkdir()
    with HttpFiles(root) as files:
        yield files


@pytest.fixture
def http_files_without_ranges(tmp_path: Path) -> Iterator[HttpFiles]:
    """A web server over the new folder `root` that answers every request with a whole file."""
    root = tmp_path / "http-whole"
    root.mkdir()
    with HttpFiles(root, has_ranges=False) as files:
        yield files


@pytest.fixture(scope="session")
def raw() -> ModuleType:
    """Builders, writers and readers of raw checkpoints."""
    return raw_checkpoints


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units in few bytes."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", UNIT_BYTES)
