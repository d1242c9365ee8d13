"""The store of a URL: made once per process, with the credentials that its own tools would use."""

from __future__ import annotations

import threading
from collections.abc import Callable

from megtool.checkpoint.storage.memory_store import MemoryStore
from megtool.checkpoint.storage.store import Store
from megtool.errors import UsageError

_STORES: dict[str, Store] = {}
_LOCK = threading.Lock()


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
        maker = _MAKERS.get(scheme)
        if maker is None:
            raise UsageError(
                f"no store has the scheme {scheme}://", file=url, hint="one of: " + _known()
            )
        made = maker(url)
        with _LOCK:
            store = _STORES.setdefault(url, made)
    return store


def register_store(store: Store) -> None:
    """Let URLs that begin with the store's URL mean this store; one before it is replaced."""
    with _LOCK:
        _STORES[store.url] = store


def _known() -> str:
    return ", ".join(f"{scheme}://" for scheme in _MAKERS)


def _s3(url: str) -> Store:
    from megtool.checkpoint.storage.s3_store import S3Store

    return S3Store(url)


def _obstore(url: str) -> Store:
    from megtool.checkpoint.storage.obstore_store import open_obstore

    return open_obstore(url)


def _hub(url: str) -> Store:
    from megtool.checkpoint.storage.hub_store import HubStore

    return HubStore(url)


_MAKERS: dict[str, Callable[[str], Store]] = {
    "s3": _s3,
    "gs": _obstore,
    "az": _obstore,
    "https": _obstore,
    "http": _obstore,
    "hf": _hub,
    "memory": MemoryStore,
}
