"""Cast: elements of one type to another, rounded to nearest even, and packed rows to elements."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from megtool.checkpoint.transport.strided import Array
from megtool.dtypes import DType, dtype
from megtool.errors import FormatError, MissingPackageError
from megtool.packing import gguf
from megtool.tensors.sharded import GlobalTensor

if TYPE_CHECKING:
    import torch

Convert = Callable[[Array, Array], None]
"""Takes a contiguous tile as read (of packed rows: uint8 `[..., row_bytes]`) and fills another."""


def converter(source: GlobalTensor, target: DType) -> Convert | None:
    """What turns tiles of a stored tensor into elements of `target`; None when they are equal."""
    if source.packing is not None:
        packing, columns = source.packing, source.shape[-1]

        def decode(raw: Array, out: Array) -> None:
            rows = gguf.decode(raw.reshape(-1, raw.shape[-1]), packing, columns)
            cast(rows.reshape(out.shape), dtype("float32"), out, target)

        return decode
    if source.dtype == target:
        return None
    return lambda raw, out: cast(raw, source.dtype, out, target)


def cast(what: Array, source: DType, out: Array, target: DType) -> None:
    """Fill `out` with the elements of `what`, both contiguous and of the types' widths.

    Raises:
        FormatError: torch has no such cast.
    """
    if source == target:
        np.copyto(out.view(target.view), what.view(target.view))
        return
    try:
        _tensor(out, target).copy_(_tensor(what, source))
    except (RuntimeError, NotImplementedError) as e:
        raise FormatError(f"torch cannot cast {source} to {target}: {e}") from e


def element(value: float, kind: DType) -> Array:
    """`value` as one element of a type, an array of one unsigned integer of its width."""
    if not value:
        return np.zeros(1, f"<u{kind.itemsize}")
    if kind.name in ("float16", "float32", "float64") or not kind.is_float:
        return np.array([value]).astype(kind.view).view(f"<u{kind.itemsize}")
    out = np.empty(1, kind.view)
    cast(np.array([value], np.float32), dtype("float32"), out, kind)
    return out.view(f"<u{kind.itemsize}")


@contextlib.contextmanager
def one_torch_thread(needed: bool) -> Iterator[None]:
    """Have torch compute on the calling thread alone: the tiles themselves go to several threads.

    The setting is put back afterwards; torch is not imported when it is not `needed`.
    """
    if not needed:
        yield
        return
    torch = _torch()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tensor(array: Array, kind: DType) -> torch.Tensor:
    carrier = np.dtype(f"i{kind.itemsize}") if kind.itemsize > 1 else np.dtype(np.uint8)
    found: torch.Tensor = _torch().from_numpy(array.reshape(-1).view(carrier))
    return found.view(_type(kind.name))


@functools.cache
def _type(name: str) -> torch.dtype:
    found = getattr(_torch(), name, None)
    if found is None:
        raise FormatError(f"this torch has no dtype {name!r}", hint="pip install -U torch")
    kind: torch.dtype = found
    return kind


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as e:
        raise MissingPackageError("casting needs torch", hint="pip install torch") from e
    return torch
