"""Lay out a GGUF file; the gguf package writes the key-values of its header."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megtool.digests.embedded import METADATA_KEY, check_reserved, reserve_digests
from megtool.dtypes import dtype
from megtool.errors import MappingError
from megtool.formats.safetensors.reader import whole_shards
from megtool.number_formats.gguf import package, row_bytes
from megtool.tensors.catalogue import Catalogue, Destination, Extents, StoredFile
from megtool.tensors.sharded import GlobalTensor

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that are plain elements, by torch's name."""

INTEGER = "I32"
"""The type of tables of integers."""

_ELEMENTS = {**PLAIN, INTEGER: "int32"}
_ALIGNMENT = 32
_MAX_NAME = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor and its type: `kind` is GGUF's name of it, `shape` counts elements."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def stored(self) -> GlobalTensor:
        """What is written: plain elements, or rows of blocks as bytes."""
        if kind := _ELEMENTS.get(self.kind):
            return GlobalTensor(name=self.name, shape=self.shape, dtype=dtype(kind))
        width = row_bytes(f"gguf:{self.kind}", self.shape[-1])
        return GlobalTensor(name=self.name, shape=(*self.shape[:-1], width), dtype=dtype("uint8"))


def plan_gguf_file(
    tensors: Sequence[GgufTensor], keys: Mapping[str, Any], *, architecture: str, file: str
) -> Destination:
    """One file `file` of these tensors, in this order, each at a multiple of 32 bytes.

    Of `keys`, ints are u32, floats f32; lists are arrays of strings, i32 or f32. One more key has
    room for the digests.

    Raises:
        MappingError: a name is longer than llama.cpp reads.
        MissingPackageError: the gguf package is not installed.
    """
    for t in tensors:
        if len(t.name) > _MAX_NAME:
            raise MappingError(
                f"a name of {len(t.name)} letters is too long for GGUF", tensor=t.name
            )
    stored = [t.stored for t in tensors]
    room = {METADATA_KEY: reserve_digests([t.num_bytes for t in stored])}
    head = _head(tensors, {**keys, **room}, architecture)
    check_reserved(head, file)
    head += bytes(-len(head) % _ALIGNMENT)
    offsets, end = [], len(head)
    for tensor in stored:
        offsets.append(end)
        end += tensor.num_bytes + -tensor.num_bytes % _ALIGNMENT
    owner = np.zeros(len(stored), np.int32)
    catalogue = Catalogue(
        format="gguf",
        root=Path(),
        files=[StoredFile(path=file, size=end)],
        tensors=stored,
        shards=whole_shards(stored, owner),
        extents=Extents(
            file=owner,
            offset=np.array(offsets, np.int64),
            length=np.array([t.num_bytes for t in stored], np.int64),
        ),
        metadata={},
    )
    catalogue.check()
    return Destination(catalogue=catalogue, fragments=[(0, 0, head)])


def _head(tensors: Sequence[GgufTensor], keys: Mapping[str, Any], architecture: str) -> bytes:
    """Magic, key-values and tensor places, as the package's own writer makes them."""
    gguf = package()
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    for t in tensors:
        width = row_bytes(f"gguf:{t.kind}", t.shape[-1])
        writer.add_tensor_info(
            t.name,
            (*t.shape[:-1], width),
            np.dtype(np.uint8),
            t.stored.num_bytes,
            raw_dtype=gguf.GGMLQuantizationType[t.kind],
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head"
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return path.read_bytes()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        kind = package().GGUFValueType.STRING
        writer.add_key_value(key, value, kind)  # add_string leaves empty ones out
    else:
        writer.add_array(key, list(value))
