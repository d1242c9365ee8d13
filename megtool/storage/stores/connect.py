"""The store of a URL: made once per process, with the credentials that its own tools would use."""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from megtool.errors import UsageError
from megtool.storage.stores.protocol import Store
from megtool.storage.stores.schemes import FSSPEC_PREFIX, SCHEMES, find_scheme

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
        maker = _find_maker(scheme)
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
    names = [name for name, row in SCHEMES.items() if not row.is_for_tests]
    return ", ".join(f"{name}://" for name in names) + ", and those of fsspec"


def _find_maker(scheme: str) -> Callable[[str], Store] | None:
    """Return the class of a scheme's store; None if neither megtool nor fsspec has one."""
    if not scheme:
        return None
    if scheme not in SCHEMES and not scheme.startswith(FSSPEC_PREFIX):
        from megtool.storage.stores.third_party import knows_fsspec

        if not knows_fsspec(scheme):
            return None
    module, _, name = find_scheme(scheme).store.partition(":")
    return cast(Callable[[str], Store], getattr(importlib.import_module(module), name))
