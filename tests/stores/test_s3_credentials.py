"""S3 is found, and entered, as the AWS CLI does it on this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megtool.errors import StorageError
from megtool.storage.stores import s3_client
from megtool.storage.stores.s3 import S3Store
from tests.support.stores.s3_bucket import S3Bucket
from tests.support.stores.s3_servers import S3Server

pytest.importorskip("boto3", reason="boto3 is not installed")

NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL")


def write_profile(folder: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a profile alone to lead to a server."""
    for name in NAMES:
        monkeypatch.delenv(name)
    (folder / "config").write_text(
        f"[profile training]\nregion = eu-west-9\nendpoint_url = {server.endpoint}\n"
    )
    (folder / "credentials").write_text(
        f"[training]\naws_access_key_id = {server.access_key}\n"
        f"aws_secret_access_key = {server.secret_key}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "training")


def test_a_profile_holds_all_that_is_needed(
    s3_bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(tmp_path, s3_bucket.server, monkeypatch)
    store = S3Store(s3_bucket.url())
    info = store.put("key", b"data")
    assert bytes(store.read("key", 1, 2, version=info.version)) == b"at"


def test_a_process_gives_credentials(
    s3_bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(tmp_path, s3_bucket.server, monkeypatch)
    (tmp_path / "credentials").rename(tmp_path / "secret")
    program = tmp_path / "give"
    program.write_text(
        "#!/bin/sh\n"
        f'echo \'{{"Version": 1, "AccessKeyId": "{s3_bucket.server.access_key}", '
        f'"SecretAccessKey": "{s3_bucket.server.secret_key}"}}\'\n'
    )
    program.chmod(0o755)
    with (tmp_path / "config").open("a") as file:
        file.write(f"credential_process = {program}\n")
    store = S3Store(s3_bucket.url())
    store.put("key", b"data")
    assert bytes(store.read("key", 0, 4)) == b"data"
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(StorageError) as caught:
        S3Store(s3_bucket.url())
    assert caught.value.id == "no-credentials"


def test_an_unknown_profile_is_told(s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StorageError, match="nobody") as caught:
        S3Store(s3_bucket.url())
    assert caught.value.id == "no-credentials"


def test_a_machine_without_credentials_is_told(
    s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES[:2]:
        monkeypatch.delenv(name)
    with pytest.raises(StorageError, match="no credentials") as caught:
        S3Store(s3_bucket.url())
    assert caught.value.id == "no-credentials"
    assert "AWS_SKIP_SIGNATURE" in str(caught.value.hint)


@pytest.fixture
def silent_metadata() -> Iterator[str]:
    """An address that takes connections and says nothing, like a network without metadata."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_metadata_that_say_nothing_are_asked_once(
    s3_bucket: S3Bucket, silent_metadata: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*NAMES[:2], "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", silent_metadata)
    ended = threading.Event()

    def connect() -> None:
        with pytest.raises(StorageError, match="role of the machine"):
            S3Store(s3_bucket.url())
        ended.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    assert ended.wait(60)


def test_a_public_bucket_needs_no_credentials(
    moto_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto_bucket.client.put_object(
        Bucket=moto_bucket.name, Key="key", Body=b"data", ACL="public-read"
    )
    for name in NAMES[:2]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert bytes(S3Store(moto_bucket.url()).read("key", 0, 4)) == b"data"


@pytest.mark.parametrize(
    ("endpoint", "style", "bucket", "expected"),
    [
        (
            "https://s3.eu-west-9.amazonaws.com",
            None,
            "bkt",
            (True, "bkt.s3.eu-west-9.amazonaws.com"),
        ),
        ("https://s3.eu-west-9.amazonaws.com", None, "b.1", (False, "s3.eu-west-9.amazonaws.com")),
        ("https://s3.amazonaws.com", None, "bkt", (True, "bkt.s3.eu-west-9.amazonaws.com")),
        ("https://s3.amazonaws.com", "path", "bkt", (False, "s3.eu-west-9.amazonaws.com")),
        ("https://minio.example", None, "bkt", (False, "minio.example")),
        ("https://oss.example", "virtual", "bkt", (True, "bkt.oss.example")),
    ],
)
def test_both_clients_go_to_one_place(
    endpoint: str, style: str | None, bucket: str, expected: tuple[bool, str]
) -> None:
    """boto3 and obstore are told where to go in different ways."""
    import boto3
    from botocore.config import Config

    client = boto3.Session().client(
        "s3",
        region_name="eu-west-9",
        endpoint_url=endpoint,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=Config(s3={"addressing_style": style} if style else {}),
    )
    options = s3_client._obstore_options(client, bucket, "eu-west-9", 3)
    assert (options["virtual_hosted_style_request"], options["endpoint"][8:]) == expected
    if "amazonaws" not in endpoint:
        url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "key"})
        here = options["endpoint"] + ("" if expected[0] else f"/{bucket}")
        assert url.startswith(f"{here}/key?")
