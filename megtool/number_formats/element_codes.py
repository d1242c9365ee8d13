"""The codes of a packed tensor's elements before scaling, one byte each, and packed again.

Between two packings of one number format only the place of bits differs. `neutral` takes codes out
of one packing and `stored` puts them into another; no value is computed, so nothing is rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype as dtype_of
from megtool.errors import FormatError, UsageError
from megtool.number_formats.int4 import paired
from megtool.number_formats.packed_parts import WHOLE, PackedPart

NUMBERS = {
    "fp8": "fp8",
    "mxfp8": "fp8",
    "int8": "int8",
    "int8words": "int8",
    "int4": "int4",
    "int4rows": "int4",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
}
"""What the codes of a packing are numbers of, by its first word: equal ones are exchanged exactly
(those of FP8 if their parts have one dtype)."""


def numbers(packing: str) -> str:
    """What codes of a packing (`int4rows:128`) are: `fp8`, `int8`, `int4` or `fp4`.

    Raises:
        FormatError: no such packing.
    """
    name = packing.partition(":")[0]
    if name not in NUMBERS:
        raise FormatError(f"unknown packing {packing!r}", hint=f"known: {', '.join(NUMBERS)}")
    return NUMBERS[name]


def neutral(window: NDArray[Any], part: PackedPart, packing: str) -> NDArray[Any]:
    """A window of codes, one element each: int8 integers, or the bits of small floats in uint8.

    `[..., rows, columns]` of all that the window holds, also what fills up a last word: cut it
    with `parts.trimmed`. FP4 codes have their bits lowest, the sign's at 8. Contiguous, and none of
    the window's own memory.
    """
    name, kind = packing.partition(":")[0], numbers(packing)
    if name == "int4rows":
        signed = window.view(np.int8)
        out = np.empty((*signed.shape[:-2], signed.shape[-2] * 2, signed.shape[-1]), np.int8)
        np.right_shift(signed, 4, out=out[..., 1::2, :])
        low = np.left_shift(signed, 4)
        np.right_shift(low, 4, out=out[..., 0::2, :])
        return out
    raw = np.ascontiguousarray(window).view(np.uint8)
    if name == "int8words":
        return (raw ^ np.uint8(128)).view(np.int8)
    if kind == "int8":
        return raw.view(np.int8).copy()
    if kind == "fp8":
        return raw.copy()
    if part.spans[-1].dim == WHOLE:  # gpt-oss: blocks of 16 bytes in an axis of their own
        raw = raw.reshape(*raw.shape[:-2], raw.shape[-2] * raw.shape[-1])
    nibbles = np.empty((*raw.shape, 2), np.uint8)
    np.bitwise_and(raw, np.uint8(15), out=nibbles[..., 0])
    np.right_shift(raw, np.uint8(4), out=nibbles[..., 1])
    flat = nibbles.reshape(*raw.shape[:-1], raw.shape[-1] * 2)
    if name != "int4":
        return flat
    signed = flat.view(np.int8)
    np.subtract(signed, np.int8(8), out=signed)
    return signed


def stored(codes: NDArray[Any], packing: str, part: PackedPart) -> NDArray[Any]:
    """The window, in `DType.view` of `part`, of codes `[..., rows, columns]` as `neutral` gives.

    What a last word has left over is zero.

    Raises:
        UsageError: an odd number of rows or columns for a packing of pairs of them.
    """
    name = packing.partition(":")[0]
    numbers(packing)
    raw = np.ascontiguousarray(codes).view(np.uint8)
    view = dtype_of(part.dtype).view
    rows, columns = raw.shape[-2:]
    if name == "int4rows":
        if rows % 2:
            raise UsageError(f"{rows} rows cannot be stored two a byte")
        low = raw[..., 0::2, :] & np.uint8(15)
        return np.asarray((low | np.left_shift(raw[..., 1::2, :], 4)).view(view))
    if name in ("int8", "fp8", "mxfp8"):
        return np.asarray(raw.copy().view(view))
    per = {"int4": 8, "int8words": 4}.get(name, 2)
    if per == 2 and columns % 2:
        raise UsageError(f"{columns} columns cannot be stored two a byte")
    if name in ("int4", "int8words"):
        raw = raw + np.uint8(8) & np.uint8(15) if name == "int4" else raw ^ np.uint8(128)
        if over := -columns % per:
            raw = np.concatenate([raw, np.zeros((*raw.shape[:-1], over), np.uint8)], axis=-1)
    if name == "int8words":
        return np.asarray(raw.view(view))
    out = np.empty((*raw.shape[:-1], raw.shape[-1] // 2), np.uint8)
    paired(np.ascontiguousarray(raw), out)
    if part.spans[-1].dim == WHOLE:
        out = out.reshape(*out.shape[:-1], out.shape[-1] // 16, 16)
    return np.asarray(out.view(view))
