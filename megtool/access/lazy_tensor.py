"""Tensors that are read when they are indexed."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megtool.access.naming import NamedTensors
from megtool.access.read_boxes import BoxRead, BoxReader
from megtool.console import Progress, silent
from megtool.convert.rank_tensors import cut_local
from megtool.dtypes import DType
from megtool.errors import MappingError, UsageError, listed
from megtool.plan.memory import Memory, allocate, as_torch
from megtool.tensors.box import numel
from megtool.tensors.sharded import GlobalTensor

if TYPE_CHECKING:
    import torch

FRAMEWORKS = ("numpy", "torch")


class NamedView(Mapping[str, "LazyTensor"]):
    """The tensors of a checkpoint under one naming and layout, none of them read yet.

    `view[name]` is a lazy tensor; `read` reads several in one go.
    """

    def __init__(self, named: NamedTensors, reader: BoxReader, *, framework: str = "numpy") -> None:
        if framework not in FRAMEWORKS:
            known = ", ".join(FRAMEWORKS)
            raise UsageError(f"the framework {framework!r} is unknown", hint=f"known: {known}")
        self.named, self.reader, self.framework = named, reader, framework

    def __getitem__(self, name: str) -> LazyTensor:
        if name not in self.named.tensors:
            raise KeyError(name)
        return LazyTensor(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.named.tensors)

    def __len__(self) -> int:
        return len(self.named.tensors)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors by {self.named.naming} names>"

    def stored_tensor(self, name: str, dtype: DType | None = None) -> GlobalTensor:
        """Name, shape and type of a tensor, as it is read."""
        kind = dtype or self.named.dtypes[name]
        return GlobalTensor(name=name, shape=self.named.tensors[name].shape, dtype=kind)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, as they are read."""
        return sum(self.stored_tensor(name).num_bytes for name in self)

    def read(
        self,
        names: Sequence[str] | None = None,
        *,
        dtypes: Mapping[str, DType] = MappingProxyType({}),
        progress: Progress = silent,
    ) -> dict[str, Any]:
        """Tensors (all, by default) by name, as arrays or torch tensors; `dtypes` casts some.

        Raises:
            MappingError: there are no such tensors.
            StorageError: a read failed, or there is no memory.
            SourceChangedError: a source file changed since it was opened.
        """
        chosen = list(self) if names is None else list(names)
        if unknown := [n for n in chosen if n not in self.named.tensors]:
            raise MappingError(
                f"no tensor has these names: {listed(unknown)}",
                tensor=unknown[0],
                hint=f"names are {self.named.naming!r} names, such as {next(iter(self), None)!r}",
                error_id="missing-tensors",
            )
        tensors = [self.stored_tensor(n, dtypes.get(n)) for n in chosen]
        memory = allocate(tensors)
        reads = [BoxRead(tensor=self.named.tensors[t.name], dtype=t.dtype) for t in tensors]
        self.reader.read(reads, [memory[t.name] for t in tensors], progress)
        return {t.name: self.wrap(memory[t.name], t) for t in tensors}

    def wrap(self, memory: Memory, tensor: GlobalTensor) -> Any:
        """Memory as an array or a torch tensor."""
        if self.framework == "torch":
            return as_torch(memory, tensor)
        return memory.view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)


