"""Folders of torch_checkpointing, PyTorch's library for saving in the background.

A file `ITEM_RANK.pt` for each item (`model`, `optimizer`, `step` ...) and rank, and `metadata.pkl`,
which says how tensors are split over ranks. Source: torch_checkpointing 0.1.1.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megtool.console import several
from megtool.errors import FormatError, listed
from megtool.formats.auxiliary_files import find_auxiliary_files, find_megatron_auxiliary_files
from megtool.formats.header_reader import check_inside, list_names, read_exact
from megtool.formats.torch_checkpointing.dtensor_parts import cut_dtensor
from megtool.formats.torch_checkpointing.item_files import (
    ItemTensor,
    RankItem,
    find_differences,
    read_rank_item,
)
from megtool.formats.torch_checkpointing.layout import plan_torch_checkpointing_layout
from megtool.formats.torch_checkpointing.metadata import (
    MAX_METADATA_BYTES,
    MAX_RANKS,
    METADATA,
    ItemFile,
    NestedPath,
    ShardedTensor,
    ShardingTable,
    Window,
    read_metadata,
)
from megtool.pickles.torch_file import StorageBudget
from megtool.process.threads import map_in_threads
from megtool.tensors.box import numel
from megtool.tensors.box import strides as row_major
from megtool.tensors.catalogue import (
    Catalogue,
    Extents,
    IgnoredTensor,
    Replica,
    ShardOffsets,
    StoredFile,
    StoredObject,
)
from megtool.tensors.sharded import GlobalTensor, Shards, widest

__all__ = ["MODEL", "detect", "open_checkpoint", "plan_torch_checkpointing_layout"]

MODEL = "model"
"""The item whose tensors have their own names; others' names begin with the item's."""

_OPTIMIZER = "optimizer"
_RANK_FILE = re.compile(r"([A-Za-z0-9_-]+)_(\d{1,7})\.pt")
_WORLD_SIZE = re.compile(r"(.+)_world_size_([0-9]{1,6})_rank")
_VERL_ITEMS = {"optim": "optimizer", "extra_state": "extra_state"}
_VERL_CONFIG = "huggingface"
_OTHER_FORMATS = ("config.json", "model.safetensors", "model.safetensors.index.json", ".metadata")
_MAX_SMALL_BYTES = 1 << 30
_SAMPLE_BYTES = 64 << 10
_THREADS = 16
_STALE = "the file is stale, or belongs to another checkpoint"
_RESHARDER_HINT = (
    "save it with ItemSpec(resharder=DefaultResharder()), so that metadata.pkl says how it is split"
)


def detect(path: Path) -> bool:
    """Whether `path` is such a folder."""
    if not path.is_dir():
        return False
    names = list_names(path)
    if any((m := _RANK_FILE.fullmatch(n)) and int(m[2]) == 0 for n in names):
        return METADATA in names or not any(n in names for n in _OTHER_FORMATS)
    return METADATA in names and not any(n in names for n in _OTHER_FORMATS)


def open_checkpoint(path: Path, *, iteration: int | str | None = None) -> Catalogue:
    """The catalogue of a folder; it is one save, so that `iteration` has no meaning.

    Tensors of the item `model` have the names of its state dict, others begin with their item.
    Values that are not tensors are objects of kind `leaf`, those of the first rank. `metadata`
    gets:

    - `planner_data`: the position of each name in a nested state dict, as in a `dcp` checkpoint,
      except of the model's;
    - `nested_paths`: the item of each name and the keys in it, as they are stored;
    - `sequences`: what the item and keys of each list or tuple with tensors in it lead to;
    - `aliases`: the stored name of each tensor that has several names.

    Raises:
        FormatError: files are missing, damaged, hostile, or nothing says how a tensor is split.
        CoverageError: the ranks' parts do not tile their tensors.
    """
    names = list_names(path)
    files: list[StoredFile] = []
    table = _read_table(path, names, files)
    _check_ranks(path, names)
    jobs = _find_files(names, table)
    if not jobs:
        raise FormatError(
            "there is no file ITEM_RANK.pt in this folder", file=path, error_id="not-a-checkpoint"
        )
    budget = StorageBudget(_MAX_SMALL_BYTES)
    read = map_in_threads(
        lambda job: read_rank_item(path, *job, budget), jobs, threads=min(_THREADS, len(jobs))
    )
    return _Builder(path, table, read, files).build()


def _read_table(path: Path, names: Sequence[str], files: list[StoredFile]) -> ShardingTable | None:
    if METADATA not in names:
        return None
    check_inside(path, METADATA)
    stored = StoredFile.stat(path, METADATA)
    if stored.size > MAX_METADATA_BYTES:
        raise FormatError(
            f"the metadata has {stored.size:,} bytes, which is too much", file=path / METADATA
        )
    files.append(stored)
    return read_metadata(read_exact(path / METADATA, 0, stored.size), file=path / METADATA)


def _find_files(
    names: Sequence[str], table: ShardingTable | None
) -> list[tuple[str, int, ItemFile]]:
    """Every file with its item and rank: those that the metadata names, and those of the others."""
    out: dict[tuple[str, int], ItemFile] = {}
    for key, item in table.items.items() if table else ():
        for rank in range(table.world_size if table else 0):
            default = ItemFile(path=f"{key}_{rank}.pt", serialization="Torch")
            out[key, rank] = item.files.get(rank, default)
    for name in names:
        match = _RANK_FILE.fullmatch(name)
        if match and (table is None or match[1] not in table.items):
            out[_item_of(match[1]), int(match[2])] = ItemFile(path=name, serialization="Torch")
    return [(key, rank, out[key, rank]) for key, rank in sorted(out, key=_order)]


def _item_of(name: str) -> str:
    """Return the item of a file's name, of which verl says the number of ranks."""
    match = _WORLD_SIZE.fullmatch(name)
    return name if match is None else _VERL_ITEMS.get(match[1], match[1])


