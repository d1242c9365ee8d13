"""Repositories of models on the Hugging Face Hub, or on a server that speaks like it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlencode, urljoin, urlsplit

from megtool.errors import StorageError, UsageError
from megtool.storage.stores.http_client import HttpClient, HttpReply, error_of, origin_of
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

_ADDRESS_SECONDS = 300
"""How long the address in a content delivery network to which the Hub led is used again."""

_MAX_PAGES = 10_000
_FORM = {"Content-Type": "application/x-www-form-urlencoded"}
_TOKEN_HINT = "`hf auth login`, or HF_TOKEN with a token that may read the repository"


class HubStore(ReadOnlyStore):
    """See `Store`; `url` is `hf://ORG/NAME` or `hf://ORG/NAME@REVISION`.

    The revision is resolved to a commit once, so files cannot change while they are read. Tokens,
    the endpoint (HF_ENDPOINT) and offline mode are those of `huggingface_hub`; requests are sent
    by `HttpClient`, because the replies that `HfApi` reads have no limits.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            from huggingface_hub import constants
            from huggingface_hub.errors import HFValidationError
            from huggingface_hub.utils import (  # type: ignore[attr-defined]
                build_hf_headers,
                validate_repo_id,
            )
        except ImportError as e:
            raise missing_package("huggingface_hub", url) from e
        name, _, revision = url.removeprefix("hf://").partition("@")
        if name.partition("/")[0] in ("datasets", "spaces", "kernels", "buckets"):
            raise UsageError(
                "only repositories of models are read", file=url, hint="hf://ORG/NAME[@REVISION]"
            )
        try:
            validate_repo_id(name)
        except HFValidationError:
            raise UsageError(
                "this is not a name of a repository", file=url, hint="hf://ORG/NAME[@REVISION]"
            ) from None
        self._repository = name
        self._revision = unquote(revision) or None
        self._constants: Any = constants
        self._endpoint = str(constants.ENDPOINT).rstrip("/")
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

    def _ask(self, path: str, key: str = "", form: Mapping[str, Any] | None = None) -> HttpReply:
        """Send a request to the API, whose answers are bounded; `form` makes it a POST.

        Raises:
            StorageError: the Hub refuses, cannot be reached, or HF_HUB_OFFLINE is set.
        """
        place = self._place(key)
        if self._constants.HF_HUB_OFFLINE:
            raise StorageError(
                "the Hub is not asked: HF_HUB_OFFLINE is set", file=place, hint="unset it"
            )
        url = urljoin(f"{self._endpoint}/", path)
        if form is None:
            reply = self._client.send("GET", url, place)
        else:
            data = urlencode(form, doseq=True).encode()
            reply = self._client.send("POST", url, place, headers=_FORM, data=data)
        if reply.status != 200:
            raise self._error_of(reply, place)
        return reply

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
                suffix = f"/revision/{quote(self._revision, safe='')}" if self._revision else ""
                reply = self._ask(f"api/models/{self._repository}{suffix}")
                info = reply.json()
                commit = info.get("sha") if isinstance(info, dict) else None
                if re.fullmatch(r"[0-9a-fA-F]{6,64}", str(commit)) is None:
                    raise odd_reply(self.url, f"the commit is {str(commit)[:40]!r}")
                name = str(info.get("id"))
                if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
                    self._repository = name  # after a redirect it has another one
                self._commit = str(commit)
            return self._commit

    def _pages(self, path: str, prefix: str) -> Iterator[list[Mapping[str, Any]]]:
        """The pages of a listing, each of entries of the API."""
        limit = ListingLimit(self._place(prefix))
        for _ in range(_MAX_PAGES):
            reply = self._ask(path, prefix)
            page = reply.json()
            if not isinstance(page, list) or not all(isinstance(e, dict) for e in page):
                raise odd_reply(self._place(prefix), "a page of a listing is no list")
            following = _find_next(reply.headers.get("Link", ""))
            limit.add(len(page), following)
            yield page
            if following is None:
                return
            path = urljoin(reply.url, following)
            if origin_of(path) != origin_of(self._endpoint):
                raise odd_reply(self._place(prefix), "the next page is on another host")
        raise odd_reply(self._place(prefix), "the listing has too many pages")

    def _to_info(self, entry: Mapping[str, Any]) -> ObjectInfo:
        lfs = entry.get("lfs")
        version = lfs.get("oid") if isinstance(lfs, dict) else entry.get("oid")
        info = ObjectInfo(
            key=to_text(entry.get("path"), "path", self.url),
            size=to_size(entry.get("size"), self.url),
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
        commit = self.commit
        form = {"paths": [key], "expand": False}
        reply = self._ask(f"api/models/{self._repository}/paths-info/{commit}", key, form)
        entries = reply.json()
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and entry.get("path") == key:
                return self._to_info(entry) if entry.get("type") == "file" else None
        if entries != []:
            raise odd_reply(self._place(key), "the answer is not about the file")
        return None

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`."""
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        commit = self.commit
        folder = f"/{quote(prefix, safe='')}" if prefix else ""
        path = f"api/models/{self._repository}/tree/{commit}{folder}"
        path += f"?recursive={recursive}&expand=False"

        def collect() -> None:
            for page in self._pages(path, prefix):
                for entry in page:
                    if entry.get("type") == "file":
                        objects.append(self._to_info(entry))
                    elif not recursive:
                        prefixes.append(to_text(entry.get("path"), "path", self.url))
                    if most is not None and len(objects) + len(prefixes) >= most:
                        return

        try:
            collect()
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

        return str(hf_hub_url(self._repository, key, revision=self.commit, endpoint=self._endpoint))

    def _address(self, key: str) -> str | None:
        with self._lock:
            address, until = self._addresses.get(key, ("", 0.0))
        return address if address and time.monotonic() < until else None

    def _check(self, key: str, reply: HttpReply, stop: int) -> None:
        """Note where the Hub led, and raise what it says in headers of its own."""
        if reply.status in (200, 206):
            if urlsplit(reply.url).netloc != urlsplit(self._endpoint).netloc:
                with self._lock:
                    until = time.monotonic() + _ADDRESS_SECONDS
                    self._addresses[key] = reply.url, until
        elif reply.status in (401, 403, 404):
            raise self._error_of(reply, self._place(key), stop)


def _find_next(link: str) -> str | None:
    """Return the address of the next page that the header `Link` names."""
    match = re.search(r'<([^<>]{1,4096})>\s*;\s*rel="?next"?', link[:16384])
    return match[1] if match else None


class _ExpiredError(Exception):
    """An address of the content delivery network is no longer valid."""


def _check_direct(reply: HttpReply) -> None:
    if 400 <= reply.status < 500 and reply.status not in (408, 416, 429):
        raise _ExpiredError
