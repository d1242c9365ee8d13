"""`torch_checkpointing` over any checkpoint: its loader fills a model from every format.

    config = CheckpointManager.Config(
        items={"model": ItemSpec(resharder=DefaultResharder())},
        storage_config=megtool.torch_checkpointing.StorageConfig(),
    )
    CheckpointManager(config).load(
        "s3://bucket/run/iter_0005000",
        into={"model": model.state_dict()},
        metadata_format=megtool.torch_checkpointing.MetadataFormat,
    )

Its library reads tensors from files of torch or safetensors, so a storage shows every checkpoint as
one safetensors file whose bytes are read, decoded and renamed when they are asked for. Each rank
asks for its own rows. Source: torch_checkpointing 0.1.1, `metadata_serialization.py`
(`DistributedMetadataFormat`), `default_resharder.py` (reads by offset), `hf/metadata.py`.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.distributed_metadata import (
    DistributedItemMetadata,
    DistributedMetadata,
    GlobalObjectMetadata,
)
from torch_checkpointing.dtensor_metadata import (
    DTensorShardingMetadata,
    ReplicateSpec,
    get_device_mesh_spec,
)
from torch_checkpointing.metadata_serialization import DistributedMetadataFormat
from torch_checkpointing.storage.base_storage import ReadArgs
from torch_checkpointing.storage.filesystem import (
    LocalFileSystemStorage,
    LocalFileSystemStorageConfig,
)

from megtool.access.checkpoint import Checkpoint, open_checkpoint
from megtool.access.lazy_tensor import LazyTensor, NamedView
from megtool.access.naming import fitting_namings
from megtool.access.read_boxes import BoxReader
from megtool.dtypes import DType, dtype
from megtool.errors import UsageError
from megtool.formats.safetensors.header import SafetensorsEntry, encode_header
from megtool.storage.location.path import location as to_location
from megtool.tensors.box import strides

__all__ = ["MetadataFormat", "StorageConfig"]

_ITEM = "model"
_FILE = "model.megtool.safetensors"
_CHUNK_BYTES = 32 << 20
_URL = re.compile(r"([a-z][a-z0-9+.-]*):/(?!/)")


class MetadataFormat(DistributedMetadataFormat):  # type: ignore[misc]
    """Describes any checkpoint as the item `model`, under all names that its tensors have."""

    @classmethod
    def maybe_load(cls, checkpoint_dir: Path, storage: Any) -> DistributedMetadata:
        """The metadata of a checkpoint; never None: what is no checkpoint is an error.

        Raises:
            UsageError: the storage is not that of `StorageConfig`.
            MegtoolError: it cannot be opened, or is no checkpoint.
        """
        if not isinstance(storage, _CheckpointStorage):
            raise UsageError(
                f"the storage is a {type(storage).__name__}, which reads files as they are",
                hint="storage_config=megtool.torch_checkpointing.StorageConfig()",
            )
        return storage.open(checkpoint_dir).describe()


@dataclass
class StorageConfig(LocalFileSystemStorageConfig):  # type: ignore[misc]
    """Local files as the library has them, and checkpoints of any format and place to load.

    `naming` is `hf`, `megatron` or `stored`; without it a tensor has all of these names. The other
    fields are the arguments of `megtool.open`.
    """

    naming: str | None = None
    family: str | None = None
    like: str | None = None
    iteration: int | str | None = None

    def create_storage(self) -> _CheckpointStorage:
        """The storage, which a manager makes itself."""
        return _CheckpointStorage(self)


class _CheckpointStorage(LocalFileSystemStorage):  # type: ignore[misc]
    """The library's local storage, which also has one file for each checkpoint that was opened."""

    def __init__(self, config: StorageConfig) -> None:
        super().__init__(config=config)
        self._settings = config
        self._opened: dict[str, _TensorFile] = {}

    def open(self, folder: Path) -> _TensorFile:
        """The file that stands for a checkpoint; each is opened once."""
        place = _restore_url(folder)
        if place not in self._opened:
            s = self._settings
            checkpoint = open_checkpoint(
                place,
                family=s.family,
                like=s.like,
                iteration=s.iteration,
                optimizer=False,
                framework="torch",
            )
            self._opened[place] = _TensorFile(checkpoint, s.naming)
        return self._opened[place]

    def exists(self, path: Path) -> bool:
        """Whether there is a file or folder, in a store too, or a checkpoint that was opened."""
        place = _restore_url(path)
        if "://" in place:
            return bool(to_location(place).exists())
        return self._is_file_of(path) or bool(super().exists(path))

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """A stream of a file."""
        if self._is_file_of(path):
            return _TensorStream(self.open(path.parent))
        stream: io.RawIOBase = super().stream_read(path, read_args)
        return stream

    def _is_file_of(self, path: Path) -> bool:
        return path.name == _FILE and _restore_url(path.parent) in self._opened


