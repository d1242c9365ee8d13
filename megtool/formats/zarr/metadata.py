"""The metadata of one zarr array, v2 (`.zarray`) or v3 (`zarr.json`), read strictly.

Sources: the zarr v2 and v3 specifications (zarr-specs.readthedocs.io), and tensorstore's additional
dtypes `bfloat16` and `float8_*`, in v2 as well.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DTYPES, DType, dtype
from megtool.errors import FormatError
from megtool.formats.header_reader import DAMAGED, short_repr
from megtool.formats.zarr.codecs import (
    COMPRESSIONS,
    INDEX_CODECS,
    SHAPING,
    SHARDING,
    Codec,
    find_wrong_setting,
)
from megtool.tensors.box import numel
from megtool.tensors.catalogue import MAX_DIMS
from megtool.transport.cast import encode_element

DTYPE_ATTRIBUTE = "megtool_dtype"
"""The attribute that names the dtype whose bits are stored as unsigned integers."""

ONLY_TENSORSTORE = frozenset(
    d.name for d in DTYPES if d.name == "bfloat16" or d.name.startswith("float8_")
)
"""Dtypes that tensorstore supports and zarr-python does not."""

_DTYPES = {d.name: d for d in DTYPES}
_V2_DTYPES = {np.dtype(d.numpy).str[1:]: d for d in DTYPES if d.name not in ONLY_TENSORSTORE}
_MAX_NESTED_SHARDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The position of a v3 shard's index, and whether it has a checksum."""

    at_end: bool
    checksum: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMetadata:
    """One array.

    `chunk` is the shape of one file; `inner` is the shape encoded at a time, the same unless
    a shard with an index that can be read by itself. `codecs` encode an `inner`. `is_raw`: this
    gives its little-endian elements, in row-major order, or column-major order if
    `is_column_major`, padded to full size at the edges of the array. `fill`
    is one element of missing chunks, as an unsigned integer of its width. `is_zarr_python_dtype`:
    zarr-python supports the stored dtype.
    """

    version: int
    shape: tuple[int, ...]
    dtype: DType
    chunk: tuple[int, ...]
    inner: tuple[int, ...]
    is_raw: bool
    fill: NDArray[Any]
    separator: str
    prefix: str
    is_zarr_python_dtype: bool = True
    is_column_major: bool = False
    index: ShardIndex | None = None
    codecs: tuple[Codec, ...] = ()

    @property
    def is_sharded(self) -> bool:
        """Whether a file holds several encoded chunks, and an index of them."""
        return self.index is not None

    @property
    def inner_bytes(self) -> int:
        """Bytes of one decoded `inner`."""
        return numel(self.inner) * self.dtype.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of `inner` chunks in every dimension."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.inner, strict=True))

    def key(self, position: tuple[int, ...]) -> str:
        """The path of a chunk file, relative to the array."""
        name = self.separator.join(map(str, position))
        return self.separator.join(p for p in (self.prefix, name) if p) or "0"


