"""FP8 by bits beside torch's casts and the float arithmetic of the scales' rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megtool.errors import FormatError
from megtool.number_formats import fp8_bits
from megtool.number_formats.decode import CODES, SCALE
from megtool.number_formats.encode import encode
from megtool.number_formats.fp8_bits import cast, cast_to_powers
from megtool.number_formats.layout import layout
from megtool.number_formats.scales import modelopt_exponent
from megtool.number_formats.small_floats import E4M3, E5M2, SmallFloat, single
from tests.support.errors import raises

KINDS = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=lambda kind: kind.name)
BLOCK = 32


def _by_torch(x: np.ndarray, kind: SmallFloat) -> np.ndarray:
    plain = torch.from_numpy(x.copy()).clamp(-kind.largest, kind.largest)
    found: np.ndarray = plain.to(getattr(torch, kind.name)).view(torch.uint8).numpy()
    return found


def _by_floats(bits: np.ndarray, kind: SmallFloat) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponents of blocks, by the rule and torch's cast."""
    x = single(bits, "bfloat16")
    exponents = modelopt_exponent(np.abs(x).reshape(len(x), -1, BLOCK).max(-1), kind)
    by = single(exponents, "float8_e8m0fnu").repeat(BLOCK, axis=1)
    return _by_torch(x / by, kind), exponents


def _usual(shape: tuple[int, ...]) -> np.ndarray:
    """Bits of normal numbers in bfloat16."""
    x = np.random.default_rng(6).standard_normal(shape).astype(np.float32)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def _check(bits: np.ndarray, kind: SmallFloat) -> None:
    out = np.empty(bits.shape, np.uint8)
    exponents = cast_to_powers(bits, BLOCK, kind, out)
    assert exponents is not None, "no float is needed"
    codes, powers = _by_floats(bits, kind)
    np.testing.assert_array_equal(exponents, powers)
    np.testing.assert_array_equal(out, codes)


@KINDS
def test_every_largest_magnitude_of_a_block(kind: SmallFloat) -> None:
    """All of bfloat16 that are far enough from its ends, each as the first of a block."""
    first = np.arange(30 << 7, (254 << 7) + 97, dtype=np.uint16)
    rng = np.random.default_rng(1)
    bits = first[:, None] - rng.integers(0, 12 << 7, (len(first), BLOCK), np.uint16)
    bits[:, 0] = first
    bits |= rng.integers(0, 2, bits.shape, np.uint16) << 15
    _check(bits, kind)


@KINDS
def test_every_number_under_one_largest(kind: SmallFloat) -> None:
    """Each number up to the largest of its block, with exact ties and those too small."""
    for top in (0x4380, 0x43E0, 0x43E1, 0x43FF):  # 256, 448, 450, 510
        few = np.arange(top, dtype=np.uint16)
        small = int(np.log2(kind.smallest)) - 3 + 127 << 7
        rng = np.random.default_rng(2)
        usual = rng.integers(small + 768, top, (len(few), 2 * BLOCK), np.uint16)
        usual[:, 0] = usual[:, BLOCK] = top
        usual[:, 7] = few
        usual |= rng.integers(0, 2, usual.shape, np.uint16) << 15
        _check(usual, kind)


@KINDS
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 0.0123, 448 / 3, 3 / 448, 7e-20, 2.0**-126, 3e30])
def test_every_bfloat16_over_a_scale(kind: SmallFloat, scale: float) -> None:
    """With exact ties, as a scale from an element's own magnitude makes them; NaN and infinity."""
    with np.errstate(all="ignore"):
        x = single(np.arange(1 << 16, dtype=np.uint16), "bfloat16") / np.float32(scale)
    found = np.empty(x.shape, np.uint8)
    cast(x, kind, found)
    np.testing.assert_array_equal(found, _by_torch(x, kind))


def test_more_than_is_handled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_bits, "CHUNK", 1 << 12)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((100, 608)).astype(np.float32)
    _check((x.view(np.uint32) >> 16).astype(np.uint16), E4M3)
    out = np.empty(x.size, np.uint8)
    cast(x.reshape(-1) * 100, E4M3, out)
    np.testing.assert_array_equal(out, _by_torch(x.reshape(-1) * 100, E4M3))


@pytest.mark.parametrize("few", [0, 1, 5, 200, 60_000])
def test_others_are_cast_whatever_their_number(few: int) -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal(60_000) * 100).astype(np.float32)
    at = rng.permutation(x.size)[:few]
    odd = [0, -0.0, 1e-30, -(2.0**-7), 2.0**-10, 1e9, np.inf, -np.inf, np.nan, -np.nan]
    x[at] = rng.permutation(np.resize(np.float32(odd), few))
    out = np.empty(x.size, np.uint8)
    cast(x, E4M3, out)
    np.testing.assert_array_equal(out, _by_torch(x, E4M3))


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7F81, 0x7FFF, 0xFFC0, 0xFFFF])
@pytest.mark.parametrize("size", [1.0, 2.0**100, 2.0**-100])
def test_what_is_no_number_is_found(bits: int, size: float) -> None:
    x = np.random.default_rng(5).standard_normal((4, 96)).astype(np.float32) * np.float32(size)
    raw = (x.view(np.uint32) >> 16).astype(np.uint16)
    raw[2, 40] = bits
    assert cast_to_powers(raw, BLOCK, E4M3, np.empty(raw.shape, np.uint8)) is None
    with raises(FormatError, id="nan-weights"):
        encode("mxfp8:32", layout("mxfp8:32", raw.shape), raw, "bfloat16", (0, 0), raw.shape)


@KINDS
@pytest.mark.parametrize("first", [0, 5, 0x80, 6 << 7, (7 << 7) + 100, 16 << 7])
def test_blocks_of_zeros_and_of_the_smallest_numbers(kind: SmallFloat, first: int) -> None:
    bits = _usual((80, 256))
    bits[3, 32:64] = np.minimum(np.arange(BLOCK), first)
    bits[7, 96] = bits[7, 96:128] = first
    bits[7, 97:128] |= 0x8000
    _check(bits, kind)
    parts = layout("mxfp8:32", bits.shape, codes=kind.name)
    found = encode("mxfp8:32", parts, bits, "bfloat16", (0, 0), bits.shape)
    plain = encode("mxfp8:32", parts, single(bits, "bfloat16"), "float32", (0, 0), bits.shape)
    for role in (CODES, SCALE):
        np.testing.assert_array_equal(found[role], plain[role])


def test_boxes_of_mostly_zeros_are_left_to_floats() -> None:
    bits = _usual((8, 128))
    bits[:, 1::2] = 0x8000
    assert cast_to_powers(bits, BLOCK, E4M3, np.empty(bits.shape, np.uint8)) is None
    found = encode("mxfp8:32", layout("mxfp8:32", bits.shape), bits, "bfloat16", (0, 0), bits.shape)
    codes, powers = _by_floats(bits, E4M3)
    np.testing.assert_array_equal(found[CODES], codes)
    np.testing.assert_array_equal(found[SCALE], powers)


def test_room_that_is_not_contiguous_is_left_alone() -> None:
    bits = _usual((2, 3, 64))
    room = np.zeros((2, 7, 64), np.uint8)[:, :3]
    for packing in ("mxfp8:32", "fp8:channel", "int8:channel"):
        parts = layout(packing, bits.shape)
        given = parts, bits, "bfloat16", (0, 0, 0), bits.shape
        found, plain = encode(packing, *given, room=room), encode(packing, *given)
        np.testing.assert_array_equal(found[CODES], plain[CODES])
    assert not room.any()
