"""One file of `torch.save` that holds a model: a state dict, or a dict with one somewhere in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megtool.errors import FormatError
from megtool.formats.header_reader import DAMAGED
from megtool.pickles.reader import Inert, check_expansion, dict_items
from megtool.pickles.torch_file import TorchFile, open_torch_file
from megtool.pickles.zip_tensor import StorageView, TensorLocation, parse_storage_view
from megtool.tensors.catalogue import (
    Catalogue,
    Extents,
    IgnoredTensor,
    ShardOffsets,
    StoredFile,
)
from megtool.tensors.sharded import GlobalTensor, Shards, widest

_MAX_DEPTH = 32
_MAX_TENSORS = 1 << 22
_UNNAMED = "state of a trainer, which has numbers in place of names"
_SUBCLASS_HINT = (
    "it is a class of another library: load the file with that library, and save plain tensors"
)


@dataclass(slots=True, kw_only=True)
class StateDictFile:
    """The contents of one file, located.

    `tensors` have their keys joined with dots; `copies` maps a name to the first one of the same
    bytes. `unnamed` are tensors in lists or under numbers, and `others` the first keys of values
    that are not tensors.
    """

    stored: StoredFile
    tensors: dict[str, TensorLocation] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    unnamed: dict[str, int] = field(default_factory=dict)
    others: dict[str, None] = field(default_factory=dict)


def read_state_dict_file(root: Path, path: str) -> StateDictFile:
    """Read the tree of a file, and where its tensors are; no tensor is read and no code is run.

    Raises:
        FormatError: the file is damaged, hostile, no file of `torch.save`, or holds a class of
            tensor that is not known.
    """
    stored = StoredFile.stat(root, path)
    out = StateDictFile(stored=stored)
    file = root / path if path else root
    with open_torch_file(file, stored.size) as torch_file:
        check_expansion(torch_file.tree, file=file)
        if dict_items(torch_file.tree) is None:
            raise FormatError(
                f"it holds {_describe(torch_file.tree)}, and no state dict",
                file=file,
                hint="save the state dict: torch.save(model.state_dict(), path)",
                error_id="not-a-checkpoint",
            )
        _Walk(torch_file, out).descend(torch_file.tree, (), named=True)
    if not out.tensors:
        raise FormatError(
            "it holds no tensors by name", file=file, hint=DAMAGED, error_id="not-a-checkpoint"
        )
    return out


def _describe(tree: Any) -> str:
    if isinstance(tree, Inert):
        if tree.module.startswith("torch._"):
            return "one tensor"
        return f"an object of {tree.name}"
    return f"a {type(tree).__name__}"


class _Walk:
    """Takes the tree of a file apart into tensors and other values."""

    def __init__(self, torch_file: TorchFile, out: StateDictFile) -> None:
        self._file, self._out = torch_file, out
        self._first: dict[StorageView, str] = {}

    def descend(self, node: Any, path: tuple[str, ...], *, named: bool) -> None:
        """Add the tensors at a node and below.

        Raises:
            FormatError: the tree is too deep, or a tensor is damaged or of an unknown class.
        """
        if len(path) > _MAX_DEPTH or len(self._out.tensors) > _MAX_TENSORS:
            raise FormatError("the tree is too deep, or too large", file=self._file.file)
        name = ".".join(path)
        if (view := self._view(node, name)) is not None:
            self._add(view, name, named=named)
        elif (pairs := dict_items(node)) is not None:
            for key, value in pairs:
                self.descend(value, (*path, str(key)), named=named and isinstance(key, str))
        elif isinstance(node, list | tuple):
            for number, value in enumerate(node):
                self.descend(value, (*path, str(number)), named=False)
        else:
            self._out.others[path[0]] = None

    def _view(self, node: Any, name: str) -> StorageView | None:
        try:
            return parse_storage_view(node, file=self._file.file)
        except FormatError as e:
            e.tensor, e.hint = e.tensor or name, e.hint or _SUBCLASS_HINT
            raise

    def _add(self, view: StorageView, name: str, *, named: bool) -> None:
        out = self._out
        if not named:
            out.unnamed[name] = view.span_bytes
            return
        if name in out.tensors or name in out.copies:
            raise FormatError("two tensors have this name", file=self._file.file, tensor=name)
        first = self._first.setdefault(view, name)
        if first != name and view.span_bytes:
            out.copies[name] = first
            return
        out.tensors[name] = TensorLocation(
            offset=self._file.locate(view, tensor=name),
            dtype=view.dtype,
            shape=view.shape,
            strides=None if view.is_row_major else view.strides,
        )


def make_catalogue(
    name: str,
    root: Path,
    files: Sequence[StateDictFile],
    *,
    metadata: dict[str, Any],
    auxiliary_files: Mapping[str, Path],
    warnings: Sequence[str],
) -> Catalogue:
    """Return the catalogue of the tensors of some files, in the format called `name`.

    A tensor that shares all its bytes with another is one of its own, over the same bytes.

    Raises:
        FormatError: two files have a tensor of one name, or tensors overlap.
    """
    tensors: list[GlobalTensor] = []
    rows: list[tuple[int, TensorLocation]] = []
    holder: dict[str, int] = {}
    for number, part in enumerate(files):
        for tensor_name, location in part.tensors.items():
            if tensor_name in holder:
                first = files[holder[tensor_name]].stored.path
                raise FormatError(
                    f"is also in {first!r}",
                    file=root / part.stored.path,
                    tensor=tensor_name,
                    hint="two checkpoints share this folder: name the file to open",
                )
            holder[tensor_name] = number
            tensors.append(
                GlobalTensor(name=tensor_name, shape=location.shape, dtype=location.dtype)
            )
            rows.append((number, location))
    out = _build(name, root, files, tensors, rows)
    out.check()  # before tensors share bytes
    position = {t.name: k for k, t in enumerate(tensors)}
    for number, part in enumerate(files):
        for copy, first in part.copies.items():
            if copy in holder:
                raise FormatError("two files have it", file=root, tensor=copy)
            holder[copy] = number
            k = position[first]
            tensors.append(GlobalTensor(name=copy, shape=tensors[k].shape, dtype=tensors[k].dtype))
            rows.append(rows[k])
    if len(tensors) > len(out.tensors):
        out = _build(name, root, files, tensors, rows)
    out.metadata, out.auxiliary_files = metadata, dict(auxiliary_files)
    out.warnings = [*warnings, *_say_others(files)]
    out.ignored = [
        IgnoredTensor(name=n, reason=_UNNAMED, num_bytes=size)
        for part in files
        for n, size in part.unnamed.items()
    ]
    return out


def _build(
    name: str,
    root: Path,
    files: Sequence[StateDictFile],
    tensors: list[GlobalTensor],
    rows: Sequence[tuple[int, TensorLocation]],
) -> Catalogue:
    strides = {k: x.strides for k, (_, x) in enumerate(rows) if x.strides is not None}
    extents = Extents(
        file=np.array([n for n, _ in rows], np.int32),
        offset=np.array([x.offset for _, x in rows], np.int64),
        length=np.array([x.span_bytes for _, x in rows], np.int64),
        contained=bool(strides),
    )
    out = Catalogue(
        format=name,
        root=root,
        files=[part.stored for part in files],
        tensors=list(tensors),
        shards=Shards.build(
            [(k, (0,) * len(t.shape), t.shape, rows[k][0]) for k, t in enumerate(tensors)],
            widest(tensors),
        ),
        extents=extents,
    )
    if strides:
        out.locate_contained = lambda ids: ShardOffsets(
            offset=extents.offset[ids],
            strides={k: strides[row] for k, row in enumerate(ids.tolist()) if row in strides},
        )
    return out


def _say_others(files: Sequence[StateDictFile]) -> list[str]:
    """Name the parts of files that are not read."""
    unread: dict[str, None] = {}
    for part in files:
        unread |= dict.fromkeys(n.partition(".")[0] for n in part.unnamed)
        unread |= part.others
    if not unread:
        return []
    names = ", ".join(list(unread)[:8]) + (", ..." if len(unread) > 8 else "")
    return [f"not read: {names}: values that are no tensors of a model"]