class LazyTensor:
    """One tensor that is read when it is indexed: `tensor[10:20, :]` reads what it must.

    It is indexed with integers, slices and `...`. The result has memory of its own.
    """

    def __init__(self, view: NamedView, name: str) -> None:
        self._view, self.name = view, name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._view.named.tensors[self.name].shape

    @property
    def ndim(self) -> int:
        """Its number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> str:
        """The name of its element type, as torch calls it; decoded where it is quantized."""
        return self._view.named.dtypes[self.name].name

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self._view.stored_tensor(self.name).num_bytes

    def __repr__(self) -> str:
        return f"<{self.name}: {self.dtype}{list(self.shape)}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """The elements at an index, as an array or a torch tensor.

        Raises:
            IndexError: the index is none that numpy would take, or selects elements by a list.
        """
        lo, hi, rest = _bounds(index, self.shape)
        kind = self._view.named.dtypes[self.name]
        shape = tuple(max(b - a, 0) for a, b in zip(lo, hi, strict=True))
        tensor = GlobalTensor(name=self.name, shape=shape, dtype=kind)
        memory = allocate([tensor])[self.name]
        if numel(shape):
            whole = self._view.named.tensors[self.name]
            read = BoxRead(tensor=cut_local(whole, lo, hi, self.name), dtype=kind)
            self._view.reader.read([read], [memory])
        return _pick(self._view.wrap(memory, tensor), rest)

    def numpy(self) -> NDArray[Any]:
        """All elements as an array."""
        array: NDArray[Any] = self._as("numpy")
        return array

    def torch(self) -> torch.Tensor:
        """All elements as a torch tensor."""
        tensor: torch.Tensor = self._as("torch")
        return tensor

    def _as(self, framework: str) -> Any:
        view = NamedView(self._view.named, self._view.reader, framework=framework)
        return view[self.name][...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """A DLPack capsule; of types that numpy lacks by torch."""
        kind = self._view.named.dtypes[self.name]
        is_native = kind.view.name == kind.name
        return (self.numpy() if is_native else self.torch()).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU."""
        return (1, 0)


def numpy_dtype(kind: DType) -> np.dtype[Any]:
    """numpy's type of the same elements; of those that numpy lacks, the one of `ml_dtypes`."""
    if kind.view.name == kind.name:
        return kind.view
    import ml_dtypes

    other: np.dtype[Any] = np.dtype(getattr(ml_dtypes, kind.name))
    return other


_Rest = tuple[int | slice, ...]


def _bounds(index: Any, shape: Sequence[int]) -> tuple[list[int], list[int], _Rest]:
    """The box that an index needs, and the index into that box."""
    given = list(index) if isinstance(index, tuple) else [index]
    dots = [n for n, i in enumerate(given) if i is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index has one `...` at most")
    split = dots[0] if dots else len(given)
    missing = len(shape) - len(given) + len(dots)
    if missing < 0:
        raise IndexError(f"{len(given) - len(dots)} indices for {len(shape)} dimensions")
    full = [*given[:split], *[slice(None)] * missing, *given[split + len(dots) :]]
    lo, hi, rest = [], [], list[int | slice]()
    for size, i in zip(shape, full, strict=True):
        if isinstance(i, slice):
            numbers = range(*i.indices(size))
            first, last = (numbers[0], numbers[-1]) if len(numbers) else (0, -1)
            lo.append(min(first, last) if len(numbers) else 0)
            hi.append(max(first, last) + 1 if len(numbers) else 0)
            rest.append(slice(None, None, numbers.step) if numbers.step != 1 else slice(None))
            continue
        try:
            if isinstance(i, bool | np.bool):
                raise TypeError
            number = operator.index(i)
        except TypeError:
            raise IndexError(
                f"a lazy tensor is indexed with integers, slices and `...`, not {i!r}: read it "
                "first, with tensor[...]"
            ) from None
        if not -size <= number < size:
            raise IndexError(f"index {number} is outside a dimension of {size}")
        lo.append(number % size)
        hi.append(number % size + 1)
        rest.append(0)
    return lo, hi, tuple(rest)


def _pick(block: Any, rest: _Rest) -> Any:
    """The elements at the index in what was read; torch has no negative steps."""
    if isinstance(block, np.ndarray):
        return block[rest] if any(r != slice(None) for r in rest) else block
    for d, r in enumerate(rest):
        if isinstance(r, slice) and r.step is not None and r.step < 0:
            block = block.flip(d)
    positive = tuple(
        slice(None, None, abs(r.step)) if isinstance(r, slice) and r.step is not None else r
        for r in rest
    )
    return block[positive]
