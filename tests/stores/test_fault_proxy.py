"""The proxy breaks what it is told to break, and clients of S3 see what they would see."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.stores.fault_proxy import Action, FaultProxy
from tests.support.stores.s3_bucket import S3Bucket

DATA = random.Random(7).randbytes(300_000)
MIB = 1 << 20


@pytest.fixture
def client(s3_bucket: S3Bucket, fault_proxy: FaultProxy) -> Any:
    """A boto3 client that tries once and goes through the proxy."""
    return s3_bucket.server.at(fault_proxy.endpoint).client


@pytest.fixture
def store(s3_bucket: S3Bucket, fault_proxy: FaultProxy) -> Any:
    """A store of obstore that finds the proxy by the environment and tries again, as it does."""
    stores = pytest.importorskip("obstore.store", reason="obstore is not installed")
    backoff = {
        "init_backoff": timedelta(milliseconds=1),
        "max_backoff": timedelta(milliseconds=10),
        "base": 2,
    }
    retry = {"backoff": backoff, "max_retries": 3, "retry_timeout": timedelta(seconds=30)}
    return stores.S3Store(s3_bucket.name, client_options={"allow_http": True}, retry_config=retry)


@pytest.fixture
def key(s3_bucket: S3Bucket) -> str:
    s3_bucket.put("folder/key", DATA)
    return "folder/key"


def outcome(call: Callable[..., Any], **arguments: Any) -> Any:
    """What a boto3 call returned, the code of S3's error, or the class of another error."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call(**arguments)
    except ClientError as error:
        return error.response["Error"]["Code"]
    except BotoCoreError as error:
        return type(error)


def test_what_is_forwarded_is_recorded(
    s3_bucket: S3Bucket, fault_proxy: FaultProxy, client: Any, store: Any
) -> None:
    import obstore

    client.put_object(Bucket=s3_bucket.name, Key="a b/ü", Body=DATA)
    assert s3_bucket.get("a b/ü") == DATA
    assert bytes(obstore.get_range(store, "a b/ü", start=10, length=20)) == DATA[10:30]
    assert obstore.head(store, "a b/ü")["size"] == len(DATA)
    obstore.put(store, "other", b"1234")
    assert s3_bucket.get("other") == b"1234"
    put, get, head, other = fault_proxy.requests
    assert (put.method, put.status) == ("PUT", 200)
    assert put.bytes_in >= len(DATA)  # a trailing checksum may follow
    assert (get.method, get.range, get.status, get.bytes_out) == ("GET", "bytes=10-29", 206, 20)
    assert (head.method, head.status, head.bytes_out) == ("HEAD", 200, 0)
    assert (other.method, other.bytes_in, other.path.endswith("/other")) == ("PUT", 4, True)
    assert [r.number for r in fault_proxy.requests] == [0, 1, 2, 3]
    assert fault_proxy.bytes_out("^GET") == 20
    assert fault_proxy.matching("GET .*bytes=10-29$") == [get]


def test_multipart_and_ranged_copies_are_forwarded(
    s3_bucket: S3Bucket, fault_proxy: FaultProxy, client: Any, store: Any, key: str
) -> None:
    import obstore

    data = random.Random(8).randbytes(11 * MIB)
    obstore.put(store, "large", data, chunk_size=5 * MIB, max_concurrency=3)
    assert s3_bucket.get("large") == data
    sizes = sorted(r.bytes_in for r in fault_proxy.matching("PUT .*partNumber="))
    assert sizes == [MIB, 5 * MIB, 5 * MIB]

    place = {"Bucket": s3_bucket.name, "Key": "copy"}
    upload = client.create_multipart_upload(**place)["UploadId"]
    source = {"Bucket": s3_bucket.name, "Key": "large"}
    reply = client.upload_part_copy(
        **place, UploadId=upload, PartNumber=1, CopySource=source, CopySourceRange="bytes=5-1004"
    )
    part = {"PartNumber": 1, "ETag": reply["CopyPartResult"]["ETag"]}
    client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": [part]})
    assert s3_bucket.get("copy") == data[5:1005]
    (copy,) = fault_proxy.matching("bytes=5-1004$")
    assert (copy.bytes_in, copy.bytes_out < 1000) == (0, True)


def test_a_cut_request_never_reaches_the_server(
    s3_bucket: S3Bucket, fault_proxy: FaultProxy, client: Any
) -> None:
    from botocore.exceptions import HTTPClientError

    fault_proxy.inject(Action.CUT)
    put = {"Bucket": s3_bucket.name, "Key": "key", "Body": DATA}
    assert issubclass(outcome(client.put_object, **put), HTTPClientError)
    assert s3_bucket.keys() == []
    client.put_object(**put)
    assert s3_bucket.get("key") == DATA
    assert [(r.action, r.status) for r in fault_proxy.requests] == [(Action.CUT, None), (None, 200)]


def test_a_lost_reply_leaves_its_effect(
    s3_bucket: S3Bucket, fault_proxy: FaultProxy, client: Any
) -> None:
    fault_proxy.inject(Action.LOSE_REPLY, "^PUT")
    put = {"Bucket": s3_bucket.name, "Key": "key", "Body": DATA, "IfNoneMatch": "*"}
    assert isinstance(outcome(client.put_object, **put), type)
    assert s3_bucket.get("key") == DATA
    assert outcome(client.put_object, **put) == "PreconditionFailed"


