"""Tensors described by the pickles of torch.save, and their positions in a container."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.dtypes import DType, dtype, from_storage
from megtool.errors import FormatError
from megtool.pickles import reader as pickle_reader
from megtool.pickles.torch_stream import TorchStream
from megtool.pickles.zip_reader import ZipArchive
from megtool.tensors.box import strides as row_major


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageView:
    """A tensor in a container's pickle: a strided view of a storage member.

    `start` and `strides` are in elements.
    """

    storage: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    storage_bytes: int

    @property
    def span_bytes(self) -> int:
        """Bytes of the storage from its start to the last element of the view."""
        if 0 in self.shape:
            return 0
        return (self.start + _span(self.shape, self.strides)) * self.dtype.itemsize

    @property
    def is_row_major(self) -> bool:
        """Whether the elements are in row-major order without gaps."""
        if 0 in self.shape:
            return True
        expected = row_major(self.shape)
        return all(
            n == 1 or s == w for n, s, w in zip(self.shape, self.strides, expected, strict=True)
        )


def parse_storage_view(node: Any, *, file: str | Path) -> StorageView | None:
    """Parse the view that an inert node rebuilds; None if the node is not a tensor.

    Raises:
        FormatError: an unsupported kind of tensor, or invalid sizes.
    """
    if not isinstance(node, pickle_reader.Inert) or node.module not in (
        "torch._utils",
        "torch._tensor",
    ):
        return None
    args = node.args
    if node.qualname in ("_rebuild_parameter", "_rebuild_parameter_with_state") and args:
        return parse_storage_view(args[0], file=file)
    if node.qualname == "_rebuild_from_type_v2" and len(args) >= 3:
        if not pickle_reader.is_global(args[1]) or not isinstance(args[2], tuple):
            raise FormatError("a tensor subclass in a pickle is damaged", file=file)
        inner = pickle_reader.inert_global("torch._utils", getattr(args[0], "qualname", ""))(
            *args[2]
        )
        return parse_storage_view(inner, file=file)
    num_args = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}
    if node.qualname not in num_args:
        if node.qualname.startswith("_rebuild"):
            raise FormatError(f"tensor kind {node.name} is not supported", file=file)
        return None
    if len(args) < num_args[node.qualname]:
        raise FormatError(f"{node.name} has {len(args)} arguments", file=file)
    storage, offset, shape, strides = args[:4]
    shape, strides = _parse_sizes(shape), _parse_sizes(strides)
    pid = storage.id if isinstance(storage, pickle_reader.PersistentRef) else None
    if (
        shape is None
        or strides is None
        or len(shape) != len(strides)
        or _parse_sizes((offset,)) is None
        or not isinstance(pid, tuple)
        or len(pid) < 5
        or pid[0] != "storage"
        or not isinstance(pid[2], str)
        or _parse_sizes((pid[4],)) is None
        or not pickle_reader.is_global(pid[1])
    ):
        raise FormatError("a tensor in a pickle is damaged", file=file)
    if pid[1].qualname == "UntypedStorage":
        stored_size = 1
        if node.qualname == "_rebuild_tensor_v3":
            if not pickle_reader.is_global(args[6]):
                raise FormatError("a tensor in a pickle is damaged", file=file)
            kind = dtype(args[6].qualname)
        else:
            kind = dtype("uint8")
    else:
        kind = from_storage(pid[1].qualname, file)
        stored_size = kind.itemsize
    return StorageView(
        storage=pid[2],
        dtype=kind,
        shape=shape,
        strides=strides,
        start=offset,
        storage_bytes=pid[4] * stored_size,
    )


def _parse_sizes(values: Any) -> tuple[int, ...] | None:
    """A tuple of plausible sizes, or None."""
    if isinstance(values, pickle_reader.Inert) and values.name == "torch.Size" and values.args:
        values = values.args[0]
    if not isinstance(values, tuple | list) or len(values) > 64:
        return None
    if any(type(v) is not int or not 0 <= v < 1 << 62 for v in values):
        return None
    return tuple(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """The file offset of a tensor's bytes; `strides` (in elements) unless row-major."""

    offset: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    @property
    def span_bytes(self) -> int:
        """Bytes from the first to the last element."""
        if 0 in self.shape:
            return 0
        strides = row_major(self.shape) if self.strides is None else self.strides
        return _span(self.shape, strides) * self.dtype.itemsize


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last, which no dim of `shape` is empty for."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


StorageViews = dict[bytes, StorageView]
"""Views by the pickle that describes them: shards of one shape share theirs."""


def locate_tensor_item(
    fd: int, offset: int, length: int, *, file: str | Path, tensor: str, views: StorageViews
) -> TensorLocation:
    """Locate the tensor in a container of one tensor, reading about 2 KiB.

    `views` caches parsed pickles between calls; threads may share it.

    Raises:
        FormatError: the container is damaged, or does not hold one tensor.
    """
    archive = ZipArchive(fd, offset, length, file=file)
    data = archive.read_pickle()
    view = views.get(data)
    if view is None:
        view = parse_storage_view(pickle_reader.decode(data, file=file), file=file)
        if view is None:
            raise FormatError(
                "an item that should hold a tensor does not", file=file, tensor=tensor
            )
        if len(views) < 1 << 16:
            views[data] = view
    offset_in_file = locate_view(archive, view, tensor=tensor)
    return TensorLocation(
        offset=offset_in_file,
        dtype=view.dtype,
        shape=view.shape,
        strides=None if view.is_row_major else view.strides,
    )


def locate_view(archive: ZipArchive | TorchStream, view: StorageView, *, tensor: str) -> int:
    """Absolute offset of a view's first element, after checking that it fits its storage."""
    offset, size = archive.locate(f"data/{view.storage}")
    if size != view.storage_bytes or view.span_bytes > size:
        raise FormatError(
            f"a view of {list(view.shape)} {view.dtype} ends at byte {view.span_bytes} of a "
            f"storage of {size} bytes, declared as {view.storage_bytes}",
            file=archive.file,
            tensor=tensor,
        )
    return offset + view.start * view.dtype.itemsize
