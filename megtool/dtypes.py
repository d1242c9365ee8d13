"""Element types by one name each, with what every format calls them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megtool.errors import FormatError


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    `name` is torch's (`torch.<name>`), `safetensors` the tag in a safetensors header, `storage`
    the legacy storage class torch.save writes (`torch.<storage>`; None where torch writes an
    untyped storage), `numpy` an array type of the same width (integers where numpy has no such
    float).
    """

    name: str
    itemsize: int
    safetensors: str | None
    storage: str | None
    numpy: str
    is_float: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def view(self) -> np.dtype[np.generic]:
        """The numpy dtype that carries these bytes unchanged."""
        return np.dtype(self.numpy)


DTYPES: tuple[DType, ...] = (
    DType("float64", 8, "F64", "DoubleStorage", "<f8", True),
    DType("float32", 4, "F32", "FloatStorage", "<f4", True),
    DType("float16", 2, "F16", "HalfStorage", "<f2", True),
    DType("bfloat16", 2, "BF16", "BFloat16Storage", "<u2", True),
    DType("int64", 8, "I64", "LongStorage", "<i8"),
    DType("int32", 4, "I32", "IntStorage", "<i4"),
    DType("int16", 2, "I16", "ShortStorage", "<i2"),
    DType("int8", 1, "I8", "CharStorage", "|i1"),
    DType("uint8", 1, "U8", "ByteStorage", "|u1"),
    DType("bool", 1, "BOOL", "BoolStorage", "|b1"),
    DType("uint16", 2, "U16", None, "<u2"),
    DType("uint32", 4, "U32", None, "<u4"),
    DType("uint64", 8, "U64", None, "<u8"),
    DType("float8_e4m3fn", 1, "F8_E4M3", None, "|u1", True),
    DType("float8_e5m2", 1, "F8_E5M2", None, "|u1", True),
    DType("float8_e8m0fnu", 1, "F8_E8M0", None, "|u1", True),
    DType("float8_e4m3fnuz", 1, None, None, "|u1", True),
    DType("float8_e5m2fnuz", 1, None, None, "|u1", True),
    DType("complex64", 8, "C64", "ComplexFloatStorage", "<c8"),
)

_BY_NAME = {d.name: d for d in DTYPES}
_BY_STORAGE = {d.storage: d for d in DTYPES if d.storage}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def dtype(name: str) -> DType:
    """The element type called `name` (`bfloat16`, `bf16`, `torch.bfloat16`).

    Raises:
        FormatError: the name is none that megtool knows.
    """
    key = name.removeprefix("torch.")
    key = _SHORT.get(key, key)
    if key not in _BY_NAME:
        raise FormatError(f"the dtype {name!r} is unknown", hint=f"known: {', '.join(_BY_NAME)}")
    return _BY_NAME[key]


def from_storage(name: str, file: str | Path | None = None) -> DType:
    """The element type of torch's legacy storage class `name`, for example `HalfStorage`.

    Raises:
        FormatError: torch has no such class; the message names `file`.
    """
    if name not in _BY_STORAGE:
        raise FormatError(
            f"the torch storage {name!r} is unknown",
            file=file,
            hint="the file is damaged: take another copy",
        )
    return _BY_STORAGE[name]
