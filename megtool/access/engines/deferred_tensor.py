"""Tensors for engines that are read when they are copied, and of which only that part is read.

The layers of an engine take whole tensors and cut what belongs to a rank: vLLM's weight loaders by
`narrow` and indices (`model_executor/layers/linear.py`, `parameter.py`, `fused_moe/layer.py`),
SGLang's likewise, TensorRT-LLM's by slices (`_torch/modules/linear.py`, `load_weight_shard`).
Layers of other stages and experts of other ranks are never copied. So a tensor that remembers how
it is cut, and is read when anything else is done with it, makes each rank read what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from megtool.access.lazy_tensor import LazyTensor

_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCut:
    """A part of a stored tensor: its box, and the stored dim of each dim of the part."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorCut:
        """All of a tensor."""
        return cls(lo=(0,) * len(shape), hi=tuple(shape), dims=tuple(range(len(shape))))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.hi[d] - self.lo[d] for d in self.dims)

    def narrow(self, dim: int, start: int, stop: int) -> TensorCut:
        """The elements from `start` to before `stop` of a dim."""
        d = self.dims[dim]
        lo, hi = list(self.lo), list(self.hi)
        lo[d], hi[d] = self.lo[d] + start, self.lo[d] + stop
        return replace(self, lo=tuple(lo), hi=tuple(hi))

    def select(self, dim: int, index: int) -> TensorCut:
        """One element of a dim, which goes."""
        size = self.shape[dim]
        if not -size <= index < size:
            raise IndexError(f"index {index} is outside a dimension of {size}")
        dims = [d for n, d in enumerate(self.dims) if n != dim % len(self.dims)]
        return replace(self.narrow(dim, index % size, index % size + 1), dims=tuple(dims))

    def permute(self, order: Sequence[int]) -> TensorCut:
        """The dims in another order."""
        return replace(self, dims=tuple(self.dims[n] for n in order))


class DeferredTensor(torch.Tensor):
    """A tensor of a checkpoint on the CPU that is read when more is done with it than cutting it.

    What it is read into is not kept: each use reads again.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    source: LazyTensor
    cut: TensorCut

    @staticmethod
    def __new__(cls, source: LazyTensor, cut: TensorCut | None = None) -> DeferredTensor:
        """A part of a lazy tensor, by default all of it."""
        cut = cut or TensorCut.whole(source.shape)
        out = torch.Tensor._make_wrapper_subclass(
            cls, cut.shape, dtype=getattr(torch, source.dtype), device=torch.device("cpu")
        )
        out.source, out.cut = source, cut
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.source.name}: {self.source.dtype}{list(self.cut.shape)}, not read>"

    def read(self) -> torch.Tensor:
        """Its elements, contiguous.

        Raises:
            StorageError: a read failed.
        """
        cut = self.cut
        box = tuple(slice(a, b) for a, b in zip(cut.lo, cut.hi, strict=True))
        tensor: torch.Tensor = self.source[box]
        gone = tuple(d for d in range(len(box)) if d not in cut.dims)
        order = (*cut.dims, *gone)
        tensor = tensor.permute(order)
        for _ in gone:
            tensor = tensor.select(-1, 0)
        return tensor.contiguous()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Cut without reading, or read and do whatever is asked for."""
        rule = _CUTS.get(func)
        if rule is not None and isinstance(args[0], DeferredTensor):
            first: DeferredTensor = args[0]
            cuts = rule(first.cut, *args[1:], **(kwargs or {}))
            if isinstance(cuts, list):
                return [DeferredTensor(first.source, cut) for cut in cuts]
            if cuts is not None:
                return DeferredTensor(first.source, cuts)
        args, kwargs = tree_map(_read, (args, kwargs or {}))
        return func(*args, **kwargs)


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, DeferredTensor) else value


def _slice(
    cut: TensorCut, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> TensorCut | None:
    if step != 1:
        return None
    first, last, _ = slice(start, end).indices(cut.shape[dim])
    return cut.narrow(dim, first, max(first, last))


def _split(cut: TensorCut, size: int, dim: int = 0) -> list[TensorCut] | None:
    total = cut.shape[dim]
    if size < 1 or not total:
        return None
    return [cut.narrow(dim, a, min(a + size, total)) for a in range(0, total, size)]


def _split_with_sizes(cut: TensorCut, sizes: Sequence[int], dim: int = 0) -> list[TensorCut]:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [cut.narrow(dim, a, a + n) for a, n in zip(starts, sizes, strict=True)]


def _unbind(cut: TensorCut, dim: int = 0) -> list[TensorCut]:
    return [cut.select(dim, n) for n in range(cut.shape[dim])]


def _transpose(cut: TensorCut, first: int, second: int) -> TensorCut:
    order = list(range(len(cut.dims)))
    order[first], order[second] = order[second], order[first]
    return cut.permute(order)


def _same(cut: TensorCut) -> TensorCut:
    return cut


_CUTS: dict[Any, Callable[..., TensorCut | list[TensorCut] | None]] = {
    _ATEN.detach.default: _same,
    _ATEN.alias.default: _same,
    _ATEN.slice.Tensor: _slice,
    _ATEN.select.int: TensorCut.select,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split_with_sizes,
    _ATEN.unbind.int: _unbind,
    _ATEN.t.default: lambda cut: cut.permute(range(len(cut.dims))[::-1]),
    _ATEN.transpose.int: _transpose,
    _ATEN.permute.default: TensorCut.permute,
}
"""Operations that cut a tensor; None reads it instead."""
