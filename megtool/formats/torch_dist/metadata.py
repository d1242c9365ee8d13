"""The `.metadata` of torch.distributed.checkpoint, read into columns.

Chunks and items come by the million: each is checked by operations on all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype
from megtool.errors import FormatError
from megtool.formats.header_reader import short_repr
from megtool.pickles import reader as pickle_reader
from megtool.tensors.box import Boxes, Ints
from megtool.tensors.sharded import GlobalTensor

MAX_NUMBER = 1 << 62


@dataclass(slots=True, kw_only=True)
class DcpItems:
    """Stored items in columns: which file (a row of `paths`), and its bytes there."""

    file: NDArray[np.int32]
    offset: Ints
    length: Ints


@dataclass(slots=True, kw_only=True)
class DcpMetadata:
    """The contents of a `.metadata` file.

    Chunk `i` is box `i` of tensor `tensor[i]` (ascending), stored as item `i`. `duplicates` are
    second items of a chunk, as `(chunk, file, offset, length)`. `objects` are the items that are
    not tensors. `extra` holds all other entries.
    """

    tensors: list[GlobalTensor]
    tensor: NDArray[np.int32]
    boxes: Boxes
    items: DcpItems
    paths: list[str]
    objects: dict[str, tuple[int, int, int]]
    duplicates: list[tuple[int, int, int, int]] = field(default_factory=list)
    planner_data: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


def read_metadata(data: bytes, *, file: str | Path) -> DcpMetadata:
    """Decode the bytes of a `.metadata` without importing what they name.

    Raises:
        FormatError: not the metadata of torch.distributed.checkpoint, or inconsistent: invalid
            numbers, unknown dtypes, chunks without items or items without chunks.
    """
    root = pickle_reader.decode(data, file=file, stub_classes=STUB_CLASSES)
    del data
    try:
        return _Reader(file).read(root)
    except AttributeError as e:  # a stub that the pickle built without a state
        raise FormatError(f"the metadata is damaged: {e}", file=file) from e


class _Reader:
    def __init__(self, file: str | Path) -> None:
        self._file = file

    def _error(self, message: str, tensor: Any = None) -> FormatError:
        return FormatError(message, file=self._file, tensor=None if tensor is None else str(tensor))

    def read(self, root: Any) -> DcpMetadata:
        state = getattr(root, "state", None) if isinstance(root, MetadataStub) else None
        if not isinstance(state, dict):
            raise self._error("it is not the metadata of a torch.distributed checkpoint")
        described, stored = state.get("state_dict_metadata"), state.get("storage_data")
        if not isinstance(described, dict) or not isinstance(stored, dict):
            raise self._error("the metadata has no state_dict_metadata or storage_data")
        tensors, chunks, counts, byte_names = self._read_tensors(described)
        ndim = max((len(t.shape) for t in tensors), default=0)
        tensor = np.repeat(np.arange(len(tensors), dtype=np.int32), counts)
        lo = self._table([c.offsets for c in chunks], tensor, tensors, ndim, 0)
        size = self._table([c.sizes for c in chunks], tensor, tensors, ndim, 1)
        del chunks
        out = DcpMetadata(
            tensors=tensors,
            tensor=tensor,
            boxes=Boxes(lo, lo + size),
            items=DcpItems(
                file=np.zeros(0, np.int32),
                offset=np.zeros(0, np.int64),
                length=np.zeros(0, np.int64),
            ),
            paths=[],
            objects={},
            planner_data=state.get("planner_data"),
            extra={
                k: v
                for k, v in state.items()
                if k not in ("state_dict_metadata", "storage_data", "planner_data")
            },
        )
        self._read_items(stored, byte_names, out)
        return out

    def _read_tensors(
        self, described: dict[Any, Any]
    ) -> tuple[list[GlobalTensor], list[ChunkStub], list[int], set[str]]:
        tensors: list[GlobalTensor] = []
        chunks: list[ChunkStub] = []
        counts: list[int] = []
        byte_names: set[str] = set()
        for name, entry in described.items():
            if not isinstance(name, str):
                raise self._error(f"a key that is not a name: {short_repr(name)}")
            if isinstance(entry, BytesStub):
                byte_names.add(name)
                continue
            try:
                shape, kind, layout = entry.size, entry.properties.dtype, entry.properties.layout
                tensor_chunks = entry.chunks
            except AttributeError as e:
                raise self._error(f"the entry {short_repr(entry)} is damaged", name) from e
            if not pickle_reader.is_global(kind) or kind.module != "torch":
                raise self._error(f"the dtype {short_repr(kind)} is unknown", name)
            if isinstance(layout, pickle_reader.Inert) and layout.args != ("torch.strided",):
                raise self._error(f"layout {layout.args!r:.60} is not supported", name)
            if not isinstance(tensor_chunks, list) or set(map(type, tensor_chunks)) - {ChunkStub}:
                raise self._error("damaged list of chunks", name)
            if (
                type(shape) is not tuple
                or len(shape) > MAX_NDIM
                or any(type(n) is not int or not 0 <= n < MAX_NUMBER for n in shape)
            ):
                raise self._error(f"the shape {short_repr(shape)} is impossible", name)
            try:
                tensors.append(GlobalTensor(name=name, shape=shape, dtype=dtype(kind.qualname)))
            except FormatError as e:
                raise FormatError(
                    e.message, file=self._file, tensor=name, hint=e.hint, error_id=e.error_id
                ) from e
            if tensors[-1].num_bytes >= MAX_NUMBER:
                raise self._error(f"the shape {list(shape)} is impossible", name)
            chunks += tensor_chunks
            counts.append(len(tensor_chunks))
        return tensors, chunks, counts, byte_names

    def _table(
        self,
        rows: list[Any],
        tensor: NDArray[np.int32],
        tensors: list[GlobalTensor],
        ndim: int,
        pad: int,
    ) -> Ints:
        """Tuples of numbers as int64 `[n, ndim]`, each as long as its tensor's shape."""
        out = np.full((len(tensor), ndim), pad, np.int64)
        if not len(tensor):
            return out
        width = np.array([len(t.shape) for t in tensors], np.int64)[tensor]
        if (
            set(map(type, rows)) != {tuple}
            or not np.array_equal(np.fromiter(map(len, rows), np.int64, len(rows)), width)
            or set(map(type, chain.from_iterable(rows))) - {int}
            or min(chain.from_iterable(rows), default=0) < 0
            or max(chain.from_iterable(rows), default=0) >= MAX_NUMBER
        ):
            raise self._wrong_row(rows, width.tolist(), tensor, tensors)
        flat = np.fromiter(chain.from_iterable(rows), np.int64, int(width.sum()))
        out[np.arange(ndim)[None, :] < width[:, None]] = flat
        return out

    def _wrong_row(
        self,
        rows: list[Any],
        width: list[int],
        tensor: NDArray[np.int32],
        tensors: list[GlobalTensor],
    ) -> FormatError:
        for row, values in enumerate(rows):
            if (
                type(values) is not tuple
                or len(values) != width[row]
                or any(type(v) is not int or not 0 <= v < MAX_NUMBER for v in values)
            ):
                name = tensors[tensor[row]].name
                return self._error(
                    f"the offsets or sizes {short_repr(values)} are impossible", name
                )
        return self._error("offsets or sizes are impossible")

    def _read_items(self, stored: dict[Any, Any], byte_names: set[str], out: DcpMetadata) -> None:
        """Match items with chunks: by number if it fits, else by name and offset."""
        if set(map(type, stored)) - {IndexStub} or set(map(type, stored.values())) - {
            StorageInfoStub
        }:
            raise self._error("storage_data is damaged")
        file = self._files(stored, out)
        try:
            offset = np.fromiter((i.offset for i in stored.values()), np.int64, len(stored))
            length = np.fromiter((i.length for i in stored.values()), np.int64, len(stored))
        except (TypeError, ValueError, OverflowError) as e:
            raise self._error(f"an item's offset or length is absurd: {e}") from e
        wrong = np.flatnonzero(
            (offset < 0) | (length <= 0) | (offset >= MAX_NUMBER) | (length >= MAX_NUMBER)
        )
        if len(wrong):
            name = list(stored)[int(wrong[0])].fqn
            raise self._error(f"an item cannot be at {offset[wrong[0]]}+{length[wrong[0]]}", name)
        number = {t.name: i for i, t in enumerate(out.tensors)}
        try:
            tensor = np.fromiter((number.get(k.fqn, -1) for k in stored), np.int64, len(stored))
        except TypeError as e:
            raise self._error("an item whose name is not a string") from e
        keys = list(stored)
        for row in np.flatnonzero(tensor < 0).tolist():
            name = keys[row].fqn
            if name not in byte_names or name in out.objects:
                raise self._error("an item that the metadata does not describe, or twice", name)
            out.objects[name] = (int(file[row]), int(offset[row]), int(length[row]))
        if missing := byte_names - out.objects.keys():
            raise self._error("an object has no item", sorted(missing)[0])
        rows = np.flatnonzero(tensor >= 0)
        self._match_items(
            [keys[r] for r in rows.tolist()], tensor[rows], rows, out, file, offset, length
        )

    def _files(self, stored: dict[Any, Any], out: DcpMetadata) -> NDArray[np.int32]:
        numbers: dict[Any, int] = {}
        try:
            file = np.fromiter(
                (numbers.setdefault(i.path, len(numbers)) for i in stored.values()),
                np.int32,
                len(stored),
            )
        except TypeError as e:
            raise self._error("an item whose file has no name") from e
        for info in stored.values():
            if info.transforms:
                raise self._error(
                    f"items are stored through {info.transforms!r:.60}, which is not supported"
                )
        for path in numbers:
            if not isinstance(path, str):
                raise self._error(f"a file name that is not a string: {short_repr(path)}")
        out.paths = list(numbers)
        return file

    def _match_items(
        self,
        keys: list[IndexStub],
        tensor: Ints,
        rows: Ints,
        out: DcpMetadata,
        file: NDArray[np.int32],
        offset: Ints,
        length: Ints,
    ) -> None:
        count = np.bincount(out.tensor, minlength=len(out.tensors)).astype(np.int64)
        first = np.cumsum(count) - count
        hint = np.fromiter(
            (k.index if type(k.index) is int and 0 <= k.index < 1 << 40 else -1 for k in keys),
            np.int64,
            len(keys),
        )
        ndim = out.boxes.ndim
        item_offset = self._table(
            [k.offset if k.offset is not None else () for k in keys],
            tensor.astype(np.int32),
            out.tensors,
            ndim,
            0,
        )
        fits = (hint >= 0) & (hint < count[tensor])
        chunk = np.where(fits, first[tensor] + np.maximum(hint, 0), 0)
        if len(out.tensor):
            fits &= (out.boxes.lo[np.minimum(chunk, len(out.tensor) - 1)] == item_offset).all(
                axis=1
            )
        chunk = np.where(fits, chunk, -1)
        if not fits.all():
            self._match_by_offset(np.flatnonzero(~fits), tensor, item_offset, chunk, first, out)
        item = np.full(len(out.tensor), -1, np.int64)
        item[chunk[::-1]] = np.arange(len(chunk), dtype=np.int64)[::-1]
        again = np.flatnonzero(item[chunk] != np.arange(len(chunk)))
        for k in again.tolist():
            r = rows[k]
            out.duplicates.append((int(chunk[k]), int(file[r]), int(offset[r]), int(length[r])))
        self._drop_repeated(item, rows, out, file, offset, length)

    def _match_by_offset(
        self,
        rows: Ints,
        tensor: Ints,
        item_offset: Ints,
        chunk: Ints,
        first: Ints,
        out: DcpMetadata,
    ) -> None:
        key = {
            (int(t), *lo): i
            for i, (t, lo) in enumerate(
                zip(out.tensor.tolist(), out.boxes.lo.tolist(), strict=True)
            )
        }
        for row in rows.tolist():
            match = key.get((int(tensor[row]), *item_offset[row].tolist()))
            if match is None:
                t = out.tensors[int(tensor[row])]
                start = item_offset[row, : len(t.shape)].tolist()
                raise self._error(f"an item at {start}, where no chunk starts", t.name)
            chunk[row] = match

    def _drop_repeated(
        self,
        item: Ints,
        rows: Ints,
        out: DcpMetadata,
        file: NDArray[np.int32],
        offset: Ints,
        length: Ints,
    ) -> None:
        """Drop chunks that are listed twice; they share one item."""
        keep = np.ones(len(item), bool)
        lacking = np.flatnonzero(item < 0)
        if len(lacking):
            have = {
                (int(out.tensor[i]), out.boxes.lo[i].tobytes(), out.boxes.hi[i].tobytes())
                for i in np.flatnonzero(item >= 0).tolist()
            }
            for i in lacking.tolist():
                box = (int(out.tensor[i]), out.boxes.lo[i].tobytes(), out.boxes.hi[i].tobytes())
                if box not in have:
                    t = out.tensors[int(out.tensor[i])]
                    start = out.boxes.lo[i, : len(t.shape)].tolist()
                    raise self._error(f"no item holds the chunk at {start}", t.name)
            keep[lacking] = False
            place = np.cumsum(keep) - 1
            out.duplicates = [(int(place[c]), *item_place) for c, *item_place in out.duplicates]  # type: ignore[misc]
        out.tensor, out.boxes = out.tensor[keep], out.boxes[keep]
        chosen = rows[item[keep]]
        out.items = DcpItems(file=file[chosen], offset=offset[chosen], length=length[chosen])


