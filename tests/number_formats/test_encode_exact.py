"""Codes of all short numbers under many scales, beside a division and a rounding written plainly.

The plain way divides in float32 and goes by `ml_dtypes` (FP8, FP4) or `numpy.rint`. Encoders look
codes up, move exponents and work slab by slab; none of that may show.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megtool.errors import FormatError
from megtool.number_formats.amax import amax
from megtool.number_formats.decode import CODES, SCALE, SCALE_2
from megtool.number_formats.encode import encode, is_number
from megtool.number_formats.layout import layout
from megtool.number_formats.small_floats import single
from megtool.number_formats.thread_buffers import CHUNK
from tests.support.errors import raises

EVERY = np.arange(1 << 16, dtype=np.uint16).reshape(512, 128)
"""All bfloat16 (or float16) values by their bits: of 256 rows a sign, the last two hold what is
infinite or NaN."""

SCALES = np.float32([1, 2.0**-9, 0.0123, 3e-5, 1.75, 0.1, 448 / 3, 7e-20, 2.0**-126, 3e30, 1e-45])


def _numbers(dtype: str) -> np.ndarray:
    """All that are no NaN, and float32 ones beside: in rows of 128."""
    raw = EVERY.view(np.float16) if dtype == "float16" else EVERY
    x = single(raw, "bfloat16" if dtype != "float16" else dtype)
    kept = x[~np.isnan(x)]
    if dtype == "float32":
        kept = np.concatenate([kept, np.nextafter(kept, np.float32(1)), kept * np.float32(1 / 3)])
        return kept[: kept.size // 128 * 128].reshape(-1, 128)
    held = raw[~np.isnan(x)]
    return held[: held.size // 128 * 128].reshape(-1, 128)


def _plain(name: str, x: np.ndarray, by: np.ndarray, half_down: bool = False) -> np.ndarray:
    """One code an element, from elements and divisors of one shape."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with np.errstate(all="ignore"):
        q = (x / by).astype(np.float32)
        if name in ("fp8", "mxfp8"):
            return np.clip(q, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        if name == "int8":
            return np.clip(np.rint(q), -128, 127).astype(np.int8)
        if name.startswith("int4"):
            return np.clip(np.rint(q), -8, 7).astype(np.int8)
        if half_down:
            borders = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
            return torch.bucketize(torch.from_numpy(np.abs(q)), borders).numpy() | ((q <= 0) << 3)
        codes = np.clip(q, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 7
        return codes | ((q < 0) << 3).astype(np.uint8)


def _unpacked(name: str, codes: np.ndarray) -> np.ndarray:
    if name == "int4rows":
        both = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1, codes.shape[1])
        return np.where(both > 7, both.astype(np.int8) - 16, both)
    if codes.dtype == np.int32:
        raw = codes.view(np.uint8)
        both = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)
        return both.astype(np.int8) - 8
    if name in ("mxfp4", "nvfp4"):
        return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    return codes


