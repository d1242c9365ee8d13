"""One rank's file of an item of torch_checkpointing: its tensors, and the values around them.

A `.pt` file holds any nested value, with DTensors among its tensors; other files hold tensors
alone (safetensors), a JSON value, or bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megtool.errors import FormatError
from megtool.formats.header_reader import check_inside, parse_json, read_exact
from megtool.formats.safetensors.header import read_header
from megtool.formats.torch_checkpointing.dtensor_parts import DTensorPlacement, read_placement
from megtool.formats.torch_checkpointing.metadata import ItemFile, NestedPath
from megtool.pickles import reader as pickle_reader
from megtool.pickles.reader import Inert, dict_items, is_global
from megtool.pickles.torch_file import StorageBudget, open_torch_file
from megtool.pickles.zip_tensor import StorageView, TensorLocation, parse_storage_view
from megtool.tensors.catalogue import StoredFile

_MAX_DEPTH = 64
_MAX_LEAVES = 1 << 24
_UNSUPPORTED_HINT = "load it with the tool that wrote it, and save plain tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTensor(TensorLocation):
    """A rank's part of a tensor: its bytes, and its element strides unless they are row-major.

    `is_dtensor`: the file says that it is a part of a larger tensor (`global_shape`), and, where
    it is understood, which (`placement`).
    """

    length: int
    is_dtensor: bool = False
    global_shape: tuple[int, ...] | None = None
    placement: DTensorPlacement | None = None


@dataclass(slots=True, kw_only=True)
class RankItem:
    """The contents of one file: tensors and other values by their path in the item.

    `sequences` are the paths of lists and tuples that hold tensors. The keys of dicts are as they
    are stored, so that a number is a position in a list or a key.
    """

    item: str
    rank: int
    stored: StoredFile
    tensors: dict[NestedPath, ItemTensor] = field(default_factory=dict)
    values: dict[NestedPath, Any] = field(default_factory=dict)
    sequences: dict[NestedPath, str] = field(default_factory=dict)


def read_rank_item(
    root: Path, item: str, rank: int, file: ItemFile, budget: StorageBudget
) -> RankItem:
    """Open a rank's file of an item, from its headers and small values alone.

    Raises:
        FormatError: the file is missing, damaged, hostile, or holds a kind of tensor that is not
            known.
    """
    if not (root / file.path).exists():
        raise FormatError(
            f"the file of item {item!r} and rank {rank} is missing: {file.path}",
            file=root,
            hint="copy the whole folder",
            error_id="missing-shard",
        )
    check_inside(root, file.path)
    stored = StoredFile.stat(root, file.path)
    out = RankItem(item=item, rank=rank, stored=stored)
    path = root / file.path
    if file.serialization == "Torch":
        _read_torch(out, path, budget)
    elif file.serialization == "Safetensors":
        header = read_header(path, stored.size)
        for entry in header.entries:
            out.tensors[(entry.name,)] = ItemTensor(
                dtype=entry.dtype,
                shape=entry.shape,
                offset=header.start + entry.begin,
                length=entry.end - entry.begin,
                strides=None,
            )
    else:
        budget.take(stored.size, file=path)
        data = read_exact(path, 0, stored.size)
        out.values[()] = data if file.serialization == "Raw" else parse_json(data, path)
    return out


def _read_torch(out: RankItem, path: Path, budget: StorageBudget) -> None:
    with open_torch_file(path, out.stored.size) as torch_file:
        pickle_reader.check_expansion(torch_file.tree, file=path)
        walk = _Walk(path, out)
        walk.descend(torch_file.tree, ())
        for place, (view, parts) in walk.views.items():
            name = ".".join(map(str, (out.item, *place)))
            offset = torch_file.locate(view, tensor=name)
            length = (
                view.span_bytes - view.start * view.dtype.itemsize if 0 not in view.shape else 0
            )
            out.tensors[place] = ItemTensor(
                dtype=view.dtype,
                shape=view.shape,
                offset=offset,
                length=length,
                strides=None if view.is_row_major else view.strides,
                is_dtensor=parts is not None,
                global_shape=None if parts is None else parts.shape,
                placement=None if parts is None else parts.placement,
            )
        for value in out.values.values():
            torch_file.attach_storages(value, budget)


class _Walk:
    """Takes a tree apart into the views of its tensors, and the largest values without tensors."""

    def __init__(self, file: Path, out: RankItem) -> None:
        self._file, self._out = file, out
        self.views: dict[NestedPath, tuple[StorageView, _Whole | None]] = {}

    def descend(self, node: Any, path: NestedPath) -> None:
        """Take the node at a path apart.

        Raises:
            FormatError: it is too deep or too large, or an unknown kind of tensor.
        """
        if len(path) > _MAX_DEPTH or len(self.views) + len(self._out.values) > _MAX_LEAVES:
            raise FormatError("the tree is too deep, or too large", file=self._file)
        if (tensor := self._tensor(node, path)) is not None:
            self.views[path] = tensor
            return
        pairs = dict_items(node)
        if pairs and all(type(k) in (str, int) for k, _ in pairs):
            for key, value in pairs:
                self.descend(value, (*path, key))
        elif isinstance(node, list | tuple) and _is_traversed(node):
            self._out.sequences[path] = "tuple" if isinstance(node, tuple) else "list"
            for number, value in enumerate(node):
                self.descend(value, (*path, number))
        else:
            self._refuse_hidden(node, path)
            self._out.values[path] = node

    def _tensor(self, node: Any, path: NestedPath) -> tuple[StorageView, _Whole | None] | None:
        """The view of a tensor, and the whole of which it is a part if it is a DTensor's."""
        if not isinstance(node, Inert):
            return None
        local = _local_part(node)
        whole = None
        if local is not None:
            inner, whole = local
            node = inner
        try:
            view = parse_storage_view(node, file=self._file)
        except FormatError as e:
            raise FormatError(
                e.message,
                file=e.file,
                tensor=self._name(path),
                hint=e.hint or _UNSUPPORTED_HINT,
                error_id=e.error_id,
            ) from e
        if view is None and local is not None:
            raise FormatError(
                "a DTensor without elements of its own",
                file=self._file,
                tensor=self._name(path),
                hint=_UNSUPPORTED_HINT,
            )
        return None if view is None else (view, whole)

    def _refuse_hidden(self, node: Any, path: NestedPath) -> None:
        """Refuse a tensor of a kind that is not read, which would be taken for a small value."""
        if isinstance(node, Inert) and node.module == "torch._tensor":
            raise FormatError(
                f"tensor kind {getattr(node.args[0], 'qualname', node.name)} is not supported"
                if node.args
                else "a tensor subclass in a pickle is damaged",
                file=self._file,
                tensor=self._name(path),
                hint=_UNSUPPORTED_HINT,
            )

    def _name(self, path: NestedPath) -> str:
        return ".".join(map(str, (self._out.item, *path)))


