"""Lists an OCDBT database in a child process with limited memory.

tensorstore allocates what the nodes of a database claim, and a node of a few kilobytes can expand
to gigabytes. So all nodes are read in a child first; a database that it lists can be read here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megtool.errors import FormatError
from megtool.process.child import ChildLimits, ChildProcess, LimitError, serve

MAX_VALUE_BYTES = 64 << 20
_CACHE_BYTES = 64 << 20
_METADATA = (".zarray", "zarr.json")
_LIMITS = ChildLimits(
    memory_bytes=512 << 20, cpu_seconds=300, wall_seconds=1800, reply_bytes=512 << 20
)


def list_metadata(
    folder: Path, manifest: str, *, readable: Path | None = None
) -> list[tuple[str, bytes]]:
    """The keys of all metadata files in a database, sorted, and their values.

    `readable` is the database on this machine, if it is elsewhere.

    Raises:
        FormatError: the database is damaged, or needs more memory than it should.
        StorageError: no process can be started.
    """
    try:
        answer = ChildProcess(__name__, _LIMITS).request(str(readable or folder))
    except LimitError as e:
        raise FormatError(
            f"reading the index of the database {e}",
            file=folder / manifest,
            hint="the database is damaged, or hostile: copy the whole folder again",
        ) from e
    if "error" in answer or "limit" in answer:
        message = answer.get("limit") or answer["error"][1]
        raise FormatError(
            f"the database cannot be read: {message}",
            file=folder / manifest,
            hint="copy the whole folder: the manifest refers to other files in it",
        )
    return [(key, value.encode("latin-1")) for key, value in answer["value"]]


def database_spec(folder: Path) -> dict[str, Any]:
    """The specification of a database for tensorstore.

    Raises:
        FormatError: the path is not UTF-8, as tensorstore needs it.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as e:
        raise FormatError(
            "the path is not UTF-8, and tensorstore opens no other",
            file=folder,
            hint="rename the folder, or copy the database to another",
        ) from e
    return {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{folder}/"},
        "path": "",
        "context": {"cache_pool": {"total_bytes_limit": _CACHE_BYTES}},
    }


def read_value(store: Any, key: str, most: int) -> bytes | None:
    """A value of at most `most` bytes; None if there is no such key.

    Raises:
        ValueError: the value is larger, or cannot be read.
    """
    try:
        probe = store.read(key, byte_range=slice(most, most + 1)).result()
    except ValueError as e:
        if "OUT_OF_RANGE" not in str(e):
            raise
    else:
        if probe.state == "missing":
            return None
        raise ValueError(f"a value of more than {most:,} bytes")
    result = store.read(key).result()
    return bytes(result.value) if result.state == "value" else None


def serve_requests() -> None:
    """Answer requests in the child: the path of a database to its metadata."""
    import tensorstore

    def answer(folder: str) -> list[tuple[str, str]]:
        try:
            store = tensorstore.KvStore.open(database_spec(Path(folder))).result()
            keys = sorted(key.decode() for key in store.list().result())
            out = []
            for key in keys:
                if key.rpartition("/")[2] in _METADATA:
                    value = read_value(store, key, MAX_VALUE_BYTES)
                    out.append((key, (value or b"").decode("latin-1")))
            return out
        except (LookupError, OSError, RuntimeError, TypeError, ValueError) as e:
            raise FormatError(str(e)[:200]) from e

    serve(answer)