def _restore_url(path: Path) -> str:
    """A URL that went through a Path, which takes two slashes for one."""
    return _URL.sub(r"\1://", str(path), count=1)


class _TensorFile:
    """A safetensors file that is nowhere: its header, and a lazy tensor for each run of data."""

    def __init__(self, checkpoint: Checkpoint, naming: str | None) -> None:
        self.tensors: dict[str, LazyTensor] = {}
        source = checkpoint.source
        for named in fitting_namings(source, naming):
            reader = BoxReader(source.catalogue, named.source, named.target)
            view = NamedView(named, reader, framework="torch")
            for name in view:
                self.tensors.setdefault(name, view[name])
        self.dtypes: dict[str, DType] = {n: dtype(t.dtype) for n, t in self.tensors.items()}
        entries = []
        self.starts: list[int] = []
        end = 0
        for name, tensor in self.tensors.items():
            self.starts.append(end)
            begin, end = end, end + tensor.num_bytes
            entries.append(SafetensorsEntry(name, self.dtypes[name], tensor.shape, begin, end))
        self.header = encode_header(entries, {}, _FILE)
        self.size = len(self.header) + end
        self._order = list(self.tensors.values())

    def describe(self) -> DistributedMetadata:
        """Every tensor as a whole one on one rank."""
        mesh = get_device_mesh_spec(device_type="cpu", mesh_shape=(1,), mesh_data=(0,))
        paths = {}
        for name, tensor in self.tensors.items():
            sharding = DTensorShardingMetadata(
                global_shape=tensor.shape,
                dtype=f"torch.{self.dtypes[name].name}",
                stride=tuple(strides([max(n, 1) for n in tensor.shape])),
                mesh_spec=mesh,
                placements=(ReplicateSpec(),),
            )
            paths[(name,)] = [GlobalObjectMetadata(sharding_metadata=sharding, ranks=(0,))]
        layout = LayoutInfo(_FILE, SafetensorsSerialization())
        item = DistributedItemMetadata(
            nested_path_to_metadata=paths, rank_to_layout_info={0: layout}
        )
        return DistributedMetadata(metadata={_ITEM: item}, world_size=1)

    def read_into(self, position: int, memory: memoryview) -> int:
        """Fill memory with the bytes from a position to the end of a tensor's rows; how many."""
        head = len(self.header)
        if position < head:
            data = self.header[position : position + len(memory)]
            memory[: len(data)] = data
            return len(data)
        number = bisect_right(self.starts, position - head) - 1
        while number >= 0 and not self._order[number].num_bytes:
            number -= 1
        if number < 0 or position >= self.size:
            return 0
        tensor, offset = self._order[number], position - head - self.starts[number]
        count = min(len(memory), tensor.num_bytes - offset)
        if not tensor.shape:
            rows, first = tensor[...], 0
        else:
            width = tensor.num_bytes // tensor.shape[0]
            first = offset // width
            last = -(-(offset + min(count, max(_CHUNK_BYTES, width))) // width)
            rows, first = tensor[first:last], first * width
        data = rows.contiguous().reshape(-1).view(torch.uint8)[offset - first :][:count]
        torch.frombuffer(memory, dtype=torch.uint8)[: len(data)].copy_(data)
        return len(data)


class _TensorStream(io.RawIOBase):
    """A position in the file that stands for a checkpoint."""

    def __init__(self, file: _TensorFile) -> None:
        super().__init__()
        self._file, self._position = file, 0

    def readable(self) -> bool:
        """It is read."""
        return True

    def seekable(self) -> bool:
        """Its position can be set."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill as much of a buffer as one tensor's rows give."""
        with memoryview(buffer).cast("B") as memory:
            count = self._file.read_into(self._position, memory) if len(memory) else 0
        self._position += count
        return count
