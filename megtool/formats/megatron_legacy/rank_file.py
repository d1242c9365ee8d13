"""One file of a legacy Megatron rank: its tensors, each view once, and the tree around them.

Tensors belong to a model or an optimizer. Random state, extra state of modules, loss scales and
step counts are small values that stay in the tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megtool.errors import FormatError
from megtool.formats.header_reader import short_repr
from megtool.pickles import reader as pickle_reader
from megtool.pickles.reader import Inert, dict_items, rebuild_dict
from megtool.pickles.torch_file import StorageBudget, TorchFile, open_torch_file
from megtool.pickles.zip_tensor import StorageView, parse_storage_view
from megtool.tensors.catalogue import StoredFile
from megtool.tensors.sharded import GlobalTensor


@dataclass(slots=True, kw_only=True)
class LegacyRankFile:
    """One file: its tree with `GlobalTensor` leaves, and the position of each of them."""

    stored: StoredFile
    tree: Any = None
    global_names: set[str] = field(default_factory=set)
    tensors: list[GlobalTensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def read_rank_file(root: Path, path: str, budget: StorageBudget) -> LegacyRankFile:
    """Open the file at `path` below `root` and read its small storages, within the budget.

    Raises:
        FormatError: the file is missing, damaged, hostile, or not a Megatron rank file.
    """
    stored = StoredFile.stat(root, path)
    out = LegacyRankFile(stored=stored)
    with open_torch_file(root / path, stored.size) as torch_file:
        collector = _TensorCollector(torch_file, path.removesuffix(".pt"), out)
        out.tree = extract_tensors(
            torch_file.tree, Path(path).name, collector.take, file=torch_file.file
        )
        collector.check_disjoint()
        torch_file.attach_storages(out.tree, budget)
        out.global_names = torch_file.global_names
    return out


class _TensorCollector:
    """Adds the tensors of one file to its `LegacyRankFile`, each view once."""

    def __init__(self, torch_file: TorchFile, prefix: str, out: LegacyRankFile) -> None:
        self._torch_file, self._prefix, self._out = torch_file, prefix, out
        self._tensors_by_view: dict[StorageView, GlobalTensor] = {}

    def take(self, path: str, view: StorageView) -> GlobalTensor:
        """The tensor at this path of the tree; the same tensor for the same view."""
        out, name = self._out, f"{self._prefix}/{path}"
        tied = self._tensors_by_view.get(view)
        if tied is not None:
            out.aliases[name] = tied.name
            return tied
        tensor = GlobalTensor(name=name, shape=view.shape, dtype=view.dtype)
        offset = self._torch_file.locate(view, tensor=name)
        length = view.span_bytes - view.start * view.dtype.itemsize if tensor.numel else 0
        if length < tensor.num_bytes:
            raise self._overlap_error(name, f"its own elements, with strides {list(view.strides)}")
        if not view.is_row_major:
            out.strides[len(out.tensors)] = view.strides
        if tensor.numel:
            self._tensors_by_view[view] = tensor
        out.tensors.append(tensor)
        out.offsets.append(offset)
        out.lengths.append(length)
        return tensor

    def check_disjoint(self) -> None:
        """Check that different views do not overlap.

        Raises:
            FormatError: two views overlap.
        """
        out = self._out
        used = sorted(
            (offset, n, i)
            for i, (offset, n) in enumerate(zip(out.offsets, out.lengths, strict=True))
            if n
        )
        for (offset, n, first), (after, _, second) in pairwise(used):
            if after < offset + n:
                raise self._overlap_error(out.tensors[second].name, repr(out.tensors[first].name))

    def _overlap_error(self, name: str, description: str) -> FormatError:
        return FormatError(
            f"shares bytes with {description}",
            file=self._torch_file.file,
            tensor=name,
            hint="load the file with torch, clone the tensor, and save it again",
        )


MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
MODEL_KEY = re.compile(r"model\d*")
EXTRA_STATE = "_extra_state"
_NUMBERED = re.compile(r"_extra_state\d+")  # of the further experts of a grouped linear layer

_SMALL_IN_OPTIMIZER = frozenset({"param_groups", "grad_scaler", "step"})
_MAX_DEPTH = 64
_MAX_TIMES = 16
_FEW_NODES = 10_000
_UNSUPPORTED_HINT = "load it with the tool that wrote it, and save plain tensors of high precision"

TakeTensor = Callable[[str, StorageView], GlobalTensor]


def extract_tensors(tree: Any, name: str, take: TakeTensor, *, file: Path) -> Any:
    """The tree of the file `name`, with each tensor replaced by the result of `take`.

    `take` receives the tensor's path in the tree, joined by `/`, and its view. The input tree is
    not modified; parts without tensors are shared with it.

    Raises:
        FormatError: the file does not hold a dict, a kind of tensor is not supported, or the tree
            is too deep or large.
    """
    if dict_items(tree) is None and not (name == OPTIMIZER_FILE and isinstance(tree, list)):
        raise FormatError(f"holds {short_repr(tree)}, not the dict of a Megatron rank", file=file)
    for key, value in dict_items(tree) or ():
        if key != "optimizer" and not (isinstance(key, str) and MODEL_KEY.fullmatch(key)):
            pickle_reader.check_expansion(value, file=file)
    walk = _Walk(take, file)
    if name == OPTIMIZER_FILE:
        return walk.descend(tree, (), frozenset())
    return rebuild_dict(
        tree,
        (
            (key, walk.descend(value, (key,), _SMALL_IN_OPTIMIZER))
            if key == "optimizer"
            else (key, walk.descend(value, (key,), frozenset({EXTRA_STATE})))
            if isinstance(key, str) and MODEL_KEY.fullmatch(key)
            else (key, value)
            for key, value in dict_items(tree) or ()
        ),
    )


class _Walk:
    def __init__(self, take: TakeTensor, file: Path) -> None:
        self._take, self._file = take, file
        self._num_nodes = 0
        self._nodes = set[int]()

    def descend(self, node: Any, path: tuple[Any, ...], small: frozenset[str]) -> Any:
        """The node with its tensors replaced, except those below a key in `small`."""
        if isinstance(path[-1] if path else None, str) and _is_small(path[-1], small):
            return node
        if isinstance(node, list | tuple | dict | Inert) and node:
            self._count(node, path)
        if isinstance(node, list):
            return [self.descend(x, (*path, i), small) for i, x in enumerate(node)]
        if isinstance(node, tuple):
            return tuple(self.descend(x, (*path, i), small) for i, x in enumerate(node))
        if (pairs := dict_items(node)) is not None:
            return rebuild_dict(node, ((k, self.descend(v, (*path, k), small)) for k, v in pairs))
        if not isinstance(node, Inert):
            return node
        name = "/".join(map(spell_key, path))
        try:
            view = parse_storage_view(node, file=self._file)
        except FormatError as e:
            raise FormatError(
                e.message,
                file=e.file,
                tensor=name,
                hint=e.hint or _UNSUPPORTED_HINT,
                error_id=e.error_id,
            ) from e
        if view is not None:
            return self._take(name, view)
        if pickle_reader.find_references(node):
            raise FormatError(
                f"a {node.name} stores its data in a way that is not supported",
                file=self._file,
                tensor=name,
                hint=_UNSUPPORTED_HINT,
            )
        return node

    def _count(self, node: Any, path: tuple[Any, ...]) -> None:
        self._num_nodes += 1
        self._nodes.add(id(node))
        if len(path) > _MAX_DEPTH or self._num_nodes > _FEW_NODES + _MAX_TIMES * len(self._nodes):
            raise FormatError("the tree is too deep, or repeats itself", file=self._file)


def _is_small(key: str, small: frozenset[str]) -> bool:
    last = key.rpartition(".")[2]
    return last in small or (EXTRA_STATE in small and _NUMBERED.fullmatch(last) is not None)


def spell_key(key: Any) -> str:
    """A key of a dict as part of a name: `torch.bfloat16,torch.bfloat16` for a pair of dtypes."""
    if pickle_reader.is_global(key):
        return f"{key.module}.{key.qualname}"
    return ",".join(map(spell_key, key)) if isinstance(key, tuple) else str(key)


def remove_tensors(tree: Any) -> Any:
    """The tree without its `GlobalTensor` leaves and the containers they leave empty."""
    stripped = _remove_tensors(tree, 0, {})
    return {} if stripped is _REMOVED else stripped


_REMOVED = object()


def _remove_tensors(node: Any, depth: int, done: dict[int, Any]) -> Any:
    if isinstance(node, GlobalTensor):
        return _REMOVED
    pairs = dict_items(node)
    if depth > _MAX_DEPTH or (pairs is None and not isinstance(node, list | tuple)):
        return node  # there is no tensor at this depth: see `_Walk`
    if id(node) in done:
        return done[id(node)]
    done[id(node)] = node  # in case a part contains itself
    out: Any
    if pairs is None:
        items = [_remove_tensors(x, depth + 1, done) for x in node]
        items = [x for x in items if x is not _REMOVED]
        out = type(node)(items) if items or not node else _REMOVED
    else:
        pairs_left = [(k, _remove_tensors(v, depth + 1, done)) for k, v in pairs]
        pairs_left = [(k, v) for k, v in pairs_left if v is not _REMOVED]
        out = rebuild_dict(node, pairs_left) if pairs_left or not pairs else _REMOVED
    done[id(node)] = out
    return out