MAX_NDIM = 16


class SizeStub(tuple[int, ...]):
    """`torch.Size`, which becomes a tuple."""

    __slots__ = ()

    def __new__(cls, values: object = ()) -> Any:
        """Return the tuple itself; refuse anything else."""
        if type(values) is not tuple or len(values) > MAX_NDIM:
            raise ValueError(f"a size of {short_repr(values)}")
        return values

    def __setstate__(self, state: object) -> None:
        raise ValueError("a size with a state")


class ChunkStub:
    """`ChunkStorageMetadata`: the offsets of a chunk in its tensor, and its sizes."""

    __slots__ = ("offsets", "sizes")
    offsets: Any
    sizes: Any

    def __setstate__(self, state: Any) -> None:
        self.offsets, self.sizes = state["offsets"], state["sizes"]
        state.clear()


class IndexStub:
    """`MetadataIndex`, the key of an item: its name, offset, and number among the chunks."""

    __slots__ = ("fqn", "index", "offset")
    fqn: Any
    index: Any
    offset: Any

    def __setstate__(self, state: Any) -> None:
        self.fqn = state["fqn"]
        self.offset = state.get("offset")
        self.index = state.get("index")
        state.clear()


class StorageInfoStub:
    """`_StorageInfo`: the file, offset and length of an item."""

    __slots__ = ("length", "offset", "path", "transforms")
    path: Any
    offset: Any
    length: Any
    transforms: Any

    def __setstate__(self, state: Any) -> None:
        self.path = state["relative_path"]
        self.offset, self.length = state["offset"], state["length"]
        self.transforms = state.get("transform_descriptors")
        state.clear()


