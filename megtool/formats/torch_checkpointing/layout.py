"""Layout of a folder of torch_checkpointing before its data is written.

Each rank gets a file per item, with its rows of the tensors as plain tensors: pickled DTensors
would need torch's classes of one release. The library puts them into DTensors by `metadata.pkl`,
and reads a folder of one rank without it, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megtool.errors import UsageError
from megtool.formats.torch_checkpointing.metadata import (
    METADATA,
    NestedPath,
    ShardedRows,
    is_item_key,
    write_metadata,
)
from megtool.pickles.torch_file import plan_torch_file
from megtool.tensors.catalogue import Catalogue, Destination, Extents, StoredFile, StoredObject
from megtool.tensors.sharded import GlobalTensor, Shards

MODEL, OPTIMIZER = "model", "optimizer"
_MAX_ITEMS = 1 << 20
_STATE_LAST = re.compile(r"optimizer\.state\.(.+)\.([^.]+)")


def plan_torch_checkpointing_layout(
    tensors: Sequence[GlobalTensor],
    shards: Shards,
    *,
    ranks: int,
    paths: Mapping[str, NestedPath],
    sequences: Mapping[NestedPath, str],
    aliases: Mapping[str, str],
    objects: Mapping[str, Any],
    small_files: Mapping[str, bytes] | None = None,
) -> Destination:
    """Plan the files of `ranks` ranks; `shards` are rows of the tensors by rank.

    `paths` are items and keys by name, for names that have some: others are the model's, or the
    optimizer's by their spelling. `sequences` are the paths of lists and tuples, `aliases` further
    names of a tensor. `objects` are inert values, which every rank gets.

    Raises:
        UsageError: two names have one path, or elements are packed.
        FormatError: a value names what no checkpoint needs.
    """
    whole = {t.name: t for t in tensors}
    places = {n: _place(n, paths, is_tensor=True) for n in whole}
    values = {_place(n, paths, is_tensor=False): value for n, value in objects.items()}
    parts: dict[int, dict[str, list[int]]] = {rank: {} for rank in range(ranks)}
    for row, (number, rank) in enumerate(
        zip(shards.tensor.tolist(), shards.owner.tolist(), strict=True)
    ):
        parts[rank].setdefault(tensors[number].name, []).append(row)
    also: dict[str, list[NestedPath]] = {}
    for alias, name in aliases.items():
        if name in whole and alias not in whole:
            also.setdefault(name, []).append(_place(alias, paths, is_tensor=True))
    build = _Build(tensors, shards)
    for rank in range(ranks):
        trees: dict[str, Any] = {}
        rows: dict[str, int] = {}
        for name, (row,) in parts[rank].items():
            shape = shards.boxes.shape[row, : len(whole[name].shape)].tolist()
            leaf = replace(whole[name], shape=tuple(shape))
            rows[name] = row
            for place in (places[name], *also.get(name, ())):
                _put(trees, place, leaf)
        for place, value in values.items():
            _put(trees, place, value)
        for item in sorted(trees):
            tree = _with_sequences(trees[item], (item,), sequences)
            build.add(f"{item}_{rank}.pt", tree, rows)
    items: dict[str, dict[NestedPath, ShardedRows]] = {}
    for name, t in whole.items():
        is_split = bool(t.shape) and t.numel > 0
        described = ShardedRows(shape=t.shape, dtype=t.dtype.name, is_split=is_split)
        for item, *path in (places[name], *also.get(name, ())):
            items.setdefault(str(item), {})[tuple(path)] = described
    return Destination(
        catalogue=build.catalogue(objects),
        fragments=build.fragments,
        small_files=dict(small_files or {}),
        final_files={METADATA: write_metadata(items, ranks)},
    )


class _Node(dict[Any, Any]):
    """A dict of the structure, unlike a value that is a dict."""


class _Build:
    """Builds the files, and where each shard is."""

    def __init__(self, tensors: Sequence[GlobalTensor], shards: Shards) -> None:
        self._tensors, self._shards = tensors, shards
        self._files: list[StoredFile] = []
        self._file = np.zeros(len(shards), np.int32)
        self._offset = np.zeros(len(shards), np.int64)
        self._length = np.zeros(len(shards), np.int64)
        self.fragments: list[tuple[int, int, bytes]] = []

    def add(self, path: str, tree: Any, rows: Mapping[str, int]) -> None:
        """Add one file; `rows` are the shards of its tensors by name."""
        layout = plan_torch_file(tree)
        number = len(self._files)
        self._files.append(StoredFile(path=path, size=layout.size))
        self.fragments += [(number, offset, data) for offset, data in layout.fragments]
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=True):
            row = rows[tensor.name]
            self._file[row], self._offset[row] = number, offset
            self._length[row] = tensor.num_bytes

    def catalogue(self, objects: Mapping[str, Any]) -> Catalogue:
        """The catalogue of all files."""
        return Catalogue(
            format="torch_checkpointing",
            root=Path(),
            files=self._files,
            tensors=list(self._tensors),
            shards=self._shards,
            extents=Extents(file=self._file, offset=self._offset, length=self._length),
            objects={
                n: StoredObject(name=n, kind="leaf", value=value) for n, value in objects.items()
            },
        )


def _place(name: str, paths: Mapping[str, NestedPath], *, is_tensor: bool) -> NestedPath:
    """The item of a name, and the keys in it."""
    path = paths.get(name)
    if path and isinstance(path[0], str) and is_item_key(path[0]):
        return path
    if path and len(path) > 1:
        return (MODEL, *path)
    if match := _STATE_LAST.fullmatch(name):
        return (OPTIMIZER, "state", match[1], match[2])
    return (name,) if is_item_key(name) and not is_tensor else (MODEL, name)


def _put(trees: dict[Any, Any], place: NestedPath, leaf: Any) -> None:
    """Set the value at a path of nested dicts.

    Raises:
        UsageError: there is another value.
    """
    node: Any = trees
    for key in place[:-1]:
        node = node.setdefault(key, _Node())
        if not isinstance(node, _Node):
            raise _twice(place)
    if place[-1] in node:
        raise _twice(place)
    node[place[-1]] = leaf


def _with_sequences(node: Any, path: NestedPath, sequences: Mapping[NestedPath, str]) -> Any:
    """The tree of an item, with lists and tuples where there were some."""
    if not isinstance(node, _Node):
        return node
    tree = {k: _with_sequences(v, (*path, k), sequences) for k, v in node.items()}
    kind = sequences.get(path)
    if kind is None or any(type(k) is not int for k in tree):
        return tree
    values = [tree.get(k) for k in range(max(tree) + 1)] if max(tree) < _MAX_ITEMS else []
    return tuple(values) if kind == "tuple" else values or tree


def _twice(place: NestedPath) -> UsageError:
    return UsageError(
        f"two names lead to {'.'.join(map(str, place))!r}", hint="rename one: --rename OLD=NEW"
    )
