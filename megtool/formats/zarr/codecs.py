"""Codecs of zarr chunks, decoded in memory that the size of the chunk bounds.

A compressed chunk of a few kilobytes can expand to gigabytes. Each decoder here gets the size that
its result must have, and stops there.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megtool.digests.crc32c import crc32c
from megtool.errors import MissingPackageError

Bytes = NDArray[np.uint8]

CHECKSUM_BYTES = 4
SHARDING = "sharding_indexed"
_INPUT_BYTES = 64 << 10
_OUTPUT_BYTES = 1 << 20
_LZMA_MEMORY = 256 << 20
_MAX_ELEMENT_BYTES = 1 << 16
_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPABLE = 0x184D2A50
_BLOSC_HEADER_BYTES = 16


class DecodeError(ValueError):
    """Bytes are not what their codec writes, or have another size than their chunk."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec of an array's metadata, with settings of checked types."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DecodedSize:
    """The size that decoded bytes have, or only a limit, if another compressor wrote them."""

    num_bytes: int
    is_exact: bool

    def encoded(self, codec: Codec) -> DecodedSize:
        """The size of such bytes after `codec` encoded them."""
        if codec.name in _CHECKSUMS:
            return DecodedSize(self.num_bytes + CHECKSUM_BYTES, self.is_exact)
        if codec.name == "shuffle":
            return self
        if codec.name == "delta":
            kind, stored = _delta_types(codec)
            return DecodedSize(self.num_bytes // kind.itemsize * stored.itemsize, self.is_exact)
        return DecodedSize(max_compressed_bytes(self.num_bytes), False)

    def check(self, num_bytes: int) -> None:
        """Refuse a size that differs, or exceeds the limit.

        Raises:
            DecodeError: it does.
        """
        if num_bytes > self.num_bytes or (self.is_exact and num_bytes != self.num_bytes):
            raise DecodeError(f"{num_bytes:,} bytes where {self.num_bytes:,} are expected")


def max_compressed_bytes(num_bytes: int) -> int:
    """More bytes than any compressor makes of `num_bytes`."""
    return num_bytes + num_bytes // 2 + 4096


# ---- settings

_Types = tuple[type, ...]
_INT: _Types = (int,)
_OPTIONAL_INT: _Types = (int, type(None))
_OPTIONAL_TEXT: _Types = (str, type(None))

_CHECKSUMS: dict[str, dict[str, _Types]] = {
    "adler32": {"location": _OPTIONAL_TEXT},
    "crc32": {"location": _OPTIONAL_TEXT},
    "crc32c": {"location": _OPTIONAL_TEXT},
    "fletcher32": {},
    "jenkins_lookup3": {"initval": _INT, "prefix": (type(None),)},
}
_SETTINGS: dict[str, dict[str, _Types]] = _CHECKSUMS | {
    "blosc": {
        "cname": (str,),
        "clevel": _INT,
        "shuffle": (int, str),
        "typesize": _OPTIONAL_INT,
        "blocksize": _OPTIONAL_INT,
    },
    "bytes": {"endian": _OPTIONAL_TEXT},
    "bz2": {"level": _INT},
    "delta": {"dtype": (str,), "astype": _OPTIONAL_TEXT},
    "gzip": {"level": _INT},
    "lz4": {"acceleration": _INT},
    "lzma": {"format": _INT, "check": _INT, "preset": _OPTIONAL_INT, "filters": (list, type(None))},
    "shuffle": {"elementsize": _OPTIONAL_INT},
    SHARDING: {
        "chunk_shape": (list,),
        "codecs": (list,),
        "index_codecs": (list,),
        "index_location": (str,),
    },
    "transpose": {"order": (list, str)},
    "zlib": {"level": _INT},
    "zstd": {"level": _INT, "checksum": (bool, int)},
}
"""Codecs that only convert numbers and bytes; `pickle`, which runs code, is not among them."""

_RANGES = {"elementsize": (1, _MAX_ELEMENT_BYTES), "format": (0, 3)}
_CHOICES = {"endian": ("little", "big"), "location": ("start", "end")}

SHAPING = frozenset(("bytes", "transpose", SHARDING))
COMPRESSIONS = tuple(sorted(set(_SETTINGS) - SHAPING))
INDEX_CODECS = frozenset(("bytes", *_CHECKSUMS))
"""The codecs of a shard's index, whose encoded size has to be known."""


def find_wrong_setting(codec: Codec) -> str | None:
    """The name of a setting whose value has a wrong type or is out of range; None if all are right.

    Settings that decoding does not need may be missing, and unknown ones are ignored.
    """
    for name, types in _SETTINGS[codec.name].items():
        if name not in codec.settings:
            continue
        value = codec.settings[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return name
        low, high = _RANGES.get(name, (-(1 << 63), 1 << 63))
        if isinstance(value, int) and not low <= value <= high:
            return name
        if isinstance(value, str) and value not in _CHOICES.get(name, (value,)):
            return name
    if codec.name == "delta":
        has_astype = codec.settings.get("astype") is not None
        names = ["dtype", "astype"] if has_astype else ["dtype"]
        return next((n for n in names if not _is_number(codec.settings.get(n))), None)
    if codec.name == "lzma" and not _are_filters(codec.settings.get("filters")):
        return "filters"
    return None


def _is_number(name: object) -> bool:
    """Whether this is the name of an integer or float type."""
    try:
        return isinstance(name, str) and np.dtype(name).kind in "iuf"
    except (TypeError, ValueError, SyntaxError):
        return False


def _are_filters(filters: object) -> bool:
    """Whether these are filters of lzma, with plain numbers and a dictionary of bounded size."""
    return filters is None or (
        isinstance(filters, list)
        and len(filters) <= 4
        and all(isinstance(f, dict) and type(f.get("id")) is int for f in filters)
        and all(type(v) is int and 0 <= v < 1 << 63 for f in filters for v in f.values())
        and all(f.get("dict_size", 0) <= _LZMA_MEMORY // 2 for f in filters)
    )


# ---- decoding


def decode(codec: Codec, data: Bytes, size: DecodedSize) -> Bytes:
    """The bytes that `codec`, which encodes bytes as bytes, made `data` of.

    Raises:
        DecodeError: the data is damaged, or decodes to another size.
        MissingPackageError: the codec needs numcodecs, which is not installed.
    """
    if codec.name in _CHECKSUMS:
        out = _without_checksum(codec, data)
        size.check(out.size)
        return out
    if codec.name == "shuffle":
        size.check(data.size)
        return _unshuffle(data, codec.settings.get("elementsize") or 1)
    if codec.name == "delta":
        return _add_up(codec, data, size)
    if codec.name in _NUMCODECS:
        return _NUMCODECS[codec.name](data, size)
    return _inflate(_STREAMS[codec.name](codec.settings), data, size)


def _delta_types(codec: Codec) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The type of the elements, and that of the stored differences."""
    kind = np.dtype(codec.settings["dtype"])
    return kind, np.dtype(codec.settings.get("astype") or kind)


def _without_checksum(codec: Codec, data: Bytes) -> Bytes:
    if data.size < CHECKSUM_BYTES:
        raise DecodeError(f"{data.size} bytes are too few for a checksum")
    default = "start" if codec.name in ("adler32", "crc32") else "end"
    is_first = (codec.settings.get("location") or default) == "start"
    body = data[CHECKSUM_BYTES:] if is_first else data[:-CHECKSUM_BYTES]
    stored = data[:CHECKSUM_BYTES] if is_first else data[-CHECKSUM_BYTES:]
    if codec.name in ("fletcher32", "jenkins_lookup3"):
        settings = {k: v for k, v in codec.settings.items() if k == "initval"}
        checks = _numcodecs().registry.get_codec({"id": codec.name, **settings})
        try:
            return np.frombuffer(checks.decode(np.ascontiguousarray(data)), np.uint8)
        except (RuntimeError, ValueError) as e:
            raise DecodeError("wrong checksum") from e
    compute: dict[str, Callable[[bytes], int]] = {
        "adler32": zlib.adler32,
        "crc32": zlib.crc32,
        "crc32c": crc32c,
    }
    if compute[codec.name](body.tobytes()) != int.from_bytes(stored.tobytes(), "little"):
        raise DecodeError("wrong checksum")
    return body


def _unshuffle(data: Bytes, element_bytes: int) -> Bytes:
    if data.size % element_bytes:
        raise DecodeError(f"{data.size:,} bytes are not whole elements of {element_bytes}")
    return np.ascontiguousarray(data.reshape(element_bytes, -1).T).reshape(-1)


def _add_up(codec: Codec, data: Bytes, size: DecodedSize) -> Bytes:
    """Elements from their differences."""
    kind, stored = _delta_types(codec)
    if data.size % stored.itemsize:
        raise DecodeError(f"{data.size:,} bytes are not whole elements of {stored.itemsize}")
    size.check(data.size // stored.itemsize * kind.itemsize)
    differences = np.ascontiguousarray(data).view(stored)
    out = np.empty(differences.shape, kind)
    with np.errstate(all="ignore"):
        np.cumsum(differences, out=out)
    return out.view(np.uint8)


class _Stream(Protocol):
    """A decompressor that is fed, and gives a limited number of bytes at a time."""

    @property
    def eof(self) -> bool:
        """Whether the end of the stream was reached."""

    @property
    def needs_input(self) -> bool:
        """Whether all input was consumed."""

    @property
    def unused_data(self) -> bytes:
        """The input after the end of the stream."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Decode `data` after what remains of earlier input, up to `max_length` bytes."""


class _ZlibStream:
    """zlib's decompressor, with the input that it has not consumed."""

    def __init__(self, wbits: int) -> None:
        self._stream, self._rest = zlib.decompressobj(wbits), b""

    @property
    def eof(self) -> bool:
        """Whether the end of the stream was reached."""
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        """Whether all input was consumed."""
        return not self._rest

    @property
    def unused_data(self) -> bytes:
        """The input after the end of the stream."""
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Decode `data` after what remains of earlier input, up to `max_length` bytes."""
        out = self._stream.decompress(self._rest + data, max_length)
        self._rest = self._stream.unconsumed_tail
        return out


def _open_lzma(settings: Mapping[str, Any]) -> Callable[[], _Stream]:
    container = settings.get("format", lzma.FORMAT_XZ)
    if container == lzma.FORMAT_RAW:
        return lambda: lzma.LZMADecompressor(container, filters=settings.get("filters"))
    return lambda: lzma.LZMADecompressor(lzma.FORMAT_AUTO, memlimit=_LZMA_MEMORY)


_STREAMS: dict[str, Callable[[Mapping[str, Any]], Callable[[], _Stream]]] = {
    "bz2": lambda settings: bz2.BZ2Decompressor,
    "gzip": lambda settings: lambda: _ZlibStream(16 + zlib.MAX_WBITS),
    "lzma": _open_lzma,
    "zlib": lambda settings: lambda: _ZlibStream(zlib.MAX_WBITS),
}


def _inflate(open_stream: Callable[[], _Stream], data: Bytes, size: DecodedSize) -> Bytes:
    """Decode streams, one after another, to a buffer of the expected size."""
    out = np.empty(size.num_bytes, np.uint8)
    filled = 0
    try:
        for part in _stream_parts(open_stream, data):
            size_after = filled + len(part)
            if size_after > size.num_bytes:
                raise DecodeError(f"more than the expected {size.num_bytes:,} bytes")
            out[filled:size_after] = np.frombuffer(part, np.uint8)
            filled = size_after
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as e:
        raise e if isinstance(e, DecodeError) else DecodeError(str(e)) from e
    size.check(filled)
    return out[:filled]


def _stream_parts(open_stream: Callable[[], _Stream], data: Bytes) -> Iterator[bytes]:
    """The decoded bytes of all streams in `data`, in parts of a bounded size."""
    stream, position, rest = open_stream(), 0, b""
    while True:
        given = rest
        if not given and stream.needs_input and position < data.size:
            given = data[position : position + _INPUT_BYTES].tobytes()
            position += len(given)
        rest = b""
        part = stream.decompress(given, _OUTPUT_BYTES)
        if part:
            yield part
        if stream.eof:
            rest = stream.unused_data.lstrip(b"\0")  # the padding that a file of gzip may have
            while not rest and position < data.size:
                rest = data[position : position + _INPUT_BYTES].tobytes().lstrip(b"\0")
                position += _INPUT_BYTES
            if not rest:
                return
            stream = open_stream()
        elif not part and not given and stream.needs_input:
            raise DecodeError("the compressed bytes end early")


def _numcodecs() -> Any:
    try:
        import numcodecs
        import numcodecs.registry
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "decoding these zarr chunks needs numcodecs", hint="pip install 'megtool[zarr]'"
        ) from e
    return numcodecs


def _decode_with_numcodecs(name: str, data: Bytes, out: Bytes) -> None:
    """Decode `data` to `out`, whose size is the one that the data claims."""
    codec = _numcodecs().registry.get_codec({"id": name})
    try:
        codec.decode(np.ascontiguousarray(data), out)
    except (RuntimeError, ValueError, TypeError) as e:
        raise DecodeError(str(e)[:200]) from e


def _decode_lz4(data: Bytes, size: DecodedSize) -> Bytes:
    if data.size < 4:
        raise DecodeError(f"{data.size} bytes are too few for lz4")
    claimed = int.from_bytes(data[:4].tobytes(), "little")
    size.check(claimed)
    out = np.empty(claimed, np.uint8)
    _decode_with_numcodecs("lz4", data, out)
    return out


def _decode_blosc(data: Bytes, size: DecodedSize) -> Bytes:
    if data.size < _BLOSC_HEADER_BYTES:
        raise DecodeError(f"{data.size} bytes are too few for blosc")
    claimed, block, stored = np.frombuffer(data[4:16].tobytes(), "<u4").tolist()
    size.check(claimed)
    if stored != data.size or block > max(claimed, 1):
        raise DecodeError(f"a blosc header of {stored:,} bytes, in blocks of {block:,}")
    out = np.empty(claimed, np.uint8)
    _decode_with_numcodecs("blosc", data, out)
    return out


def _decode_zstd(data: Bytes, size: DecodedSize) -> Bytes:
    frames = list(_zstd_frames(data))
    sizes = [claimed for _, claimed in frames]
    if sizes.count(None) > 1 or (None in sizes and not size.is_exact):
        raise DecodeError("several zstd frames, one of which does not name its size")
    total = sum(n for n in sizes if n is not None)
    if None in sizes:
        DecodedSize(size.num_bytes, False).check(total)
        sizes[sizes.index(None)] = size.num_bytes - total
        total = size.num_bytes
    size.check(total)
    out, position = np.empty(total, np.uint8), 0
    for (frame, _), num_bytes in zip(frames, sizes, strict=True):
        end = position + (num_bytes or 0)
        if num_bytes:
            _decode_with_numcodecs("zstd", frame, out[position:end])
        position = end
    return out


def _zstd_frames(data: Bytes) -> Iterator[tuple[Bytes, int | None]]:
    """The zstd frames in `data`, and the decoded size that each claims."""
    view, position = data.data, 0

    def number(first: int, length: int) -> int:
        if first + length > len(view):
            raise DecodeError("the compressed bytes end early")
        return int.from_bytes(view[first : first + length], "little")

    while position < len(view) or not position:
        start, magic = position, number(position, 4)
        if magic & ~0xF == _ZSTD_SKIPPABLE:
            position += 8 + number(position + 4, 4)
            continue
        if magic != _ZSTD_MAGIC:
            raise DecodeError("no zstd frame")
        flags = number(position + 4, 1)
        is_single = bool(flags & 0x20)
        position += 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
        width = (1 if is_single else 0, 2, 4, 8)[flags >> 6]
        claimed = number(position, width) + (256 if width == 2 else 0) if width else None
        position += width
        is_last = False
        while not is_last:
            block = number(position, 3)
            is_last = bool(block & 1)
            position += 3 + (1 if (block >> 1) & 3 == 1 else block >> 3)
        position += 4 if flags & 4 else 0
        if position > len(view):
            raise DecodeError("the compressed bytes end early")
        yield data[start:position], claimed


_NUMCODECS: dict[str, Callable[[Bytes, DecodedSize], Bytes]] = {
    "blosc": _decode_blosc,
    "lz4": _decode_lz4,
    "zstd": _decode_zstd,
}