class PropertiesStub:
    """`TensorProperties`: the dtype and layout of a tensor."""

    __slots__ = ("dtype", "layout")
    dtype: Any
    layout: Any

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.dtype, self.layout = state["dtype"], state.get("layout")
        else:
            self.dtype, self.layout = state[0], state[1]


class TensorStub:
    """`TensorStorageMetadata`: the size and chunks of a tensor."""

    __slots__ = ("chunks", "properties", "size")
    chunks: Any
    properties: Any
    size: Any

    def __setstate__(self, state: Any) -> None:
        self.chunks, self.size = state["chunks"], state["size"]
        self.properties = state["properties"]


class BytesStub:
    """`BytesStorageMetadata`: an object that is not a tensor."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Discard the state."""


class DiscardedStub:
    """A part of the saver's plan, which is large and not needed by a reader."""

    __slots__ = ()

    def __new__(cls, *_args: object) -> DiscardedStub:
        """Discard the arguments."""
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            state.clear()


class MetadataStub:
    """`Metadata`, the root of the file."""

    __slots__ = ("state",)
    state: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
STUB_CLASSES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): SizeStub,
    (_METADATA, "Metadata"): MetadataStub,
    (_MEGATRON, "MCoreMetadata"): MetadataStub,
    (_METADATA, "TensorStorageMetadata"): TensorStub,
    (_METADATA, "BytesStorageMetadata"): BytesStub,
    (_METADATA, "ChunkStorageMetadata"): ChunkStub,
    (_METADATA, "TensorProperties"): PropertiesStub,
    (_METADATA, "MetadataIndex"): IndexStub,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfoStub,
    (_PLANNER, "SavePlan"): DiscardedStub,
    (_PLANNER, "WriteItem"): DiscardedStub,
    (_PLANNER, "TensorWriteData"): DiscardedStub,
    (_PLANNER, "BytesIOWriteData"): DiscardedStub,
    (_MEGATRON, "MCoreSavePlan"): DiscardedStub,
}
