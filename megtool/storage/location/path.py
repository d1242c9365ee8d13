"""Locations: local paths and URLs of object stores, both as `Path`."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeGuard, TypeVar

from megtool.errors import UsageError
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.stores.schemes import FSSPEC_PREFIX, SCHEMES, find_scheme

if TYPE_CHECKING:
    from megtool.storage.stores.protocol import Store

T = TypeVar("T")

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL | re.IGNORECASE)
_ONE_SLASH = re.compile(
    rf"({'|'.join(SCHEMES)}|file|{re.escape(FSSPEC_PREFIX)}[a-z0-9.-]+):/(?!/).*",
    re.DOTALL | re.IGNORECASE,
)
_SIGNATURE = re.compile(
    r"\?(.*&)?(x-(amz|goog|ms)-|(sig|signature|awsaccesskeyid|(access_?)?token|(access_?)?key)=)",
    re.DOTALL | re.IGNORECASE,
)
_LOCAL_FSSPEC = f"{FSSPEC_PREFIX}file"


def location(text: str | Path) -> Path:
    """The path that a text names: a `StorePath` for a URL such as `s3://bucket/run`.

    Raises:
        UsageError: it is empty or no text; or the URL names no bucket, has a query or credentials
            in it, is of another host (`file://`), or has lost a slash, which
            `Path("s3://bucket/run")` does.
    """
    if isinstance(text, StorePath):
        return text
    if not isinstance(text, str | Path) or not str(text).strip():
        raise UsageError(
            f"{text!r:.80} names no place",
            hint="a location is a path or a URL, such as s3://BUCKET/RUN",
        )
    if one_slash := _ONE_SLASH.fullmatch(str(text)):
        raise UsageError(
            f"{str(text)!r} has one slash behind the colon, so it names no place in a store",
            hint=f"{one_slash[1].lower()}:// has two; in Python, give a URL as str: Path drops one",
        )
    if isinstance(text, Path):
        return text
    match = _URL.fullmatch(text)
    if match is None:
        return Path(text)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        host, _, path = rest.partition("/")
        if host not in ("", "localhost"):
            raise UsageError(
                f"{text!r} names a file of the host {host!r}",
                hint="file:///PATH is a path on this machine",
            )
        return Path("/" + path.lstrip("/"))
    names = [part for part in rest.split("/") if part]
    row = find_scheme(scheme)
    if len(names) < row.bucket_names or rest.startswith("/"):
        local = "/PATH or file:///PATH, which need no fsspec"
        raise UsageError(
            f"{text!r} names no {row.bucket}", hint=local if scheme == _LOCAL_FSSPEC else row.form
        )
    if "@" in names[0] and not row.has_revisions:
        raise UsageError(
            "a URL must not contain a user name or a password",
            hint="credentials come from the environment or the profile of the store's own tools",
        )
    if _SIGNATURE.search(rest) or ("?" in rest and row.has_queries):
        raise UsageError(
            f"a URL of {scheme}:// must not contain a query ('?'), such as a signature",
            hint="credentials come from where the store's own tools look for them, and for "
            "https:// from ~/.netrc",
        )
    if ".." in names:
        raise UsageError(f"{text!r} contains '..'", hint="name the place itself")
    return StorePath(f"{scheme}://{'/'.join(names)}")


def require_local(path: Path, name: str) -> None:
    """Refuse a location in a store for what is written step by step; `name` is what it is for.

    Raises:
        UsageError: it is in a store.
    """
    if is_remote(path):
        raise UsageError(
            f"{name} cannot be in a store", file=path, hint="name a place on this machine"
        )


def is_remote(path: Path) -> bool:
    """Whether a path is in an object store."""
    return isinstance(path, StorePath)


def choose_by_latency(path: Path, local: T, remote: T) -> T:
    """Return `remote` for what is in a store, where every request is waited for; else `local`."""
    return remote if is_remote(path) else local


def resolve_links(path: Path) -> Path:
    """Return the absolute path without links; a link in a loop stays as it is.

    `Path.resolve` raises a `RuntimeError` for such a link before Python 3.13.
    """
    return path if isinstance(path, StorePath) else Path(os.path.realpath(path))


def make_folder(path: Path) -> None:
    """Create a folder and those above it, if they are missing; a store has none.

    Raises:
        OSError: it cannot be created.
    """
    if not is_remote(path):
        path.mkdir(parents=True, exist_ok=True)


def is_in_store(path: Path, store: Store) -> TypeGuard[StorePath]:
    """Return whether a path is in this store."""
    return isinstance(path, StorePath) and path.bucket_url == store.url


def find_copying_store(path: Path) -> Store | None:
    """Return the store of a path, if it copies between its own objects; None for any other."""
    return path.store if isinstance(path, StorePath) and path.store.can_copy else None


class StorePath(ObjectPath):
    """A place in an object store. It is a `Path`: `/`, `name`, `is_dir()` and so on work.

    A store has no folders: a name is a folder if some key begins with it and a slash. What the
    store said is remembered (see `StoreIndex`); `Files.refresh` forgets it.
    """

    __slots__ = ()

    def _status(self) -> os.stat_result | None:
        from megtool.storage.objects.index import store_index

        return store_index().stat(self)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size, time and version (as `st_ino`) of an object; that of a folder if it is one.

        Raises:
            FileNotFoundError: there is neither.
            StorageError: the store refused.
        """
        status = self._status()
        if status is None:
            raise FileNotFoundError(2, "No such object", str(self))
        return status

    def lstat(self) -> os.stat_result:
        """The same as `stat`."""
        return self.stat()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object or a folder."""
        return self._status() is not None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object of this name."""
        status = self._status()
        return status is not None and stat.S_ISREG(status.st_mode)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there are objects below this name."""
        status = self._status()
        return status is not None and stat.S_ISDIR(status.st_mode)

    def is_symlink(self) -> bool:
        """False: stores have no links."""
        return False

    def iterdir(self) -> Iterator[StorePath]:  # type: ignore[override]
        """What is in a folder, sorted."""
        from megtool.storage.objects.index import store_index

        return iter([self / name for name in store_index().names(self)])

    def glob(self, pattern: str, **_: Any) -> Iterator[StorePath]:  # type: ignore[override]
        """What matches a pattern of names and `*` (and `**` for any depth)."""
        import fnmatch

        first, _slash, rest = pattern.partition("/")
        if first == "**":
            yield from self.rglob(rest or "*")
            return
        if not self.is_dir():
            return
        for path in self.iterdir():
            if not fnmatch.fnmatchcase(path.name, first):
                continue
            if rest:
                yield from path.glob(rest)
            else:
                yield path

    def rglob(self, pattern: str, **_: Any) -> Iterator[StorePath]:  # type: ignore[override]
        """What matches a pattern in this folder or any below."""
        yield from self.glob(pattern)
        for path in self.iterdir() if self.is_dir() else ():
            if path.is_dir():
                yield from path.rglob(pattern)

    # ---- whole objects

    def read_bytes(self) -> bytes:
        """All bytes of an object.

        Raises:
            StorageError: it is missing, or the store refused.
        """
        from megtool.storage.location.object_file import ObjectFile

        with ObjectFile(self) as file:
            return file.read_whole()

    def read_text(self, encoding: str | None = None, errors: str | None = None, **_: Any) -> str:
        """An object as text (UTF-8)."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def open(  # type: ignore[override]
        self, mode: str = "r", *args: Any, **kwargs: Any
    ) -> IO[Any]:
        """An object as a file that can be read and sought.

        Raises:
            StorageError: it is missing, or the store refused.
            io.UnsupportedOperation: the mode is one of writing.
        """
        import io

        from megtool.storage.location.object_file import ObjectFile

        if set(mode) & set("wax+"):
            raise io.UnsupportedOperation(f"{self} cannot be written through open()")
        raw = io.BufferedReader(ObjectFile(self), 8 << 20)
        if "b" in mode:
            return raw
        return io.TextIOWrapper(raw, kwargs.get("encoding", "utf-8"), kwargs.get("errors"))


for _name in ("chmod", "mkdir", "rename", "replace", "rmdir", "symlink_to", "touch", "unlink"):

    def _refuse(self: StorePath, *_: Any, **__: Any) -> Any:
        import io

        raise io.UnsupportedOperation(f"{self} is in a store: `Files` or a stage writes there")

    setattr(StorePath, _name, _refuse)
for _name in ("write_bytes", "write_text"):
    setattr(StorePath, _name, _refuse)
