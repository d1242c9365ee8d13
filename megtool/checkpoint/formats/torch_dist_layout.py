"""A torch.distributed checkpoint laid out ahead of its data, plain or as Megatron loads it.

Each owner rank gets one data file, `__RANK_0.distcp`: its items back to back, each a container
that torch.load reads. Core versions before and after 0.19 both find the common state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megtool.checkpoint.catalogue import Catalogue, Destination, Extents, StoredFile, StoredObject
from megtool.checkpoint.formats.dcp_metadata_writer import write_metadata
from megtool.checkpoint.formats.save_folder import TRACKER, folder_name
from megtool.checkpoint.zip_writer import object_item, tensor_item
from megtool.errors import UsageError
from megtool.tensors.sharded import GlobalTensor, Shards

COMMON_OBJECT = "common_state/shard_0_1"
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def lay_out(
    tensors: Sequence[GlobalTensor],
    shards: Shards,
    *,
    num_files: int,
    objects: Mapping[str, Any] | None = None,
    common: Any = None,
    iteration: int | None = None,
    small: Mapping[str, bytes] | None = None,
    megatron: bool,
) -> Destination:
    """Lay out tensors in `num_files` files, one per owner rank; a rank without shards has none.

    `objects` are bytes of ready items, or trees of values (in a Megatron checkpoint a sharded
    object). `common` is Megatron's common state, a dict. `iteration` names the folder inside the
    save folder, `release` when None; a plain checkpoint has no such folder. `small` are further
    files by their path beside the data.

    Raises:
        UsageError: an owner is no rank, names repeat, or a common state is missing or too much.
    """
    _check(tensors, shards, num_files, objects or {}, common, megatron)
    folder = f"{folder_name(iteration)}/" if megatron else ""
    writer = _Files(folder, shards.owner, has_objects=bool(objects))
    held: dict[str, tuple[int, int, int]] = {}
    for name, value in (objects or {}).items():
        if not isinstance(value, bytes):
            value = object_item([value] if megatron else value)
        held[name] = writer.add_object(value)
    count = len(shards)
    item_offset, item_length = np.zeros(count, np.int64), np.zeros(count, np.int64)
    offset, length = np.zeros(count, np.int64), np.zeros(count, np.int64)
    file = writer.number[shards.owner] if count else np.zeros(0, np.int32)
    sizes = shards.boxes.shape.tolist()
    files = file.tolist()
    for row, owner in enumerate(shards.tensor.tolist()):
        tensor = tensors[owner]
        shape = sizes[row][: len(tensor.shape)]
        item_offset[row], item_length[row], offset[row], length[row] = writer.add_tensor(
            files[row], tensor, shape
        )
    names = [f"__{rank}_0.distcp" for rank in writer.ranks]
    metadata = write_metadata(
        tensors,
        shards,
        names,
        files,
        item_offset.tolist(),
        item_length.tolist(),
        held,
        planner_data=not megatron,
    )
    writer.flush()
    catalogue = Catalogue(
        format="torch_dist" if megatron else "dcp",
        root=Path(),
        files=[
            StoredFile(path=folder + name, size=size)
            for name, size in zip(names, writer.end, strict=True)
        ],
        tensors=list(tensors),
        shards=shards,
        extents=Extents(file=file, offset=offset, length=length),
        objects={
            name: StoredObject(name=name, kind="bytes", extent=extent)
            for name, extent in held.items()
        },
        metadata={} if common is None else {"common": common, "iteration": iteration},
    )
    others = {folder + name: data for name, data in (small or {}).items()}
    if not megatron:
        last = {".metadata": metadata}
    else:
        others |= {f"{folder}common.pt": object_item(common), f"{folder}.metadata": metadata}
        last = {
            f"{folder}metadata.json": json.dumps(_CONFIG).encode(),
            TRACKER: (folder_name(None) if iteration is None else str(iteration)).encode(),
        }
    return Destination(catalogue=catalogue, fragments=writer.fragments, small=others, last=last)


def _check(
    tensors: Sequence[GlobalTensor],
    shards: Shards,
    num_files: int,
    objects: Mapping[str, Any],
    common: Any,
    megatron: bool,
) -> None:
    names = [*(t.name for t in tensors), *objects]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UsageError(f"two things are called {twice!r}")
    if packed := next((t for t in tensors if t.packing), None):
        raise UsageError(
            f"elements packed as {packed.packing!r} cannot be stored so", tensor=packed.name
        )
    if len(shards) and not 0 <= int(shards.owner.min()) <= int(shards.owner.max()) < num_files:
        raise UsageError(f"shards of rank {int(shards.owner.max())} in {num_files} files")
    if megatron != isinstance(common, dict):
        raise UsageError("a common state belongs to a Megatron checkpoint, and only to one")


class _Files:
    """The data files as they grow: where each ends, and the bytes around the data.

    The end of an item and the beginning of the next are one fragment, so that each is one write.
    """

    def __init__(self, folder: str, owner: Any, *, has_objects: bool) -> None:
        ranks = set(np.unique(owner).tolist()) | ({0} if has_objects else set())
        self.ranks: list[int] = sorted(ranks)
        self.number = np.full(max(ranks, default=0) + 1, -1, np.int32)
        self.number[self.ranks] = np.arange(len(self.ranks), dtype=np.int32)
        self.end = [0] * len(self.ranks)
        self.fragments: list[tuple[int, int, bytes]] = []
        self._pending: list[list[bytes]] = [[] for _ in self.ranks]
        self._pending_at = [0] * len(self.ranks)

    def add_object(self, item: bytes) -> tuple[int, int, int]:
        """Append a whole item to the first file: `(file, offset, length)`."""
        at = self.end[0]
        self._pending[0].append(item)
        self.end[0] += len(item)
        return 0, at, len(item)

    def add_tensor(
        self, file: int, tensor: GlobalTensor, shape: list[int]
    ) -> tuple[int, int, int, int]:
        """Append a tensor's item: its offset and length, and those of its raw bytes."""
        at = self.end[file]
        item = tensor_item(tensor.dtype, shape, at=at)
        self._pending[file].append(item.prefix)
        start = at + item.offset
        size = item.length - len(item.prefix) - len(item.suffix)
        if size:
            self._flush(file)
        self._pending[file].append(item.suffix)
        if size:
            self._pending_at[file] = start + size
        self.end[file] = at + item.length
        return at, item.length, start, size

    def _flush(self, file: int) -> None:
        if parts := self._pending[file]:
            self.fragments.append((file, self._pending_at[file], b"".join(parts)))
            self._pending[file] = []

    def flush(self) -> None:
        """Give out what is still held back."""
        for file in range(len(self.ranks)):
            self._flush(file)
