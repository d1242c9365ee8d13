"""Checkpoints in a bucket are read as those on a disk are, in few requests and few bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stores import fault_runs
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3_bucket import S3Bucket

FORMATS = ("hf", "safetensors", "torch_dist", "dcp", "gguf")


def num_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("words", [("inspect",), ("inspect", "--stats"), ("verify",)], ids=" ".join)
def test_a_report_is_the_same_from_a_bucket(
    checkpoints: dict[str, Path],
    s3_bucket: S3Bucket,
    fault_proxy: FaultProxy,
    name: str,
    words: tuple[str, ...],
) -> None:
    local = checkpoints[name]
    url = s3_bucket.upload(local, f"run 1/{local.name}")
    before = s3_bucket.contents()
    expected = fault_runs.run(*words, local)
    ending = fault_runs.run(*words, url)
    assert (ending.status, ending.error) == (expected.status, expected.error)
    assert ending.report == expected.report
    assert s3_bucket.contents() == before
    assert {request.method for request in fault_proxy.requests} <= {"GET", "HEAD"}
    assert fault_proxy.bytes_out() < 2 * num_bytes(local) + 20_000


@pytest.mark.parametrize("name", ["hf", "safetensors", "dcp"])
def test_two_places_are_compared(
    checkpoints: dict[str, Path], s3_bucket: S3Bucket, name: str
) -> None:
    url = s3_bucket.upload(checkpoints["torch_dist"], "run")
    assert fault_runs.run("verify", url, checkpoints[name]).status == 0
    assert fault_runs.run("verify", checkpoints[name], url).status == 0


def test_one_flipped_bit_in_a_bucket_is_reported(
    checkpoints: dict[str, Path], s3_bucket: S3Bucket
) -> None:
    url = s3_bucket.upload(checkpoints["hf"], "run")
    (key,) = s3_bucket.keys("run/model-00002")
    data = bytearray(s3_bucket.get(key))
    data[-1] ^= 1
    s3_bucket.put(key, bytes(data))
    assert fault_runs.run("verify", url).status == 7


@pytest.mark.parametrize("missing", ["run", "run/sub", "ru"])
def test_a_place_where_nothing_is(
    checkpoints: dict[str, Path], s3_bucket: S3Bucket, missing: str
) -> None:
    s3_bucket.put("run2/key", b"data")
    for verb in ("inspect", "verify"):
        ending = fault_runs.run(verb, s3_bucket.url(missing))
        assert ending.status == 3
        assert ending.report["error"]["id"] == "source-not-found"
        assert ending.report["error"]["file"] == s3_bucket.url(missing)
