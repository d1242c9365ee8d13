"""Boxes of packed tensors: whatever box is asked, its elements are those of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megtool.errors import FormatError
from megtool.number_formats.decode import CODES, COLUMNS, DIVISOR, SCALE, SCALE_2, ZEROS, decode
from megtool.number_formats.decode_torch import as_bytes, decode_torch
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import WHOLE, Index, PackedPart, PartSpan

SHAPE = (3, 20, 64)
_RNG = np.random.default_rng(7)


def _bytes(*shape: int) -> np.ndarray:
    return _RNG.integers(0, 126, shape, dtype=np.uint8)


def _floats(*shape: int) -> np.ndarray:
    return _RNG.uniform(0.5, 2, shape).astype(np.float32)


def _part(
    role: str, dtype: str, array: np.ndarray, *spans: PartSpan
) -> tuple[PackedPart, np.ndarray]:
    return PackedPart(role=role, dtype=dtype, shape=array.shape, spans=spans), array


def _spread(array: np.ndarray, *per: int) -> np.ndarray:
    for axis, n in enumerate(per):
        array = np.repeat(array, n, axis=axis)
    return array[tuple(slice(0, n) for n in SHAPE)]


def _fp8() -> tuple[list[Any], np.ndarray]:
    """Ragged blocks of 8 x 24, and a scale a column besides."""
    codes, by, columns = _bytes(*SHAPE), _floats(3, 3, 3), _floats(64)
    parts = [
        _part(CODES, "float8_e5m2", codes, PartSpan(0), PartSpan(1), PartSpan(2)),
        _part(SCALE, "float32", by, PartSpan(0), PartSpan(1, 8), PartSpan(2, 24)),
        _part(COLUMNS, "float32", columns, PartSpan(2)),
    ]
    import torch

    plain = torch.from_numpy(codes).view(torch.float8_e5m2).float().numpy()
    return parts, plain * _spread(by, 1, 8, 24) * columns


def _int8() -> tuple[list[Any], np.ndarray]:
    codes, zeros, by = _bytes(*SHAPE).view(np.int8), _bytes(3, 20).view(np.int8), _floats(3, 20)
    parts = [
        _part(CODES, "int8", codes, PartSpan(0), PartSpan(1), PartSpan(2)),
        _part(ZEROS, "int8", zeros, PartSpan(0), PartSpan(1)),
        _part(SCALE, "float32", by, PartSpan(0), PartSpan(1)),
    ]
    return parts, (codes.astype(np.float32) - zeros[..., None]) * by[..., None]


def _rows() -> tuple[list[Any], np.ndarray]:
    codes, by = _RNG.integers(0, 256, (3, 10, 64), dtype=np.uint8), _floats(3, 20, 2)
    parts = [
        _part(CODES, "uint8", codes, PartSpan(0), PartSpan(1, 2), PartSpan(2)),
        _part(SCALE, "float32", by, PartSpan(0), PartSpan(1), PartSpan(2, 32)),
    ]
    low, high = (codes & 15).astype(np.int8), (codes >> 4).astype(np.int8)
    both = np.stack([low, high], axis=2).reshape(SHAPE)
    signed = np.where(both > 7, both - 16, both).astype(np.float32)
    return parts, signed * _spread(by, 1, 1, 32)


def _nvfp4() -> tuple[list[Any], np.ndarray]:
    """Codes that lie transposed (as gpt-oss's do), a scale an expert, and a divisor for all."""
    import ml_dtypes

    codes = _RNG.integers(0, 256, (3, 64, 10), dtype=np.uint8)
    by, second, divisor = _floats(3, 64, 5), _floats(3), np.float32([1.7])
    parts = [
        _part(CODES, "uint8", codes, PartSpan(0), PartSpan(2), PartSpan(1, 2)),
        _part(SCALE, "float32", by, PartSpan(0), PartSpan(2), PartSpan(1, 4)),
        _part(SCALE_2, "float32", second, PartSpan(0)),
        _part(DIVISOR, "float32", divisor, PartSpan(WHOLE)),
    ]
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(3, 64, 20)
    plain = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = np.repeat(by * second[:, None, None] / divisor, 4, axis=2)
    return parts, (plain * scales).transpose(0, 2, 1)


CASES = {"fp8": _fp8(), "int8": _int8(), "int4rows": _rows(), "nvfp4": _nvfp4()}


@pytest.mark.parametrize("kind", CASES)
@given(st.data())
def test_any_box(kind: str, data: st.DataObject) -> None:
    pytest.importorskip("ml_dtypes")
    held, whole = CASES[kind]
    lo = tuple(data.draw(st.integers(0, n - 1)) for n in SHAPE)
    hi = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(lo, SHAPE, strict=True))
    windows = {}
    for part, array in held:
        first, end = part.window(lo, hi)
        index = tuple(slice(a, b) for a, b in zip(first, end, strict=True))
        windows[part.role] = np.ascontiguousarray(array[index])
    found = decode(kind, [p for p, _ in held], windows, lo, hi)
    want = whole[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
    np.testing.assert_array_equal(found, want)
    parts, tensors = as_tensors(kind, held, windows, lo, hi)
    np.testing.assert_array_equal(decode_torch(kind, parts, tensors, lo, hi).numpy(), want)


def as_tensors(
    kind: str, held: list[Any], windows: dict[str, np.ndarray], lo: Index, hi: Index
) -> tuple[list[PackedPart], dict[str, torch.Tensor]]:
    """Parts and windows as `decode_torch` takes them."""
    parts = [p for p, _ in held]
    return parts, {role: as_bytes(torch.from_numpy(w.copy())) for role, w in windows.items()}


@pytest.mark.parametrize("kind", ["int4", "int8words", "mxfp4", "mxfp8", "nvfp4", "int4rows"])
def test_torch_decodes_what_is_encoded(kind: str) -> None:
    """Packings of two dimensions as they are written, with all their parts."""
    packing = {"mxfp4": "mxfp4:32", "mxfp8": "mxfp8:32", "nvfp4": "nvfp4:16"}.get(
        kind, f"{kind}:32"
    )
    values = (_RNG.standard_normal((6, 64)) * 0.1).astype(np.float32)
    parts = layout(packing, values.shape)
    lo, hi = (0, 0), values.shape
    windows = encode(packing, parts, values.copy(), "float32", lo, hi)
    want = decode(packing, parts, windows, lo, hi)
    _, tensors = as_tensors(kind, [(p, None) for p in parts], windows, lo, hi)
    found = decode_torch(packing, parts, tensors, lo, hi).numpy()
    np.testing.assert_array_equal(found, want)


def test_an_unknown_format() -> None:
    with pytest.raises(FormatError, match="fp5"):
        decode("fp5:tensor", [], {}, (), ())
    with pytest.raises(FormatError, match="fp5"):
        decode_torch("fp5:tensor", [], {}, (), ())
