"""One file of a Megatron rank: its tensors, each view once, and the tree around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megtool.checkpoint.catalogue import StoredFile
from megtool.checkpoint.containers.torch_file import Budget, TorchFile, open_torch_file
from megtool.checkpoint.containers.zip_tensor import TensorView
from megtool.checkpoint.formats.megatron_legacy_tree import take_tensors
from megtool.errors import FormatError
from megtool.tensors.sharded import GlobalTensor


@dataclass(slots=True, kw_only=True)
class RankFile:
    """What one file says: its tree with `GlobalTensor` leaves, and where each of these lies."""

    stored: StoredFile
    tree: Any = None
    named: set[str] = field(default_factory=set)
    tensors: list[GlobalTensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def read_rank_file(root: Path, path: str, budget: Budget) -> RankFile:
    """Open the file at `path` below `root`; its small storages are read, as the budget allows.

    Raises:
        FormatError: it is missing, damaged, hostile, or no file of a Megatron rank.
    """
    stored = StoredFile.stat(root, path)
    out = RankFile(stored=stored)
    with open_torch_file(root / path, stored.size) as opened:
        taker = _Taker(opened, path.removesuffix(".pt"), out)
        out.tree = take_tensors(opened.tree, Path(path).name, taker.take, file=opened.file)
        taker.check_apart()
        opened.attach(out.tree, budget)
        out.named = opened.named
    return out


class _Taker:
    """Puts the tensors of one file into its `RankFile`, each view once."""

    def __init__(self, opened: TorchFile, prefix: str, out: RankFile) -> None:
        self._opened, self._prefix, self._out = opened, prefix, out
        self._known: dict[TensorView, GlobalTensor] = {}

    def take(self, path: str, view: TensorView) -> GlobalTensor:
        """The tensor at this path of the tree: one seen before where it is the same view."""
        out, name = self._out, f"{self._prefix}/{path}"
        known = self._known.get(view)
        if known is not None:
            out.aliases[name] = known.name
            return known
        tensor = GlobalTensor(name=name, shape=view.shape, dtype=view.dtype)
        offset = self._opened.place(view, tensor=name)
        length = view.span_bytes - view.start * view.dtype.itemsize if tensor.numel else 0
        if length < tensor.num_bytes:
            raise self._shared(name, f"its own elements, with strides {list(view.strides)}")
        if not view.row_major:
            out.strides[len(out.tensors)] = view.strides
        if tensor.numel:
            self._known[view] = tensor
        out.tensors.append(tensor)
        out.offsets.append(offset)
        out.lengths.append(length)
        return tensor

    def check_apart(self) -> None:
        """Prove that no two views that differ overlap.

        Raises:
            FormatError: two do.
        """
        out = self._out
        used = sorted(
            (at, n, i) for i, (at, n) in enumerate(zip(out.offsets, out.lengths, strict=True)) if n
        )
        for (at, n, one), (after, _, other) in pairwise(used):
            if after < at + n:
                raise self._shared(out.tensors[other].name, repr(out.tensors[one].name))

    def _shared(self, name: str, other: str) -> FormatError:
        return FormatError(
            f"shares bytes with {other}",
            file=self._opened.file,
            tensor=name,
            hint="load the file with torch, clone the tensor, and save it again",
        )
