"""Casts between dtypes, rounded to nearest even, and decoding of packed rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from megtool.dtypes import DType, dtype
from megtool.errors import FormatError, MissingPackageError
from megtool.number_formats import gguf
from megtool.number_formats.small_floats import eight_bit
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.strided import Array

if TYPE_CHECKING:
    import torch

_NUMPY = (
    "float32",
    "bfloat16",
    "float16",
)  # cast to each other without torch, which takes a second to import
_CHUNK = 1 << 16  # elements; intermediate arrays stay in a core's L2 cache

_TOO_LARGE = 0x477FF000  # float32 bits of 65520: from here on float16 is infinite
_INFINITE = 0x7F800000

Convert = Callable[[Array, Array], int]
"""Takes a contiguous tile (of packed rows: uint8 `[..., row_bytes]`) and fills another; returns the
result of `cast`."""


def make_converter(
    source: GlobalTensor, target: DType, window: tuple[int, int, int] | None = None
) -> Convert | None:
    """The conversion from tiles of a stored tensor to elements of `target`; None if not needed.

    For packed rows, `window` is the number of elements a tile holds of each row, and the first and
    the end of those to return; without it rows are whole.
    """
    if source.packing is not None:
        packing = source.packing
        columns, first, end = window or (source.shape[-1], 0, source.shape[-1])

        def decode(raw: Array, out: Array) -> int:
            rows = gguf.decode(raw.reshape(-1, raw.shape[-1]), packing, columns)
            solid = np.ascontiguousarray(rows[:, first:end])
            return cast(solid.reshape(out.shape), dtype("float32"), out, target)

        return decode
    if source.dtype == target:
        return None
    return lambda raw, out: cast(raw, source.dtype, out, target)


def cast(values: Array, source: DType, out: Array, target: DType) -> int:
    """Fill `out` with the elements of `values`, both contiguous and of the dtypes' widths.

    The bits equal torch's, on x86 also for NaN. Returns how many numbers were too large for float16
    and became infinite; it is 0 for other dtypes, whose exponents are wide enough.

    Raises:
        FormatError: torch has no such cast.
    """
    if source == target:
        np.copyto(out.view(target.view), values.view(target.view))
        return 0
    if not needs_torch(source, target):
        return _cast_by_numpy(values.reshape(-1), source.name, out.reshape(-1), target.name)
    try:
        _torch_view(out, target).copy_(_torch_view(values, source))
    except RuntimeError as e:  # torch's NotImplementedError is one
        raise FormatError(f"torch cannot cast {source} to {target}: {e}") from e
    if target.name != "float16":
        return 0
    infinite = (out.reshape(-1).view(np.uint16) & 0x7FFF) == 0x7C00
    if not infinite.any():
        return 0
    unrounded = _torch_view(values, source).to(_torch_dtype("float64"))
    return int(np.isfinite(unrounded.numpy()[infinite]).sum())


def add_shift(
    values: Array, source: DType, out: Array, target: DType, by: float
) -> tuple[int, int]:
    """Fill `out` with `values` plus `by`, both contiguous and of the dtypes' widths.

    Returns how many became infinite (see `cast`), and how many were rounded: less `by` they are no
    longer what they were.
    """
    single = dtype("float32")
    before, after = np.empty((2, values.size), np.float32)
    cast(values.reshape(-1), source, before, single)
    total = (before.astype(np.float64) + by).astype(np.float32)
    overflowed = cast(total, single, out.reshape(-1), target)
    cast(out.reshape(-1), target, after, single)
    rounded = (after.astype(np.float64) - by != before) & ~np.isnan(before)
    return overflowed, int(rounded.sum())


def needs_torch(source: DType, target: DType) -> bool:
    """Whether the cast needs torch."""
    return source != target and not (source.name in _NUMPY and target.name in _NUMPY)


def encode_element(value: float, kind: DType) -> Array:
    """`value` as one element of a dtype: an array of one unsigned integer of its width."""
    if not value:
        return np.zeros(1, f"<u{kind.itemsize}")
    if kind.name in ("float16", "float32", "float64") or not kind.is_float:
        return np.array([value]).astype(kind.view).view(f"<u{kind.itemsize}")
    out = np.empty(1, kind.view)
    cast(np.array([value], np.float32), dtype("float32"), out, kind)
    return out.view(f"<u{kind.itemsize}")


@contextlib.contextmanager
def limit_torch_threads(needed: bool) -> Iterator[None]:
    """Limit torch to the calling thread, because tiles already go to several threads.

    The setting is restored afterwards. Torch is not imported unless `needed`.
    """
    if not needed:
        yield
        return
    torch = _import_torch()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cast_by_numpy(values: Array, source: str, out: Array, target: str) -> int:
    """Cast through float32, which represents the other two dtypes exactly: one rounding."""
    overflowed = 0
    middle, *buffers = np.empty((3, min(len(values), _CHUNK)), np.uint32)
    for start in range(0, len(values), _CHUNK):
        chunk, result = values[start : start + _CHUNK], out[start : start + _CHUNK]
        single, scratch, more = (b[: len(chunk)] for b in (middle, *buffers))
        if source == "float32":
            single = chunk.view(np.uint32)
        elif target == "float32":
            single = result.view(np.uint32)
        if source == "bfloat16":
            _single_from_brain(chunk.view(np.uint16), single)
        elif source == "float16":
            _single_from_half(chunk.view(np.uint16), single)
        if target == "bfloat16":
            _brain_from_single(single, result.view(np.uint16), scratch)
        elif target == "float16":
            overflowed += _half_from_single(single, result.view(np.uint16), scratch, more)
    return overflowed


def _single_from_brain(values: Array, out: Array) -> None:
    np.copyto(out, values)
    np.left_shift(out, 16, out=out)


def _single_from_half(values: Array, out: Array) -> None:
    np.copyto(out.view(np.float32), values.view(np.float16))
    if (nan := np.isnan(out.view(np.float32))).any():
        out[nan] |= 1 << 22  # quiet NaN, as processors return


def _brain_from_single(values: Array, out: Array, scratch: Array) -> None:
    """Round float32 to bfloat16, to nearest even."""
    np.right_shift(values, 16, out=scratch)
    np.bitwise_and(scratch, 1, out=scratch)
    np.add(scratch, 0x7FFF, out=scratch)
    np.add(scratch, values, out=scratch)
    np.right_shift(scratch, 16, out=scratch)
    np.copyto(out, scratch, casting="unsafe")
    if (nan := np.isnan(values.view(np.float32))).any():
        out[nan] = 0xFFFF  # torch's NaN


def _half_from_single(values: Array, out: Array, scratch: Array, power: Array) -> int:
    """Round float32 to float16, to nearest even. Returns how many numbers become infinite.

    numpy's own cast handles one element at a time, and is far slower if it under- or overflows. A
    float 2^13 times the power of two below an element has its last bit at the last bit of the
    float16: adding it rounds the element, and the bits it adds are the float16's significand.
    """
    np.bitwise_and(values, 0x7FFFFFFF, out=scratch)
    largest = int(scratch.max(initial=0))  # cheaper than a search for NaN, whose bits are larger
    overflowed = 0
    if largest >= _TOO_LARGE:
        overflowed = int(((scratch >= _TOO_LARGE) & (scratch < _INFINITE)).sum())
    np.minimum(scratch, 0x47800000, out=scratch)  # 2^16, which becomes infinity
    np.bitwise_and(scratch, 0x7F800000, out=power)
    np.maximum(power, 113 << 23, out=power)  # 2^-14: below it, halves lie evenly spaced
    np.add(power, 13 << 23, out=power)
    np.add(scratch.view(np.float32), power.view(np.float32), out=scratch.view(np.float32))
    np.subtract(scratch, power, out=scratch)
    np.right_shift(power, 13, out=power)
    np.add(scratch, power, out=scratch)
    np.right_shift(values, 16, out=power)
    np.bitwise_and(power, 0x8000, out=power)
    np.add(scratch, power, out=scratch)
    np.subtract(scratch, 126 << 10, out=scratch)
    np.copyto(out, scratch, casting="unsafe")
    if largest > _INFINITE:
        nan = np.isnan(values.view(np.float32))
        bits = values[nan]
        out[nan] = (
            bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF
        )  # quiet NaN, as processors return
    return overflowed


def _torch_view(array: Array, kind: DType) -> torch.Tensor:
    carrier = np.dtype(f"i{kind.itemsize}") if kind.itemsize > 1 else np.dtype(np.uint8)
    tensor: torch.Tensor = _import_torch().from_numpy(array.reshape(-1).view(carrier))
    return tensor.view(_torch_dtype(kind.name))


@functools.cache
def _torch_dtype(name: str) -> torch.dtype:
    value = getattr(_import_torch(), name, None)
    if value is None:
        raise FormatError(f"this torch has no dtype {name!r}", hint="pip install -U torch")
    kind: torch.dtype = value
    return kind


def _import_torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as e:
        raise MissingPackageError("casting needs torch", hint="pip install torch") from e
    return torch


def numeric_values(array: Array, kind: DType) -> Array:
    """Elements of dtype `kind`, as stored in files, as exact numpy numbers, without torch.

    Numpy's own dtypes stay as they are; bfloat16 and the 8-bit floats become float32.
    """
    if kind.name == "bfloat16":
        return (array.astype("<u4") << 16).view("<f4")
    if kind.is_float and kind.itemsize == 1:
        return eight_bit(kind.name)[array]
    return array.view(kind.view)
