"""Remotes that answer anything: without end, with other fields, or from elsewhere."""

from __future__ import annotations

import contextlib
import gzip
import resource
import time
from typing import Any, ClassVar

import pytest

from megtool.errors import MegtoolError, StorageError
from megtool.storage.stores import http_client, reply_limits
from megtool.storage.stores.gcs import GcsStore
from megtool.storage.stores.http import HttpStore
from megtool.storage.stores.http_client import HttpClient
from megtool.storage.stores.protocol import ConditionError
from tests.support.stores.loopback import LoopbackHandler, LoopbackService

pytest.importorskip("requests", reason="requests is not installed")


class _Handler(LoopbackHandler):
    def do_GET(self) -> None:
        service: Hostile = self.server.service
        service.requests.append((self.command, self.path, dict(self.headers)))
        answer = service.answer(self)
        if answer is not None:
            self.send(*answer)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.read_body()
        self.do_GET()


class Hostile(LoopbackService):
    """A server whose answers a test writes: `answer` gives a reply, or sends one and gives None."""

    handler = _Handler
    answer: Any

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.requests: list[tuple[str, str, dict[str, str]]] = []


def headers_without_length(handler: LoopbackHandler, status: int, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Connection": "close", **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.close_connection = True


def send_without_end(handler: LoopbackHandler, status: int, block: bytes = b"x" * 65536) -> None:
    headers_without_length(handler, status, Content_Type="text/html")
    try:
        for _ in range(10_000):
            handler.wfile.write(block)
    except OSError:
        return


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@pytest.mark.parametrize("status", [200, 400])
def test_a_body_without_end_is_not_read(status: int) -> None:
    before = peak_mib()
    with Hostile(lambda h: send_without_end(h, status)) as server:
        client = HttpClient(server.endpoint)
        if status == 400:
            assert client.send("GET", f"{server.endpoint}/x", "place").body == b""
        else:
            with pytest.raises(StorageError, match="more than"):
                client.send("GET", f"{server.endpoint}/x", "place")
    assert peak_mib() - before < 200


def test_a_compressed_body_is_bounded_and_a_small_one_is_read() -> None:
    bomb = gzip.compress(bytes(16 << 20)) * 16
    small = gzip.compress(b"[]")

    def answer(handler: LoopbackHandler) -> Any:
        return 200, {"Content-Encoding": "gzip"}, bomb if "bomb" in handler.path else small

    before = peak_mib()
    with Hostile(answer) as server:
        client = HttpClient(server.endpoint)
        assert client.send("GET", f"{server.endpoint}/small", "place").body == b"[]"
        with pytest.raises(StorageError, match="more than"):
            client.send("GET", f"{server.endpoint}/bomb", "place")
    assert peak_mib() - before < 200


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_reply_that_drips_ends(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_limits, "_HEADER_SECONDS", 0.3)
    monkeypatch.setattr(http_client, "_PATIENCE", 0.0)

    def answer(handler: LoopbackHandler) -> None:
        if part == "body":
            headers_without_length(handler, 200)
        else:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        try:
            for n in range(200):
                handler.wfile.write(b"x" if part == "body" else b"X-%d: y\r\n" % n)
                time.sleep(0.05)
        except OSError:
            pass
        handler.close_connection = True

    start = time.monotonic()
    with Hostile(answer) as server, pytest.raises(StorageError, match="cannot be reached"):
        HttpClient(server.endpoint).send("GET", f"{server.endpoint}/x", "place")
    assert time.monotonic() - start < 5


def test_credentials_do_not_follow_a_redirect_to_another_host() -> None:
    secrets = {"Authorization": "Bearer secret", "X-Amz-Security-Token": "secret"}
    with Hostile(lambda _: (200, {}, b"end")) as other:

        def answer(handler: LoopbackHandler) -> Any:
            if handler.path == "/first":
                return 302, {"Location": "/second"}, b""
            return 307, {"Location": f"{other.endpoint}/end"}, b""

        with Hostile(answer) as server:
            client = HttpClient(server.endpoint, authorize=lambda: secrets)
            reply = client.send("GET", f"{server.endpoint}/first", "place")
    assert reply.body == b"end"
    assert all(name in headers for _, _, headers in server.requests for name in secrets)
    assert not any(name in headers for _, _, headers in other.requests for name in secrets)


def test_redirects_in_a_circle_end() -> None:
    with (
        Hostile(lambda h: (302, {"Location": h.path + "x"}, b"")) as server,
        pytest.raises(StorageError),
    ):
        HttpClient(server.endpoint).send("GET", f"{server.endpoint}/", "place")
    assert len(server.requests) <= 12


FIELDS: list[dict[str, str]] = [
    {"Content-Range": "bytes 0-0/" + "9" * 40},
    {"Content-Range": "bytes 0-0/-5"},
    {"Content-Range": "bytes 0-0/*"},
    {"Content-Range": "rubbish"},
    {},
    {"ETag": '"' + "e" * 5000 + '"', "Content-Range": "bytes 0-0/9"},
]


@pytest.mark.parametrize("headers", FIELDS)
def test_odd_headers_are_told(headers: dict[str, str]) -> None:
    def answer(handler: LoopbackHandler) -> Any:
        return (405, {}, b"") if handler.command == "HEAD" else (206, headers, b"x")

    with Hostile(answer) as server, pytest.raises(StorageError, match="is not understood"):
        HttpStore(server.endpoint).head("key")


def test_an_odd_date_is_no_date() -> None:
    with Hostile(lambda _: (200, {"Last-Modified": "Mon, 99 Foo 9999"}, b"x")) as server:
        info = HttpStore(server.endpoint).head("key")
    assert info is not None
    assert (info.size, info.modified_ns) == (1, 0)


def test_a_file_without_version_is_pinned_by_its_size() -> None:
    sizes = [9, 10]

    def answer(handler: LoopbackHandler) -> Any:
        if handler.command == "HEAD":
            return 200, {}, bytes(sizes[0])
        return handler.cut_range(bytes(sizes[1]))

    with Hostile(answer) as server:
        store = HttpStore(server.endpoint)
        info = store.head("key")
        assert info is not None
        with pytest.raises(ConditionError):
            store.read("key", 0, 4, version=info.version)


def test_folders_without_end_are_refused() -> None:
    def answer(handler: LoopbackHandler) -> Any:
        return 200, {"Content-Type": "text/html"}, b"<a href='a/'>a</a> <a href='b/'>b</a>"

    with Hostile(answer) as server, pytest.raises(StorageError, match="folders in each other"):
        HttpStore(server.endpoint).list("m", recursive=True)
    assert len(server.requests) < 100


def test_a_server_that_has_everything_is_refused() -> None:
    with (
        Hostile(lambda _: (200, {"Content-Type": "text/plain"}, b"not found")) as server,
        pytest.raises(StorageError, match="every name"),
    ):
        HttpStore(server.endpoint).list("m")
    assert len(server.requests) < 60


def test_deep_json_is_no_listing() -> None:
    body = b"[" * 100_000 + b"]" * 100_000

    def answer(handler: LoopbackHandler) -> Any:
        if handler.path.endswith("/"):
            return 200, {"Content-Type": "application/json"}, body
        return 404, {}, b""

    with Hostile(answer) as server:
        assert HttpStore(server.endpoint).list("m").objects == ()


class TestGcs:
    """Google's API in JSON."""

    PAGES: ClassVar[dict[str, bytes]] = {
        "no object": b"[]",
        "items of another type": b'{"items": 5}',
        "an item without name": b'{"items": [{"size": "1", "generation": "1"}]}',
        "an item without size": b'{"items": [{"name": "m/a", "generation": "1"}]}',
        "a negative size": b'{"items": [{"name": "m/a", "size": "-1", "generation": "1"}]}',
        "no generation": b'{"items": [{"name": "m/a", "size": "1"}]}',
        "the same page": b'{"items": [], "nextPageToken": "t"}',
        "a token that is none": b'{"items": [], "nextPageToken": 5}',
    }

    @pytest.fixture(params=PAGES, ids=str)
    def page(self, request: pytest.FixtureRequest) -> bytes:
        return self.PAGES[request.param]

    def test_odd_pages(self, page: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        with Hostile(lambda _: (200, {}, page)) as server:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
            with pytest.raises(MegtoolError) as caught:
                GcsStore("gs://bucket").list("m")
        assert caught.value.file == "gs://bucket/m"
        assert len(server.requests) < 5


class TestS3:
    """Listings, and reads with the token of a session."""

    @pytest.fixture
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        pytest.importorskip("boto3", reason="boto3 is not installed")
        pytest.importorskip("obstore", reason="obstore is not installed")
        for name in ("AWS_PROFILE", "AWS_SKIP_SIGNATURE"):
            monkeypatch.delenv(name, raising=False)

        def point(endpoint: str, **more: str) -> None:
            values = {
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_REGION": "us-east-1",
                "AWS_MAX_ATTEMPTS": "2",
                **more,
            }
            for name, value in values.items():
                monkeypatch.setenv(name, value)

        return point

    @pytest.mark.parametrize(
        "fields",
        [
            "<Key>m/a</Key><Size>5</Size>",
            '<Key>m/a</Key><ETag>"1"</ETag>',
            '<Size>5</Size><ETag>"1"</ETag>',
            '<Key>m/a</Key><Size>5x</Size><ETag>"1"</ETag>',
            '<Key>m/a</Key><Size>-5</Size><ETag>"1"</ETag>',
            '<Key>other/a</Key><Size>5</Size><ETag>"1"</ETag>',
        ],
    )
    def test_odd_items(self, environment: Any, fields: str) -> None:
        from megtool.storage.stores.s3 import S3Store

        with Hostile(lambda _: (200, {}, _page(f"<Contents>{fields}</Contents>"))) as server:
            environment(server.endpoint)
            with pytest.raises(StorageError, match="is not understood"):
                S3Store("s3://bucket").list("m")

    @pytest.mark.parametrize("token", ["", "<NextContinuationToken>t</NextContinuationToken>"])
    def test_pages_without_end(self, environment: Any, token: str) -> None:
        from megtool.storage.stores.s3 import S3Store

        page = _page("", f"<IsTruncated>true</IsTruncated>{token}")
        with Hostile(lambda _: (200, {}, page)) as server:
            environment(server.endpoint)
            with pytest.raises(StorageError):
                S3Store("s3://bucket").list("m")
        assert len(server.requests) < 5

    def test_a_listing_without_end_is_not_read(self, environment: Any) -> None:
        from megtool.storage.stores.s3 import S3Store

        before = peak_mib()
        with Hostile(lambda h: send_without_end(h, 200, b"<Contents/>" * 6000)) as server:
            environment(server.endpoint)
            with pytest.raises(StorageError, match="is not read"):
                S3Store("s3://bucket").list("m")
        assert peak_mib() - before < 300

    def test_a_tag_that_changes_in_spite_of_the_condition(self, environment: Any) -> None:
        from megtool.storage.stores.s3 import S3Store

        def answer(handler: LoopbackHandler) -> Any:
            status, headers, body = handler.cut_range(b"0123456789")
            return status, {**headers, "ETag": '"2"', "Last-Modified": _DATE}, body

        with Hostile(answer) as server:
            environment(server.endpoint)
            with pytest.raises(ConditionError):
                S3Store("s3://bucket").read("key", 0, 4, version='"1"')

    def test_the_token_of_a_session_stays_at_its_store(self, environment: Any) -> None:
        from megtool.storage.stores.s3 import S3Store

        with Hostile(lambda h: h.cut_range(b"0123456789")) as other:

            def answer(handler: LoopbackHandler) -> Any:
                if handler.path.startswith("/bucket/moved"):
                    return 307, {"Location": f"{other.endpoint}/end"}, b""
                status, headers, body = handler.cut_range(b"0123456789")
                return status, {**headers, "ETag": '"1"'}, body

            with Hostile(answer) as server:
                environment(server.endpoint, AWS_SESSION_TOKEN="secret")
                store = S3Store("s3://bucket")
                assert bytes(store.read("key", 2, 3, version='"1"')) == b"234"
                with pytest.raises(ConditionError):
                    store.read("key", 2, 3, version='"2"')
                with pytest.raises(StorageError):
                    store.read("moved", 0, 4)
        assert other.requests == []


_DATE = "Mon, 01 Jan 2024 00:00:00 GMT"


def _page(items: str, more: str = "<IsTruncated>false</IsTruncated>") -> bytes:
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    root = "ListBucketResult"
    return f'<?xml version="1.0"?><{root} xmlns="{space}">{more}{items}</{root}>'.encode()


# ---- through the packages of others


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store of Azure at an endpoint."""
    pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed")
    from megtool.storage.stores.azure import AzureStore

    def connect(server: Hostile) -> AzureStore:
        text = f"AccountName=a;AccountKey=YQ==;BlobEndpoint={server.endpoint}/a;"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
        store = AzureStore("az://box")
        store._container._config.retry_policy.total_retries = 0
        return store

    return connect


def test_a_listing_of_azure_is_bounded(azure: Any) -> None:
    bomb = gzip.compress(bytes(16 << 20)) * 16

    def answer(handler: LoopbackHandler) -> Any:
        if "endless" in handler.path:
            return send_without_end(handler, 200)
        return 200, {"Content-Type": "application/xml", "Content-Encoding": "gzip"}, bomb

    before = peak_mib()
    with Hostile(answer) as server:
        for prefix in ("endless", "compressed"):
            with pytest.raises(StorageError):
                azure(server).list(prefix)
    assert peak_mib() - before < 200


@pytest.mark.parametrize("headers", [{"Content-Range": "bytes 0-9/10"}, {}])
def test_a_range_of_azure_is_bounded(azure: Any, headers: dict[str, str]) -> None:
    def answer(handler: LoopbackHandler) -> None:
        handler.send_response(206)
        for name, value in {**headers, "ETag": '"1"', "Connection": "close"}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):
            for _ in range(10_000):
                handler.wfile.write(b"x" * 65536)

    before = peak_mib()
    with Hostile(answer) as server, pytest.raises(StorageError):
        azure(server).read("key", 0, 10)
    assert peak_mib() - before < 100


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store of the Hub at an endpoint."""
    constants = pytest.importorskip(
        "huggingface_hub.constants", reason="huggingface_hub is missing"
    )
    from megtool.storage.stores.hub import HubStore

    def connect(server: Hostile) -> HubStore:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        return HubStore("hf://org/model")

    return connect


def _as_hub(answer: Any) -> Any:
    """A server that knows the commit, and answers anything else by `answer`."""

    def reply(handler: LoopbackHandler) -> Any:
        if "/tree/" in handler.path or "paths-info" in handler.path:
            return answer(handler)
        return 200, {}, b'{"id": "org/model", "sha": "0123456789abcdef"}'

    return reply


HUB_ANSWERS = {
    "without end": lambda h: send_without_end(h, 200),
    "no JSON": lambda _: (200, {}, b"<html>"),
    "no list": lambda _: (200, {}, b'{"a": 1}'),
    "deep": lambda _: (200, {}, b"[" * 500_000),
    "many values": lambda _: (200, {}, b"[" + b"[]," * 9_000_000 + b"[]]"),
    "no objects": lambda _: (200, {}, b"[1, null]"),
    "no size": lambda _: (200, {}, b'[{"type": "file", "path": "a", "oid": "x"}]'),
    "a size of text": lambda _: (
        200, {}, b'[{"type": "file", "path": "a", "oid": "x", "size": "NaN"}]'
    ),
    "the same page": lambda _: (200, {"Link": '</x/tree/y>; rel="next"'}, b"[]"),
    "another host": lambda _: (200, {"Link": '<http://localhost:1/tree>; rel="next"'}, b"[]"),
    "not found": lambda _: (418, {}, b"x" * 100_000),
}  # fmt: skip


@pytest.mark.parametrize("kind", HUB_ANSWERS)
def test_a_listing_of_the_hub_is_bounded(hub: Any, kind: str) -> None:
    before = peak_mib()
    with Hostile(_as_hub(HUB_ANSWERS[kind])) as server:
        with pytest.raises(StorageError) as caught:
            hub(server).list("")
        assert "hf_secret" not in str(caught.value)
        assert len(server.requests) < 5
    assert peak_mib() - before < 200


def test_a_repository_with_a_new_name_is_followed(hub: Any) -> None:
    def answer(handler: LoopbackHandler) -> Any:
        if handler.path.startswith("/api/models/org/model"):
            return 307, {"Location": handler.path.replace("org/model", "new/name")}, b""
        if "/revision/" in handler.path or handler.path.endswith("/name"):
            return 200, {}, b'{"id": "new/name", "sha": "0123456789abcdef"}'
        entry = b'[{"type": "file", "path": "a", "oid": "x", "size": 3}]'
        return 200, {}, entry if "/new/name/" in handler.path else b"[]"

    with Hostile(answer) as server:
        store = hub(server)
        assert store.head("a") is not None
        assert [i.key for i in store.list("").objects] == ["a"]