def _check(packing: str, x: np.ndarray, dtype: str, given: Any, by: np.ndarray, style: Any) -> None:
    name = packing.partition(":")[0]
    parts = layout(packing, x.shape, style)
    before = x.copy()
    found = encode(packing, parts, x, dtype, (0, 0), x.shape, scales=given, style=style)
    want = _plain(name, single(x, dtype), by, name == "mxfp4" and style == "modelopt")
    np.testing.assert_array_equal(_unpacked(name, found[CODES]), want)
    assert x.tobytes() == before.tobytes(), "the elements are left alone"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "packing",
    [
        "fp8:tensor",
        "fp8:channel",
        "fp8:2x64",
        "fp8:32",
        "int8:tensor",
        "int8:channel",
        "int8:16",
        "int4rows:32",
        "int4:32",
        "int4:channel",
    ],
)
def test_every_number_under_a_scale(packing: str, dtype: str) -> None:
    x = _numbers(dtype)
    x = x[: len(x) // 2 * 2]
    parts = layout(packing, x.shape)
    shape = parts[1].shape
    rng = np.random.default_rng(1)
    for scale in SCALES:
        few = np.full(shape, scale, np.float32)
        if shape:
            few *= rng.uniform(0.75, 1.25, shape).astype(np.float32)
            few = np.maximum(few, np.float32(1e-45))
        whole = few.reshape([n for n in shape if n != 1] or [1, 1])
        whole = whole[:, None] if whole.ndim == 1 else whole
        for d in range(2):
            whole = np.repeat(whole, x.shape[d] // whole.shape[d], axis=d)
        _check(packing, x, dtype, {SCALE: few}, whole, "modelopt")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("packing", ["mxfp8:32", "mxfp4:32"])
def test_every_number_over_a_power_of_two(packing: str, style: Any, dtype: str) -> None:
    x = _numbers(dtype)
    shape = (len(x), 4)
    rng = np.random.default_rng(2)
    for low, high in ((117, 118), (127, 128), (0, 1), (254, 255), (100, 128), (0, 30), (0, 255)):
        few = rng.integers(low, high, shape, np.uint8)
        by = np.exp2(few.astype(np.float64) - 127).astype(np.float32).repeat(32, axis=1)
        for some in (slice(None), slice(8, 120)):  # with what only a float divides, and without
            _check(packing, x[some], dtype, {SCALE: few[some]}, by[some], style)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("style", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("packing", ["mxfp8:32", "mxfp4:32"])
def test_zeros_among_small_numbers(packing: str, style: Any, dtype: str) -> None:
    bits = np.array([0, 0x8000, 0x3C00, 0xBC00], np.uint16).repeat(16).reshape(2, 32)
    bits = np.stack([bits.T.reshape(-1), np.roll(bits.T.reshape(-1), 1)])
    x = bits if dtype == "bfloat16" else single(bits, "bfloat16").astype(dtype)
    few = np.full((2, 2), 120, np.uint8)
    by = np.full(x.shape, 2.0**-7, np.float32)
    _check(packing, x, dtype, {SCALE: few}, by, style)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_number_over_two_scales(dtype: str) -> None:
    x = _numbers(dtype)
    rng = np.random.default_rng(3)
    for second in SCALES[:8]:
        few = rng.integers(1, 126, (len(x), 8), np.uint8)
        by = torch.from_numpy(few).view(torch.float8_e4m3fn).float().numpy() * second
        given = {SCALE: few, SCALE_2: np.float32(second)}
        _check("nvfp4:16", x, dtype, given, by.repeat(16, axis=1), "modelopt")


@pytest.mark.parametrize("packing", ["mxfp8:32", "mxfp4:32"])
def test_blocks_of_their_own_scales(packing: str) -> None:
    """Zeros and blocks of any size in one box, the powers found by it."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((64, 256)).astype(np.float32)
    x *= np.exp2(rng.integers(-130, 100, (64, 8))).astype(np.float32).repeat(32, axis=1)
    x[::5, 32:96] = 0
    x[1::5, 64:128] = -0.0
    for rows in (slice(None), slice(0, 1), slice(5, 6)):
        wide = x[rows]
        for some in (wide, np.where(np.abs(wide) < 2.0**-30, 0, np.clip(wide, -9, 9))):
            bits = (np.float32(some).view(np.uint32) >> 16).astype(np.uint16)
            parts = layout(packing, bits.shape)
            found = encode(packing, parts, bits, "bfloat16", (0, 0), bits.shape)
            by = single(found[SCALE], "float8_e8m0fnu").repeat(32, axis=1)
            _check(packing, bits, "bfloat16", None, by, "modelopt")


SLABBED = ["int8:tensor", "int4rows:128", "mxfp8:32", "mxfp4:32", "nvfp4:16"]


@pytest.mark.parametrize("packing", ["fp8:channel", "fp8:128x128", *SLABBED])
@pytest.mark.parametrize("shape", [(256, 2560), (2, CHUNK + 256), (1, 3, 128, 1280)], ids=str)
def test_slabs_do_not_show(packing: str, shape: tuple[int, ...]) -> None:
    """More than is handled at a time, from every second row of an array: as in small pieces."""
    if packing == "fp8:128x128" and shape[-2] % 128:
        packing = "fp8:2x128"
    rng = np.random.default_rng(6)
    x = rng.standard_normal((*shape[:-2], shape[-2] * 2, shape[-1]), np.float32)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)[..., ::2, :]
    parts = layout(packing, shape)
    zero = (0,) * len(shape)
    whole = encode(packing, parts, bits, "bfloat16", zero, shape)
    known = {p.role: whole[p.role] for p in parts[1:]}
    step = 128 if shape[-2] % 128 == 0 else 2
    for r in range(0, shape[-2], step):
        for c in range(0, shape[-1], 1280):
            lo = (*zero[:-2], r, c)
            hi = (*shape[:-2], r + step, min(c + 1280, shape[-1]))
            some = {}
            for p in parts:
                begin, end = p.window(lo, hi)
                array = whole[p.role]
                index = tuple(slice(a, b) for a, b in zip(begin, end, strict=True))
                some[p.role] = array[index] if begin else array
            box = bits[..., r : r + step, c : hi[-1]]
            given = {role: some[role] for role in known}
            made = encode(packing, parts, box, "bfloat16", lo, hi, scales=given)
            np.testing.assert_array_equal(made[CODES], some[CODES])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("per", [1, 2, 6, 10, 16, 24, 32, 96, 160, 480])
def test_the_largest_of_every_run(per: int, dtype: str) -> None:
    raw = _numbers(dtype).reshape(-1)
    raw = np.random.default_rng(5).permutation(raw)[:11520].reshape(24, 480)
    part = layout(f"int8:{per}", raw.shape)[1]
    want = np.abs(single(raw, dtype)).reshape(24, -1, per).max(-1)
    np.testing.assert_array_equal(amax(raw, dtype, part, (0, 0), raw.shape), want)


def test_nan_is_seen_among_either_sign() -> None:
    for bits, good in ((0x7F80, True), (0xFF80, True), (0x7F81, False), (0xFFC0, False)):
        raw = np.array([0, 0x8000, 0x3F80, bits], np.uint16)
        assert is_number(raw, 0x7F80) is good
    x = np.full((2, 64), 0x3F80, np.uint16)
    x[1, 5] = 0xFFC0
    for packing in ("int8:tensor", "int8:channel", "mxfp4:32", "nvfp4:16", "int4rows:32"):
        parts = layout(packing, x.shape)
        known = {
            p.role: np.full(p.shape, 100, "u1") if "8" in p.dtype else np.ones(p.shape, "f4")
            for p in parts[1:]
        }
        with raises(FormatError, id="nan-weights"):
            encode(packing, parts, x, "bfloat16", (0, 0), x.shape, scales=known)
    parts = layout("mxfp8:32", x.shape)
    known = {SCALE: np.full(parts[1].shape, 127, np.uint8)}
    found = encode("mxfp8:32", parts, x, "bfloat16", (0, 0), x.shape, scales=known)
    assert found[CODES][1, 5] == 0xFF


@pytest.mark.parametrize("packing", ["fp8:channel", "int4rows:32", "mxfp8:32", "mxfp4:32"])
def test_codes_go_where_earlier_ones_were(packing: str) -> None:
    rng = np.random.default_rng(7)
    first, second, wider = (rng.standard_normal((8, n)).astype(np.float32) for n in (64, 64, 96))
    parts = layout(packing, first.shape)
    room = encode(packing, parts, first, "float32", (0, 0), first.shape)[CODES]
    want = encode(packing, parts, second, "float32", (0, 0), second.shape)[CODES]
    found = encode(packing, parts, second, "float32", (0, 0), second.shape, room=room)[CODES]
    assert found is room
    np.testing.assert_array_equal(found, want)
    parts = layout(packing, wider.shape)
    other = encode(packing, parts, wider, "float32", (0, 0), wider.shape, room=room)[CODES]
    assert not np.shares_memory(other, room)