@dataclass(frozen=True, slots=True)
class _Whole:
    """The whole tensor of which a DTensor holds a part."""

    shape: tuple[int, ...]
    placement: DTensorPlacement | None


def _local_part(node: Inert) -> tuple[Any, _Whole] | None:
    """The inert tensor inside a DTensor, and the whole one; None for any other node."""
    if node.module == "torch._utils" and node.qualname.startswith("_rebuild_parameter"):
        inner = node.args[0] if node.args else None
        return _local_part(inner) if isinstance(inner, Inert) else None
    is_wrapped = node.name == "torch._tensor._rebuild_from_type_v2" and len(node.args) == 4
    if not is_wrapped or not is_global(node.args[0], "torch._utils._rebuild_wrapper_subclass"):
        return None
    _, kind, args, state = node.args
    if not is_global(kind) or kind.qualname != "DTensor" or not isinstance(args, tuple):
        return None
    states = state if isinstance(state, tuple) else (state,)  # attributes, and those in slots
    attributes = {k: v for s in states if isinstance(s, dict) for k, v in s.items()}
    local = attributes.get("_local_tensor")
    size = pickle_reader.to_plain(args[2]) if len(args) > 2 else None
    if local is None or not isinstance(size, tuple) or any(type(n) is not int for n in size):
        return None
    return local, _Whole(size, read_placement(attributes.get("_spec"), len(size)))


def is_leaf(value: Any) -> bool:
    """Whether reading leaves a value whole: it is no tensor, and none is in it, nor a dict."""
    pairs = dict_items(value)
    if pairs and all(type(k) in (str, int) for k, _ in pairs):
        return False
    if isinstance(value, list | tuple) and _is_traversed(value):
        return False
    return not (isinstance(value, Inert) and value.module in ("torch._utils", "torch._tensor"))


def _is_traversed(node: Sequence[Any]) -> bool:
    """Whether a list or tuple is taken apart: it holds tensors or, as a list, dicts.

    So does torch.distributed.checkpoint.
    """
    stack: list[Any] = list(node)
    while stack:
        value = stack.pop()
        if isinstance(value, list | tuple):
            stack.extend(value)
        elif (pairs := dict_items(value)) is not None:
            if isinstance(node, list):
                return True
            stack.extend(v for _, v in pairs)
        elif isinstance(value, Inert) and value.module in ("torch._utils", "torch._tensor"):
            return True
    return False


def find_differences(items: Sequence[RankItem]) -> list[str]:
    """Names of values that are not the same in all ranks' files of an item."""
    first: dict[str, RankItem] = {}
    out: dict[str, None] = {}
    for part in items:
        base = first.setdefault(part.item, part)
        for path in {**base.values, **part.values}:
            try:
                is_same = _same(base.values.get(path), part.values.get(path))
            except RecursionError:
                is_same = False
            if not is_same:
                out[".".join(map(str, (part.item, *path)))] = None
    return list(out)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Inert) and isinstance(b, Inert):
        fields = ("name", "args", "kwargs", "state", "items", "pairs")
        return all(_same(getattr(a, f), getattr(b, f)) for f in fields)
    if isinstance(a, pickle_reader.PersistentRef) and isinstance(b, pickle_reader.PersistentRef):
        return a.data == b.data
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or (a != a and b != b)
