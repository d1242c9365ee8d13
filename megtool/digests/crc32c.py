"""CRC-32C digests of tensors and files, combined from pieces in any order, and their sidecar."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from megtool import __version__
from megtool.dtypes import DType, dtype
from megtool.errors import FormatError
from megtool.storage.files import Files
from megtool.storage.objects.open_objects import Buffer

SIDECAR = "megtool.json"
TOOL = f"megtool {__version__}"
VERSION = 2
MAX_SIDECAR_BYTES = 1 << 28


class Digests:
    """CRC-32C of the row-major bytes of tensors, by name, computed from pieces. Thread-safe.

    `sizes` are the bytes of each tensor; each byte must be added once. A CRC without its start
    value and final inversion is linear: that of a tensor is the xor of those of its pieces, each
    shifted by the bytes that follow the piece. So order and threads do not matter, and runs of
    zeros add nothing. `observer` is called with what a piece adds: see `add_parts`.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._parts: dict[str, tuple[int, int]] = {}  # name -> (xor, bytes)
        self._lock = threading.Lock()
        self.observer: Callable[[str, int, int], None] | None = None

    def add(self, name: str, offset: int, data: bytes | Buffer) -> None:
        """Add the bytes of tensor `name` that start at byte `offset`."""
        num_bytes = len(data) if isinstance(data, bytes) else data.nbytes
        self.add_piece(name, offset, num_bytes, self.piece(data))

    def piece(self, data: bytes | Buffer) -> int:
        """The linear CRC of `data`, for `add_piece`."""
        return chain_crc(0, data)

    def add_piece(self, name: str, offset: int, num_bytes: int, linear: int) -> None:
        """Add bytes by their linear CRC, the result of `piece`.

        Raises:
            ValueError: the piece lies outside the tensor, or more bytes were added than it has.
        """
        size = self._sizes[name]
        if not 0 <= offset <= offset + num_bytes <= size:
            raise ValueError(f"{name!r}: bytes {offset}+{num_bytes} are not within {size}")
        moved = shift_crc(linear, size - offset - num_bytes) if linear else 0
        self._include(name, moved, num_bytes)
        if self.observer is not None:
            self.observer(name, moved, num_bytes)

    def add_zeros(self, name: str, offset: int, num_bytes: int) -> None:
        """Add `num_bytes` zeros at `offset`."""
        self.add_piece(name, offset, num_bytes, 0)

    def merge(self, digests: Digests) -> None:
        """Add all pieces of other digests of the same sizes."""
        for name, (crc, num_bytes) in digests._parts.items():
            self._include(name, crc, num_bytes)

    def parts(self) -> dict[str, tuple[int, int]]:
        """By tensor, the linear CRC of what was added so far, and its bytes: see `add_parts`."""
        with self._lock:
            return dict(self._parts)

    def add_parts(self, name: str, linear: int, num_bytes: int) -> None:
        """Add pieces of a tensor that another process digested: what its `parts` has.

        Raises:
            ValueError: there is no such tensor, or more bytes were added than it has.
        """
        if name not in self._sizes:
            raise ValueError(f"there is no tensor {name!r}")
        self._include(name, linear, num_bytes)

    def _include(self, name: str, crc_part: int, num_bytes: int) -> None:
        with self._lock:
            crc, added = self._parts.get(name, (0, 0))
            if added + num_bytes > self._sizes[name]:
                raise ValueError(f"{name!r}: more than its {self._sizes[name]} bytes were added")
            self._parts[name] = crc ^ crc_part, added + num_bytes

    def get(self, name: str) -> int | None:
        """The CRC-32C of a tensor, or None if some of its bytes were not added."""
        crc, added = self._parts.get(name, (0, -1))
        size = self._sizes.get(name)
        if added != size:
            return None
        return finish_crc(crc, size)

    def complete(self) -> dict[str, int]:
        """The CRC-32C of every tensor all of whose bytes were added."""
        return {n: crc for n in self._sizes if (crc := self.get(n)) is not None}


_ONES = 0xFFFFFFFF


def chain_crc(linear: int, data: bytes | Buffer) -> int:
    """The linear CRC of some bytes followed by `data`, given that of the former (0 of none)."""
    return int(_checksums().crc32c(data, linear ^ _ONES)) ^ _ONES


def shift_crc(linear: int, num_bytes: int) -> int:
    """The linear CRC after `num_bytes` more zeros."""
    return int(_checksums().combine_crc32c(linear, 0, num_bytes))


def finish_crc(linear: int, num_bytes: int) -> int:
    """The CRC-32C of `num_bytes` bytes with this linear CRC."""
    return linear ^ shift_crc(_ONES, num_bytes) ^ _ONES


