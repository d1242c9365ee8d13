"""A lock in a store: an object that names its holder, who renews it while the run lives."""

from __future__ import annotations

import _thread
import json
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megtool.errors import DestinationError, MegtoolError
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.objects.small_object import read_json
from megtool.storage.stores.protocol import ConditionError, ObjectInfo

RENEW_S = 20.0
EXPIRE_S = 120.0
"""A lease of another host that was not renewed for so long is taken over."""

_LIVE: set[str] = set()


class Lease:
    """Holds the object at `path` until `release`.

    The holder of a lease that was left behind is looked for by its process, on this host and in
    this container, and elsewhere by the time of the last renewal, by the store's clock.

    Raises:
        DestinationError: another run holds it.
        StorageError: the store refused.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path, self._store = path, path.store
        self._token = secrets.token_hex(8)
        self._stopped = threading.Event()
        self._info = self._acquire()
        _LIVE.add(self._token)
        _thread.start_new_thread(self._keep, ())  # `Thread.start` waits for one that dies

    def _content(self) -> bytes:
        return json.dumps(
            {
                "token": self._token,
                "pid": os.getpid(),
                "host": os.uname().nodename,
                "boot": _boot_id(),
                "processes": _process_namespace(),
                "renewed": time.time(),
            }
        ).encode()

    def _acquire(self) -> ObjectInfo:
        for _ in range(8):
            data = self._content()
            try:
                return self._store.put(self._path.key, data, create=True)
            except ConditionError:
                pass
            info = self._store.head(self._path.key)
            if info is None:
                continue
            holder = read_holder(self._path, info)
            if holder.get("token") == self._token:  # the reply to our own put was lost
                return info
            if is_alive(self._path, info, holder):
                raise DestinationError(
                    f"{describe_holder(holder)} is writing this destination",
                    file=self._path.parent,
                    hint="wait until it has ended, or choose another destination; what a run on a "
                    f"dead host holds is free after {EXPIRE_S:.0f} s",
                    error_id="destination-locked",
                )
            with suppress(ConditionError):
                return self._store.put(self._path.key, data, version=info.version)
        raise DestinationError(
            "other runs take the destination at the same time",
            file=self._path.parent,
            hint="run the command again",
            error_id="destination-locked",
        )

    def _keep(self) -> None:
        while not self._stopped.wait(RENEW_S):
            with suppress(MegtoolError):
                self.renew()

    def renew(self) -> None:
        """Say that the run lives.

        Raises:
            ConditionError: another run has taken the lease.
            StorageError: the store refused, or did not answer: a later call renews it.
        """
        data = self._content()
        try:
            self._info = self._store.put(self._path.key, data, version=self._info.version)
        except ConditionError:
            info = self._store.head(self._path.key)
            if info is None or read_holder(self._path, info).get("token") != self._token:
                raise
            # The reply to an earlier renewal was lost.
            self._info = self._store.put(self._path.key, data, version=info.version)

    def check(self) -> None:
        """Refuse to go on if another run has taken the lease.

        Raises:
            DestinationError: it has.
        """
        if not self._is_held():
            raise DestinationError(
                "another run has taken over this destination",
                file=self._path.parent,
                hint="this one was out of touch with the store for too long: run it again",
                error_id="destination-locked",
            )

    def _is_held(self) -> bool:
        key = self._path.key
        info = self._store.head(key)
        if info is None:  # a wrong reply would leave the object there: a listing decides
            listing = self._store.list(self._path.parent.key)
            info = next((o for o in listing.objects if o.key == key), None)
        if info is None:
            return False
        if info.version and info.version == self._info.version:
            return True
        return read_holder(self._path, info).get("token") == self._token

    def release(self, *, remove: bool = True) -> None:
        """End it, unless another run has taken it; a second call does nothing.

        Raises:
            StorageError: the store refused.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        _LIVE.discard(self._token)
        if remove and self._is_held():
            self._store.delete([self._path.key])


def read_holder(path: ObjectPath, info: ObjectInfo) -> dict[str, Any]:
    """Who holds a lease; empty if it is gone or damaged."""
    return read_json(path, info)


def describe_holder(holder: dict[str, Any]) -> str:
    """The holder in words."""
    return f"process {holder.get('pid', '?')} on {str(holder.get('host', '?'))[:80]!r}"


def is_alive(path: ObjectPath, info: ObjectInfo, holder: dict[str, Any]) -> bool:
    """Whether the holder of a lease still runs.

    Its process is looked for if this one sees it: on the same host, and in the same container.
    """
    here = os.uname().nodename, _boot_id(), _process_namespace()
    if (holder.get("host"), holder.get("boot"), holder.get("processes")) == here:
        pid = holder.get("pid")
        if pid == os.getpid():
            return holder.get("token") in _LIVE
        if isinstance(pid, int) and not _has_process(pid):
            return False
    return _age_s(path, info) < EXPIRE_S


def _has_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _age_s(path: ObjectPath, info: ObjectInfo) -> float:
    """How long ago an object was written, by the store's own clock."""
    store, key = path.store, f"{path.key}.clock-{secrets.token_hex(4)}"
    store.put(key, b"")
    try:
        now = store.head(key)
    finally:
        store.delete([key])
    return ((now.modified_ns if now else time.time_ns()) - info.modified_ns) / 10**9


def _process_namespace() -> str:
    """What says among which processes an ID is unique: containers of a host differ."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