def _check_ranks(path: Path, names: Sequence[str]) -> None:
    """Raise if a file of a rank is missing where the names say how many there are."""
    present = set(names)
    items = {match[1] for name in names if (match := _RANK_FILE.fullmatch(name))}
    for item in sorted(items):
        world = _WORLD_SIZE.fullmatch(item)
        rank_numbers = range(min(int(world[2]), MAX_RANKS)) if world else ()
        missing = [n for rank in rank_numbers if (n := f"{item}_{rank}.pt") not in present]
        if missing:
            raise FormatError(
                f"{several(len(missing), 'file')} of ranks are missing: {listed(missing)}",
                file=path,
                hint="copy the whole folder",
                error_id="missing-shard",
            )


def _order(place: tuple[str, int]) -> tuple[bool, str, int]:
    return place[0] != MODEL, *place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One box of a tensor in a file."""

    window: Window
    file: int
    offset: int
    length: int
    strides: tuple[int, ...] | None


@dataclass(slots=True)
class _Builder:
    """Builds the catalogue from the files of all ranks."""

    root: Path
    table: ShardingTable | None
    read: list[RankItem]
    other_files: list[StoredFile]
    tensors: list[GlobalTensor] = field(default_factory=list)
    pieces: list[list[_Piece]] = field(default_factory=list)
    copies: list[tuple[int, int, _Piece]] = field(default_factory=list)
    ignored: list[IgnoredTensor] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def build(self) -> Catalogue:
        """The catalogue.

        Raises:
            FormatError: what `open_checkpoint` lists.
        """
        by_item: dict[str, list[tuple[int, RankItem]]] = defaultdict(list)
        for number, part in enumerate(self.read):
            by_item[part.item].append((number, part))
        prefixes = _prefixes(by_item)
        for item, parts in by_item.items():
            self._add_item(item, parts, prefixes[item])
        objects = self._objects(by_item, prefixes)
        catalogue = self._catalogue(objects)
        if differing := find_differences(self.read):
            self.warnings.append(
                f"{several(len(differing), 'value')} of later ranks differ from rank 0's and are "
                f"left out, such as {differing[0]}"
            )
        sequences = {
            (part.item, *path): kind for part in self.read for path, kind in part.sequences.items()
        }
        catalogue.metadata |= {
            "planner_data": self._planner_data(sequences),
            "nested_paths": self.paths,
            "sequences": sequences,
            "aliases": self.aliases,
        }
        return catalogue

    def _planner_data(self, sequences: dict[Any, str]) -> dict[str, tuple[str | int, ...]]:
        """Paths as torch.distributed.checkpoint has them: keys of dicts are strings."""
        out: dict[str, tuple[str | int, ...]] = {}
        for name, (item, *path) in self.paths.items():
            if item == MODEL:
                continue
            keys: list[str | int] = [name.split(".")[0] if path else name]
            for k, key in enumerate(path):
                keys.append(key if (item, *path[:k]) in sequences else str(key))
            out[name] = tuple(keys)
        return out

    def _add_item(self, item: str, parts: list[tuple[int, RankItem]], prefix: str) -> None:
        sharded = self.table.items.get(item) if self.table else None
        paths: dict[NestedPath, None] = dict.fromkeys(sharded.tensors if sharded else ())
        stored: dict[NestedPath, list[tuple[int, RankItem, ItemTensor]]] = defaultdict(list)
        joined = {".".join(map(str, p)): p for p in paths}
        for number, part in parts:
            for path, local in part.tensors.items():
                place = path
                if path not in paths and len(path) == 1:  # safetensors joins the keys
                    place = joined.get(str(path[0]), path)
                stored[place].append((number, part, local))
        by_bytes: dict[tuple[Any, ...], str] = {}
        for path in stored | paths:
            name = _name(prefix, path)
            holders = stored.get(path, [])
            if not holders:
                self._fail("is in no file, though metadata.pkl lists it", name)
            key = tuple(
                (n, x.offset, x.length, x.shape, x.strides, x.dtype.name) for n, _, x in holders
            )
            if holders[0][2].length and (first := by_bytes.setdefault(key, name)) != name:
                self.aliases[name] = first
                size = next(t for t in self.tensors if t.name == first).num_bytes
                self.ignored.append(
                    IgnoredTensor(name=name, reason=f"the same bytes as {first}", num_bytes=size)
                )
            elif sharded and path in sharded.tensors:
                self._add_sharded(name, sharded.tensors[path], holders)
            elif (tensor := self._placed(name, holders)) is not None:
                self._add_sharded(name, tensor, holders)
            else:
                self._add_whole(name, holders)
            self.paths[name] = (item, *path)

    def _add_sharded(
        self,
        name: str,
        tensor: ShardedTensor,
        holders: list[tuple[int, RankItem, ItemTensor]],
    ) -> None:
        """Add a tensor whose parts the metadata describes."""
        by_rank = {part.rank: (number, local) for number, part, local in holders}
        kind = holders[0][2].dtype
        boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], _Piece] = {}
        copies: list[tuple[tuple[tuple[int, ...], tuple[int, ...]], _Piece]] = []
        for part in tensor.parts:
            if part.rank not in by_rank:
                continue  # where no other rank has the box, the check of the catalogue says so
            number, local = by_rank[part.rank]
            file = self.root / self.read[number].stored.path
            if local.dtype.name != tensor.dtype or local.dtype is not kind:
                self._fail(f"it is {local.dtype}, and {tensor.dtype} elsewhere", name, file)
            if part.shape is not None and local.shape != part.shape and numel(part.shape):
                self._fail(
                    f"a part of shape {list(local.shape)}, and by its place {list(part.shape)}",
                    name,
                    file,
                )
            for window in part.windows:
                piece = self._piece(name, window, local, number, len(part.windows))
                box = window[0], window[1]
                if boxes.setdefault(box, piece) is not piece:
                    copies.append((box, piece))
        rows = {box: k for k, box in enumerate(boxes)}
        self.copies += [(len(self.tensors), rows[box], piece) for box, piece in copies]
        self._add(GlobalTensor(name=name, shape=tensor.shape, dtype=kind), [*boxes.values()])

    def _placed(
        self, name: str, holders: list[tuple[int, RankItem, ItemTensor]]
    ) -> ShardedTensor | None:
        """Return a tensor whose parts are DTensors that say where they lie; None for any other."""
        shape, kind = holders[0][2].global_shape, holders[0][2].dtype
        placements = {part.rank: x.placement for _, part, x in holders if x.placement is not None}
        if shape is None or len(placements) < len(holders):
            return None
        parts = cut_dtensor(shape, placements)
        if parts is None or any(x.global_shape != shape for _, _, x in holders):
            self._fail("its ranks' DTensors contradict each other", name)
        return ShardedTensor(shape=shape, dtype=kind.name, parts=parts)

    def _piece(
        self, name: str, window: Window, local: ItemTensor, number: int, count: int
    ) -> _Piece:
        """The bytes of a box that begins at a corner of a rank's part."""
        lo, hi, corner = window
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        steps = local.strides or row_major(local.shape)
        if len(corner) != len(local.shape) or any(
            c + n > size for c, n, size in zip(corner, shape, local.shape, strict=True)
        ):
            self._fail(f"a box of it is outside a part of shape {list(local.shape)}", name)
        start = sum(c * s for c, s in zip(corner, steps, strict=True))
        span = 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
        plain = all(
            n == 1 or s == w for n, s, w in zip(shape, steps, row_major(shape), strict=True)
        )
        if not plain and count > 1:
            self._fail("its ranks' parts alternate along a dim other than the first", name)
        return _Piece(
            window=window,
            file=number,
            offset=local.offset + start * local.dtype.itemsize,
            length=span * local.dtype.itemsize,
            strides=None if plain else steps,
        )

    def _add_whole(self, name: str, holders: list[tuple[int, RankItem, ItemTensor]]) -> None:
        """Add a tensor of which nothing says that it is split: each rank has the whole."""
        number, part, local = holders[0]
        for other_number, other, tensor in holders:
            if tensor.is_dtensor and tensor.global_shape != tensor.shape:
                self._fail(
                    f"a part of a DTensor of shape {list(tensor.global_shape or ())}, and nothing "
                    "says which",
                    name,
                    self.root / other.stored.path,
                    _RESHARDER_HINT,
                )
            if other_number != number and not self._are_copies((part, local), (other, tensor)):
                if local.dtype.is_float:
                    self._fail(
                        f"ranks {part.rank} and {other.rank} hold different tensors of this name, "
                        "and nothing says how they belong together",
                        name,
                        self.root / other.stored.path,
                        _RESHARDER_HINT,
                    )
                reason = "each rank has its own, and they have no common form"
                size = numel(local.shape) * local.dtype.itemsize
                self.ignored.append(IgnoredTensor(name=name, reason=reason, num_bytes=size))
                self.warnings.append(f"{name} is left out: {reason}")
                return
        zeros = (0,) * len(local.shape)
        if numel(local.shape):
            window = (zeros, local.shape, zeros)
            pieces = [self._piece(name, window, x, n, 1) for n, _, x in holders]
        else:
            pieces = []
        self.copies += [(len(self.tensors), 0, piece) for piece in pieces[1:]]
        self._add(GlobalTensor(name=name, shape=local.shape, dtype=local.dtype), pieces[:1])

    def _are_copies(
        self, first: tuple[RankItem, ItemTensor], second: tuple[RankItem, ItemTensor]
    ) -> bool:
        """Whether two ranks' tensors have one form, and the same bytes where some are looked at."""
        (a_part, a), (b_part, b) = first, second
        if (a.shape, a.dtype, a.strides, a.length) != (b.shape, b.dtype, b.strides, b.length):
            return False
        size = min(a.length, _SAMPLE_BYTES)
        for start in dict.fromkeys((0, (a.length - size) // 2, a.length - size)):
            left = read_exact(self.root / a_part.stored.path, a.offset + start, size)
            if left != read_exact(self.root / b_part.stored.path, b.offset + start, size):
                return False
        return True

    def _add(self, tensor: GlobalTensor, pieces: list[_Piece]) -> None:
        self.tensors.append(tensor)
        if not pieces and not tensor.numel:  # a tensor without elements has one shard
            zeros = (0,) * len(tensor.shape)
            pieces = [
                _Piece(
                    window=(zeros, tensor.shape, zeros), file=0, offset=0, length=0, strides=None
                )
            ]
        self.pieces.append(pieces)

    def _objects(
        self, by_item: dict[str, list[tuple[int, RankItem]]], prefixes: dict[str, str]
    ) -> dict[str, StoredObject]:
        out: dict[str, StoredObject] = {}
        names = {t.name for t in self.tensors} | {t.name for t in self.ignored}
        for item, parts in by_item.items():
            for path, value in parts[0][1].values.items():
                name = _name(prefixes[item], path)
                if name in names or name in out:
                    self._fail("two values have this name", name)
                out[name] = StoredObject(name=name, kind="leaf", value=value)
                self.paths[name] = (item, *path)
        return out

    def _catalogue(self, objects: dict[str, StoredObject]) -> Catalogue:
        flat = [(k, p) for k, pieces in enumerate(self.pieces) for p in pieces]
        first = np.cumsum([0, *map(len, self.pieces)])
        strides = {row: p.strides for row, (_, p) in enumerate(flat) if p.strides is not None}
        extents = Extents(
            file=np.array([p.file for _, p in flat], np.int32),
            offset=np.array([p.offset for _, p in flat], np.int64),
            length=np.array([p.length for _, p in flat], np.int64),
            contained=bool(strides),
        )
        replicas = [
            Replica(shard=int(first[t]) + k, file=p.file, offset=p.offset, length=p.length)
            for t, k, p in self.copies
        ]
        catalogue = Catalogue(
            format="torch_checkpointing",
            root=self.root,
            files=[part.stored for part in self.read] + self.other_files,
            tensors=self.tensors,
            shards=Shards.build(
                [(k, p.window[0], p.window[1], p.file) for k, p in flat], widest(self.tensors)
            ),
            extents=extents,
            objects=objects,
            auxiliary_files=self._auxiliary_files(),
            replicas=[] if strides else replicas,
            ignored=self.ignored,
            warnings=self.warnings,
        )
        catalogue.check()
        if strides:
            catalogue.locate_contained = lambda rows: ShardOffsets(
                offset=extents.offset[rows], strides=_select(strides, rows)
            )
        return catalogue

    def _auxiliary_files(self) -> dict[str, Path]:
        out = find_megatron_auxiliary_files(self.root, self.warnings)
        if (self.root / _VERL_CONFIG).is_dir():
            files = find_auxiliary_files(self.root / _VERL_CONFIG, self.warnings)
            out |= {f"hf/{name}": path for name, path in files.items()}
        return out

    def _fail(
        self, message: str, name: str, file: Path | None = None, hint: str = _STALE
    ) -> NoReturn:
        raise FormatError(message, file=file or self.root, tensor=name, hint=hint)


def _select(
    strides: dict[int, tuple[int, ...]], rows: NDArray[np.int64]
) -> dict[int, tuple[int, ...]]:
    return {k: strides[row] for k, row in enumerate(rows.tolist()) if row in strides}


def _prefixes(by_item: dict[str, list[tuple[int, RankItem]]]) -> dict[str, str]:
    """What names of each item begin with: nothing for the model, else the item, and `optimizer` for
    the one item that looks like an optimizer's state dict, whatever it is called."""
    out = {item: "" if item == MODEL else item for item in by_item}
    optimizers = [
        item
        for item, parts in by_item.items()
        if {p[0] for p in (*parts[0][1].tensors, *parts[0][1].values) if p}
        == {"state", "param_groups"}
    ]
    if len(optimizers) == 1 and _OPTIMIZER not in by_item and optimizers[0] != MODEL:
        out[optimizers[0]] = _OPTIMIZER
    return out


def _name(prefix: str, path: NestedPath) -> str:
    return ".".join(map(str, (prefix, *path) if prefix else path or (MODEL,)))
