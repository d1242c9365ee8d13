"""Unsigned integers of 2 to 8 bits in 32-bit words, as GPTQ, AWQ and MLX pack them.

GPTQ packs along the inputs: words `[in * bits / 32, out]`, the first value in the lowest bits; of 3
bits, 32 values are a stream of 96 bits in three words. Its zero points `[groups, out * bits / 32]`
are packed along the outputs, and are stored less one (`gptq`; not in `gptq_v2`). AWQ packs eight
outputs a word `[in, out / 8]` in the order 0, 2, 4, 6, 1, 3, 5, 7. MLX packs along the inputs of
each row, as a stream of bits. Sources: GPTQModel 7.7, `nn_modules/qlinear/__init__.py`; AutoAWQ
0.2.9, `utils/packing_utils.py`; MLX 0.32, `mlx/backend/cpu/quantized.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.packed_parts import WHOLE, Index, PackedPart, PartSpan

WORD_BITS = 32
_AWQ_LOW, _AWQ_HIGH = (0, 4, 1, 5), (2, 6, 3, 7)
"""The columns of the low and of the high halves of a word's four bytes."""

WordCodes = NDArray[np.uint8]
Unpack = Callable[[NDArray[Any], PackedPart], NDArray[np.float32]]


def gptq_codes(values: NDArray[Any], part: PackedPart) -> NDArray[np.float32]:
    """Values of words along the inputs: `[words, out]`, or `[n, bits, out]` of 32 values each."""
    return _unpack_first(values, part).astype(np.float32)


def awq_codes(values: NDArray[Any], _part: PackedPart) -> NDArray[np.float32]:
    """Values of words `[in, out / 8]` in AWQ's order."""
    return _unpack_awq(values).astype(np.float32)


def mlx_codes(values: NDArray[Any], part: PackedPart) -> NDArray[np.float32]:
    """Values of words along the inputs of each row: `[out, words]`, or `[out, n, bits]`."""
    raw = np.ascontiguousarray(values).view(np.uint8)
    whole = next((n for n, s in zip(part.shape, part.spans, strict=True) if s.dim == WHOLE), None)
    bits = whole or WORD_BITS // part.spans[-1].per
    return _unpack_stream(raw.reshape(len(raw), -1), bits).astype(np.float32)


def unpacked_word_zeros(
    values: NDArray[Any], part: PackedPart, lo: Index, hi: Index, packing: str
) -> tuple[NDArray[np.float32], PackedPart]:
    """The zero points `[groups, out]` of `lo:hi`, and how they lie then."""
    if packing.startswith("awq"):
        rows = _unpack_awq(values)
    else:
        bits = int(packing[-1])
        words = np.ascontiguousarray(values).view(np.uint32)
        if not packing.startswith("gptq_v2") and bits in (2, 4, 8):
            # The writer takes one from each value of a word at once, so that a value of zero
            # borrows from its neighbor: adding to the word gives both back.
            words = words + np.uint32(0xFFFFFFFF // ((1 << bits) - 1))
        rows = _unpack_stream(words.reshape(len(words), -1).view(np.uint8), bits)
        if not packing.startswith("gptq_v2") and bits == 3:
            rows = (rows + np.uint8(1)) & np.uint8(7)
    span = next(s for s in part.spans if s.dim == 0)
    begin = lo[0] % span.per
    window = rows[:, begin : begin + hi[0] - lo[0]].astype(np.float32)
    groups = part.spans[0]
    return window, replace(
        part, dtype="float32", shape=window.shape, spans=(groups, PartSpan(span.dim))
    )


def _unpack_first(values: NDArray[Any], part: PackedPart) -> WordCodes:
    words = np.ascontiguousarray(values)
    if words.ndim == 3:  # [n, bits, out]
        bits, columns = words.shape[1:]
        stream = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8)
        codes = _unpack_stream(stream.reshape(-1, bits * 4), bits)
        codes = codes.reshape(len(words), columns, WORD_BITS)
        return np.ascontiguousarray(codes.transpose(0, 2, 1)).reshape(-1, columns)
    per = part.spans[0].per
    bits, mask = WORD_BITS // per, np.uint8((1 << (WORD_BITS // per)) - 1)
    octets = words.view(np.uint8).reshape(*words.shape, 4)
    out = np.empty((len(words), per, words.shape[1]), np.uint8)
    each = 8 // bits
    for byte in range(4):
        plain = np.ascontiguousarray(octets[..., byte])
        for k in range(each):
            shifted = plain if k == 0 else plain >> np.uint8(bits * k)
            np.bitwise_and(shifted, mask, out=out[:, byte * each + k])
    return out.reshape(-1, words.shape[1])


def _unpack_awq(values: NDArray[Any]) -> WordCodes:
    octets = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, 4)
    out = np.empty((*values.shape, 8), np.uint8)
    out[..., _AWQ_LOW] = octets & np.uint8(15)
    out[..., _AWQ_HIGH] = octets >> np.uint8(4)
    return out.reshape(len(out), -1)


def _unpack_stream(raw: NDArray[np.uint8], bits: int) -> WordCodes:
    """The values of each row of bytes, which are a stream of bits, the lowest first."""
    if bits == 8:
        return raw
    if bits in (2, 4):
        each, mask = 8 // bits, np.uint8((1 << bits) - 1)
        out = np.empty((*raw.shape, each), np.uint8)
        for k in range(each):
            np.bitwise_and(raw >> np.uint8(bits * k), mask, out=out[..., k])
        return out.reshape(len(raw), -1)
    stream = np.unpackbits(raw, axis=-1, bitorder="little")
    stream = stream.reshape(len(raw), -1, bits)
    out = np.zeros(stream.shape[:-1], np.uint8)
    for k in range(bits):
        out |= stream[..., k] << np.uint8(k)
    return out


def round_to(values: NDArray[np.float32], kind: str) -> None:
    """Round to the nearest of a narrower dtype, in place; float32 stays."""
    if kind == "float16":
        values[...] = values.astype(np.float16)
    elif kind == "bfloat16":
        bits = values.view(np.uint32)
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        bits &= np.uint32(0xFFFF0000)
