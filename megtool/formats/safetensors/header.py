"""The header of one safetensors file: read strictly, written page-aligned."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.dtypes import DTYPES, DType
from megtool.errors import FormatError
from megtool.formats.header_reader import (
    DAMAGED,
    Pairs,
    parse_json,
    read_exact,
    short_repr,
    unique_keys,
)
from megtool.storage.stores.json_size import MAX_PARSED_BYTES, estimate_parsed_bytes

ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000
MAX_NDIM = 16

_TAGS = {d.safetensors: d for d in DTYPES if d.safetensors}
_KEYS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor of a header: `begin` and `end` count from the start of the data."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A validated header: entries in the order of their data, which starts at `start`."""

    entries: list[SafetensorsEntry]
    metadata: dict[str, str]
    start: int


def read_header(path: Path, size: int) -> SafetensorsHeader:
    """The header of the safetensors file `path` of `size` bytes, checked against that size.

    Raises:
        FormatError: anything but a well-formed header whose tensors fill the data exactly.
    """
    if size < 8:
        raise FormatError(
            f"{size} bytes are too few for a safetensors file",
            file=path,
            hint="fetch it again",
            error_id="truncated-file",
        )
    (length,) = struct.unpack("<Q", read_exact(path, 0, 8))
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise FormatError(
            f"a header of {length} bytes does not fit a file of {size}",
            file=path,
            hint="the file is truncated, or not a safetensors file",
            error_id="truncated-file",
        )
    text = read_exact(path, 8, length)
    if text[:1] != b"{":
        raise FormatError(f"the header begins with {text[:1]!r}, not '{{'", file=path, hint=DAMAGED)
    parsed = estimate_parsed_bytes(text)
    if parsed > MAX_PARSED_BYTES and text.count(b"[") > 2 * text.count(b'"dtype"'):
        raise FormatError("the header has too many lists", file=path, hint=DAMAGED)
    return _check_header(parse_json(text, path, hook=_entry_or_dict), path, 8 + length, size)


def _entry_or_dict(pairs: Pairs) -> Any:
    """A tensor's object as a compact tuple, because headers may hold a million of them."""
    if len(pairs) == 3:
        (a, x), (b, y), (c, z) = pairs
        if (a, b, c) == _KEYS:
            return x, y, z
    return unique_keys(pairs)


def _check_header(parsed: Any, path: Path, start: int, size: int) -> SafetensorsHeader:
    metadata: dict[str, str] = {}
    entries: list[SafetensorsEntry] = []
    if not isinstance(parsed, dict):  # the header itself has a tensor's three keys
        parsed = dict(zip(_KEYS, parsed, strict=True))
    for name, value in parsed.items():
        if name == "__metadata__":
            metadata = _check_metadata(value, path)
        else:
            entries.append(_check_entry(name, value, path))
    entries.sort(key=lambda e: (e.begin, e.end))
    position = 0
    for e in entries:
        if e.begin != position:
            kind = "a hole" if e.begin > position else "an overlap"
            raise FormatError(
                f"data begins at byte {short_repr(e.begin)} where {position} is expected ({kind})",
                file=path,
                tensor=_label(e.name),
                hint=DAMAGED,
            )
        position = e.end
    if position != size - start:
        raise FormatError(
            f"the header describes {short_repr(position)} bytes of data, "
            f"the file holds {size - start}",
            file=path,
            hint="the file is truncated or has bytes appended: fetch it again",
        )
    return SafetensorsHeader(entries, metadata, start)


def _check_metadata(value: object, path: Path) -> dict[str, str]:
    if isinstance(value, tuple):
        value = dict(zip(_KEYS, value, strict=True))
    if not isinstance(value, dict) or any(type(v) is not str for v in value.values()):
        raise FormatError(
            f"__metadata__ {short_repr(value)} does not map strings to strings",
            file=path,
            hint=DAMAGED,
        )
    return value


def _check_entry(name: str, value: object, path: Path) -> SafetensorsEntry:
    if isinstance(value, dict) and value.keys() == {"dtype", "shape", "data_offsets"}:
        value = (value["dtype"], value["shape"], value["data_offsets"])
    if not isinstance(value, tuple):
        raise FormatError(
            f"{short_repr(value)} is not an object of dtype, shape and data_offsets",
            file=path,
            tensor=_label(name),
            hint=DAMAGED,
        )
    tag, shape, offsets = value
    dtype = _TAGS.get(tag) if type(tag) is str else None
    if dtype is None:
        raise FormatError(
            f"the dtype {short_repr(tag)} is unknown",
            file=path,
            tensor=_label(name),
            hint=f"known: {', '.join(str(t) for t in _TAGS)}",
        )
    if not _are_sizes(shape) or len(shape) > MAX_NDIM:
        raise FormatError(
            f"shape {short_repr(shape)} is not a list of at most {MAX_NDIM} sizes",
            file=path,
            tensor=_label(name),
            hint=DAMAGED,
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise FormatError(
            f"data_offsets {short_repr(offsets)} are not a begin and an end",
            file=path,
            tensor=_label(name),
            hint=DAMAGED,
        )
    numel = 1
    for n in shape:
        numel *= n
    if numel * dtype.itemsize != offsets[1] - offsets[0]:
        raise FormatError(
            f"shape {short_repr(shape)} of {dtype} does not take "
            f"{short_repr(offsets[1] - offsets[0])} bytes",
            file=path,
            tensor=_label(name),
            hint=DAMAGED,
        )
    return SafetensorsEntry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(value: object) -> bool:
    """A list of non-negative 63-bit integers (and neither `true` nor `1.0`)."""
    if type(value) is not list or not set(map(type, value)) <= {int}:
        return False
    return min(value, default=0) >= 0 and max(value, default=0) < 1 << 63


def _label(name: str) -> str:
    return name if len(name) <= 200 else short_repr(name)


def encode_header(
    entries: Sequence[SafetensorsEntry], metadata: Mapping[str, str], name: str
) -> bytes:
    """Length and header of a file, padded so that the data starts at a multiple of `ALIGNMENT`."""
    value: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for e in entries:
        tag, offsets = e.dtype.safetensors, [e.begin, e.end]
        value[e.name] = {"dtype": tag, "shape": e.shape, "data_offsets": offsets}
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            f"a header of {len(text)} bytes exceeds the limit of {MAX_HEADER_BYTES}",
            file=name,
            hint="choose smaller shards: --max-shard-size",
        )
    return struct.pack("<Q", len(text)) + text
