"""Layout of a folder of zarr v3 arrays: raw chunks, many of them in one shard file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megtool.digests.crc32c import crc32c
from megtool.dtypes import DType
from megtool.errors import UsageError
from megtool.formats.zarr.compression import codec_metadata
from megtool.formats.zarr.folder import BACKEND, COMMON, V3_NAME
from megtool.formats.zarr.metadata import (
    DTYPE_ATTRIBUTE,
    ONLY_TENSORSTORE,
    ArrayMetadata,
    ShardIndex,
)
from megtool.pickles.zip_writer import encode_object
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue, Destination, Extents, StoredFile
from megtool.tensors.sharded import GlobalTensor, Shards, widest

OBJECTS = "objects"
DEFAULT_CHUNK_BYTES = 16 << 20
DEFAULT_SHARD_BYTES = 1 << 30

_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_RESERVED = (OBJECTS, COMMON, "hf", "tokenizer", "metadata.json", V3_NAME)
_MAX_NAME_BYTES = 255
_MAX_SIZE = 1 << 62


def plan_zarr_layout(
    tensors: Sequence[GlobalTensor],
    *,
    kind: str,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    shard_bytes: int | None = DEFAULT_SHARD_BYTES,
    chunks: Mapping[str, Sequence[int]] | None = None,
    objects: Mapping[str, Any] | None = None,
    common: Any = None,
    small_files: Mapping[str, bytes] | None = None,
    compress: str | None = None,
) -> Destination:
    """Plan one array per tensor, of raw chunks.

    With `compress` the metadata declares that compression, and `compression.compress` must be
    called after the raw bytes are written.

    Chunks are as many whole leading rows as fit `chunk_bytes` (parts of a row if a row is larger),
    so each is one run of the tensor. `chunks` gives other shapes, which must divide all but the
    first dimension they cut. Files hold several chunks, up to `shard_bytes`; None means one chunk
    per file. `kind` is `zarr` (readable by zarr-python: dtypes it lacks are stored as unsigned
    integers of their width, with the attribute `megtool_dtype`), `tensorstore` (dtypes by name), or
    `ocdbt` (for `tensorstore.write_database`: dtypes by name, one chunk per file).

    `objects` are bytes of ready items, or values to be saved as lists of one, in
    `objects/NAME.pt`. `common` is Megatron's common state (`common.pt`). `small_files` are further
    files.

    Raises:
        UsageError: a name cannot be a folder name, names collide, or a chunk does not fit.
    """
    other_files, final_files = dict(small_files or {}), dict[str, bytes]()
    shard_bytes = None if kind == "ocdbt" else shard_bytes
    _check_names([t.name for t in tensors], list(objects or {}))
    for name, value in (objects or {}).items():
        data = value if isinstance(value, bytes) else encode_object([value])
        other_files[f"{OBJECTS}/{name}.pt"] = data
    files = _Files(other_files)
    nodes: dict[str, dict[str, Any]] = {}
    for number, t in enumerate(tensors):
        chunk_shape = (chunks or {}).get(t.name)
        metadata = _metadata(t, chunk_bytes, shard_bytes, chunk_shape)
        nodes[t.name] = _array_json(t, metadata, kind, compress)
        for group in Path(t.name).parents:
            if group.name:
                nodes.setdefault(group.as_posix(), _group_json())
        files.add(number, t, metadata)
    other_files |= {f"{name}/{V3_NAME}": _json(node) for name, node in nodes.items()}
    root = _group_json()
    if kind == "zarr":  # zarr-python cannot open a group with a dtype it lacks
        consolidated = dict(sorted(nodes.items()))
        root["consolidated_metadata"] = {
            "kind": "inline",
            "must_understand": False,
            "metadata": consolidated,
        }
    if common is not None:
        other_files[COMMON] = encode_object(common)
        config = {
            "sharded_backend": BACKEND,
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        final_files["metadata.json"] = json.dumps(config).encode()
    final_files[V3_NAME] = _json(root)
    catalogue = Catalogue(
        format=kind,
        root=Path(),
        files=[StoredFile(path=p, size=n) for p, n in files.files],
        tensors=list(tensors),
        shards=Shards.build(files.rows, widest(tensors)),
        extents=Extents(
            file=np.array(files.file, np.int32),
            offset=np.array(files.offset, np.int64),
            length=np.array(files.length, np.int64),
        ),
        metadata={} if common is None else {"common": common},
    )
    return Destination(
        catalogue=catalogue,
        fragments=files.fragments,
        small_files=other_files,
        final_files=final_files,
    )


def _check_names(names: list[str], objects: list[str]) -> None:
    """Check that names are paths inside the folder, not nested and not reserved."""
    used = set(names)
    if len(used) != len(names):
        raise UsageError(f"two tensors are called {next(n for n in names if names.count(n) > 1)!r}")
    for name in [*names, *objects]:
        parts = name.split("/")
        bad = any(
            p in ("", ".", "..")
            or p.startswith("__")
            or len(p.encode(errors="replace")) > _MAX_NAME_BYTES - len(".pt")
            for p in parts
        )
        if bad or any(c in name for c in "\0\\"):
            raise UsageError(
                f"{name!r:.200} cannot be the path of an array", hint="rename it: --rename OLD=NEW"
            )
    for name in names:
        parts = name.split("/")
        if parts[0] in _RESERVED:
            raise UsageError(f"{parts[0]!r} is reserved by megtool", tensor=name)
        for k in range(1, len(parts)):
            if "/".join(parts[:k]) in used:
                raise UsageError(f"is inside the array {'/'.join(parts[:k])!r}", tensor=name)


# ---- the shapes of chunks and files


def _metadata(
    t: GlobalTensor,
    chunk_bytes: int,
    shard_bytes: int | None,
    chunk_shape: Sequence[int] | None,
) -> ArrayMetadata:
    if t.packing is not None:
        raise UsageError(
            f"elements packed as {t.packing!r} cannot be stored in zarr", tensor=t.name
        )
    if max(t.shape, default=0) > _MAX_SIZE:
        raise UsageError(
            f"its shape {list(t.shape)} is too large for an array that tensorstore reads",
            tensor=t.name,
            hint="--to safetensors holds it, --exclude leaves it out",
        )
    inner = (
        choose_chunk_shape(t.shape, t.dtype, chunk_bytes)
        if chunk_shape is None
        else tuple(chunk_shape)
    )
    if (
        len(inner) != len(t.shape)
        or min(inner, default=1) < 1
        or not is_contiguous_chunk(t.shape, inner)
    ):
        raise UsageError(
            f"chunks of {list(inner)} do not fit the shape {list(t.shape)}",
            tensor=t.name,
            hint="all but the first dimension that is cut must be multiples of the chunk",
        )
    budget = max(1, (shard_bytes or 0) // (numel(inner) * t.dtype.itemsize))
    chunks_per_file = [1] * len(inner)
    for d in reversed(range(len(inner))):
        num_chunks = max(1, -(-t.shape[d] // inner[d]))
        chunks_per_file[d] = min(num_chunks, budget)
        budget //= chunks_per_file[d]
        if chunks_per_file[d] < num_chunks:
            break
    chunk = tuple(i * n for i, n in zip(inner, chunks_per_file, strict=True))
    return ArrayMetadata(
        version=3,
        shape=t.shape,
        dtype=t.dtype,
        chunk=chunk,
        inner=inner,
        is_raw=True,
        fill=np.zeros(1, f"<u{t.dtype.itemsize}"),
        separator="/",
        prefix="c",
        is_zarr_python_dtype=t.dtype.name not in ONLY_TENSORSTORE,
        index=ShardIndex(at_end=True, checksum=True) if chunk != inner else None,
    )


def choose_chunk_shape(shape: Sequence[int], dtype: DType, num_bytes: int) -> tuple[int, ...]:
    """The shape of a chunk of about `num_bytes`: whole rows, or a part of one row."""
    out = [max(n, 1) for n in shape]
    for d in range(len(out)):
        inner = numel(out[d + 1 :]) * dtype.itemsize
        if inner <= num_bytes:
            out[d] = min(out[d], max(1, num_bytes // inner))
            break
        out[d] = 1
    return tuple(out)


def is_contiguous_chunk(shape: Sequence[int], chunk: Sequence[int]) -> bool:
    """Whether the data of an edge chunk is at its start: only the first dimension is cut."""
    first = next((d for d, c in enumerate(chunk) if c > 1), len(chunk))
    return not any(n % c for n, c in zip(shape[first + 1 :], chunk[first + 1 :], strict=True))


class _Files:
    """Builds the chunk files and the position of each chunk; one row per chunk."""

    def __init__(self, small: dict[str, bytes]) -> None:
        self.files: list[tuple[str, int]] = []
        self.rows: list[tuple[int, list[int], list[int], int]] = []
        self.file: list[int] = []
        self.offset: list[int] = []
        self.length: list[int] = []
        self.fragments: list[tuple[int, int, bytes]] = []

    def add(self, number: int, t: GlobalTensor, m: ArrayMetadata) -> None:
        """Plan the files of one tensor."""
        if not t.numel:
            return
        grid = [-(-n // c) for n, c in zip(t.shape, m.chunk, strict=True)]
        per = [c // i for c, i in zip(m.chunk, m.inner, strict=True)]
        for position in np.ndindex(*grid):
            end = 0
            index = np.full((numel(per), 2), (1 << 64) - 1, "<u8")
            for k, inside in enumerate(np.ndindex(*per)):
                coordinates = [p * n + i for p, n, i in zip(position, per, inside, strict=True)]
                lo = [a * i for a, i in zip(coordinates, m.inner, strict=True)]
                if any(x >= n for x, n in zip(lo, t.shape, strict=True)):
                    continue
                hi = [min(x + i, n) for x, i, n in zip(lo, m.inner, t.shape, strict=True)]
                num_bytes = numel([b - a for a, b in zip(lo, hi, strict=True)]) * t.dtype.itemsize
                self.rows.append((number, lo, hi, 0))
                self.file.append(len(self.files))
                self.offset.append(end)
                self.length.append(num_bytes)
                index[k] = end, m.inner_bytes
                end += m.inner_bytes
            if m.index is not None:
                data = index.tobytes()
                data += crc32c(data).to_bytes(4, "little")
                self.fragments.append((len(self.files), end, data))
                end += len(data)
            self.files.append((f"{t.name}/{m.key(position)}", end))


# ---- metadata


def _array_json(
    t: GlobalTensor, m: ArrayMetadata, kind: str, compress: str | None
) -> dict[str, Any]:
    codecs: list[dict[str, Any]] = [_LITTLE if t.dtype.itemsize > 1 else {"name": "bytes"}]
    if compress is not None:
        codecs.append(codec_metadata(compress, t.dtype))
    if m.index is not None:
        settings = {
            "chunk_shape": list(m.inner),
            "codecs": codecs,
            "index_codecs": [_LITTLE, {"name": "crc32c"}],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": settings}]
    is_stored_as_uint = kind == "zarr" and not m.is_zarr_python_dtype
    name = f"uint{8 * t.dtype.itemsize}" if is_stored_as_uint else t.dtype.name
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(t.shape),
        "data_type": name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(m.chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill_value(name),
        "codecs": codecs,
        "attributes": {DTYPE_ATTRIBUTE: t.dtype.name} if is_stored_as_uint else {},
        "storage_transformers": [],
    }


def _fill_value(name: str) -> Any:
    if name == "bool":
        return False
    if name.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if "float" in name else 0


def _group_json() -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def _json(node: dict[str, Any]) -> bytes:
    return json.dumps(node, indent=1).encode()
