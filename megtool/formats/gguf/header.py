"""The header of one GGUF file, key-values and tensor positions, read in bounded memory.

The `gguf` package reads headers too, but it creates an array object for every token (2 s and 150 MB
for 49,152 tokens) and trusts every count, so a hostile file of a few bytes can block it forever.
Only its tables of block formats are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megtool.dtypes import dtype
from megtool.errors import FormatError
from megtool.formats.header_reader import read_exact, short_repr
from megtool.number_formats.gguf import block, type_names
from megtool.tensors.sharded import GlobalTensor

MAX_HEADER_BYTES = 100_000_000
_WINDOW = 1 << 20
_MAX_DIMS = 4
_MAX_NESTING = 4
_LIMIT = 1 << 63

_PLAIN = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
}
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """One tensor, with the `offset` of its bytes from the start of the data."""

    tensor: GlobalTensor
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A validated header: key-values, tensors in file order, and the start of the data."""

    values: dict[str, Any]
    entries: list[GgufEntry]
    start: int


def read_header(path: Path, size: int) -> GgufHeader:
    """The header of the GGUF file `path` of `size` bytes.

    Raises:
        FormatError: not little-endian GGUF version 2 or 3, truncated, or an invalid field.
    """
    scan = _Scanner(path, size)
    if scan.take(4) != b"GGUF":
        raise scan.fault("does not begin with GGUF", hint="is this a GGUF file?")
    version = scan.u32()
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        raise scan.fault(
            "is big-endian" if swapped else f"is of GGUF version {version}, not 2 or 3",
            hint="write it again with a current llama.cpp",
        )
    num_tensors, num_values = scan.u64(), scan.u64()
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = scan.string()
        if key in values:
            raise scan.fault(f"key {short_repr(key)} occurs twice")
        values[key] = scan.value(scan.u32())
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise scan.fault(f"alignment {short_repr(alignment)} is not a power of two")
    entries: list[GgufEntry] = []
    names: set[str] = set()
    for _ in range(num_tensors):
        entry = _read_entry(scan, alignment)
        name = entry.tensor.name
        if name in names:
            raise scan.fault("two tensors of one name", tensor=name)
        names.add(name)
        entries.append(entry)
    start = scan.position + -scan.position % alignment
    for e in entries:
        if e.offset + e.num_bytes > size - start:
            raise scan.fault(
                f"bytes {start + e.offset}+{e.num_bytes} are outside a file of {size} bytes",
                tensor=e.tensor.name,
                hint="the file is truncated: fetch it again",
            )
    return GgufHeader(values, entries, start)


def _read_entry(scan: _Scanner, alignment: int) -> GgufEntry:
    name = scan.string()
    num_dims = scan.u32()
    if num_dims > _MAX_DIMS:
        raise scan.fault(f"{num_dims} dimensions are more than {_MAX_DIMS}", tensor=name)
    shape = tuple(scan.u64() for _ in range(num_dims))[::-1]
    number, offset = scan.u32(), scan.u64()
    kind = type_names().get(number)
    if kind is None:
        raise scan.fault(
            f"the type {number} is unknown",
            tensor=name,
            hint=f"known: {', '.join(type_names().values())}; or update the gguf package",
        )
    numel = 1
    for n in shape:
        numel *= n
    if numel >= _LIMIT or any(n >= _LIMIT for n in shape) or offset % alignment:
        raise scan.fault(f"shape {shape} at offset {offset} is invalid", tensor=name)
    if kind in _PLAIN:
        plain = dtype(_PLAIN[kind])
        tensor = GlobalTensor(name=name, shape=shape, dtype=plain)
        return GgufEntry(tensor, offset, tensor.num_bytes)
    elements, num_bytes = block(kind)
    if not shape or shape[-1] % elements:
        raise scan.fault(
            f"rows of shape {shape} are not whole blocks of {elements} ({kind})", tensor=name
        )
    tensor = GlobalTensor(name=name, shape=shape, dtype=dtype("float32"), packing=f"gguf:{kind}")
    return GgufEntry(tensor, offset, numel // elements * num_bytes)


class _Scanner:
    """Reads a file forward through a window, and checks every length before use."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.end = min(size, MAX_HEADER_BYTES)
        self.is_whole_file = size <= MAX_HEADER_BYTES
        self.position = 0
        self._window = b""
        self._base = 0

    def fault(
        self, message: str, *, tensor: str | None = None, hint: str | None = None
    ) -> FormatError:
        if tensor is not None and len(tensor) > 200:
            tensor = short_repr(tensor)
        return FormatError(message, file=self.path, tensor=tensor, hint=hint)

    def require(self, length: int) -> int:
        """Position in the window of the next `length` bytes; reads them if they exist."""
        if length > self.end - self.position:
            if self.is_whole_file:
                raise self.fault(
                    f"{length} more bytes are expected at byte {self.position} of {self.end}",
                    hint="the file is truncated, or not a GGUF file: fetch it again",
                )
            raise self.fault(f"the header has more than {MAX_HEADER_BYTES} bytes")
        if self.position + length > self._base + len(self._window):
            ahead = min(max(length, _WINDOW), self.end - self.position)
            self._window = read_exact(self.path, self.position, ahead)
            self._base = self.position
        return self.position - self._base

    def take(self, length: int) -> bytes:
        begin = self.require(length)
        self.position += length
        return self._window[begin : begin + length]

    def u32(self) -> int:
        begin = self.require(4)
        self.position += 4
        return int.from_bytes(self._window[begin : begin + 4], "little")

    def u64(self) -> int:
        begin = self.require(8)
        self.position += 8
        return int.from_bytes(self._window[begin : begin + 8], "little")

    def string(self) -> str:
        raw = self.take(self.u64())
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.fault(f"text before byte {self.position} is not UTF-8") from e

    def value(self, kind: int, nesting: int = 0) -> Any:
        """The value of type `kind` that follows: a number, a bool, a string, or a list."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if nesting == _MAX_NESTING:
                raise self.fault(f"arrays are nested deeper than {_MAX_NESTING}")
            return self.array(self.u32(), self.u64(), nesting + 1)
        return self.array(kind, 1, nesting)[0]

    def array(self, kind: int, count: int, nesting: int) -> list[Any]:
        if kind in _SCALARS:
            item = np.dtype(_SCALARS[kind])
            raw = self.take(count * item.itemsize)
            if kind == _BOOL and raw.strip(b"\0\1"):
                raise self.fault(f"a bool before byte {self.position} is neither 0 nor 1")
            return list(np.frombuffer(raw, item).tolist())
        if kind not in (_STRING, _ARRAY):
            raise self.fault(f"the type {kind} of a value at byte {self.position} is unknown")
        if count > self.end - self.position:
            raise self.fault(
                f"an array of {count} items is expected at byte {self.position} of {self.end}",
                hint="the file is truncated, or not a GGUF file: fetch it again",
            )
        if kind == _STRING:
            read: Callable[[], Any] = self.string
        else:
            read = functools.partial(self.value, _ARRAY, nesting)
        return [read() for _ in range(count)]
