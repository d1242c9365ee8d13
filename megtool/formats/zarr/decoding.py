"""Decodes the chunks of zarr arrays: codecs, transpositions and shards within shards.

Every step has a limit of bytes that follows from the shape of the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.digests.crc32c import crc32c
from megtool.formats.zarr.codecs import (
    CHECKSUM_BYTES,
    SHARDING,
    Bytes,
    Codec,
    DecodedSize,
    DecodeError,
    decode,
    max_compressed_bytes,
)
from megtool.formats.zarr.metadata import ArrayMetadata, ShardIndex
from megtool.tensors.box import numel

MISSING = (1 << 64) - 1
"""Offset and length in a shard's index of a chunk that is not stored."""


def max_stored_bytes(m: ArrayMetadata) -> int:
    """More bytes than an encoded chunk of the array can have."""
    return _encoded_size(m.codecs, m.inner, m.dtype.itemsize).num_bytes


def decode_chunk(m: ArrayMetadata, data: bytes) -> NDArray[Any]:
    """The elements of one chunk as unsigned integers of their width, of the shape `m.inner`.

    Raises:
        DecodeError: the data is damaged, or decodes to another size.
        MissingPackageError: a codec needs numcodecs, which is not installed.
    """
    chunk = _Chunk(m.dtype.itemsize, 4 if m.dtype.name == "complex64" else m.dtype.itemsize, m.fill)
    return chunk.decode(m.codecs, np.frombuffer(data, np.uint8), m.inner)


def index_bytes(counts: Sequence[int], index: ShardIndex) -> int:
    """The size of the index of a shard of `counts` chunks."""
    return _ENTRY_BYTES * numel(counts) + (CHECKSUM_BYTES if index.checksum else 0)


def check_index(data: bytes, counts: Sequence[int], index: ShardIndex) -> NDArray[np.uint64]:
    """Offset and length of every chunk of a shard, uint64 `[*counts, 2]`.

    Raises:
        DecodeError: the index is incomplete, or its checksum is wrong.
    """
    if len(data) < index_bytes(counts, index):
        raise DecodeError(f"an index of {len(data):,} bytes is incomplete")
    entries = data[: _ENTRY_BYTES * numel(counts)]
    if index.checksum and crc32c(entries) != int.from_bytes(data[len(entries) :][:4], "little"):
        raise DecodeError("an index with a wrong checksum")
    return np.frombuffer(entries, "<u8").reshape(*counts, 2)


def _serializer(codecs: Sequence[Codec]) -> int:
    """The number of the codec that turns elements into bytes."""
    return next(k for k, c in enumerate(codecs) if c.name in ("bytes", SHARDING))


def _encoded_size(codecs: Sequence[Codec], shape: tuple[int, ...], itemsize: int) -> DecodedSize:
    """The size of an encoded chunk of `shape`."""
    return _encoded_sizes(codecs, shape, itemsize)[-1]


def _encoded_sizes(
    codecs: Sequence[Codec], shape: tuple[int, ...], itemsize: int
) -> list[DecodedSize]:
    """The sizes of a chunk as bytes: of its elements, and after each codec that follows."""
    number = _serializer(codecs)
    if codecs[number].name == SHARDING:
        settings = codecs[number].settings
        count = numel(shape) // numel(settings["chunk_shape"])
        inner = _encoded_size(settings["codecs"], settings["chunk_shape"], itemsize).num_bytes
        index = _encoded_size(settings["index_codecs"], (count, 2), 8).num_bytes
        sizes = [DecodedSize(count * max_compressed_bytes(inner) + index, False)]
    else:
        sizes = [DecodedSize(numel(shape) * itemsize, True)]
    for codec in codecs[number + 1 :]:
        sizes.append(sizes[-1].encoded(codec))
    return sizes


_ENTRY_BYTES = 16


class _Chunk:
    """The type of elements of `itemsize` bytes, whose parts of `part` bytes have a byte order."""

    def __init__(self, itemsize: int, part: int, fill: NDArray[Any]) -> None:
        self._itemsize, self._part, self._fill = itemsize, part, fill

    def decode(self, codecs: Sequence[Codec], data: Bytes, shape: tuple[int, ...]) -> NDArray[Any]:
        """The elements of a chunk, or of an index, in row-major order."""
        number = _serializer(codecs)
        transposed = shape
        for codec in codecs[:number]:
            transposed = tuple(transposed[a] for a in codec.settings["order"])
        sizes = _encoded_sizes(codecs, transposed, self._itemsize)
        for codec, size in zip(codecs[:number:-1], sizes[-2::-1], strict=True):
            data = decode(codec, data, size)
        if codecs[number].name == SHARDING:
            elements = self._decode_shard(codecs[number], data, transposed)
        else:
            sizes[0].check(data.size)
            is_big = codecs[number].settings.get("endian") == "big"
            parts = np.ascontiguousarray(data).view(f"<u{self._part}")
            parts = parts.byteswap() if is_big and self._part > 1 else parts
            elements = parts.view(f"<u{self._itemsize}").reshape(transposed)
        for codec in codecs[:number][::-1]:
            elements = elements.transpose(np.argsort(codec.settings["order"]))
        return np.ascontiguousarray(elements).reshape(shape)

    def _decode_shard(self, codec: Codec, data: Bytes, shape: tuple[int, ...]) -> NDArray[Any]:
        inner: tuple[int, ...] = codec.settings["chunk_shape"]
        counts = [n // i for n, i in zip(shape, inner, strict=True)]
        codecs = codec.settings["index_codecs"]
        num_bytes = _encoded_size(codecs, (*counts, 2), 8).num_bytes
        if num_bytes > data.size:
            raise DecodeError(f"{data.size:,} bytes are too few for the index of a shard")
        at_end = codec.settings["index_location"] == "end"
        stored = data[data.size - num_bytes :] if at_end else data[:num_bytes]
        index = _Chunk(8, 8, self._fill).decode(codecs, stored, (*counts, 2))
        out = np.full(shape, self._fill[0])
        for position in np.ndindex(*counts):
            offset, length = (int(n) for n in index[position])
            if offset == MISSING and length == MISSING:
                continue
            if offset + length > data.size:
                raise DecodeError(f"a chunk of {length:,} bytes at {offset:,} of a shard")
            box = tuple(slice(p * i, (p + 1) * i) for p, i in zip(position, inner, strict=True))
            part = data[offset : offset + length]
            out[box] = self.decode(codec.settings["codecs"], part, inner)
        return out
