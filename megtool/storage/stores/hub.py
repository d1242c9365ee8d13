"""Repositories of models on the Hugging Face Hub, or on a server that speaks like it."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from megtool.errors import StorageError, UsageError
from megtool.storage.stores.http_client import HttpClient, HttpReply, error_of
from megtool.storage.stores.protocol import (
    BucketMissingError,
    ConditionError,
    Listing,
    ObjectInfo,
    ObjectMissingError,
    by_key,
)
from megtool.storage.stores.read_only import ReadOnlyStore
from megtool.storage.stores.reply_limits import ListingLimit, odd_reply, to_size, to_text
from megtool.storage.stores.schemes import missing_package

T = TypeVar("T")

_ADDRESS_SECONDS = 300
"""How long the address in a content delivery network to which the Hub led is used again."""

_TOKEN_HINT = "`hf auth login`, or HF_TOKEN with a token that may read the repository"


class HubStore(ReadOnlyStore):
    """See `Store`; `url` is `hf://ORG/NAME` or `hf://ORG/NAME@REVISION`.

    The revision is resolved to a commit once, so files cannot change while they are read. Tokens,
    the endpoint (HF_ENDPOINT) and offline mode are those of `huggingface_hub`.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            from huggingface_hub import HfApi
            from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
        except ImportError as e:
            raise missing_package("huggingface_hub", url) from e
        name, _, revision = url.removeprefix("hf://").partition("@")
        if name.partition("/")[0] in ("datasets", "spaces", "kernels", "buckets"):
            raise UsageError(
                "only repositories of models are read", file=url, hint="hf://ORG/NAME[@REVISION]"
            )
        self._repository = name
        self._revision = unquote(revision) or None
        self._api: Any = HfApi(library_name="megtool")
        self._headers: Callable[[], Mapping[str, str]] = lambda: {
            **build_hf_headers(library_name="megtool"),
            "Accept-Encoding": "identity",
        }
        self._client = HttpClient(url, authorize=self._headers)
        self._direct = HttpClient(url, authorize=lambda: {})
        self._commit = ""
        self._lock = threading.Lock()
        self._infos: dict[str, ObjectInfo] = {}
        self._addresses: dict[str, tuple[str, float]] = {}

    # ---- errors

    def _call(self, key: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call the Hub's client; its errors become megtool's."""
        import huggingface_hub.errors as x

        try:
            return call(*arguments, **named)
        except (x.HfHubHTTPError, x.OfflineModeIsEnabled, x.HFValidationError) as e:
            self._raise(e, key)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
            raise odd_reply(self._place(key), str(e)[:200] or type(e).__name__) from None
        except _network_errors() as e:
            raise StorageError(
                f"the Hub cannot be reached ({type(e).__name__})",
                file=self._place(key),
                hint="check the network, HTTPS_PROXY and HF_ENDPOINT",
            ) from None

    def _raise(self, error: Exception, key: str) -> NoReturn:
        import huggingface_hub.errors as x

        place = self._place(key)
        if isinstance(error, x.OfflineModeIsEnabled):
            raise StorageError(
                "the Hub is not asked: HF_HUB_OFFLINE is set", file=place, hint="unset it"
            ) from None
        if isinstance(error, x.HFValidationError):
            raise UsageError(
                "this is not a name of a repository", file=place, hint="hf://ORG/NAME[@REVISION]"
            ) from None
        response = getattr(error, "response", None)
        if response is None:
            raise StorageError("the Hub failed", file=place) from None
        reply = HttpReply(status=response.status_code, headers=response.headers, body=b"", url="")
        raise self._error_of(reply, place) from None

    def _error_of(self, reply: HttpReply, place: str, stop: int = 0) -> Exception:
        code = reply.headers.get("X-Error-Code", "")
        if code == "GatedRepo":
            return StorageError(
                "the repository is gated, and this token has no access",
                file=place,
                hint=f"accept its terms on its page, then {_TOKEN_HINT}",
                error_id="permission-denied",
            )
        if code == "RevisionNotFound":
            return BucketMissingError(
                f"the repository has no revision {self._revision or 'main'!r}", file=self.url
            )
        if code == "RepoNotFound" or reply.status == 401:
            return BucketMissingError(
                "there is no such repository, or this token may not see it",
                file=self.url,
                hint=_TOKEN_HINT,
            )
        if reply.status == 403:
            return StorageError(
                "the Hub denies access with this token",
                file=place,
                hint=_TOKEN_HINT,
                error_id="permission-denied",
            )
        return error_of(reply, place, stop)

    # ---- the repository

    @property
    def commit(self) -> str:
        """The commit of the revision, resolved at the first use.

        Raises:
            StorageError: there is no such repository or revision, or no access.
        """
        with self._lock:
            if not self._commit:
                info = self._call(
                    "", self._api.repo_info, self._repository, revision=self._revision
                )
                if re.fullmatch(r"[0-9a-fA-F]{6,64}", str(info.sha)) is None:
                    raise odd_reply(self.url, f"the commit is {str(info.sha)[:40]!r}")
                self._commit = str(info.sha)
            return self._commit

    def _to_info(self, entry: Any) -> ObjectInfo:
        version = entry.lfs.sha256 if getattr(entry, "lfs", None) else entry.blob_id
        info = ObjectInfo(
            key=to_text(entry.path, "path", self.url),
            size=to_size(entry.size, self.url),
            version=f'"{to_text(version, "digest", self.url, max_length=256)}"',
        )
        self._infos[info.key] = info
        return info

    # ---- reading

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        known = self._infos.get(key)
        if known is not None:
            return known
        entries = self._call(
            key, self._api.get_paths_info, self._repository, [key], revision=self.commit
        )
        files = [e for e in entries if e.path == key and hasattr(e, "size")]
        return self._to_info(files[0]) if files else None

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`."""
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        limit = ListingLimit(self._place(prefix))

        def collect() -> None:
            for entry in self._api.list_repo_tree(
                self._repository, prefix or None, recursive=recursive, revision=self.commit
            ):
                limit.add(1)
                if hasattr(entry, "size"):
                    objects.append(self._to_info(entry))
                elif not recursive:
                    prefixes.append(entry.path)
                if most is not None and len(objects) + len(prefixes) >= most:
                    return

        try:
            self._call(prefix, collect)
        except BucketMissingError:
            raise
        except ObjectMissingError:
            if not prefix:
                raise
        return Listing(objects=tuple(sorted(objects, key=by_key)), prefixes=tuple(prefixes))

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        known = self._infos.get(key)
        if version and known is not None and known.version != version:
            raise ConditionError("the file has another version", file=self._place(key))
        if num_bytes == 0:
            return memoryview(b"")
        place = self._place(key)
        direct = self._address(key)
        if direct is not None:
            try:
                return self._direct.read_range(
                    direct, place, offset, num_bytes, check=_check_direct
                )
            except _ExpiredError:
                with self._lock:
                    self._addresses.pop(key, None)
        return self._client.read_range(
            self._resolve_url(key),
            place,
            offset,
            num_bytes,
            check=lambda reply: self._check(key, reply, offset + num_bytes),
        )

    def _resolve_url(self, key: str) -> str:
        from huggingface_hub import hf_hub_url

        return str(
            hf_hub_url(
                self._repository, key, revision=self.commit, endpoint=str(self._api.endpoint)
            )
        )

    def _address(self, key: str) -> str | None:
        with self._lock:
            address, until = self._addresses.get(key, ("", 0.0))
        return address if address and time.monotonic() < until else None

    def _check(self, key: str, reply: HttpReply, stop: int) -> None:
        """Note where the Hub led, and raise what it says in headers of its own."""
        if reply.status in (200, 206):
            if urlsplit(reply.url).netloc != urlsplit(str(self._api.endpoint)).netloc:
                with self._lock:
                    until = time.monotonic() + _ADDRESS_SECONDS
                    self._addresses[key] = reply.url, until
        elif reply.status in (401, 403, 404):
            raise self._error_of(reply, self._place(key), stop)


def _network_errors() -> tuple[type[Exception], ...]:
    """Those of the HTTP library beneath, which differs between versions of huggingface_hub."""
    modules = (sys.modules.get(name) for name in ("httpx", "httpx2"))
    others = [module.HTTPError for module in modules if module is not None]
    return (OSError, RuntimeError, *others)


class _ExpiredError(Exception):
    """An address of the content delivery network is no longer valid."""


def _check_direct(reply: HttpReply) -> None:
    if 400 <= reply.status < 500 and reply.status not in (408, 416, 429):
        raise _ExpiredError
