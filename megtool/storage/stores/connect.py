"""The store of a URL: made once per process, with the credentials that its own tools would use."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from contextlib import suppress

from megtool.errors import UsageError
from megtool.storage.stores.memory import MemoryStore
from megtool.storage.stores.protocol import Store

_STORES: dict[str, Store] = {}
_LOCK = threading.Lock()

_M_ARENA_MAX = -8


def connect(url: str) -> Store:
    """The store of the URL of a bucket.

    Raises:
        UsageError: no store has this scheme.
        MissingPackageError: the package of the store is missing.
    """
    with _LOCK:
        store = _STORES.get(url)
    if store is None:
        scheme = url.partition("://")[0]
        maker = _maker_of(scheme)
        if maker is None:
            raise UsageError(
                f"no store has the scheme {scheme}://", file=url, hint="one of: " + _known()
            )
        _limit_heaps()
        new = maker(url)
        with _LOCK:
            store = _STORES.setdefault(url, new)
    return store


@functools.cache
def _limit_heaps() -> None:
    """Let all threads share two heaps of glibc, before a store starts threads.

    Each heap keeps what was freed in it: with one for each of the threads that hold parts for a
    moment, a process has more than 100 MiB that nothing uses.
    """
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def register_store(store: Store) -> None:
    """Let URLs that begin with the store's URL mean this store; one before it is replaced."""
    with _LOCK:
        _STORES[store.url] = store


def _known() -> str:
    return ", ".join(f"{scheme}://" for scheme in _MAKERS) + ", and those of fsspec"


def _s3(url: str) -> Store:
    from megtool.storage.stores.s3 import S3Store

    return S3Store(url)


def _gcs(url: str) -> Store:
    from megtool.storage.stores.gcs import GcsStore

    return GcsStore(url)


def _azure(url: str) -> Store:
    from megtool.storage.stores.azure import AzureStore

    return AzureStore(url)


def _http(url: str) -> Store:
    from megtool.storage.stores.http import HttpStore

    return HttpStore(url)


def _hub(url: str) -> Store:
    from megtool.storage.stores.hub import HubStore

    return HubStore(url)


def _msc(url: str) -> Store:
    from megtool.storage.stores.third_party import MscStore

    return MscStore(url)


def _fsspec(url: str) -> Store:
    from megtool.storage.stores.third_party import FsspecStore

    return FsspecStore(url)


def _maker_of(scheme: str) -> Callable[[str], Store] | None:
    if scheme in _MAKERS or not scheme:
        return _MAKERS.get(scheme)
    if scheme.startswith("fsspec+"):
        return _fsspec
    from megtool.storage.stores.third_party import knows_fsspec

    return _fsspec if knows_fsspec(scheme) else None


_MAKERS: dict[str, Callable[[str], Store]] = {
    "s3": _s3,
    "gs": _gcs,
    "az": _azure,
    "https": _http,
    "http": _http,
    "hf": _hub,
    "msc": _msc,
    "memory": MemoryStore,
}