def crc32c(data: bytes | memoryview) -> int:
    """The CRC-32C of `data`."""
    return int(_checksums().crc32c(data))


@functools.cache
def _checksums() -> Any:
    """The checksum library, imported at first use: kernel copies need no digest."""
    from awscrt import checksums

    return checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """The digest of one tensor; `dtype` is that of the digested bytes."""

    crc32c: int
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """The size in bytes and the digest of one file."""

    size: int
    crc32c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDigest(TensorDigest):
    """The digest of one stored tensor: all its bytes, from byte `begin` of `file`."""

    file: str
    begin: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Digests stored with a checkpoint.

    `tensors` are by `canonical` names of a family or by `stored` names. `stored_tensors` are the
    raw bytes of further tensors, by stored name: computed ones, and those of formats that are not
    read back by canonical names. `files` are by path relative to the folder of the sidecar, which
    is not among them: it has a digest of itself. `pruning` is the record of what was left out of a
    larger model (see `reshard.width_subset`), and `rotation` of what its weights are multiplied by
    (see `quant.rotation`), as plain data; `dropped_settings` are those that the model it was made
    from computes by, with what they were.
    """

    names: Literal["canonical", "stored"]
    tool: str
    tensors: Mapping[str, TensorDigest]
    family: str | None = None
    stored_tensors: Mapping[str, StoredDigest] = field(default_factory=dict)
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    pruning: Mapping[str, Any] | None = None
    rotation: Mapping[str, Any] | None = None
    dropped_settings: Mapping[str, Any] | None = None

    @property
    def num_tensors(self) -> int:
        """The number of tensors that have a digest."""
        return len(self.tensors) + len(self.stored_tensors)


def encode_sidecar(sidecar: Sidecar) -> bytes:
    """The contents of the file `SIDECAR`; equal digests give equal bytes."""
    head = {
        "version": VERSION,
        "algorithm": "crc32c",
        "names": sidecar.names,
        "family": sidecar.family,
        "tool": sidecar.tool,
    }
    sections = {
        "tensors": _encode_tensors(sidecar.tensors),
        "stored_tensors": {
            name: entry | {"file": t.file, "begin": t.begin, "size": t.size}
            for name, entry in _encode_tensors(sidecar.stored_tensors).items()
            if (t := sidecar.stored_tensors[name])
        },
        "files": {
            name: {"crc32c": f"{f.crc32c:08x}", "size": f.size}
            for name, f in sorted(sidecar.files.items())
        },
    }
    text = json.dumps(head)[:-1]
    for key, entries in sections.items():
        lines = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}"
            for name, entry in entries.items()
        )
        text += f',\n"{key}": {{\n{lines}\n}}'
    for key in _RECORDS:
        record = getattr(sidecar, key)
        if record is not None:
            text += f',\n"{key}": {json.dumps(record, separators=(",", ":"))}'
    data = text.encode()
    return data + b',\n"crc32c": "%08x"}\n' % crc32c(data)


_RECORDS = ("pruning", "rotation", "dropped_settings")


def _encode_tensors(tensors: Mapping[str, TensorDigest]) -> dict[str, dict[str, object]]:
    return {
        name: {"crc32c": f"{t.crc32c:08x}", "dtype": t.dtype.name, "shape": list(t.shape)}
        for name, t in sorted(tensors.items())
    }


def read_sidecar(path: Path, *, files: Files | None = None) -> Sidecar | None:
    """Read the sidecar at `path`; None if there is no such file.

    Raises:
        FormatError: it is damaged, hostile, or written by a later megtool.
    """
    data = (files or Files()).read_whole(path, at_most=MAX_SIDECAR_BYTES)
    return None if data is None else parse_sidecar(data, path)


def parse_sidecar(data: bytes, path: Path) -> Sidecar:
    """Parse a sidecar; errors name `path`."""
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_reject_duplicates, parse_constant=reject_constant
        )
        out = _sidecar(value)
        _check_own_digest(data)
        return out
    except (ValueError, RecursionError) as e:
        raise FormatError(
            f"the digests are damaged: {e}", file=path, hint=_HINT, error_id="damaged-digests"
        ) from e
    except FormatError as e:
        raise FormatError(
            e.message, file=path, tensor=e.tensor, hint=e.hint or _HINT, error_id=e.error_id
        ) from e


_HINT = "without this file the checkpoint can be used, but not verified"
_OWN_DIGEST = re.compile(rb'(.*),\n"crc32c": "([0-9a-f]{8})"\}\n', re.DOTALL)


def _check_own_digest(data: bytes) -> None:
    match = _OWN_DIGEST.fullmatch(data)
    if match is None:
        raise FormatError(
            "the digests are damaged: the end, with their own digest, is missing",
            error_id="damaged-digests",
        )
    if crc32c(match[1]) != int(match[2], 16):
        raise FormatError(
            "the digests are damaged: they differ from their own digest", error_id="damaged-digests"
        )


def _sidecar(value: Any) -> Sidecar:
    if not isinstance(value, dict):
        raise FormatError("the digests are damaged: not an object", error_id="damaged-digests")
    if value.get("version") != VERSION or value.get("algorithm") != "crc32c":
        raise FormatError(
            f"digests have version {value.get('version')!r}, algorithm {value.get('algorithm')!r}",
            hint=f"this megtool reads version {VERSION}, crc32c: update megtool",
            error_id="damaged-digests",
        )
    names, family, tool = value.get("names"), value.get("family"), value.get("tool")
    if names not in ("canonical", "stored") or not isinstance(tool, str):
        raise FormatError(
            f"the digests are damaged: names {names!r}, tool {tool!r}", error_id="damaged-digests"
        )
    sections = [value.get(key) for key in ("tensors", "stored_tensors", "files")]
    tensors, stored, files = (s if isinstance(s, dict) else None for s in sections)
    is_named = family is None or isinstance(family, str)
    if not is_named or tensors is None or stored is None or files is None:
        kinds = ", ".join(type(s).__name__ for s in sections)
        raise FormatError(
            f"the digests are damaged: family {family!r}, {kinds}", error_id="damaged-digests"
        )
    records = {key: value.get(key) for key in _RECORDS}
    for key, record in records.items():
        if record is not None and not isinstance(record, dict):
            raise FormatError(
                f"the digests are damaged: {key} is {record!r:.80}", error_id="damaged-digests"
            )
    return Sidecar(
        **records,
        names=cast(Literal["canonical", "stored"], names),
        family=family,
        tool=tool,
        tensors={name: _tensor(name, entry) for name, entry in tensors.items()},
        stored_tensors={name: _stored_tensor(name, entry) for name, entry in stored.items()},
        files={name: _file(name, entry) for name, entry in files.items()},
    )


def _file(name: str, entry: Any) -> FileDigest:
    crc, size = (entry.get("crc32c"), entry.get("size")) if isinstance(entry, dict) else (None, 0)
    _check_path(name)
    if not isinstance(crc, str) or not re.fullmatch("[0-9a-f]{8}", crc):
        raise FormatError(
            f"the digests are damaged: crc32c {crc!r} of {name!r:.80}", error_id="damaged-digests"
        )
    if not _is_size(size):
        raise FormatError(
            f"the digests are damaged: size {size!r} of {name!r:.80}", error_id="damaged-digests"
        )
    return FileDigest(size=int(size or 0), crc32c=int(crc, 16))


def _check_path(name: object) -> None:
    pure = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in str(name):
        raise FormatError(
            f"the digests are damaged: {name!r:.80} is no path in a checkpoint",
            error_id="damaged-digests",
        )


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _stored_tensor(name: str, entry: Any) -> StoredDigest:
    digest = _tensor(name, entry)
    file, begin, size = (entry.get(k) for k in ("file", "begin", "size"))
    _check_path(file)
    if not _is_size(begin) or not _is_size(size):
        raise FormatError(
            f"the digests are damaged: bytes {begin!r} + {size!r}",
            tensor=name,
            error_id="damaged-digests",
        )
    return StoredDigest(
        crc32c=digest.crc32c,
        dtype=digest.dtype,
        shape=digest.shape,
        file=file,
        begin=begin,
        size=size,
    )


def _tensor(name: str, entry: Any) -> TensorDigest:
    crc, kind, shape = (
        (entry.get(k) for k in ("crc32c", "dtype", "shape"))
        if isinstance(entry, dict)
        else (None, None, None)
    )
    if not isinstance(crc, str) or not re.fullmatch("[0-9a-f]{8}", crc):
        raise FormatError(
            f"the digests are damaged: crc32c {crc!r}", tensor=name, error_id="damaged-digests"
        )
    if not isinstance(kind, str):
        raise FormatError(
            f"the digests are damaged: dtype {kind!r}", tensor=name, error_id="damaged-digests"
        )
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise FormatError(
            f"the digests are damaged: shape {shape!r}", tensor=name, error_id="damaged-digests"
        )
    return TensorDigest(crc32c=int(crc, 16), dtype=dtype(kind), shape=tuple(shape))


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("duplicate key")
    return out


def reject_constant(constant: str) -> None:
    """Reject NaN and Infinity, which JSON does not allow (a `parse_constant` hook)."""
    raise ValueError(f"{constant} is not a JSON number")
