"""Stores that ignore what a commit relies on are refused by name, and nothing is left there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.stores import fault_runs
from tests.support.stores.fault_proxy import Action, FaultProxy
from tests.support.stores.s3_bucket import S3Bucket
from tests.support.stores.s3_servers import S3Server


@pytest.fixture
def bucket(request: pytest.FixtureRequest, use_s3: Callable[[S3Server], S3Bucket]) -> S3Bucket:
    return use_s3(request.getfixturevalue(request.param))


@pytest.mark.parametrize(
    "bucket", ["nanio", pytest.param("rclone", marks=pytest.mark.slow)], indirect=True
)
def test_a_store_that_ignores_conditions_is_no_destination(
    checkpoints: dict[str, Path], bucket: S3Bucket
) -> None:
    ending = fault_runs.run("reshard", checkpoints["hf"], bucket.url("out/new"), "--to=torch_dist")
    assert ending.status == 2
    error = ending.report["error"]
    assert (error["id"], error["file"]) == ("unsafe-store", bucket.url())
    assert "If-None-Match" in error["message"]
    assert "--unsafe-store" in error["hint"]
    assert bucket.keys() == []


@pytest.mark.parametrize("bucket", ["nanio", "rclone"], indirect=True)
def test_such_a_store_is_a_source(checkpoints: dict[str, Path], bucket: S3Bucket) -> None:
    url = bucket.upload(checkpoints["torch_dist"], "run")
    ending = fault_runs.run("verify", url)
    assert (ending.status, ending.error) == (0, "")


IGNORED_RANGES = {"times": None, "headers": (("Range", ""),)}


def test_a_store_that_ignores_ranges_is_no_source(
    tmp_path: Path, moto_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    tensors = {name: np.zeros(6 << 20, np.float32) for name in ("a", "b")}
    numpy.save_file(tensors, tmp_path / "model.safetensors")
    url = moto_bucket.upload(tmp_path, "run")
    with FaultProxy(moto_bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.inject(Action.DROP_HEADERS, "^GET", **IGNORED_RANGES)
        ending = fault_runs.run("inspect", url)
        assert proxy.bytes_out() < 60 << 20
    assert (ending.status, ending.report["error"]["id"]) == (3, "ranges-ignored")
    assert ending.report["error"]["file"] == f"{url}/model.safetensors"


def test_a_store_that_ignores_ranges_is_no_destination(
    checkpoints: dict[str, Path], moto_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(moto_bucket.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.inject(Action.DROP_HEADERS, "^GET", **IGNORED_RANGES)
        ending = fault_runs.run("reshard", checkpoints["hf"], moto_bucket.url("out/new"))
    assert (ending.status, ending.report["error"]["id"]) == (2, "unsafe-store")
    assert "range" in ending.report["error"]["message"]
    assert moto_bucket.keys() == []
    assert moto_bucket.uploads() == {}
