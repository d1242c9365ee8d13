"""The metadata of one zarr array, v2 (`.zarray`) or v3 (`zarr.json`), read strictly.

Sources: the zarr v2 and v3 specifications (zarr-specs.readthedocs.io), and tensorstore's additional
dtypes `bfloat16` and `float8_*`, in v2 as well.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import MAX_DIMS
from megtool.checkpoint.formats.header_reader import DAMAGED, short_repr
from megtool.checkpoint.transport.cast import encode_element
from megtool.dtypes import DTYPES, DType, dtype
from megtool.errors import FormatError
from megtool.tensors.box import numel

V2_NAME, V3_NAME = ".zarray", "zarr.json"
DTYPE_ATTRIBUTE = "megtool_dtype"
"""The attribute that names the dtype whose bits are stored as unsigned integers."""

ONLY_TENSORSTORE = frozenset(
    d.name for d in DTYPES if d.name == "bfloat16" or d.name.startswith("float8_")
)
"""Dtypes that tensorstore supports and zarr-python does not."""

_DTYPES = {d.name: d for d in DTYPES}
_V2_DTYPES = {np.dtype(d.numpy).str[1:]: d for d in DTYPES if d.name not in ONLY_TENSORSTORE}
_SHAPING = ("bytes", "transpose", "sharding_indexed")
_COMPRESSIONS = (
    "adler32 blosc bz2 crc32 crc32c delta fletcher32 gzip jenkins_lookup3 lz4 lzma shuffle zlib "
    "zstd"
)
"""Codecs that only convert numbers and bytes; `pickle`, which runs code, is not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The position of a v3 shard's index, and whether it has a checksum."""

    at_end: bool
    checksum: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMetadata:
    """One array.

    `chunk` is the shape of one file; `inner` is the shape encoded at a time, the same unless
    sharded. `is_raw`: an encoded `inner` is its little-endian elements, in row-major order, or
    column-major order if `is_column_major`, padded to full size at the edges of the array. `fill`
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

    @property
    def is_sharded(self) -> bool:
        """Whether a file holds several encoded chunks."""
        return self.index is not None or self.chunk != self.inner

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

    def compression(self, name: object) -> None:
        plain = name.removeprefix("numcodecs.") if isinstance(name, str) else ""
        if plain not in _COMPRESSIONS.split():
            raise self.error(f"codec {short_repr(name)} is unknown", f"known: {_COMPRESSIONS}")

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
    codecs = [metadata.get("compressor"), *r.items(metadata.get("filters") or [], "the filters")]
    codecs = [r.members(c, "a codec") for c in codecs if c is not None]
    for codec in codecs:
        r.compression(codec.get("id"))
    order = r.choice(metadata.get("order", "C"), "the order", ("C", "F"))
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
    codecs = [r.named(c, "a codec") for c in r.items(metadata.get("codecs"), "the codecs")]
    _check_codecs(r, codecs)
    inner, index = chunk, None
    is_raw = _is_raw(codecs, kind)
    if codecs and codecs[0][0] == "sharding_indexed":
        inner, index, is_raw = _sharding(r, codecs, chunk, kind)
    return ArrayMetadata(
        version=3,
        shape=shape,
        dtype=kind,
        chunk=chunk,
        inner=inner,
        is_raw=is_raw,
        fill=r.fill(metadata.get("fill_value"), stored),
        separator=separator,
        prefix="c" if encoding == "default" else "",
        is_zarr_python_dtype=stored.name not in ONLY_TENSORSTORE,
        index=index,
    )


_Codecs = list[tuple[str, dict[str, Any]]]


def _check_codecs(r: _Reader, codecs: _Codecs) -> None:
    if not codecs:
        raise r.error("no codec turns the elements into bytes")
    for name, _ in codecs:
        if name not in _SHAPING:
            r.compression(name)


def _is_raw(codecs: _Codecs, kind: DType) -> bool:
    """Whether the only codec writes little-endian elements."""
    if [name for name, _ in codecs] != ["bytes"]:
        return False
    return kind.itemsize == 1 or codecs[0][1].get("endian") == "little"


def _sharding(
    r: _Reader, codecs: _Codecs, chunk: tuple[int, ...], kind: DType
) -> tuple[tuple[int, ...], ShardIndex | None, bool]:
    """The inner chunk of a shard, its index (if supported), and whether chunks are raw."""
    settings = codecs[0][1]
    inner = r.grid(chunk, settings.get("chunk_shape"), "the inner chunk shape")
    if any(c % i for c, i in zip(chunk, inner, strict=True)):
        raise r.error(f"inner chunks of {list(inner)} do not divide the shard {list(chunk)}")
    inner_codecs = [
        r.named(c, "a codec") for c in r.items(settings.get("codecs"), "the inner codecs")
    ]
    _check_codecs(r, inner_codecs)
    index_codecs = [
        r.named(c, "a codec") for c in r.items(settings.get("index_codecs"), "index codecs")
    ]
    _check_codecs(r, index_codecs)
    location = r.choice(
        settings.get("index_location", "end"), "the index location", ("start", "end")
    )
    names = [name for name, _ in index_codecs]
    plain = (
        names in (["bytes"], ["bytes", "crc32c"]) and index_codecs[0][1].get("endian") == "little"
    )
    is_raw = plain and len(codecs) == 1 and _is_raw(inner_codecs, kind)
    index = ShardIndex(at_end=location == "end", checksum=len(names) == 2) if is_raw else None
    return inner, index, is_raw