class _Reader:
    """Reads and validates members of a JSON object."""

    def __init__(self, data: Any, file: Path) -> None:
        self.file = file
        self.data = self.members(data, "the metadata")

    def error(self, message: str, hint: str = DAMAGED) -> FormatError:
        return FormatError(message, file=self.file, hint=hint)

    def members(self, value: Any, label: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"{label} is {short_repr(value)}, not a JSON object")
        return value

    def named(self, value: Any, label: str) -> tuple[str, dict[str, Any]]:
        """An extension of v3: a name, and its configuration."""
        if isinstance(value, str):
            return value, {}
        extension = self.members(value, label)
        if not isinstance(extension.get("name"), str):
            raise self.error(f"{label} has the name {short_repr(extension.get('name'))}")
        return extension["name"], self.members(
            extension.get("configuration", {}), f"the {label}'s settings"
        )

    def items(self, value: Any, label: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.error(f"{label} is {short_repr(value)}, not a list")
        return value

    def sizes(self, value: Any, label: str, least: int) -> tuple[int, ...]:
        sizes = self.items(value, label)
        if len(sizes) > MAX_DIMS or any(type(n) is not int or n < least for n in sizes):
            raise self.error(f"{label} is {short_repr(value)}")
        if math.prod(sizes) >= 1 << 62:
            raise self.error(f"{label} {short_repr(value)} has too many elements")
        return tuple(sizes)

    def grid(self, shape: tuple[int, ...], value: Any, label: str) -> tuple[int, ...]:
        chunk = self.sizes(value, label, 1)
        if len(chunk) != len(shape):
            raise self.error(f"{label} {list(chunk)} does not fit the shape {list(shape)}")
        return chunk

    def choice(self, value: Any, label: str, choices: tuple[Any, ...]) -> Any:
        if value not in choices or isinstance(value, bool):
            raise self.error(
                f"{label} is {short_repr(value)}", f"known: {', '.join(map(str, choices))}"
            )
        return value

    def codec(self, name: object, settings: dict[str, Any], known: Collection[str]) -> Codec:
        """A codec of one of the `known` names, whose settings have the right types."""
        plain = name.removeprefix("numcodecs.") if isinstance(name, str) else ""
        if plain not in known:
            raise self.error(f"codec {short_repr(name)} is unknown", f"known: {' '.join(known)}")
        codec = Codec(plain, settings)
        if wrong := find_wrong_setting(codec):
            raise self.error(f"codec {plain} has {wrong} {short_repr(settings.get(wrong))}")
        return codec

    def bits(self, value: Any) -> Any:
        """The fill value of untyped elements (base64) in the notation of v3."""
        if not isinstance(value, str):
            return value
        try:
            return "0x" + base64.b64decode(value, validate=True)[::-1].hex()
        except ValueError as e:
            raise self.error(f"the fill value {short_repr(value)} is not base64") from e

    def fill(self, value: Any, kind: DType) -> NDArray[Any]:
        width = f"<u{kind.itemsize}"
        try:
            if value is None:
                return np.zeros(1, width)
            if isinstance(value, str) and value.startswith("0x"):
                return np.array([int(value, 16)]).astype(np.uint64).astype(width)
            if isinstance(value, list):
                value = complex(*map(float, value))
            elif isinstance(value, str):
                value = float(value)
            elif not isinstance(value, int | float):
                raise ValueError
            return encode_element(value, kind).view(width).reshape(1)
        except (ValueError, TypeError, OverflowError) as e:
            raise self.error(f"the fill value {short_repr(value)} is not a {kind}") from e


def read_v2(data: Any, *, file: Path, void_is_bfloat16: bool = False) -> ArrayMetadata:
    """Parse the array metadata of a `.zarray`.

    Megatron's zarr backend stored bfloat16 as two untyped bytes (`|V2`) if tensorstore was missing:
    `void_is_bfloat16` reads them as bfloat16.

    Raises:
        FormatError: the metadata is invalid, or names something unknown.
    """
    r = _Reader(data, file)
    metadata = r.data
    r.choice(metadata.get("zarr_format"), "zarr_format", (2,))
    shape = r.sizes(metadata.get("shape"), "the shape", 0)
    chunk = r.grid(shape, metadata.get("chunks"), "the chunk shape")
    name = metadata.get("dtype")
    kind: DType | None = None
    fill, swapped = metadata.get("fill_value"), False
    if isinstance(name, str):
        if name in ONLY_TENSORSTORE:
            kind = _DTYPES[name]
        elif name in ("<V2", "|V2") and void_is_bfloat16:
            kind = dtype("bfloat16")
            fill = r.bits(fill)
        elif name[:1] in "<>|=":
            kind = _V2_DTYPES.get(name[1:])
            swapped = name[:1] == ">" and kind is not None and kind.itemsize > 1
    if kind is None:
        raise r.error(
            f"elements of type {short_repr(name)} are not supported", "convert them first"
        )
    order = r.choice(metadata.get("order", "C"), "the order", ("C", "F"))
    stored = [*r.items(metadata.get("filters") or [], "the filters"), metadata.get("compressor")]
    settings = [r.members(c, "a codec") for c in stored if c is not None]
    codecs = [r.codec(c.get("id"), c, COMPRESSIONS) for c in settings]
    reverse = list(range(len(shape)))[::-1]
    shaping = [Codec("transpose", {"order": reverse})] if order == "F" else []
    shaping.append(Codec("bytes", {"endian": "big" if swapped else "little"}))
    return ArrayMetadata(
        version=2,
        shape=shape,
        dtype=kind,
        chunk=chunk,
        inner=chunk,
        is_raw=not codecs and not swapped,
        is_column_major=order == "F",
        fill=r.fill(fill, kind),
        separator=r.choice(metadata.get("dimension_separator", "."), "the separator", (".", "/")),
        prefix="",
        is_zarr_python_dtype=kind.name not in ONLY_TENSORSTORE,
        codecs=(*shaping, *codecs),
    )


def read_v3(data: Any, *, file: Path) -> ArrayMetadata:
    """Parse the array metadata of a `zarr.json`.

    Raises:
        FormatError: the metadata is invalid, or names something unknown.
    """
    r = _Reader(data, file)
    metadata = r.data
    r.choice(metadata.get("zarr_format"), "zarr_format", (3,))
    shape = r.sizes(metadata.get("shape"), "the shape", 0)
    grid, settings = r.named(metadata.get("chunk_grid"), "the chunk grid")
    r.choice(grid, "the chunk grid", ("regular",))
    chunk = r.grid(shape, settings.get("chunk_shape"), "the chunk shape")
    name, _ = r.named(metadata.get("data_type"), "the data type")
    kind = _DTYPES.get(name)
    if kind is None:
        raise r.error(
            f"elements of type {short_repr(name)} are not supported", "convert them first"
        )
    stored = kind
    true_name = r.members(metadata.get("attributes", {}), "the attributes").get(DTYPE_ATTRIBUTE)
    if true_name is not None:
        kind = _DTYPES.get(true_name) if isinstance(true_name, str) else None
        if kind is None or stored.name != f"uint{8 * kind.itemsize}":
            raise r.error(f"elements of {stored} are declared as {short_repr(true_name)}")
    encoding, settings = r.named(metadata.get("chunk_key_encoding"), "the chunk key encoding")
    r.choice(encoding, "the chunk key encoding", ("default", "v2"))
    usual = "/" if encoding == "default" else "."
    separator = r.choice(settings.get("separator", usual), "the separator", (".", "/"))
    for transformer in r.items(
        metadata.get("storage_transformers", []), "the storage transformers"
    ):
        raise r.error(f"the storage transformer {short_repr(transformer)} is unknown")
    codecs = _read_codecs(r, metadata.get("codecs"), chunk)
    inner, index = chunk, None
    shard = codecs[0].settings if codecs[0].name == SHARDING and len(codecs) == 1 else None
    if shard is not None and _is_plain_index(shard["index_codecs"]):
        index = ShardIndex(
            at_end=shard["index_location"] == "end", checksum=len(shard["index_codecs"]) == 2
        )
        inner, codecs = shard["chunk_shape"], shard["codecs"]
    return ArrayMetadata(
        version=3,
        shape=shape,
        dtype=kind,
        chunk=chunk,
        inner=inner,
        is_raw=_is_raw(codecs, kind),
        fill=r.fill(metadata.get("fill_value"), stored),
        separator=separator,
        prefix="c" if encoding == "default" else "",
        is_zarr_python_dtype=stored.name not in ONLY_TENSORSTORE,
        index=index,
        codecs=codecs,
    )


def _read_codecs(
    r: _Reader, stored: Any, shape: tuple[int, ...], depth: int = 0
) -> tuple[Codec, ...]:
    """The codecs of chunks of `shape`: any transpositions, one that gives bytes, and any others.

    In a shard's settings, `codecs` and `index_codecs` are codecs too, and its defaults are filled
    in.
    """
    known = (*sorted(SHAPING), *COMPRESSIONS)
    codecs = [r.codec(*r.named(c, "a codec"), known) for c in r.items(stored or [], "the codecs")]
    number = next((k for k, c in enumerate(codecs) if c.name in ("bytes", SHARDING)), None)
    if number is None:
        raise r.error("no codec turns the elements into bytes")
    first, serializer, last = codecs[:number], codecs[number], codecs[number + 1 :]
    deltas = [c for c in first if c.name == "delta"]
    first = first[: len(first) - len(deltas)]
    orders = [_axes(r, c.settings.get("order"), len(shape)) for c in first if c.name == "transpose"]
    if len(orders) != len(first) or any(c.name in SHAPING for c in last):
        raise r.error(f"the codecs {' '.join(c.name for c in codecs)} are in a wrong order")
    for axes in orders:
        shape = tuple(shape[a] for a in axes)
    transposed = [Codec("transpose", {"order": axes}) for axes in orders]
    if serializer.name == SHARDING:
        if deltas or depth == _MAX_NESTED_SHARDS:
            raise r.error("shards are nested too deeply, or in another codec")
        serializer = _read_sharding(r, serializer.settings, shape, depth)
    elif deltas and serializer.settings.get("endian", "little") != "little":
        raise r.error("differences of big-endian elements are not supported")
    return (*transposed, serializer, *deltas, *last)


def _axes(r: _Reader, order: Any, ndim: int) -> list[int]:
    """The permutation of a transposition."""
    names = {"C": list(range(ndim)), "F": list(range(ndim))[::-1]}
    axes = names.get(order) if isinstance(order, str) else order
    if not isinstance(axes, list) or any(type(a) is not int for a in axes):
        raise r.error(f"codec transpose has order {short_repr(order)}")
    if sorted(axes) != list(range(ndim)):
        raise r.error(f"codec transpose has order {short_repr(order)} in {ndim} dimensions")
    return axes


def _read_sharding(
    r: _Reader, settings: Mapping[str, Any], shape: tuple[int, ...], depth: int
) -> Codec:
    inner = r.grid(shape, settings.get("chunk_shape"), "the inner chunk shape")
    if any(c % i for c, i in zip(shape, inner, strict=True)):
        raise r.error(f"inner chunks of {list(inner)} do not divide the shard {list(shape)}")
    location = settings.get("index_location", "end")
    counts = tuple(c // i for c, i in zip(shape, inner, strict=True))
    index_codecs = _read_codecs(r, settings.get("index_codecs"), (*counts, 2), depth + 1)
    if any(c.name not in INDEX_CODECS for c in index_codecs):
        raise r.error("the index of a shard is compressed")
    return Codec(
        SHARDING,
        {
            "chunk_shape": inner,
            "codecs": _read_codecs(r, settings.get("codecs"), inner, depth + 1),
            "index_codecs": index_codecs,
            "index_location": r.choice(location, "the index location", ("start", "end")),
        },
    )


def _is_plain_index(codecs: tuple[Codec, ...]) -> bool:
    """Whether an index is little-endian numbers, and at most a CRC-32C after them."""
    names = [c.name for c in codecs]
    is_plain = names == ["bytes"] or (
        names == ["bytes", "crc32c"] and codecs[1].settings.get("location") in (None, "end")
    )
    return is_plain and codecs[0].settings.get("endian") == "little"


def _is_raw(codecs: tuple[Codec, ...], kind: DType) -> bool:
    """Whether the only codec writes little-endian elements."""
    if [c.name for c in codecs] != ["bytes"]:
        return False
    return kind.itemsize == 1 or codecs[0].settings.get("endian") == "little"
