"""The `metadata.pkl` of torch_checkpointing: how each item's tensors are split over ranks.

Source: torch_checkpointing 0.1.1, `distributed_metadata.py`, `dtensor_metadata.py` and
`default_metadata.py`. It is a pickle of dicts, lists and plain values: anything else is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from megtool.errors import FormatError
from megtool.formats.header_reader import DAMAGED, short_repr
from megtool.pickles import reader as pickle_reader
from megtool.pickles.writer import encode
from megtool.tensors.box import strides as row_major

METADATA = "metadata.pkl"
MAX_METADATA_BYTES = 1 << 30
MAX_RANKS = 1 << 20
MESH_NAME = "megtool"
"""The name of the mesh axis in what is written. No program names its own mesh so: it reads plain
tensors into DTensors only if the two meshes differ."""

VERSION = "2.0"
_VERSIONS = ("1.0", VERSION)
_MAX_RUNS = 1 << 16
_MAX_PARTS = 1 << 24

NestedPath = tuple[str | int, ...]
Runs = tuple[tuple[int, int, int], ...]
"""Runs `(first element of the tensor, first element of the rank's part, number)` of one dim."""

Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The box `lo`, `hi` of the whole tensor, and the corner of its elements in a rank's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one rank holds of a tensor: the shape of its part, and the boxes in it."""

    rank: int
    shape: tuple[int, ...] | None
    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensor:
    """A tensor by its shape, the name of its dtype, and the parts of the ranks."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[RankPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFile:
    """A rank's file of an item; `serialization` is `Torch`, `Safetensors`, `Json` or `Raw`."""

    path: str
    serialization: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedItem:
    """One item: its tensors by path, and the files by rank that are not at their default place."""

    tensors: Mapping[NestedPath, ShardedTensor]
    files: Mapping[int, ItemFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingTable:
    """The contents of a `metadata.pkl`."""

    items: Mapping[str, ShardedItem]
    world_size: int


def read_metadata(data: bytes, *, file: Path) -> ShardingTable:
    """Decode a `metadata.pkl` without running it.

    Raises:
        FormatError: it is damaged, hostile, or describes what no save has.
    """
    tree = pickle_reader.to_plain(pickle_reader.decode(data, file=file), file=file)
    return _Parser(file).parse(tree)


class _Parser:
    """Checks and converts the plain tree of a `metadata.pkl`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._world = 0
        self._coordinates: dict[tuple[int, ...], dict[int, int]] = {}
        self._num_parts = 0

    def parse(self, tree: Any) -> ShardingTable:
        """The table of the tree."""
        top = self._dict(tree, "the metadata")
        version = top.get("version", "1.0")
        if version not in _VERSIONS:
            self._fail(f"its version {short_repr(version)} is not known, only {VERSION} is")
        self._world = self._size(top.get("world_size"), "world_size")
        if not 0 < self._world <= MAX_RANKS:
            self._fail(f"world_size is {self._world}")
        metadata = self._dict(top.get("metadata"), "metadata")
        if version == "1.0":
            metadata = self._group_by_item(metadata, top.get("rank_to_layout_info_mappings"))
        items = {}
        for key, value in metadata.items():
            if not isinstance(key, str) or not is_item_key(key):
                self._fail(f"an item is called {short_repr(key)}")
            items[key] = self._item(key, self._dict(value, f"item {key!r}"))
        return ShardingTable(items=items, world_size=self._world)

    def _group_by_item(self, flat: dict[Any, Any], layouts: Any) -> dict[str, Any]:
        """Version 1.0 as version 2.0: its paths begin with the item."""
        by_rank = self._dict(layouts, "rank_to_layout_info_mappings")
        out: dict[str, Any] = {}
        for text, groups in flat.items():
            key, *rest = self._path(text)
            item = out.setdefault(
                str(key),
                {
                    "nested_path_to_metadata": {},
                    "rank_to_layout_info": {
                        rank: self._dict(layout, "a layout").get(key)
                        for rank, layout in by_rank.items()
                    },
                },
            )
            item["nested_path_to_metadata"][json.dumps(rest)] = groups
        return out

    def _item(self, key: str, item: dict[Any, Any]) -> ShardedItem:
        tensors: dict[NestedPath, ShardedTensor] = {}
        paths = self._dict(item.get("nested_path_to_metadata"), f"paths of item {key!r}")
        for text, groups in paths.items():
            path = self._path(text)
            if path in tensors:
                self._fail(f"item {key!r} has the path {short_repr(text)} twice")
            tensors[path] = self._tensor(".".join(map(str, (key, *path))), groups)
        files: dict[int, ItemFile] = {}
        layouts = self._dict(item.get("rank_to_layout_info"), f"files of item {key!r}")
        ranks = {self._rank(r) for r in layouts}
        if len(ranks) != len(layouts) or len(ranks) != self._world:
            self._fail(f"item {key!r} has files of {len(ranks)} ranks, world_size is {self._world}")
        for rank, layout in layouts.items():
            if layout is not None:
                files[self._rank(rank)] = self._item_file(self._dict(layout, "a layout"))
        return ShardedItem(tensors=tensors, files=files)

    def _item_file(self, layout: dict[Any, Any]) -> ItemFile:
        path, kind = layout.get("file_path"), layout.get("serialization_format")
        name = self._dict(kind, "a serialization format").get("type")
        known = ("Torch", "Safetensors", "Json", "Raw")
        if name not in [f"{k}Serialization" for k in known]:
            self._fail(f"the serialization format {short_repr(name)} is not known")
        return ItemFile(
            path=_check_file_path(path, self._file),
            serialization=name.removesuffix("Serialization"),
        )

    def _tensor(self, name: str, groups: Any) -> ShardedTensor:
        if not isinstance(groups, list) or not groups:
            self._fail("it has no group of ranks", name)
        shape: tuple[int, ...] | None = None
        dtype: str | None = None
        parts: list[RankPart] = []
        for group in groups:
            group = self._dict(group, name)
            packed = self._dict(group.get("sharding_metadata"), name)
            kind, data = packed.get("type"), self._dict(packed.get("data"), name)
            ranks = group.get("ranks")
            if not isinstance(ranks, tuple | list) or not ranks or len(ranks) > self._world:
                self._fail(f"its ranks are {short_repr(ranks)}", name)
            numbers = [self._rank(r, name) for r in ranks]
            self._num_parts += len(numbers)
            if self._num_parts > _MAX_PARTS:
                self._fail(f"it describes more than {_MAX_PARTS:,} parts of tensors")
            global_shape = self._sizes(data.get("global_shape"), name)
            if shape not in (None, global_shape) or dtype not in (None, data.get("dtype")):
                self._fail("its ranks disagree about its shape or dtype", name)
            shape, dtype = global_shape, data.get("dtype")
            if kind == "DTensorShardingMetadata":
                parts += self._dtensor_parts(data, global_shape, numbers, name)
            elif kind == "default_tensor_v1":
                parts += [self._listed_part(data, global_shape, r, name) for r in numbers]
            else:
                self._fail(f"sharding of the kind {short_repr(kind)} is not known", name)
        if not isinstance(dtype, str) or not dtype.startswith("torch.") or shape is None:
            self._fail(f"its dtype is {short_repr(dtype)}", name)
        if len({p.rank for p in parts}) != len(parts):
            self._fail("a rank holds it twice", name)
        parts.sort(key=lambda p: p.rank)
        return ShardedTensor(shape=shape, dtype=dtype.removeprefix("torch."), parts=tuple(parts))

    def _dtensor_parts(
        self, data: dict[Any, Any], shape: tuple[int, ...], ranks: list[int], name: str
    ) -> Iterator[RankPart]:
        mesh = self._dict(data.get("mesh_spec"), name)
        sizes = self._sizes(mesh.get("mesh_shape"), name)
        members = self._sizes(mesh.get("mesh_data"), name, most=self._world)
        if math.prod(sizes) != len(members) or len(set(members)) != len(members) or not sizes:
            self._fail(f"a mesh of shape {short_repr(sizes)} has {len(members)} ranks", name)
        places = self._coordinates.get(members)
        if places is None:
            places = self._coordinates[members] = {r: k for k, r in enumerate(members)}
        placements = self._placements(data.get("placements"), len(sizes), len(shape), name)
        for rank in ranks:
            place = places.get(rank)
            if place is None:
                self._fail(f"rank {rank} is not in its mesh", name)
            coordinate = _unravel(place, sizes)
            runs: list[Runs] = [((0, 0, n),) if n else () for n in shape]
            for (dim, split), size, index in zip(placements, sizes, coordinate, strict=True):
                if dim is not None:
                    runs[dim] = _take_chunk(runs[dim], size, index, split)
            if math.prod(max(len(r), 1) for r in runs) > _MAX_RUNS:
                self._fail("a rank's part is in too many pieces", name)
            yield RankPart(
                rank=rank,
                shape=tuple(sum(n for _, _, n in r) for r in runs),
                windows=tuple(_windows(runs)),
            )

    def _placements(
        self, value: Any, count: int, ndim: int, name: str
    ) -> list[tuple[int | None, int]]:
        """For each axis of the mesh, the dim it splits (None: none), and the split factor."""
        if not isinstance(value, list | tuple) or len(value) != count:
            self._fail(f"its placements are {short_repr(value)}", name)
        out: list[tuple[int | None, int]] = []
        for placement in value:
            placement = self._dict(placement, name)
            kind, dim = placement.get("type"), placement.get("dim")
            split = placement.get("split_factor", 1)
            if kind == "Replicate":
                out.append((None, 1))
                continue
            if kind not in ("Shard", "StridedShard"):
                self._fail(f"its placement {short_repr(kind)} is not known", name)
            if type(dim) is not int or not -ndim <= dim < ndim:
                self._fail(f"it is split along dim {short_repr(dim)} of {ndim}", name)
            if type(split) is not int or not 0 < split <= _MAX_RUNS:
                self._fail(f"its split factor is {short_repr(split)}", name)
            out.append((dim % ndim, split))
        return out

    def _listed_part(
        self, data: dict[Any, Any], shape: tuple[int, ...], rank: int, name: str
    ) -> RankPart:
        """The part of a rank whose boxes are listed one by one."""
        columns = [data.get(k) for k in ("global_offsets", "local_offsets", "local_sizes")]
        lists = [c for c in columns if isinstance(c, list | tuple)]
        if len(lists) != 3 or len({len(c) for c in lists}) != 1 or len(lists[0]) > _MAX_RUNS:
            self._fail("its offsets and sizes do not belong together", name)
        windows = []
        for start, local, size in zip(*lists, strict=True):
            lo, corner, sizes = (self._sizes(v, name) for v in (start, local, size))
            if not len(lo) == len(corner) == len(sizes) == len(shape):
                self._fail("a box of it has another number of dims", name)
            if math.prod(sizes):
                windows.append((lo, tuple(a + n for a, n in zip(lo, sizes, strict=True)), corner))
        return RankPart(rank=rank, shape=None, windows=tuple(windows))

    def _path(self, text: Any) -> NestedPath:
        try:
            value = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, list) or any(type(p) not in (str, int) for p in value):
            self._fail(f"{short_repr(text)} is no path")
        return tuple(value)

    def _rank(self, value: Any, name: str | None = None) -> int:
        if isinstance(value, str) and value.isdecimal() and len(value) < 10:
            value = int(value)
        if type(value) is not int or not 0 <= value < self._world:
            self._fail(f"{short_repr(value)} is no rank of {self._world}", name)
        return value

    def _dict(self, value: Any, what: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            self._fail(f"{what} is {short_repr(value)}, not a dict")
        return value

    def _size(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value < 1 << 62:
            self._fail(f"{what} is {short_repr(value)}")
        return value

    def _sizes(self, value: Any, name: str, *, most: int = 64) -> tuple[int, ...]:
        if not isinstance(value, list | tuple) or len(value) > most:
            self._fail(f"{short_repr(value)} are no sizes", name)
        return tuple(self._size(v, "a size") for v in value)

    def _fail(self, message: str, tensor: str | None = None) -> NoReturn:
        raise FormatError(message, file=self._file, tensor=tensor, hint=DAMAGED)


def is_item_key(key: str) -> bool:
    """Whether torch_checkpointing takes this name of an item."""
    return bool(key) and key.isascii() and key.replace("-", "a").replace("_", "a").isalnum()


def _check_file_path(path: Any, file: Path) -> str:
    parts = path.split("/") if isinstance(path, str) else []
    absurd = any(p in ("", ".", "..") or len(p.encode(errors="replace")) > 255 for p in parts)
    if not parts or absurd or len(parts) > 8 or any(c in path for c in "\0\\"):
        raise FormatError(
            f"an item in a file {path!r:.80} that leaves the folder",
            file=file,
            error_id="unsafe-path",
        )
    return str(path)


def _unravel(place: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for n in reversed(sizes):
        place, index = divmod(place, n)
        out.append(index)
    return tuple(reversed(out))


def _take_chunk(runs: Runs, count: int, index: int, split: int) -> Runs:
    """Chunk `index` of `count` near equal chunks of some runs, as torch.chunk cuts them.

    With `split` they are cut into so many pieces first, and each piece into `count` chunks, as a
    strided shard is.
    """
    total = sum(n for _, _, n in runs)
    piece = -(-total // split)
    out: list[tuple[int, int, int]] = []
    begin = 0
    for first in range(0, total, max(piece, 1)):
        last = min(first + piece, total)
        chunk = -(-(last - first) // count)
        lo = min(first + index * chunk, last)
        hi = min(lo + chunk, last)
        for start, local, n in runs:
            a, b = max(lo, local), min(hi, local + n)
            if a >= b:
                continue
            if out and out[-1][0] + out[-1][2] == start + a - local:
                out[-1] = (*out[-1][:2], out[-1][2] + b - a)
            else:
                out.append((start + a - local, begin, b - a))
            begin += b - a
    return tuple(out)


def _windows(runs: list[Runs]) -> Iterator[Window]:
    for choice in product(*runs):
        yield (
            tuple(a for a, _, _ in choice),
            tuple(a + n for a, _, n in choice),
            tuple(local for _, local, _ in choice),
        )


def write_metadata(items: Mapping[str, Mapping[NestedPath, ShardedRows]], ranks: int) -> bytes:
    """The bytes of a `metadata.pkl` of tensors whose rows are split over `ranks`."""
    metadata = {
        key: {
            "nested_path_to_metadata": {
                json.dumps(list(path), separators=(",", ":")): [_describe_rows(t, ranks)]
                for path, t in tensors.items()
            },
            "rank_to_layout_info": dict.fromkeys(range(ranks)),
        }
        for key, tensors in items.items()
    }
    return encode({"metadata": metadata, "world_size": ranks, "version": VERSION})


def _describe_rows(t: ShardedRows, ranks: int) -> dict[str, Any]:
    """The group of ranks that hold a tensor."""
    members = tuple(range(ranks if t.is_split else 1))
    mesh = {
        "device_type": "cpu",
        "mesh_shape": (len(members),),
        "mesh_data": members,
        "mesh_dim_names": (MESH_NAME,),
    }
    data = {
        "global_shape": list(t.shape),
        "dtype": f"torch.{t.dtype}",
        "stride": list(row_major(t.shape)),
        "mesh_spec": mesh,
        "placements": [{"type": "Shard", "dim": 0} if t.is_split else {"type": "Replicate"}],
    }
    packed = {"type": "DTensorShardingMetadata", "data": data}
    return {"sharding_metadata": packed, "ranks": members}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRows:
    """A tensor to write, split by rows over the ranks, or whole on the first one."""

    shape: tuple[int, ...]
    dtype: str
    is_split: bool
