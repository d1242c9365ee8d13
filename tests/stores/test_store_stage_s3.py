"""Checkpoints written to buckets of real servers: the same bytes, and resumed after faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard, verify
from megtool.errors import DestinationError
from megtool.storage.stores.s3 import S3Store
from tests.support.errors import raises
from tests.support.folders import contents
from tests.support.models import tiny_llama
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3_bucket import S3Bucket
from tests.support.stores.s3_servers import S3Server

FORMATS: dict[str, dict[str, Any]] = {
    "torch_dist": {"to": "torch_dist", "tp": 2, "pp": 2},
    "hf": {"to": "hf", "max_shard_size": "30KB"},
    "zarr": {"to": "zarr"},
    "one.safetensors": {"to": "safetensors"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("made") / "source")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about 40 MB, whose tensors are larger than a part may be."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2}
    return tiny_llama.save(
        tmp_path_factory.mktemp("made") / "large", vocab_size=6000, dtype="float32", **sizes
    )


def objects(bucket: S3Bucket, name: str) -> dict[str, bytes]:
    return {
        key[len(name) :].lstrip("/"): bucket.get(key)
        for key in bucket.keys("")
        if key == name or key.startswith(f"{name}/")
    }


def uploads(bucket: S3Bucket) -> list[str]:
    reply = bucket.client.list_multipart_uploads(Bucket=bucket.name)
    return [upload["Key"] for upload in reply.get("Uploads", ())]


@pytest.mark.parametrize("name", FORMATS)
def test_a_bucket_has_what_a_disk_has(
    source: Path, tmp_path: Path, s3_bucket: S3Bucket, name: str
) -> None:
    reshard(source, tmp_path / name, **FORMATS[name])
    reshard(source, s3_bucket.url(f"run/{name}"), **FORMATS[name])
    assert objects(s3_bucket, f"run/{name}") == contents(tmp_path / name)
    assert [key for key in s3_bucket.keys("") if ".megtool" in key] == []
    assert uploads(s3_bucket) == []


@pytest.mark.parametrize("name", ["torch_dist", "one.safetensors"])
def test_objects_of_many_parts(large: Path, tmp_path: Path, s3_bucket: S3Bucket, name: str) -> None:
    reshard(large, tmp_path / name, **FORMATS[name])
    reshard(large, s3_bucket.url(name), **FORMATS[name])
    assert objects(s3_bucket, name) == contents(tmp_path / name)
    again = reshard(s3_bucket.url(name), tmp_path / "back", to="hf", like=large)
    assert again.tensors
    assert uploads(s3_bucket) == []


def test_workers_write_one_checkpoint(large: Path, tmp_path: Path, s3_bucket: S3Bucket) -> None:
    options = FORMATS["torch_dist"] | {"threads": 1}
    reshard(large, tmp_path / "out", **options)
    states = [
        reshard(large, s3_bucket.url("out"), worker=f"{n}/3", **options).worker.state
        for n in (1, 0, 2)
    ]
    assert states == ["waiting", "waiting", "published"]
    assert objects(s3_bucket, "out") == contents(tmp_path / "out")
    assert uploads(s3_bucket) == []


def test_what_another_program_puts_meanwhile_is_not_taken(
    large: Path, s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = dict[str, bytes]()
    complete = S3Store.complete_upload

    def complete_late(store: S3Store, key: str, *arguments: Any, **conditions: Any) -> Any:
        if not foreign and ".megtool" not in key:
            foreign[key] = b"x" * sum(part.size for part in arguments[1])
            store.put(key, foreign[key])
        return complete(store, key, *arguments, **conditions)

    monkeypatch.setattr(S3Store, "complete_upload", complete_late)
    with raises(DestinationError, "another program has written this object meanwhile"):
        reshard(large, s3_bucket.url("one.safetensors"), to="safetensors")
    assert foreign
    assert objects(s3_bucket, "one.safetensors") == {"": foreign["one.safetensors"]}


@pytest.mark.slow
def test_parts_are_sent_on_a_slow_connection(
    large: Path, tmp_path: Path, s3_bucket: S3Bucket, fault_proxy: FaultProxy
) -> None:
    fault_proxy.bandwidth = 512 << 10  # a part of 8 MiB takes 16 seconds
    reshard(large, s3_bucket.url("one.safetensors"), to="safetensors")
    fault_proxy.bandwidth = None
    reshard(large, tmp_path / "one.safetensors", to="safetensors")
    assert objects(s3_bucket, "one.safetensors") == contents(tmp_path / "one.safetensors")


def test_the_server_copies_large_tensors(
    large: Path, tmp_path: Path, s3_bucket: S3Bucket, fault_proxy: FaultProxy
) -> None:
    reshard(large, s3_bucket.url("source"), to="torch_dist")
    sent = fault_proxy.bytes_in()
    report = reshard(s3_bucket.url("source"), s3_bucket.url("out"), to="dcp", like=large)
    assert report.kernel_bytes > report.num_bytes // 3  # layers are too small for parts
    assert fault_proxy.bytes_in() - sent < report.num_bytes - report.kernel_bytes + 1_000_000
    reshard(large, tmp_path / "local", to="torch_dist")
    assert verify(s3_bucket.url("out"), tmp_path / "local").exit_status == 0


@pytest.mark.parametrize("name", ["nanio", pytest.param("rclone", marks=pytest.mark.slow)])
def test_servers_that_are_no_place_for_a_checkpoint(
    source: Path,
    request: pytest.FixtureRequest,
    use_s3: Callable[[S3Server], S3Bucket],
    name: str,
) -> None:
    bucket = use_s3(request.getfixturevalue(name))
    with raises(DestinationError, "the store", "--unsafe-store") as caught:
        reshard(source, bucket.url("run"), to="hf")
    assert caught.value.id == "unsafe-store"
    assert [key for key in bucket.keys("") if not key.endswith("/")] == []