def test_a_create_only_put_that_obstore_repeats_looks_like_a_conflict(
    s3_bucket: S3Bucket, fault_proxy: FaultProxy, store: Any
) -> None:
    """Why a 412 has to be read back: this client won and is told that it lost."""
    import obstore
    from obstore.exceptions import AlreadyExistsError

    fault_proxy.inject(Action.ANSWER_AFTERWARDS, "^PUT", status=500, code="InternalError")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "key", DATA, mode="create")
    assert s3_bucket.get("key") == DATA


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "ExpiredToken"),
        (403, "AccessDenied"),
        (412, "PreconditionFailed"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "SlowDown"),
    ],
)
def test_answers_are_errors_of_s3(
    s3_bucket: S3Bucket, fault_proxy: FaultProxy, client: Any, status: int, code: str
) -> None:
    fault_proxy.inject(Action.ANSWER, "^PUT", status=status, code=code)
    put = {"Bucket": s3_bucket.name, "Key": "key", "Body": DATA}
    assert outcome(client.put_object, **put) == code
    assert s3_bucket.keys() == []
    fault_proxy.inject(Action.ANSWER_AFTERWARDS, "^PUT", status=status, code=code)
    assert outcome(client.put_object, **put) == code
    assert s3_bucket.keys() == ["key"]
    assert [r.status for r in fault_proxy.requests] == [status, status]


def test_a_truncated_body_is_noticed_and_a_shortened_one_is_not(
    s3_bucket: S3Bucket, fault_proxy: FaultProxy, client: Any, key: str
) -> None:
    get = {"Bucket": s3_bucket.name, "Key": key, "Range": "bytes=0-999"}
    fault_proxy.inject(Action.TRUNCATE, offset=-1)
    body = client.get_object(**get)["Body"]
    assert isinstance(outcome(body.read), type)
    assert fault_proxy.requests[0].bytes_out == 999
    fault_proxy.inject(Action.SHORTEN, offset=-1)
    assert client.get_object(**get)["Body"].read() == DATA[:999]


def test_flipped_bits(s3_bucket: S3Bucket, fault_proxy: FaultProxy, client: Any, key: str) -> None:
    fault_proxy.inject(Action.FLIP, offset=3)
    get = {"Bucket": s3_bucket.name, "Key": key, "Range": "bytes=0-9"}
    data = client.get_object(**get)["Body"].read()
    assert [i for i in range(10) if data[i] != DATA[i]] == [3]

    fault_proxy.inject(Action.FLIP_REQUEST, "^PUT", offset=3)
    put = {"Bucket": s3_bucket.name, "Key": "new", "Body": DATA, "ChecksumAlgorithm": "CRC32C"}
    assert isinstance(outcome(client.put_object, **put), str)
    assert s3_bucket.keys("new") == []


def test_obstore_gets_over_what_passes(
    s3_bucket: S3Bucket, fault_proxy: FaultProxy, store: Any, key: str
) -> None:
    import obstore

    for action in (Action.CUT, Action.LOSE_REPLY, Action.TRUNCATE):
        fault_proxy.inject(action, "^GET", offset=100)
        assert bytes(obstore.get(store, key).bytes()) == DATA
    for status in (429, 500, 503):
        fault_proxy.inject(Action.ANSWER, "^GET", status=status)
        assert bytes(obstore.get(store, key).bytes()) == DATA
    assert len(fault_proxy.requests) == 12


def test_faults_choose_their_requests(
    s3_bucket: S3Bucket, fault_proxy: FaultProxy, client: Any, key: str
) -> None:
    bucket = s3_bucket.name
    fault_proxy.inject(Action.ANSWER, f"^GET .*{key}", skip=1, times=2)
    fault_proxy.inject(Action.ANSWER, "^HEAD", times=None, status=403)
    get = {"Bucket": bucket, "Key": key}
    codes = [outcome(client.get_object, **get) for _ in range(4)]
    assert [code if isinstance(code, str) else "" for code in codes] == ["", *2 * ["SlowDown"], ""]
    assert [outcome(client.head_object, **get) for _ in range(2)] == ["403", "403"]
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 1


def test_dropped_headers_make_a_server_that_ignores_them(moto_bucket: S3Bucket) -> None:
    """For moto, which does not check signatures."""
    moto_bucket.put("key", DATA)
    with FaultProxy(moto_bucket.endpoint) as proxy:
        client = moto_bucket.server.at(proxy.endpoint).client
        ignored = (("Range", ""), ("If-None-Match", ""))
        proxy.inject(Action.DROP_HEADERS, times=None, headers=ignored)
        place = {"Bucket": moto_bucket.name, "Key": "key"}
        assert len(client.get_object(**place, Range="bytes=0-9")["Body"].read()) == len(DATA)
        client.put_object(**place, Body=b"new", IfNoneMatch="*")
        assert moto_bucket.get("key") == b"new"


def test_bandwidth_and_latency_are_waited_for(
    fault_proxy: FaultProxy, client: Any, s3_bucket: S3Bucket, key: str
) -> None:
    waits: list[float] = []
    fault_proxy.sleep = waits.append
    fault_proxy.clock = lambda: sum(waits)
    fault_proxy.latency, fault_proxy.bandwidth = 0.02, 1e6
    client.get_object(Bucket=s3_bucket.name, Key=key)["Body"].read()
    assert waits[0] == 0.02
    assert sum(waits[1:]) == pytest.approx(len(DATA) / 1e6)


def test_connections_end_with_the_proxy(s3_bucket: S3Bucket) -> None:
    with FaultProxy(s3_bucket.endpoint) as proxy:
        client = s3_bucket.server.at(proxy.endpoint).client
        client.list_objects_v2(Bucket=s3_bucket.name)
        assert any("process_request_thread" in thread.name for thread in threading.enumerate())
        threads = [t for t in threading.enumerate() if "process_request_thread" in t.name]
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
