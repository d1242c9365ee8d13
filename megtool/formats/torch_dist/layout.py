"""Layout of a torch.distributed checkpoint, plain or for Megatron, before its data is written.

Each owner rank gets one data file, `__RANK_0.distcp`: consecutive items, each a container that
torch.load reads. Core versions before and after 0.19 both find the common state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import UsageError
from megtool.formats.save_folder import TRACKER, folder_name
from megtool.formats.torch_dist.metadata import MAX_NUMBER
from megtool.formats.torch_dist.metadata_writer import KeyPaths, write_metadata
from megtool.pickles.zip_writer import (
    TensorFrame,
    TensorItem,
    encode_object,
    tensor_frame,
)
from megtool.tensors.box import Ints, numel
from megtool.tensors.catalogue import Catalogue, Destination, Extents, StoredFile, StoredObject
from megtool.tensors.grouping import distinct, grouped
from megtool.tensors.sharded import GlobalTensor, Shards

COMMON_OBJECT = "common_state/shard_0_1"
COMMON_FILE, CONFIG_FILE, TRAIN_STATE = "common.pt", "metadata.json", "train_state.pt"
COMMON_OBJECT_SINCE = (0, 19)
"""The first core version that stores the common state as an object instead of a file."""

OLDEST_CORE = (0, 13)
"""The oldest core version whose format is known."""

_CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_CONFIG = {"common_backend": "torch", "common_backend_version": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSave:
    """What makes a checkpoint Megatron's: its `common` state, and one folder of a save folder.

    `iteration` names that folder, `release` when None. `core_version` (`0.19`) is the Megatron-Core
    that will read it; without it, every version can.
    """

    common: dict[str, Any]
    iteration: int | None = None
    core_version: str | None = None

    @property
    def folder(self) -> str:
        """The folder of the iteration, as a prefix of paths."""
        return f"{folder_name(self.iteration)}/"

    @property
    def keeps_common_object(self) -> bool:
        """Whether the common state is stored as an object instead of a file.

        Raises:
            UsageError: the core version is invalid.
        """
        version = self.core_version
        return version is not None and _parse_version(version) >= COMMON_OBJECT_SINCE


def plan_torch_dist_layout(
    tensors: Sequence[GlobalTensor],
    shards: Shards,
    *,
    num_files: int,
    objects: Mapping[str, Any] | None = None,
    small_files: Mapping[str, bytes] | None = None,
    key_paths: KeyPaths | None = None,
    megatron: MegatronSave | None = None,
) -> Destination:
    """Plan tensors in `num_files` files, one per owner rank; a rank without shards has none.

    Without `megatron`, the checkpoint is plain. `objects` are bytes of ready items, or trees of
    values (in a Megatron checkpoint a sharded object). `small_files` are further files by their
    path in the folder. `key_paths` (a plain checkpoint's `planner_data`) give positions in a nested
    state dict.

    Raises:
        UsageError: an owner is not a rank, names repeat, the common state is no dict, or a core
            version is invalid, or a shape is too large to be read back.
    """
    _check_request(tensors, shards, num_files, objects or {}, megatron)
    keeps_common_object = megatron is not None and megatron.keeps_common_object
    folder = megatron.folder if megatron else ""
    writer = _Files(shards.owner, has_objects=bool(objects) or keeps_common_object)
    object_extents: dict[str, tuple[int, int, int]] = {}
    common_objects: dict[str, Any] = {}
    if megatron is not None and keeps_common_object:
        common_objects[COMMON_OBJECT] = megatron.common
    items: dict[int, bytes] = {}  # large models repeat one empty object thousands of times
    for name, value in {**(objects or {}), **common_objects}.items():
        if isinstance(value, bytes):
            item = value
        elif (item := items.get(id(value), b"")) == b"":
            item = items[id(value)] = encode_object([value] if megatron else value)
        object_extents[name] = writer.add_object(item)
    items_laid = writer.add_tensors(tensors, shards)
    names = [f"__{rank}_0.distcp" for rank in writer.ranks]
    metadata = write_metadata(
        tensors,
        shards,
        names,
        items_laid.file,
        items_laid.item_offset,
        items_laid.item_length,
        object_extents,
        key_paths=None if megatron else key_paths or {},
    )
    catalogue = Catalogue(
        format="torch_dist" if megatron else "dcp",
        root=Path(),
        files=[
            StoredFile(path=folder + name, size=size)
            for name, size in zip(names, writer.end, strict=True)
        ],
        tensors=list(tensors),
        shards=shards,
        extents=Extents(file=items_laid.file, offset=items_laid.offset, length=items_laid.length),
        objects={
            name: StoredObject(name=name, kind="bytes", extent=extent)
            for name, extent in object_extents.items()
            if name not in common_objects
        },
        metadata={"common": megatron.common, "iteration": megatron.iteration} if megatron else {},
    )
    other_files = {folder + name: data for name, data in (small_files or {}).items()}
    if megatron is None:
        last = {".metadata": metadata}
    else:
        other_files |= {f"{folder}.metadata": metadata}
        if not keeps_common_object:
            other_files[f"{folder}{COMMON_FILE}"] = encode_object(megatron.common)
        if TRAIN_STATE in (small_files or {}):
            other_files[f"latest_{TRAIN_STATE}"] = other_files[folder + TRAIN_STATE]
        config = _CONFIG if keeps_common_object else _CONFIG | _COMMON_CONFIG
        last = {
            f"{folder}{CONFIG_FILE}": json.dumps(config).encode(),
            TRACKER: megatron.folder[:-1].encode()
            if megatron.iteration is None
            else str(megatron.iteration).encode(),
        }
    return Destination(
        catalogue=catalogue, fragments=writer.fragments, small_files=other_files, final_files=last
    )


def _parse_version(text: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)(?:\D|$)", text)
    if match is None:
        raise UsageError(
            f"the core version {text!r} is not a release of megatron-core",
            hint="for example 0.16 or 0.19",
        )
    version = int(match[1]), int(match[2])
    if version < OLDEST_CORE:
        least = ".".join(map(str, OLDEST_CORE))
        raise UsageError(
            f"core version {text!r} is older than {least}",
            hint=f"{least} and later are known: 0.19 and later store the common state elsewhere",
        )
    return version


def _check_request(
    tensors: Sequence[GlobalTensor],
    shards: Shards,
    num_files: int,
    objects: Mapping[str, Any],
    megatron: MegatronSave | None,
) -> None:
    names = [*(t.name for t in tensors), *objects]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UsageError(f"two tensors or objects are named {twice!r}")
    if packed := next((t for t in tensors if t.packing), None):
        raise UsageError(
            f"elements packed as {packed.packing!r} cannot be stored in this format",
            tensor=packed.name,
        )
    for t in tensors:
        # torch multiplies the sizes beside a zero, too.
        if numel([max(n, 1) for n in t.shape]) * t.dtype.itemsize >= MAX_NUMBER:
            raise UsageError(
                f"its shape {list(t.shape)} is too large for a torch.distributed checkpoint",
                tensor=t.name,
                hint="--to safetensors holds it, --exclude leaves it out",
            )
    if len(shards) and not 0 <= int(shards.owner.min()) <= int(shards.owner.max()) < num_files:
        raise UsageError(
            f"shards belong to rank {int(shards.owner.max())}, and there are {num_files} files"
        )
    if megatron is not None and not isinstance(megatron.common, dict):
        raise UsageError(
            f"the common state of a Megatron checkpoint is {megatron.common!r:.60}, not a dict"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ItemColumns:
    """The position of each shard's item, and of the raw bytes in it."""

    file: NDArray[np.int32]
    item_offset: Ints
    item_length: Ints
    offset: Ints
    length: Ints


class _Files:
    """Builds the data files: the current end of each, and the bytes around the data.

    The end of an item and the beginning of the next are one fragment, so that each is one write.
    """

    def __init__(self, owner: NDArray[np.int32], *, has_objects: bool) -> None:
        ranks = set(distinct(owner).tolist()) | ({0} if has_objects else set())
        self.ranks: list[int] = sorted(ranks)
        self.number = np.full(max(ranks, default=0) + 1, -1, np.int32)
        self.number[self.ranks] = np.arange(len(self.ranks), dtype=np.int32)
        self.end = [0] * len(self.ranks)
        self.fragments: list[tuple[int, int, bytes]] = []
        self._objects: list[bytes] = []
        self._tail: list[bytes] = [b""] * len(self.ranks)
        self._tail_at = [0] * len(self.ranks)

    def add_object(self, item: bytes) -> tuple[int, int, int]:
        """Append a whole item to the first file, before all tensors: `(file, offset, length)`."""
        offset = self.end[0]
        self._objects.append(item)
        self.end[0] += len(item)
        return 0, offset, len(item)

    def add_tensors(self, tensors: Sequence[GlobalTensor], shards: Shards) -> _ItemColumns:
        """Append the items of all shards, each to its owner's file."""
        file = self.number[shards.owner].astype(np.int32)
        frames, frame_index = _frames(tensors, shards)
        end, fragments = self.end, self.fragments
        tail, tail_at = self._tail, self._tail_at
        if self._objects:
            tail[0] = b"".join(self._objects)
        joined: dict[tuple[int, int], tuple[bytes, bytes, bytes]] = {}
        item_offset, paddings = [0] * len(shards), [0] * len(shards)
        for row, (number, kind) in enumerate(zip(file.tolist(), frame_index.tolist(), strict=True)):
            frame = frames[kind]
            item_offset[row] = start = end[number]
            paddings[row] = padding = frame.padding(start)
            item: TensorItem = frame.item(padding)
            end[number] = start + item.length
            if not frame.num_bytes:
                # An item without data has its padding inside a fragment: write it.
                zeros = bytes(item.offset - len(item.prefix))
                tail[number] += item.prefix + zeros + item.suffix
                continue
            key = id(tail[number]), id(item.prefix)
            fragment = joined.get(key)
            if fragment is None:
                fragment = tail[number], item.prefix, tail[number] + item.prefix
                joined[key] = fragment
            fragments.append((number, tail_at[number], fragment[2]))
            tail[number] = item.suffix
            tail_at[number] = start + item.offset + frame.num_bytes
        fragments += [(k, tail_at[k], data) for k, data in enumerate(tail) if data]
        head = np.array([f.head_bytes for f in frames], np.int64)[frame_index]
        length = np.array([f.num_bytes for f in frames], np.int64)[frame_index]
        suffix_bytes = np.array([f.tail_bytes for f in frames], np.int64)[frame_index]
        item_start, padded = np.array(item_offset, np.int64), head + np.array(paddings, np.int64)
        return _ItemColumns(
            file=file,
            item_offset=item_start,
            item_length=padded + length + suffix_bytes,
            offset=item_start + padded,
            length=length,
        )


def _frames(
    tensors: Sequence[GlobalTensor], shards: Shards
) -> tuple[list[TensorFrame], NDArray[np.int64]]:
    """The distinct frames of all items, and the frame of each shard."""
    if not len(shards):
        return [], np.zeros(0, np.int64)
    kinds = {t.dtype.name: t.dtype for t in tensors}
    order = {name: i for i, name in enumerate(kinds)}
    kind = np.array([order[t.dtype.name] for t in tensors], np.int64)[shards.tensor]
    ndim = np.array([len(t.shape) for t in tensors], np.int64)[shards.tensor]
    frame_index = np.zeros(len(shards), np.int64)
    for column in (kind, ndim, *shards.boxes.shape.T):  # many times faster than np.unique on rows
        values, place = grouped(column)
        first, frame_index = grouped(frame_index * len(values) + place)
    dtypes, shape = list(kinds.values()), shards.boxes.shape[first].tolist()
    frames = [
        tensor_frame(dtypes[k], tuple(size[:n]))
        for k, n, size in zip(kind[first].tolist(), ndim[first].tolist(), shape, strict=True)
    ]
    return frames, frame_index
