"""Files of torch.save: locate the tensors of one, or plan one before its data is written.

A `.pt` file is a zip container: a pickle that describes a tree, and one member for each storage of
the tree's tensors. The form of before torch 1.6 is read, too (`torch_stream`).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.errors import FormatError, UsageError
from megtool.pickles import reader as pickle_reader
from megtool.pickles.reader import Inert, PersistentRef, inert_global
from megtool.pickles.rewrite import encode_payloads
from megtool.pickles.storage_stream import STREAM_MAGIC
from megtool.pickles.torch_stream import TorchStream
from megtool.pickles.writer import encode
from megtool.pickles.zip_reader import ZipArchive
from megtool.pickles.zip_tensor import StorageView, locate_view
from megtool.pickles.zip_writer import (
    LARGE_ALIGNMENT,
    LARGE_BYTES,
    SMALL_ALIGNMENT,
    alignment_padding,
    central_entry,
    directory,
    encode_object,
    local_header,
)
from megtool.storage.files import Files
from megtool.tensors.box import strides as row_major
from megtool.tensors.sharded import GlobalTensor

_ZIP = b"PK\3\4"
_TAR_AT = 257
_OLD_HINT = "load it with torch and save it again: torch.save(torch.load(path), path)"
_DAMAGED_HINT = "the file is truncated or damaged: copy it again"


class StorageBudget:
    """A limit on the bytes of small storages to read; shared by threads."""

    def __init__(self, num_bytes: int) -> None:
        self._limit = self._left = num_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int, *, file: str | Path) -> None:
        """Claim bytes.

        Raises:
            FormatError: the limit is exceeded.
        """
        with self._lock:
            self._left -= num_bytes
            if self._left < 0:
                raise FormatError(
                    f"values that are not tensors take more than {self._limit:,} bytes",
                    file=file,
                    hint="remove values that are neither model, optimizer nor random state",
                )


class TorchFile:
    """A `.pt` file open for reading. `tree` is inert; `global_names` are the globals it names.

    With `is_old` it is in the form of before torch 1.6, which is no zip container.
    """

    def __init__(self, fd: int, size: int, *, file: Path, is_old: bool = False) -> None:
        self.file = file
        self._archive: ZipArchive | TorchStream = (
            TorchStream(fd, size, file=file) if is_old else ZipArchive(fd, 0, size, file=file)
        )
        self._archive.prefetch()
        self.global_names: set[str] = set()
        self.tree = pickle_reader.decode(
            self._archive.read_pickle(), file=file, global_names=self.global_names
        )
        if isinstance(self._archive, TorchStream):
            self._archive.place_storages(self.tree)
        self._first: dict[str, tuple[int, int]] = {}
        self._small: dict[str, bytes] = {}

    def locate(self, view: StorageView, *, tensor: str) -> int:
        """Absolute offset of a view's first element; each storage is located once.

        Raises:
            FormatError: the view exceeds its storage, or the container has no such storage.
        """
        first, size = self._first.get(view.storage, (-1, -1))
        if size < view.span_bytes or size != view.storage_bytes:
            # Also raises the error.
            offset = locate_view(self._archive, view, tensor=tensor)
            first = offset - view.start * view.dtype.itemsize
            self._first[view.storage] = first, view.storage_bytes
        return first + view.start * view.dtype.itemsize

    def attach_storages(self, tree: Any, budget: StorageBudget) -> None:
        """Read the bytes of every storage that a part of the tree refers to.

        Raises:
            FormatError: a storage is missing, or the budget is exceeded.
        """
        for node in pickle_reader.find_references(tree):
            key = _storage(node)
            if key is None:
                raise FormatError(f"{node!r} refers to no storage", file=self.file)
            if key not in self._small:
                _, size = self._archive.locate(f"data/{key}")
                budget.take(size, file=self.file)
                self._small[key] = self._archive.read(f"data/{key}")
            node.data = self._small[key]


def _storage(node: PersistentRef) -> str | None:
    """The storage key of a reference: `("storage", class, key, device, numel)`.

    The form of before torch 1.6 has a sixth part, a view, which is None.
    """
    pid = node.id
    if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
        return None
    plain = pickle_reader.is_global(pid[1]) and isinstance(pid[3], str) and type(pid[4]) is int
    return pid[2] if plain and isinstance(pid[2], str) else None


@contextmanager
def open_torch_file(path: Path, size: int) -> Iterator[TorchFile]:
    """Open a `.pt` file: reads its end, its directory and its pickle.

    A `FormatError` without a hint inside the `with` gets a hint about damage.

    Raises:
        FormatError: the file is truncated or not written by torch.save, or its pickle is damaged or
            hostile.
        StorageError: a system call failed.
    """
    files = Files()
    fd = files.open_read(path)
    try:
        start = bytearray(min(size, 512))
        files.pread_into(fd, memoryview(start), 0)
        is_old = start.startswith(STREAM_MAGIC)
        if not is_old and not start.startswith(_ZIP):
            raise _not_a_zip(bytes(start), path)
        try:
            yield TorchFile(fd, size, file=path, is_old=is_old)
        except FormatError as e:
            if e.hint:
                raise
            raise FormatError(
                e.message, file=e.file, tensor=e.tensor, hint=_DAMAGED_HINT, error_id=e.error_id
            ) from e
    finally:
        files.close(fd)


def _not_a_zip(start: bytes, path: Path) -> FormatError:
    if not start:
        return FormatError("the file is empty", file=path, hint=_DAMAGED_HINT)
    if start[:1] == b"\x80":
        return FormatError(
            "it is a pickle that torch.save has not written", file=path, hint=_OLD_HINT
        )
    if start[_TAR_AT : _TAR_AT + 5] == b"ustar":
        return FormatError(
            "it is a tar archive, which torch wrote before version 0.2", file=path, hint=_OLD_HINT
        )
    if start[8:9] == b"{":
        return FormatError(
            "it looks like a safetensors file", file=path, hint="rename it to NAME.safetensors"
        )
    return FormatError(
        f"begins with {start[:4]!r}, which torch.save never writes", file=path, hint=_DAMAGED_HINT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFileLayout:
    """The layout of a `.pt` file: `tensors[i]` is stored at byte `offsets[i]`.

    `fragments` are `(offset, bytes)` around the data. All other bytes are zeros.
    """

    size: int
    fragments: list[tuple[int, bytes]]
    tensors: list[GlobalTensor]
    offsets: list[int]


def plan_torch_file(tree: Any) -> TorchFileLayout:
    """Plan the file torch.save would write for a tree whose tensors are `GlobalTensor` leaves.

    Each becomes a row-major tensor with its own storage. A leaf that occurs twice is written once,
    and torch.load returns two tensors over the same storage. References in inert parts of the tree
    need their bytes (`TorchFile.attach_storages`); shared storages stay shared.

    Raises:
        FormatError: the tree names what no checkpoint needs.
        UsageError: two tensors have one name, elements are packed, or a reference has no bytes.
        TypeError: a value in the tree cannot be pickled.
    """
    tree = encode_payloads(tree, encode_object)
    storages = _Storages()
    growing = _FileBuilder()
    growing.add_bytes("data.pkl", encode(tree, replace=storages.replace))
    growing.add_bytes("byteorder", b"little")
    tensors: list[GlobalTensor] = []
    offsets: list[int] = []
    for key, member in enumerate(storages.members):
        if isinstance(member, bytes):
            growing.add_bytes(f"data/{key}", member, SMALL_ALIGNMENT)
        else:
            tensors.append(member)
            offsets.append(growing.add_data(f"data/{key}", member.num_bytes))
    growing.add_bytes("version", b"3\n")
    size = growing.finish()
    return TorchFileLayout(size=size, fragments=growing.fragments, tensors=tensors, offsets=offsets)


class _FileBuilder:
    """Builds a container: its current end, and the bytes around its data.

    The bytes between two tensors are one fragment, so each is one write.
    """

    def __init__(self) -> None:
        self.fragments: list[tuple[int, bytes]] = []
        self._entries: list[bytes] = []
        self._end = self._since = 0
        self._pending = bytearray()

    def add_bytes(self, name: str, data: bytes, alignment: int = 1) -> None:
        """Append a member whose bytes are known."""
        self._add(name, zlib.crc32(data), len(data), alignment)
        self._pending += bytes(self._end - self._since - len(self._pending)) + data
        self._end += len(data)

    def add_data(self, name: str, num_bytes: int) -> int:
        """Append a member whose bytes come later; returns their offset."""
        large = num_bytes >= LARGE_BYTES
        self._add(name, 0, num_bytes, LARGE_ALIGNMENT if large else SMALL_ALIGNMENT)
        offset = self._end
        if num_bytes:
            self.fragments.append((self._since, bytes(self._pending)))
            self._pending.clear()
            self._since = self._end = offset + num_bytes
        return offset

    def _add(self, name: str, crc: int, size: int, alignment: int) -> None:
        bare = len(local_header(name, crc, size, 0))
        padding = alignment_padding(self._end + bare, alignment)
        self._pending += bytes(self._end - self._since - len(self._pending))
        self._pending += local_header(name, crc, size, padding)
        self._entries.append(central_entry(name, crc, size, self._end))
        self._end += bare + padding

    def finish(self) -> int:
        """Append the directory; returns the size of the file."""
        end = directory(self._entries, self._end)
        gap = bytes(self._end - self._since - len(self._pending))
        self.fragments.append((self._since, bytes(self._pending) + gap + end))
        return self._end + len(end)


class _Storages:
    """The storages of a file, numbered in order of appearance, and the references to them."""

    def __init__(self) -> None:
        self.members: list[GlobalTensor | bytes] = []
        self._number: dict[Any, int] = {}
        self._ready: dict[int, PersistentRef] = {}

    def replace(self, node: Any) -> Any:
        """The id of a reference under its new number, or the node that rebuilds a tensor."""
        if isinstance(node, GlobalTensor):
            return self._rebuild_node(node)
        if not isinstance(node, PersistentRef):
            raise TypeError(f"cannot pickle a {type(node).__name__}: {node!r:.60}")
        if id(node) in self._ready:
            return node.id
        if node.data is None:
            raise UsageError(f"{node!r} has no bytes attached")
        # Trees of several files may be combined, and each numbers its storages from 0.
        number = self._add((node.id[2], id(node.data)), node.data)
        return (*node.id[:2], str(number), *node.id[3:])

    def _add(self, key: Any, member: GlobalTensor | bytes) -> int:
        number = self._number.setdefault(key, len(self.members))
        if number == len(self.members):
            self.members.append(member)
        return number

    def _rebuild_node(self, tensor: GlobalTensor) -> Inert:
        if tensor.packing:
            raise UsageError(
                f"elements packed as {tensor.packing!r} cannot be stored in a torch file",
                tensor=tensor.name,
            )
        number = self._add(tensor.name, tensor)
        if self.members[number] != tensor:
            raise UsageError("two tensors have this name", tensor=tensor.name)
        kind = tensor.dtype
        if kind.storage:
            function, storage, count = "_rebuild_tensor_v2", ("torch", kind.storage), tensor.numel
        else:
            function, storage = "_rebuild_tensor_v3", ("torch.storage", "UntypedStorage")
            count = tensor.num_bytes
        reference = PersistentRef(("storage", inert_global(*storage), str(number), "cpu", count))
        self._ready[id(reference)] = reference
        strides = row_major([max(n, 1) for n in tensor.shape])
        hooks = inert_global("collections", "OrderedDict")()
        extra_args = () if kind.storage else (inert_global("torch", kind.name),)
        return inert_global("torch._utils", function)(
            reference, 0, tensor.shape, strides, False, hooks, *extra_args
        )
