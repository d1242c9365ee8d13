"""Texts that name places: local paths, URLs of stores, and what is neither."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from megtool import reshard
from megtool.errors import UsageError
from megtool.storage.location.path import StorePath, is_remote, location
from megtool.storage.stores.s3_errors import client_error
from megtool.storage.stores.schemes import SCHEMES
from tests.support.errors import raises

SECRET = "c106c8c071a3a5017b"


@pytest.mark.parametrize(
    ("text", "bucket", "key"),
    [
        ("s3://bucket/run/7", "s3://bucket", "run/7"),
        ("S3://bucket//run/", "s3://bucket", "run"),
        ("s3://bucket", "s3://bucket", ""),
        ("s3://bucket/what?now", "s3://bucket", "what?now"),
        ("https://host:81/a/b", "https://host:81", "a/b"),
        ("hf://org/name@v1/model.safetensors", "hf://org/name@v1", "model.safetensors"),
    ],
)
def test_a_url_is_a_place_in_a_store(text: str, bucket: str, key: str) -> None:
    path = location(text)
    assert isinstance(path, StorePath)
    assert (path.bucket_url, path.key) == (bucket, key)
    assert location(path) is path
    assert pickle.loads(pickle.dumps(path)) == path


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("run/7", "run/7"),
        ("/a:/b", "/a:/b"),
        ("s3", "s3"),
        ("file:///a/b", "/a/b"),
        ("file://localhost/a/b", "/a/b"),
        ("./s3:/b", "s3:/b"),
    ],
)
def test_anything_else_is_local(text: str, path: str) -> None:
    assert location(text) == Path(path)
    assert not is_remote(location(text))


def test_a_file_of_another_host_is_refused() -> None:
    with raises(UsageError, "the host 'node7'", id="usage"):
        location("file://node7/a/b")


@pytest.mark.parametrize(
    "text",
    [
        *(f"{scheme}:/a/b" for scheme in SCHEMES),
        *("HTTPS:/host/a", "file:/a", "fsspec+sftp:/host/a", str(Path("s3://bucket/run"))),
    ],
)
def test_a_url_that_lost_a_slash_is_no_local_folder(text: str) -> None:
    with raises(UsageError, id="usage"):
        location(text)


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("s3://", "bucket", "s3://BUCKET/PREFIX"),
        ("s3:///run", "bucket", "s3://BUCKET/PREFIX"),
        ("gs:///bucket/run", "bucket", "gs://BUCKET/PREFIX"),
        ("az://", "container", "az://CONTAINER/PREFIX"),
        ("https://", "host", "https://HOST/PATH"),
        ("hf://", "repository", "hf://ORG/NAME"),
        ("hf://org", "repository", "hf://ORG/NAME"),
        ("sftp://", "bucket", "sftp://BUCKET/PREFIX"),
        ("fsspec+file:///a", "bucket", "file:///PATH"),
    ],
)
def test_a_url_without_a_bucket_is_refused(text: str, what: str, hint: str) -> None:
    with raises(UsageError, f"names no {what}", hint=hint, id="usage"):
        location(text)


def test_a_path_made_of_a_url_is_no_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(UsageError, id="usage") as caught:
        reshard(tmp_path, Path("s3://bucket/run"), to="torch_dist")
    assert "s3://" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        f"s3://key:{SECRET}@bucket/run",
        f"https://user:{SECRET}@host/a",
        f"https://host/a?X-Amz-Signature={SECRET}",
        f"https://host/a?download=true&token={SECRET}",
        f"az://container/a?sv=2024-01-01&sig={SECRET}",
        f"gs://bucket/a?x-goog-signature={SECRET}",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with raises(UsageError, id="usage") as caught:
        location(text)
    assert SECRET not in str(caught.value)


def test_the_password_of_an_endpoint_is_not_repeated() -> None:
    from botocore.exceptions import EndpointConnectionError

    error = EndpointConnectionError(endpoint_url=f"http://user:{SECRET}@host:9000/bucket")
    told = client_error(error, "s3://bucket")
    assert "http://host:9000" in str(told)
    assert SECRET not in str(told)
