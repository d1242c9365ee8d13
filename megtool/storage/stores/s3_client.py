"""Clients of one bucket of S3, set up as the AWS CLI would set them up on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megtool.errors import StorageError
from megtool.storage.stores.protocol import SEND_TIMEOUT
from megtool.storage.stores.reply_limits import (
    MAX_BODY_BYTES,
    MAX_ERROR_BYTES,
    OversizeReplyError,
    paced_pools,
    read_body,
)
from megtool.storage.stores.retries import ATTEMPTS, CONNECTIONS
from megtool.storage.stores.s3_errors import client_error, no_credentials
from megtool.storage.stores.schemes import missing_package

_CREDENTIALS_TTL = timedelta(minutes=5)
"""botocore renews credentials 10 minutes before they expire, at the latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Clients:
    """boto3's clients with and without retries, and obstore's store, of one bucket.

    Without `needs_checksum`, TLS covers what is sent. With `has_exposed_token`, obstore must not
    read: it follows redirects to other hosts, with the token of the session in a header.
    """

    retrying: Any
    single: Any
    objects: Any
    attempts: int
    needs_checksum: bool
    has_exposed_token: bool


def open_s3(bucket: str, url: str) -> S3Clients:
    """The clients of a bucket.

    Raises:
        MissingPackageError: boto3 or obstore is not installed.
        StorageError: there are no credentials, or the settings are no use.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
        from obstore.store import S3Store
    except ImportError as e:
        raise missing_package(str(e.name), url) from e
    try:
        session = boto3.Session(
            botocore_session=_make_session(), region_name=os.environ.get("AWS_REGION")
        )
        is_anonymous = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes")
        credentials = None if is_anonymous else session.get_credentials()
        if credentials is not None:
            credentials.get_frozen_credentials()  # a failure to renew them is told here
        elif not is_anonymous:
            raise no_credentials(url)
        attempts = _attempts(session)
        clients = [
            session.client("s3", config=Config(**_settings(session, number, is_anonymous)))
            for number in (attempts, 1)
        ]
        region = _region(session, clients[0], bucket)
        if region != clients[0].meta.region_name:
            clients = [
                session.client(
                    "s3",
                    region_name=region,
                    config=Config(**_settings(session, number, is_anonymous)),
                )
                for number in (attempts, 1)
            ]
    except BotoCoreError as e:
        raise client_error(e, url) from e
    except ValueError as e:  # botocore: an endpoint that is no URL
        raise StorageError(
            f"a setting of S3 is no use: {e}",
            file=url,
            hint="AWS_ENDPOINT_URL is a whole URL: https://HOST",
        ) from e
    options = _obstore_options(clients[0], bucket, region, attempts)
    if credentials is None:
        options["skip_signature"] = True
    else:
        options["credential_provider"] = _provider(credentials)
    endpoint = clients[0].meta.endpoint_url
    for client in clients:
        _limit_replies(client)
    return S3Clients(
        retrying=clients[0],
        single=clients[1],
        objects=S3Store(**options),
        attempts=attempts,
        needs_checksum=not endpoint.startswith("https://") and not _is_amazon(endpoint),
        has_exposed_token=credentials is not None
        and bool(credentials.get_frozen_credentials().token)
        and not _is_amazon(endpoint),
    )


@cache
def _make_oversize_error() -> Any:
    """Return the class of an error of botocore that its retries do not take for a lost reply."""
    from botocore.exceptions import BotoCoreError

    return type("OversizeReply", (BotoCoreError,), {"fmt": "its reply is not read: {reason}"})


def _limit_replies(client: Any) -> None:
    """Bound what a client of boto3 reads of a reply, which it does before it looks at it."""
    from botocore.exceptions import HTTPClientError
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.exceptions import HTTPError

    session = client._endpoint.http_session
    manager = getattr(session, "_manager", None)
    if manager is not None:
        known = getattr(manager, "pool_classes_by_scheme", {})
        manager.pool_classes_by_scheme = paced_pools(
            known.get("http", HTTPConnectionPool), known.get("https", HTTPSConnectionPool)
        )
    send = session.send

    def send_limited(request: Any) -> Any:
        is_stream = request.stream_output
        request.stream_output = True
        reply = send(request)
        if not is_stream or reply.status_code >= 300:
            limit = MAX_BODY_BYTES if reply.status_code < 300 else MAX_ERROR_BYTES
            try:
                reply._content = read_body(
                    reply.raw, reply.headers.get("Content-Encoding", ""), limit
                )
            except OversizeReplyError as e:
                reply.raw.close()
                raise _make_oversize_error()(reason=str(e)) from e
            except (HTTPError, OSError) as e:
                raise HTTPClientError(error=e) from e
        return reply

    session.send = send_limited


def _make_session() -> Any:
    """Return a session of botocore that shares its descriptions of services with the others.

    They are half a megabyte of JSON, which takes three quarters of the time to open a store.
    """
    from botocore.session import get_session

    session = get_session()
    loader = _service_loader(session.get_config_variable("data_path"))
    session.register_component("data_loader", loader)
    return session


@cache
def _service_loader(data_path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _attempts(session: Any) -> int:
    number = session._session.get_config_variable("max_attempts")
    return max(1, int(number)) if number else ATTEMPTS


def _settings(session: Any, attempts: int, is_anonymous: bool) -> dict[str, Any]:
    from botocore import UNSIGNED

    # A digest of what is sent takes longer than to send it: TLS or a CRC-32C protects it.
    s3: dict[str, Any] = {"payload_signing_enabled": False}
    if os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in ("1", "true"):
        s3["addressing_style"] = "virtual"
    out: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": attempts},
        "connect_timeout": SEND_TIMEOUT,
        "read_timeout": 120,
        "max_pool_connections": CONNECTIONS,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "tcp_keepalive": True,
        "s3": s3,
    }
    if is_anonymous:
        out["signature_version"] = UNSIGNED
    return out


def _is_amazon(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))


def _region(session: Any, client: Any, bucket: str) -> str:
    """The region to sign for: that of the bucket, which Amazon tells, or the one that is set."""
    region: str = client.meta.region_name or "us-east-1"
    if region == "aws-global":
        region = "us-east-1"
    if not _is_amazon(client.meta.endpoint_url) or "--x-s3" in bucket:
        return region
    from botocore.exceptions import ClientError

    try:
        headers = client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
    except ClientError as e:
        headers = e.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region") or region)


def _obstore_options(client: Any, bucket: str, region: str, attempts: int) -> dict[str, Any]:
    """Settings of obstore that lead to the same place as those of a client of boto3."""
    endpoint = client.meta.endpoint_url
    style = (client.meta.config.s3 or {}).get("addressing_style")
    options: dict[str, Any] = {
        "bucket": bucket,
        "region": region,
        "virtual_hosted_style_request": False,
        "client_options": _client_options(endpoint),
        "retry_config": {
            "max_retries": attempts - 1,
            "retry_timeout": timedelta(minutes=5),
            "backoff": {"init_backoff": timedelta(milliseconds=200)},
        },
    }
    if endpoint.startswith("https://"):
        options["unsigned_payload"] = True
    if _is_amazon(endpoint):
        # A bucket with dots in its name has no certificate of its own.
        options["virtual_hosted_style_request"] = style != "path" and "." not in bucket
        parts = urlsplit(endpoint)
        host = parts.netloc if region in parts.netloc else f"s3.{region}.amazonaws.com"
        is_virtual = options["virtual_hosted_style_request"]
        options["endpoint"] = f"{parts.scheme}://{bucket + '.' if is_virtual else ''}{host}"
    elif style == "virtual":
        parts = urlsplit(endpoint)
        options["virtual_hosted_style_request"] = True
        options["endpoint"] = f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path}"
    else:
        options["endpoint"] = endpoint.rstrip("/")
    return options


def _client_options(endpoint: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": "10s",
        "read_timeout": "60s",
        "timeout": "600s",
        "pool_max_idle_per_host": str(CONNECTIONS),
    }
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        if (bundle := os.environ.get(name)) and Path(bundle).is_file():
            options["root_certificate"] = Path(bundle).read_bytes()
            break
    return options


def _provider(credentials: Any) -> Callable[[], Mapping[str, Any]]:
    """What gives obstore the credentials of boto3: of profiles, sign-on, roles and so on."""
    lock = threading.Lock()

    def provide() -> Mapping[str, Any]:
        with lock:
            frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_TTL,
        }

    return provide
