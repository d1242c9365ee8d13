"""What a store refuses ends in one typed error: the location, a hint, and no credentials."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from megtool.errors import StorageError
from megtool.storage.stores.protocol import (
    MIN_PART_BYTES,
    ConditionError,
    ObjectMissingError,
    Store,
)
from megtool.storage.stores.s3 import S3Store
from tests.support.stores.fault_proxy import Action, FaultProxy
from tests.support.stores.s3_bucket import S3Bucket

DATA = random.Random(3).randbytes(1000)

Call = Callable[[Store], object]


CALLS: dict[str, Call] = {
    "list": lambda store: store.list(""),
    "read": lambda store: store.read("key", 0, 10),
    "put": lambda store: store.put("key", DATA),
    "create": lambda store: store.put("new", b"new", create=True),
    "delete": lambda store: store.delete(["missing"]),
    "begin_upload": lambda store: store.begin_upload("new"),
    "upload_part": lambda store: store.upload_part("new", "upload", 1, b"data"),
    "list_parts": lambda store: store.list_parts("new", "upload"),
    "list_uploads": lambda store: store.list_uploads(""),
    "complete_upload": lambda store: store.complete_upload("new", "upload", []),
    "abort_upload": lambda store: store.abort_upload("new", "upload"),
}


@pytest.fixture
def bucket(s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    s3_bucket.put("key", DATA)
    return s3_bucket


def refusal(bucket: S3Bucket, store: Store, call: Call) -> StorageError:
    """The error of a call, whose form is checked."""
    with pytest.raises(StorageError) as caught:
        call(store)
    error = caught.value
    text = f"{error} {error.hint}"
    assert str(error.file).startswith(store.url)
    assert "\n" not in error.message
    assert len(error.message) < 400
    assert error.hint
    for secret in (bucket.server.secret_key, "Signature=", "Authorization"):
        assert secret not in text
    return error


def test_a_bucket_that_is_missing(bucket: S3Bucket) -> None:
    store = S3Store("s3://bucket-nobody-made")
    for name in sorted(CALLS.keys() - {"delete", "abort_upload"}):  # missing ones are no error
        assert isinstance(refusal(bucket, store, CALLS[name]), ObjectMissingError)


def test_wrong_credentials(bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong" + bucket.server.secret_key[5:])
    store = S3Store(bucket.url())
    for call in CALLS.values():
        assert refusal(bucket, store, call).id == "no-credentials"


REGION = {"headers": (("x-amz-bucket-region", "eu-west-9"),)}
REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "AccessDenied": ("permission-denied", {"status": 403}),
    "ExpiredToken": ("no-credentials", {"status": 400}),
    "InvalidToken": ("no-credentials", {"status": 400}),
    "RequestTimeTooSkewed": ("storage", {"status": 403}),
    "PermanentRedirect": ("wrong-region", {"status": 301, **REGION}),
    "AuthorizationHeaderMalformed": (
        "wrong-region",
        {"status": 400, "detail": "<Region>eu-west-9</Region>", **REGION},
    ),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_what_a_server_refuses(bucket: S3Bucket, fault_proxy: FaultProxy, code: str) -> None:
    """It is not tried again, but for what a client asks to find the region."""
    store = S3Store(bucket.url())
    error_id, answer = REFUSALS[code]
    # The answer to a HEAD has no body, so the code of the error is asked for once more.
    for name, call in {**CALLS, "head": lambda store: store.head("key")}.items():
        fault_proxy.reset()
        fault_proxy.inject(Action.ANSWER, times=None, code=code, **answer)
        error = refusal(bucket, store, call)
        assert (name, error.id) == (name, error_id)
        if error_id == "wrong-region":
            assert "eu-west-9" in str(error.hint)
        assert len(fault_proxy.requests) <= (4 if error_id == "wrong-region" else 3)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again(bucket: S3Bucket, fault_proxy: FaultProxy, status: int) -> None:
    store = S3Store(bucket.url())
    needs_upload = {"upload_part", "list_parts", "complete_upload", "abort_upload"}
    needs_upload.add("create")  # see test_a_create_whose_reply_was_lost_succeeds
    for name in sorted(CALLS.keys() - needs_upload):
        fault_proxy.reset()
        fault_proxy.inject(Action.ANSWER, status=status, code="SlowDown")
        CALLS[name](store)
        assert len(fault_proxy.requests) == 2


@pytest.mark.parametrize(
    ("action", "status"),
    [(Action.CUT, 0), (Action.LOSE_REPLY, 0), *((Action.ANSWER, s) for s in (429, 500, 503))],
)
def test_parts_are_tried_again(
    bucket: S3Bucket, fault_proxy: FaultProxy, action: Action, status: int
) -> None:
    store = S3Store(bucket.url())
    source = store.put("source", bytes(MIN_PART_BYTES))
    upload = store.begin_upload("new")
    fault_proxy.inject(action, "PUT .*partNumber=1", status=status)
    fault_proxy.inject(action, "PUT .*partNumber=2", status=status)
    fault_proxy.inject(action, "GET .*uploadId=", status=status)
    parts = [
        store.copy_part("new", upload, 1, source, 0, MIN_PART_BYTES),
        store.upload_part("new", upload, 2, DATA),
    ]
    assert list(store.list_parts("new", upload)) == parts
    fault_proxy.inject(Action.ANSWER, "POST .*uploadId=", status=status or 500)
    assert store.complete_upload("new", upload, parts).size == MIN_PART_BYTES + 1000
    assert bucket.get("new") == bytes(MIN_PART_BYTES) + DATA


def test_a_reply_that_breaks_off_at_once_is_not_an_empty_one(
    bucket: S3Bucket, fault_proxy: FaultProxy
) -> None:
    """To boto3 it is a reply without content: a bucket without objects."""
    store = S3Store(bucket.url())
    source = store.put("source", bytes(MIN_PART_BYTES))
    fault_proxy.inject(Action.TRUNCATE, "list-type=2", times=2)
    assert len(store.list("").objects) == 2
    fault_proxy.inject(Action.TRUNCATE, "^POST .*uploads")
    upload = store.begin_upload("new")
    fault_proxy.inject(Action.TRUNCATE, "^PUT .*partNumber=")
    part = store.copy_part("new", upload, 1, source, 0, MIN_PART_BYTES)
    fault_proxy.inject(Action.TRUNCATE, "^GET .*uploadId=")
    assert list(store.list_parts("new", upload)) == [part]
    fault_proxy.inject(Action.TRUNCATE, "^GET .*uploads")
    assert {u.key for u in store.list_uploads("")} == {"new"}
    fault_proxy.inject(Action.TRUNCATE, "^POST .*uploadId=")
    assert store.complete_upload("new", upload, [part], create=True).size == MIN_PART_BYTES
    fault_proxy.inject(Action.TRUNCATE, "list-type=2", times=None)
    with pytest.raises(StorageError):
        store.list("")


@pytest.mark.parametrize("action", [Action.CUT, Action.LOSE_REPLY, Action.ANSWER_AFTERWARDS])
def test_a_create_whose_reply_was_lost_succeeds(
    bucket: S3Bucket, fault_proxy: FaultProxy, action: Action
) -> None:
    """It is tried again, and told apart from an object that another program wrote."""
    store = S3Store(bucket.url())
    fault_proxy.inject(action, "PUT", status=500, code="InternalError")
    info = store.put("new", DATA, create=True)
    assert bytes(store.read("new", 0, 1000, version=info.version)) == DATA
    fault_proxy.inject(action, "PUT", status=500, code="InternalError")
    with pytest.raises(ConditionError):
        store.put("new", DATA[::-1], create=True)
    with pytest.raises(ConditionError):
        store.put("new", DATA, create=True)  # without a fault, no object of another is its own
    assert bytes(store.read("new", 0, 1000, version=info.version)) == DATA


@pytest.mark.parametrize("action", [Action.CUT, Action.LOSE_REPLY, Action.ANSWER_AFTERWARDS])
def test_a_replacement_whose_reply_was_lost_succeeds(
    bucket: S3Bucket, fault_proxy: FaultProxy, action: Action
) -> None:
    """It is tried again as well, unless another program has replaced the object meanwhile."""
    store = S3Store(bucket.url())
    first = store.put("new", DATA)
    fault_proxy.inject(action, "PUT", status=500, code="InternalError")
    second = store.put("new", DATA[::-1], version=first.version)
    assert bytes(store.read("new", 0, 1000, version=second.version)) == DATA[::-1]
    fault_proxy.inject(action, "PUT", status=500, code="InternalError")
    with pytest.raises(ConditionError):
        store.put("new", DATA, version=first.version)
    assert bytes(store.read("new", 0, 1000)) == DATA[::-1]
    store.delete(["new"])
    fault_proxy.inject(action, "PUT", status=500, code="InternalError")
    with pytest.raises(ConditionError):
        store.put("new", DATA, version=second.version)


@pytest.mark.parametrize("action", [Action.LOSE_REPLY, Action.ANSWER_AFTERWARDS])
@pytest.mark.parametrize("create", [False, True])
def test_a_completion_whose_reply_was_lost_can_be_read_back(
    bucket: S3Bucket, fault_proxy: FaultProxy, action: Action, create: bool
) -> None:
    store = S3Store(bucket.url())
    upload = store.begin_upload("new")
    part = store.upload_part("new", upload, 1, DATA)
    fault_proxy.inject(action, "POST .*uploadId=", status=500, code="InternalError")
    with contextlib.suppress(StorageError):
        store.complete_upload("new", upload, [part], create=create)
    assert bytes(store.read("new", 0, 1000)) == DATA


@pytest.mark.parametrize("offset", [0, 1, 500, -1])
def test_a_truncated_body_is_read_again(
    bucket: S3Bucket, fault_proxy: FaultProxy, offset: int
) -> None:
    store = S3Store(bucket.url())
    fault_proxy.inject(Action.TRUNCATE, "^GET", offset=offset)
    assert bytes(store.read("key", 0, 1000)) == DATA


def test_a_body_that_is_too_short_is_no_data(bucket: S3Bucket, fault_proxy: FaultProxy) -> None:
    """Headers that agree with each other and not with the request: a broken proxy."""
    store = S3Store(bucket.url())
    fault_proxy.inject(Action.SHORTEN, "^GET", offset=-1, times=None)
    try:
        data = store.read("key", 0, 1000)
    except StorageError:
        return
    assert data.nbytes != 1000  # `ReadableObject` refuses it


@pytest.mark.parametrize("offset", [0, 777])
def test_a_bit_that_flips_on_the_way_is_refused(
    bucket: S3Bucket, fault_proxy: FaultProxy, offset: int
) -> None:
    """What is stored is what was sent: uploads carry a checksum."""
    store = S3Store(bucket.url())
    fault_proxy.inject(Action.FLIP_REQUEST, "^PUT", offset=offset, times=1)
    try:
        store.put("new", DATA)
    except StorageError:
        assert store.head("new") is None
    else:
        assert bucket.get("new") == DATA
    upload = store.begin_upload("parts")
    fault_proxy.inject(Action.FLIP_REQUEST, "^PUT .*partNumber", offset=offset, times=1)
    try:
        part = store.upload_part("parts", upload, 1, DATA)
    except StorageError:
        assert list(store.list_parts("parts", upload)) == []
    else:
        store.complete_upload("parts", upload, [part])
        assert bucket.get("parts") == DATA
