"""The servers that the tests of stores run against do what those tests take for granted."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.stores.http_files import HttpFiles
from tests.support.stores.s3_bucket import S3Bucket
from tests.support.stores.s3_servers import S3Server

SERVERS = ("seaweedfs", "moto", "nanio", "rclone")
WHOLE_SERVERS = ("seaweedfs", "moto")


def code_of(call: Callable[..., Any], **arguments: Any) -> str | None:
    """The error code of S3, or None if the call succeeds."""
    from botocore.exceptions import ClientError

    try:
        call(**arguments)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return None


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> S3Bucket:
    return S3Bucket(request.getfixturevalue(request.param))


@pytest.mark.parametrize("bucket", SERVERS, indirect=True)
def test_a_server_keeps_objects(bucket: S3Bucket) -> None:
    assert bucket.keys() == []
    bucket.put("a/b", b"data")
    assert bucket.contents("a/") == {"b": b"data"}
    assert bucket.new_bucket() != bucket.name
    bucket.delete("a/b")
    assert bucket.keys() == []


@pytest.mark.parametrize("bucket", WHOLE_SERVERS, indirect=True)
def test_whole_servers_heed_conditions_and_ranges(bucket: S3Bucket) -> None:
    first = bucket.put("key", bytes(range(100)))
    place = {"Bucket": bucket.name, "Key": "key"}
    put = bucket.client.put_object
    assert code_of(put, **place, Body=b"", IfNoneMatch="*") == "PreconditionFailed"
    assert code_of(put, **place, Body=b"", IfMatch='"0"') == "PreconditionFailed"
    assert code_of(put, **place, Body=b"new", IfMatch=first) is None
    assert code_of(bucket.client.get_object, **place, IfMatch=first) in (
        "PreconditionFailed",
        "412",
    )
    reply = bucket.client.get_object(**place, Range="bytes=1-1")
    assert (reply["Body"].read(), reply["ContentRange"]) == (b"e", "bytes 1-1/3")


@pytest.mark.parametrize("bucket", ["seaweedfs"], indirect=True)
def test_a_missing_bucket_and_wrong_credentials_are_refused(bucket: S3Bucket) -> None:
    put = bucket.client.put_object
    assert code_of(put, Bucket="bucket-nobody-made", Key="key", Body=b"") == "NoSuchBucket"
    stranger = S3Server("seaweedfs", bucket.endpoint)
    assert code_of(stranger.client.list_objects_v2, Bucket=bucket.name) == "InvalidAccessKeyId"


def ignored(bucket: S3Bucket) -> set[str]:
    """What of a commit's needs the server accepts and does not do."""
    bucket.put("key", b"old")
    place = {"Bucket": bucket.name, "Key": "key"}
    out = set()
    if code_of(bucket.client.put_object, **place, Body=b"new", IfNoneMatch="*") is None:
        out.add("If-None-Match")
    if code_of(bucket.client.put_object, **place, Body=b"new", IfMatch='"0"') is None:
        out.add("If-Match")
    if bucket.client.get_object(**place, Range="bytes=1-1")["Body"].read() != b"e":
        out.add("Range")
    return out


@pytest.mark.parametrize("bucket", ["nanio", "rclone"], indirect=True)
def test_negative_servers_ignore_conditions(bucket: S3Bucket) -> None:
    assert ignored(bucket) == {"If-Match", "If-None-Match"}


def test_the_environment_leads_every_client_to_the_server(s3_bucket: S3Bucket) -> None:
    s3_bucket.put("from/outside", b"data")
    code = (
        "import boto3, sys; c = boto3.client('s3');"
        "print([o['Key'] for o in c.list_objects_v2(Bucket=sys.argv[1])['Contents']])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, s3_bucket.name], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['from/outside']\n"
    assert os.environ["AWS_ENDPOINT_URL"] == s3_bucket.endpoint
    assert s3_bucket.url("a") == f"s3://{s3_bucket.name}/a"


def get(url: str, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_http_files_with_ranges(http_files: HttpFiles) -> None:
    (http_files.root / "a b").write_bytes(bytes(range(10)))
    url = http_files.url("a b")
    assert get(url) == (200, bytes(range(10)))
    assert get(url, Range="bytes=2-3") == (206, b"\2\3")
    assert get(url, Range="bytes=8-") == (206, b"\x08\x09")
    assert get(url, Range="bytes=-1") == (206, b"\x09")
    assert get(url, Range="bytes=10-12")[0] == 416
    assert get(url, **{"If-Match": '"0"'})[0] == 412
    assert get(http_files.url("missing"))[0] == 404
    assert get(http_files.url("../x"))[0] == 404
    assert [r.size for r in http_files.requests] == [10, 2, 2, 1, 0, 0, 0, 0]


def test_http_files_without_ranges(http_files_without_ranges: HttpFiles) -> None:
    (http_files_without_ranges.root / "a").write_bytes(bytes(range(10)))
    url = http_files_without_ranges.url("a")
    assert get(url, Range="bytes=2-3") == (200, bytes(range(10)))
