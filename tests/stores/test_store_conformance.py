"""What `Store` promises, of every store: in memory, S3, Azure, and a server like Google's."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megtool.errors import DestinationError, FormatError, StorageError
from megtool.staging.publication import complete_once
from megtool.storage.location.path import StorePath
from megtool.storage.objects.probe import probe_store
from megtool.storage.stores.connect import connect, register_store
from megtool.storage.stores.memory import MemoryStore
from megtool.storage.stores.protocol import (
    MIN_PART_BYTES,
    BucketMissingError,
    ConditionError,
    ObjectInfo,
    ObjectMissingError,
    Store,
    UploadedPart,
)
from megtool.storage.stores.s3 import S3Store
from tests.support.stores.s3_bucket import S3Bucket
from tests.support.stores.s3_servers import S3Server

ALL = ("memory", "s3", "s3-moto", "gcs", "azure")
S3_PARTS = ("memory", "s3", "s3-moto")
"""Those whose uploads are those of S3, and which copy ranges: Google and Azure do not."""
DATA = random.Random(18).randbytes(3000)
PART = random.Random(19).randbytes(MIN_PART_BYTES)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    """An empty store of the kind that the test is parametrized with."""
    kind: str = request.param
    if kind == "memory":
        memory = MemoryStore("memory://bucket")
        register_store(memory)
        return memory
    if kind in ("gcs", "azure"):
        cloud: Store = request.getfixturevalue(f"{kind}_store")
        return cloud
    use_s3: Callable[[S3Server], S3Bucket] = request.getfixturevalue("use_s3")
    bucket = use_s3(request.getfixturevalue("moto" if kind == "s3-moto" else "seaweedfs"))
    return S3Store(bucket.url())


every_store = pytest.mark.parametrize("store", ALL, indirect=True)
s3_parts = pytest.mark.parametrize("store", S3_PARTS, indirect=True)


def keys_of(objects: Sequence[ObjectInfo]) -> list[str]:
    return [info.key for info in objects]


# ---- whole objects


@every_store
def test_what_was_put_is_there(store: Store) -> None:
    info = store.put("folder/key", DATA)
    assert (info.key, info.size, bool(info.version)) == ("folder/key", 3000, True)
    head = store.head("folder/key")
    assert head is not None
    assert (head.key, head.size, head.version) == ("folder/key", 3000, info.version)
    assert head.modified_ns > 1.7e18
    (listed,) = store.list("folder").objects
    assert (listed.key, listed.size, listed.version) == ("folder/key", 3000, info.version)
    assert bytes(store.read("folder/key", 0, 3000)) == DATA


@every_store
@pytest.mark.parametrize("data", [b"", bytearray(b"ab"), memoryview(DATA)[10:30]])
def test_any_bytes_can_be_put(store: Store, data: bytes) -> None:
    assert store.put("key", data).size == len(data)
    assert bytes(store.read("key", 0, len(data))) == bytes(data)


@every_store
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (2999, 3000), (0, 3000), (17, 1717), (5, 5)])
def test_a_range_is_read(store: Store, start: int, stop: int) -> None:
    store.put("key", DATA)
    assert bytes(store.read("key", start, stop - start)) == DATA[start:stop]


@every_store
@pytest.mark.parametrize(("start", "stop"), [(2999, 3001), (3000, 3001), (9000, 9999)])
def test_an_object_that_is_shorter_is_told(store: Store, start: int, stop: int) -> None:
    store.put("key", DATA)
    with pytest.raises(FormatError) as caught:
        store.read("key", start, stop - start)
    assert caught.value.id == "truncated-file"


@every_store
def test_what_is_missing_is_told(store: Store) -> None:
    store.put("folder/key", DATA)
    for key in ("missing", "folder", "folder/key/more", "folder/ke"):
        assert store.head(key) is None
        with pytest.raises(ObjectMissingError) as caught:
            store.read(key, 0, 1)
        assert f"{store.url}/{key}" in str(caught.value)
    assert store.list("missing").objects == ()
    assert store.list("missing").prefixes == ()


REQUESTS: dict[str, Callable[[Store], object]] = {
    "head": lambda store: store.head("run/key"),
    "read": lambda store: store.read("run/key", 0, 1),
    "list": lambda store: store.list("run"),
    "put": lambda store: store.put("run/key", b"data"),
    "create": lambda store: store.put("run/key", b"data", create=True),
    "begin_upload": lambda store: store.begin_upload("run/key"),
    "list_uploads": lambda store: store.list_uploads("run"),
}


@pytest.mark.parametrize("store", [kind for kind in ALL if kind != "memory"], indirect=True)
def test_a_missing_bucket_is_told(store: Store) -> None:
    scheme = store.url.partition("://")[0]
    missing = connect(f"{scheme}://nobody-made-this")
    for call in REQUESTS.values():
        with pytest.raises(BucketMissingError) as caught:
            call(missing)
        assert caught.value.hint
        assert str(caught.value.file).startswith(missing.url)
    assert store.head("run/key") is None


@every_store
def test_an_object_is_created_once(store: Store) -> None:
    store.put("key", b"first", create=True)
    with pytest.raises(ConditionError):
        store.put("key", b"second", create=True)
    assert bytes(store.read("key", 0, 5)) == b"first"
    store.delete(["key"])
    store.put("key", b"third", create=True)


@every_store
def test_of_many_that_create_one_wins(store: Store) -> None:
    outcomes: list[int] = []
    barrier = threading.Barrier(8)

    def create(number: int) -> None:
        barrier.wait()
        try:
            store.put("key", b"%d" % number, create=True)
        except ConditionError:
            return
        outcomes.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1
    assert bytes(store.read("key", 0, 1)) == b"%d" % outcomes[0]


@every_store
def test_an_object_is_replaced_only_if_it_is_the_known_one(store: Store) -> None:
    first = store.put("key", b"first")
    second = store.put("key", b"second", version=first.version)
    assert second.version != first.version
    with pytest.raises(ConditionError):
        store.put("key", b"third", version=first.version)
    assert bytes(store.read("key", 0, 6)) == b"second"
    with pytest.raises((ConditionError, ObjectMissingError)):
        store.put("missing", b"data", version=first.version)
    assert store.head("missing") is None


@every_store
def test_a_version_is_read_or_none(store: Store) -> None:
    first = store.put("key", DATA)
    assert bytes(store.read("key", 1, 2, version=first.version)) == DATA[1:3]
    second = store.put("key", DATA[::-1])
    with pytest.raises(ConditionError):
        store.read("key", 1, 2, version=first.version)
    assert bytes(store.read("key", 0, 1, version=second.version)) == DATA[-1:]


@every_store
def test_objects_are_deleted(store: Store) -> None:
    for key in ("a", "b", "c/d", "c/e"):
        store.put(key, b"data")
    store.delete(["a", "missing", "c/d"])
    assert keys_of(store.list("", recursive=True).objects) == ["b", "c/e"]
    store.delete(["missing"])
    store.delete([])
    store.delete(["b", "c/e"])
    # SeaweedFS lists an empty folder as a prefix for a while.
    assert store.list("").objects == store.list("", recursive=True).objects == ()


@every_store
@pytest.mark.parametrize(
    "name",
    [
        "with space",
        "a+b",
        "50%",
        "50%25",
        "ü",
        "モデル",
        "a=b&c",
        "q?x",
        "a#b",
        "~t",
        "(1)",
        "it's",
    ],
)
def test_names_are_what_they_are(store: Store, name: str) -> None:
    key = f"top {name}/{name}"
    store.put(key, b"data")
    head = store.head(key)
    assert head is not None
    assert head.key == key
    assert keys_of(store.list("", recursive=True).objects) == [key]
    assert store.list("").prefixes == (f"top {name}",)
    assert keys_of(store.list(f"top {name}").objects) == [key]
    assert bytes(store.read(key, 0, 4)) == b"data"
    store.delete([key])
    assert store.head(key) is None


@every_store
def test_the_probe_before_a_run_finds_no_fault(store: Store) -> None:
    assert probe_store(StorePath(f"{store.url}/.run.megtool")) == ()
    assert store.list("", recursive=True).objects == ()
    assert list(store.list_uploads("")) == []


# ---- listing


@every_store
def test_a_folder_is_listed(store: Store) -> None:
    for key in ("a", "run/x", "run/y/1", "run/y/2", "run/z/1", "run2/x", "running"):
        store.put(key, b"data")
    listing = store.list("run")
    assert keys_of(listing.objects) == ["run/x"]
    assert sorted(listing.prefixes) == ["run/y", "run/z"]
    assert keys_of(store.list("run", recursive=True).objects) == [
        *("run/x", "run/y/1", "run/y/2", "run/z/1")
    ]
    assert store.list("run", recursive=True).prefixes == ()
    top = store.list("")
    assert (keys_of(top.objects), sorted(top.prefixes)) == (["a", "running"], ["run", "run2"])


@every_store
def test_a_listing_is_sorted_by_key(store: Store) -> None:
    keys = ["run/b", "run/a/c", "run/a.b", "run/a-b", "run/a", "run/B"]
    if store.url.startswith("s3:"):  # in SeaweedFS, a folder is no object
        keys.remove("run/a")
    for key in keys:
        store.put(key, b"data")
    assert keys_of(store.list("run", recursive=True).objects) == sorted(keys)
    assert keys_of(store.list("run").objects) == sorted(set(keys) - {"run/a/c"})


@pytest.mark.slow
@every_store
def test_more_than_a_page_is_listed(store: Store) -> None:
    keys = [f"run/{n % 3}/{n:05}" for n in range(1100)] + [f"wide/{n:05}/x" for n in range(1050)]
    with_threads(lambda key: store.put(key, b""), keys)
    assert keys_of(store.list("run", recursive=True).objects) == sorted(keys[:1100])
    assert len(store.list("wide").prefixes) == 1050
    assert 1 <= len(store.list("run", recursive=True, most=1).objects) <= 1100
    store.delete(keys)
    assert store.list("", recursive=True).objects == ()


def with_threads(call: Callable[[Any], Any], items: Sequence[Any]) -> None:
    def work(part: Sequence[Any]) -> None:
        for item in part:
            call(item)

    threads = [threading.Thread(target=work, args=(items[n::8],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- objects in parts


@every_store
def test_parts_become_an_object(store: Store) -> None:
    upload = store.begin_upload("run/key")
    last = store.upload_part("run/key", upload, 7, memoryview(b"the end"))
    store.upload_part("run/key", upload, 2, bytes(MIN_PART_BYTES))
    first = store.upload_part("run/key", upload, 2, PART)  # replaces the other
    assert store.head("run/key") is None
    assert store.list("run", recursive=True).objects == ()
    assert (first.number, first.size) == (2, MIN_PART_BYTES)
    # SeaweedFS lists a replaced part as well; of two of one second, neither is told.
    assert list(store.list_parts("run/key", upload)) in ([first, last], [last])
    info = store.complete_upload("run/key", upload, [first, last])
    assert (info.key, info.size) == ("run/key", MIN_PART_BYTES + 7)
    head = store.head("run/key")
    assert head is not None
    assert (head.size, head.version) == (info.size, info.version)
    assert bytes(store.read("run/key", 0, info.size, version=info.version)) == PART + b"the end"


# Azure drops the blocks of all uploads of a key.
@pytest.mark.parametrize("store", [*S3_PARTS, "gcs"], indirect=True)
def test_uploads_are_listed_until_they_end(store: Store) -> None:
    first, second = store.begin_upload("run/a"), store.begin_upload("run/a")
    third, other = store.begin_upload("run/b/c"), store.begin_upload("run2/a")
    begun = [("run/a", first), ("run/a", second), ("run/b/c", third)]
    listed = [
        (key, begin)
        for key, begin in begun
        for u in store.list_uploads("run")
        if u.key == key and begin.endswith(u.upload_id)
    ]
    assert sorted(listed) == sorted(begun)
    assert len(store.list_uploads("")) == 4
    # Those of moto all began in 2010.
    assert all(upload.started_ns > 1.28e18 for upload in store.list_uploads(""))
    store.abort_upload("run/a", first)
    store.abort_upload("run/a", first)
    part = store.upload_part("run/a", second, 1, b"data")
    store.complete_upload("run/a", second, [part])
    (left,) = store.list_uploads("run")
    assert third.endswith(left.upload_id)
    assert list(store.list_parts("run/b/c", left.upload_id)) == []
    store.abort_upload("run2/a", other)
    assert list(store.list_uploads("run2")) == []


# moto answers a part of an upload that is missing with an error of its own.
@pytest.mark.parametrize("store", ["memory", "s3"], indirect=True)
def test_an_upload_that_ended_is_missing(store: Store) -> None:
    upload = store.begin_upload("key")
    part = store.upload_part("key", upload, 1, b"data")
    store.complete_upload("key", upload, [part])
    other = store.begin_upload("other")
    store.upload_part("other", other, 1, b"data")
    store.abort_upload("other", other)
    for key, upload_id in (("key", upload), ("other", other)):
        with pytest.raises(ObjectMissingError):
            store.list_parts(key, upload_id)
        with pytest.raises(ObjectMissingError):
            store.upload_part(key, upload_id, 1, b"more")
    with pytest.raises(ObjectMissingError):
        store.complete_upload("other", other, [part])
    assert bytes(store.read("key", 0, 4)) == b"data"
    assert store.head("other") is None


@every_store
def test_an_upload_is_completed_only_where_there_is_nothing(store: Store) -> None:
    uploads = [store.begin_upload("key") for _ in range(2)]
    parts = [
        store.upload_part("key", u, 1, data) for u, data in zip(uploads, (b"1", b"2"), strict=True)
    ]
    store.complete_upload("key", uploads[0], [parts[0]], create=True)
    with pytest.raises(ConditionError):
        store.complete_upload("key", uploads[1], [parts[1]], create=True)
    assert bytes(store.read("key", 0, 1)) == b"1"
    if store.url.startswith("az:"):  # the blocks of other uploads end with a commit
        return
    store.complete_upload("key", uploads[1], [parts[1]])
    assert bytes(store.read("key", 0, 1)) == b"2"


@every_store
def test_an_object_is_known_by_the_upload_that_it_was(store: Store) -> None:
    """By this a completion whose reply was lost is told from an object that another wrote."""
    path = StorePath(f"{store.url}/key")
    first = store.begin_upload("key")
    parts = [store.upload_part("key", first, 1, b"data")]
    info = store.complete_upload("key", first, parts, create=True)
    assert store.is_made_of(info, first)
    assert complete_once(path, first, parts).version == info.version
    second = store.begin_upload("key")
    same = [store.upload_part("key", second, 1, b"same")]
    assert not store.is_made_of(info, second)
    with pytest.raises(DestinationError, match="another program"):
        complete_once(path, second, same)
    other = store.put("key", b"more")
    assert not store.is_made_of(other, first)
    with pytest.raises(DestinationError, match="another program"):
        complete_once(path, second, same)
    assert bytes(store.read("key", 0, 4)) == b"more"


@s3_parts
def test_only_what_was_uploaded_is_completed(store: Store) -> None:
    upload = store.begin_upload("key")
    part = store.upload_part("key", upload, 1, b"data")
    wrong = UploadedPart(number=1, size=4, tag='"' + "0" * 32 + '"')
    missing = UploadedPart(number=2, size=4, tag=part.tag)
    for parts in ([wrong], [part, missing]):
        with pytest.raises(StorageError):
            store.complete_upload("key", upload, parts)
        assert store.head("key") is None
    small = [part, store.upload_part("key", upload, 2, b"data")]
    with pytest.raises(StorageError):
        store.complete_upload("key", upload, small)
    assert store.head("key") is None


@s3_parts
def test_ranges_are_copied_by_the_store(store: Store) -> None:
    assert store.can_copy
    source = store.put("source", PART + DATA)
    upload = store.begin_upload("run/key")
    parts = [
        store.copy_part("run/key", upload, 1, source, 100, MIN_PART_BYTES),
        store.copy_part("run/key", upload, 2, source, 2, MIN_PART_BYTES),
        store.copy_part("run/key", upload, 3, source, source.size - 1, 1),
    ]
    assert [part.size for part in parts] == [MIN_PART_BYTES, MIN_PART_BYTES, 1]
    assert list(store.list_parts("run/key", upload)) == parts
    info = store.complete_upload("run/key", upload, parts)
    data = PART + DATA
    expected = data[100 : 100 + MIN_PART_BYTES] + data[2 : 2 + MIN_PART_BYTES] + data[-1:]
    assert bytes(store.read("run/key", 0, info.size)) == expected


# moto copies a part whatever its condition is.
@pytest.mark.parametrize("store", ["memory", "s3"], indirect=True)
def test_a_source_that_changed_is_not_copied(store: Store) -> None:
    first = store.put("source", DATA)
    store.put("source", DATA[::-1])
    upload = store.begin_upload("key")
    with pytest.raises(ConditionError):
        store.copy_part("key", upload, 1, first, 0, 100)
    store.delete(["source"])
    with pytest.raises((ConditionError, ObjectMissingError)):
        store.copy_part("key", upload, 1, first, 0, 100)
    assert list(store.list_parts("key", upload)) == []


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory", "s3"], indirect=True)
def test_more_than_a_page_of_parts_and_uploads_is_listed(store: Store) -> None:
    upload = store.begin_upload("key")
    with_threads(lambda n: store.upload_part("key", upload, n, b"%d" % n), range(1, 1051))
    parts = store.list_parts("key", upload)
    assert [(p.number, p.size) for p in parts] == [(n, len(str(n))) for n in range(1, 1051)]
    with_threads(lambda n: store.begin_upload(f"many/{n}"), range(1050))
    assert len(store.list_uploads("many")) == 1050
