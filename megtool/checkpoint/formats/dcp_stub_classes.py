"""Stand-ins for the classes in the `.metadata` of torch.distributed.checkpoint.

A pickle of one object per chunk and two per item, by the million: these keep two to four
references each, and empty what nobody needs while the pickle is still being read.
"""

from __future__ import annotations

from typing import Any

MAX_NDIM = 16


class Size(tuple[int, ...]):
    """`torch.Size`, which becomes the tuple it is made from."""

    __slots__ = ()

    def __new__(cls, values: object = ()) -> Any:
        """The tuple itself; nothing else is a size."""
        if type(values) is not tuple or len(values) > MAX_NDIM:
            raise ValueError(f"a size of {values!r:.60}")
        return values

    def __setstate__(self, state: object) -> None:
        raise ValueError("a size with a state")


class Chunk:
    """A chunk: where it starts in its tensor, and its size."""

    __slots__ = ("offsets", "sizes")
    offsets: Any
    sizes: Any

    def __setstate__(self, state: Any) -> None:
        self.offsets, self.sizes = state["offsets"], state["sizes"]
        state.clear()


class Index:
    """The key of an item: its name, where it starts, and its number among the chunks."""

    __slots__ = ("fqn", "index", "offset")
    fqn: Any
    index: Any
    offset: Any

    def __setstate__(self, state: Any) -> None:
        self.fqn = state["fqn"]
        self.offset = state.get("offset")
        self.index = state.get("index")
        state.clear()


class Info:
    """Where an item is stored."""

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


class Properties:
    """The dtype and layout of a tensor."""

    __slots__ = ("dtype", "layout")
    dtype: Any
    layout: Any

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.dtype, self.layout = state["dtype"], state.get("layout")
        else:
            self.dtype, self.layout = state[0], state[1]


class TensorEntry:
    """What a tensor is: its size, and its chunks."""

    __slots__ = ("chunks", "properties", "size")
    chunks: Any
    properties: Any
    size: Any

    def __setstate__(self, state: Any) -> None:
        self.chunks, self.size = state["chunks"], state["size"]
        self.properties = state["properties"]


class BytesEntry:
    """An object that is no tensor."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Nothing to keep."""


class Dropped:
    """A part of the saver's own plan: larger than all the rest, and of no use to a reader."""

    __slots__ = ()

    def __new__(cls, *_args: object) -> Dropped:
        """Whatever it is made of."""
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            state.clear()


class Metadata:
    """All of it."""

    __slots__ = ("state",)
    state: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
STAND_INS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): Size,
    (_METADATA, "Metadata"): Metadata,
    (_MEGATRON, "MCoreMetadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): TensorEntry,
    (_METADATA, "BytesStorageMetadata"): BytesEntry,
    (_METADATA, "ChunkStorageMetadata"): Chunk,
    (_METADATA, "TensorProperties"): Properties,
    (_METADATA, "MetadataIndex"): Index,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Info,
    (_PLANNER, "SavePlan"): Dropped,
    (_PLANNER, "WriteItem"): Dropped,
    (_PLANNER, "TensorWriteData"): Dropped,
    (_PLANNER, "BytesIOWriteData"): Dropped,
    (_MEGATRON, "MCoreSavePlan"): Dropped,
}
