"""Stores of other packages, where they are installed: `msc://`, and what fsspec knows."""

from __future__ import annotations

import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime
from textwrap import shorten
from typing import Any, NoReturn, TypeVar

from megtool.errors import MissingPackageError, StorageError, UsageError
from megtool.storage.stores.protocol import (
    ConditionError,
    Listing,
    ObjectInfo,
    ObjectMissingError,
    by_key,
    truncated,
)
from megtool.storage.stores.read_only import ReadOnlyStore
from megtool.storage.stores.schemes import FSSPEC_PREFIX, missing_package

T = TypeVar("T")

_PACKAGE_ERRORS: tuple[type[Exception], ...] = (Exception,)
"""What these packages, and those behind them, raise: anything."""

_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_VERSIONS = ("ETag", "etag", "e_tag", "md5Hash", "generation", "version_id", "checksum")


class _PackageStore(ReadOnlyStore, ABC):
    """A store behind a package, which does not tell a missing bucket from an empty one."""

    write_hint = f"this package writes no objects in parts: {ReadOnlyStore.write_hint}"
    package = ""

    def _call(self, key: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call the package, whose errors are of any kind, and become megtool's."""
        try:
            return call(*arguments, **named)
        except (FileNotFoundError, NotADirectoryError, KeyError) as e:
            raise ObjectMissingError("there is no such object", file=self._place(key)) from e
        except PermissionError as e:
            raise StorageError(
                f"the store denies access: {_first_line(e)}",
                file=self._place(key),
                hint=f"{self.package} takes the credentials: see its documentation",
                error_id="permission-denied",
            ) from e
        except _PACKAGE_ERRORS as e:
            self._raise(e, key)

    def _raise(self, error: Exception, key: str) -> NoReturn:
        if isinstance(error, socket.gaierror):
            raise StorageError(
                f"the store cannot be reached: {self.package} did not find the host",
                file=self._place(key),
                hint="check the name of the host, and the network",
            ) from error
        raise StorageError(
            f"{self.package} failed ({type(error).__name__})",
            file=self._place(key),
            hint="check the settings that the package reads, and its own logs",
        ) from error

    def _whole(self, key: str, data: bytes, offset: int, num_bytes: int) -> memoryview:
        if len(data) != num_bytes:
            raise truncated(self._place(key), offset + len(data), offset + num_bytes)
        return memoryview(data)

    def _check(self, key: str, version: str) -> None:
        """Raise if the object has another version: these packages read without conditions."""
        info = self.head(key) if version else None
        if info is not None and info.version != version:
            raise ConditionError("the object has another version", file=self._place(key))

    @abstractmethod
    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""


class FsspecStore(_PackageStore):
    """See `Store`; `url` is `fsspec+PROTOCOL://BUCKET`, or without `fsspec+` if only fsspec has it.

    Options and credentials come from fsspec's configuration files and variables.
    """

    package = "fsspec"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        plain = url.removeprefix(FSSPEC_PREFIX)
        protocol = plain.partition("://")[0]
        try:
            import fsspec
        except ImportError as e:
            raise missing_package("fsspec", url) from e
        try:
            self._fs, root = fsspec.core.url_to_fs(plain)
        except ImportError as e:
            raise MissingPackageError(
                f"fsspec needs another package for {protocol}://: {_first_line(e)}",
                file=url,
                hint=find_install_command(e),
            ) from e
        except ValueError as e:
            raise UsageError(
                f"fsspec does not know {protocol}://", file=url, hint="see fsspec's documentation"
            ) from e
        except _PACKAGE_ERRORS as e:
            self._raise(e, "")
        self._root = root.rstrip("/")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root or "/"

    def _info(self, item: Any) -> ObjectInfo:
        name = str(item["name"]).rstrip("/")
        key = name.removeprefix(self._root).lstrip("/")
        modified_ns = 0
        for field in _MODIFIED:
            value = item.get(field)
            if isinstance(value, datetime):
                modified_ns = round(value.timestamp() * 10**9)
            elif isinstance(value, int | float):
                modified_ns = round(value * 10**9)
            if modified_ns:
                break
        tag = next((str(item[f]) for f in _VERSIONS if item.get(f)), "")
        size = int(item.get("size") or 0)
        return ObjectInfo(
            key=key,
            size=size,
            version=tag or (f"{modified_ns}-{size}" if modified_ns else ""),
            modified_ns=modified_ns,
        )

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        try:
            item = self._call(key, self._fs.info, self._path(key))
        except ObjectMissingError:
            return None
        return self._info(item) if item["type"] == "file" else None

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`."""
        path = self._path(prefix)
        try:
            if recursive:
                items = self._call(prefix, self._fs.find, path, detail=True).values()
            else:
                self._fs.invalidate_cache(path)
                items = self._call(prefix, self._fs.ls, path, detail=True)
        except ObjectMissingError:
            return Listing(objects=())
        infos = [(item["type"], self._info(item)) for item in items]
        objects = (i for kind, i in infos if kind == "file" and i.key != prefix)
        return Listing(
            objects=tuple(sorted(objects, key=by_key)),
            prefixes=tuple(i.key for kind, i in infos if kind == "directory" and i.key != prefix),
        )

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        if num_bytes == 0:
            return memoryview(b"")
        data = self._call(key, self._fs.cat_file, self._path(key), offset, offset + num_bytes)
        if len(data) != num_bytes:
            self._check(key, version)
        return self._whole(key, data, offset, num_bytes)


class MscStore(_PackageStore):
    """See `Store`; `url` is `msc://PROFILE`, of NVIDIA's multi-storage-client and its settings."""

    package = "multi-storage-client"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        try:
            import multistorageclient
        except ImportError as e:
            raise missing_package("multi-storage-client", url) from e
        try:
            self._client, _ = multistorageclient.resolve_storage_client(f"{url}/")
        except ValueError as e:
            raise UsageError(
                f"multi-storage-client has no such profile: {_first_line(e)}",
                file=url,
                hint="MSC_CONFIG names the file of profiles",
            ) from e
        except _PACKAGE_ERRORS as e:
            self._raise(e, "")

    def _info(self, item: Any) -> ObjectInfo:
        modified_ns = round(item.last_modified.timestamp() * 10**9)
        size = int(item.content_length)
        return ObjectInfo(
            key=item.key.strip("/"),
            size=size,
            version=item.etag or f"{modified_ns}-{size}",
            modified_ns=modified_ns,
        )

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        try:
            item = self._call(key, self._client.info, key)
        except ObjectMissingError:
            return None
        return self._info(item) if item.type == "file" else None

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`."""
        start = f"{prefix}/" if prefix else ""

        def collect() -> Sequence[Any]:
            return list(self._client.list(path=start, include_directories=not recursive))

        try:
            items = self._call(prefix, collect)
        except ObjectMissingError:
            return Listing(objects=())
        infos = [(item.type, self._info(item)) for item in items]
        return Listing(
            objects=tuple(sorted((i for kind, i in infos if kind == "file"), key=by_key)),
            prefixes=tuple(i.key for kind, i in infos if kind == "directory"),
        )

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        from multistorageclient.types import Range

        if num_bytes == 0:
            return memoryview(b"")
        data = self._call(
            key, self._client.read, key, byte_range=Range(offset=offset, size=num_bytes)
        )
        if len(data) != num_bytes:
            self._check(key, version)
        return self._whole(key, data, offset, num_bytes)


def knows_fsspec(scheme: str) -> bool:
    """Whether fsspec is installed and knows a protocol that megtool does not."""
    try:
        from fsspec.registry import known_implementations, registry
    except ImportError:
        return False
    return scheme in known_implementations or scheme in registry


def find_install_command(error: ImportError) -> str:
    """Return what installs the package that an error of fsspec names, or that Python missed."""
    text = str(error)
    quoted = re.findall(r'"([\w.\[\]-]+)"', text)
    if " or " in text:
        quoted = quoted[:1]
    named = re.search(r"\binstall (?:the )?'?([\w.\[\]-]+)", text, re.IGNORECASE)
    missed = getattr(error.__cause__, "name", None) or error.name
    names = quoted or ([named[1]] if named else [missed.partition(".")[0]] if missed else [])
    if not names:
        return "see fsspec's documentation"
    return "pip install " + " ".join(f"'{n}'" if "[" in n else n for n in names)


def _first_line(error: Exception) -> str:
    return shorten(str(error).partition("\n")[0], 300, placeholder=" …")
