"""Whatever is encoded decodes to something near, tile by tile as all at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import FormatError, UsageError
from megtool.number_formats.amax import amax, merge
from megtool.number_formats.decode import CODES, DIVISOR, SCALE, SCALE_2, decode
from megtool.number_formats.encode import encode
from megtool.number_formats.layout import largest_divisor, layout
from megtool.number_formats.packed_parts import PackedPart
from megtool.number_formats.scales import RULES
from megtool.number_formats.small_floats import single
from tests.support.errors import raises

# Half the widest step between codes, over the largest value under a scale.
STEP = {"fp8": 16 / 448, "mxfp8": 16 / 224, "int8": 0.5 / 127, "int8words": 0.5 / 127}
STEP |= {"int4": 0.5 / 7, "int4rows": 0.5 / 7, "nvfp4": 1 / 6, "mxfp4": 1 / 3}
PACKINGS = [
    "fp8:tensor",
    "fp8:channel",
    "fp8:8x32",
    "fp8:32",
    "int8:tensor",
    "int8:channel",
    "int8:64",
    "int4:32",
    "int4:channel",
    "int8words:32",
    "int4rows:64",
    "int4rows:channel",
    "mxfp8:32",
    "mxfp4:32",
    "nvfp4:16",
    "nvfp4:32",
]
STYLES = ("modelopt", "compressed-tensors")
SHAPE = (16, 192)
ZERO = (0, 0)


def _numbers(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Elements of `dtype` as files hold them: normal numbers, with zeros, tiny and large rows."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    x[0], x[1, ::3] = 0, -0.0
    x[2] *= 2.0**-9
    x[3] *= 64
    t = torch.from_numpy(x).to(getattr(torch, dtype))
    return t.view(torch.uint16).numpy() if dtype == "bfloat16" else t.numpy()


def _cut(part: PackedPart, array: np.ndarray, lo: Any, hi: Any) -> np.ndarray:
    first, end = part.window(lo, hi)
    return array[tuple(slice(a, b) for a, b in zip(first, end, strict=True))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_decodes_to_the_nearest(packing: str, style: Any, dtype: str) -> None:
    x = _numbers(5, SHAPE, dtype)
    parts = layout(packing, SHAPE, style)
    held = encode(packing, parts, x, dtype, ZERO, SHAPE, style=style)
    assert {p.role: p.shape for p in parts} == {r: a.shape for r, a in held.items()}
    back = decode(packing, parts, held, ZERO, SHAPE)
    plain = single(x, dtype)
    tops = amax(x, dtype, parts[1], ZERO, SHAPE)
    top = np.broadcast_to(_spread(tops, parts[1]), SHAPE)
    name = packing.partition(":")[0]
    limit = STEP[name] * top * 1.07  # scales and quotients are rounded too
    if name == "nvfp4":
        limit = limit + top.max() / 6 / 448 * 2.0**-8
    assert (np.abs(back - plain) <= limit).all()
    assert not back[0].any()
    again = encode(packing, parts, back, "float32", ZERO, SHAPE, scales=_known(held), style=style)
    np.testing.assert_array_equal(_unsigned(again, name), _unsigned(held, name))


def _known(held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {r: a for r, a in held.items() if r != CODES}


def _unsigned(held: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Codes, of FP4 with zeros that have no sign: from minus zero, none is made."""
    codes = held[CODES]
    if name not in ("nvfp4", "mxfp4"):
        return codes
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1)
    return np.where(nibbles == 8, 0, nibbles)


def _spread(tops: np.ndarray, part: PackedPart) -> np.ndarray:
    """Amax as an array that broadcasts over the elements."""
    out = tops.reshape([n for n in tops.shape if n != 1] or [1])
    dims = {s.dim: s.per for s in part.spans if s.dim >= 0}
    axes = [SHAPE[d] // dims[d] if d in dims else 1 for d in range(2)]
    out = out.reshape(axes)
    for d in range(2):
        if dims.get(d, 1) > 1:
            out = np.repeat(out, dims[d], axis=d)
    return out


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=15)
@given(st.data())
def test_tiles_make_the_whole(packing: str, style: Any, data: st.DataObject) -> None:
    """Amax by any tiles, then codes by tiles of whole blocks: what one call makes."""
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    x = _numbers(data.draw(st.integers(0, 9)), SHAPE, dtype)
    parts = layout(packing, SHAPE, style)
    whole = encode(packing, parts, x, dtype, ZERO, SHAPE, style=style)
    rows, columns = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 200))
    totals = {p.role: np.zeros(p.shape, np.float32) for p in parts[1:]}
    for lo, hi in _tiles(rows, columns):
        box = x[lo[0] : hi[0], lo[1] : hi[1]]
        for p in parts[1:]:
            merge(totals[p.role], amax(box, dtype, p, lo, hi), p, lo, hi)
    rules, name = RULES[style], packing.partition(":")[0]
    for p in parts[1:]:
        np.testing.assert_array_equal(totals[p.role], amax(x, dtype, p, ZERO, SHAPE))
    given_scales = {}
    for role in (SCALE_2, DIVISOR):
        if role in totals:
            given_scales[role] = rules.second(totals[role])
            assert given_scales[role].tobytes() == whole[role].tobytes()
    computes = name[:2] in ("mx", "nv") or packing.endswith(("32", "64"))
    for lo, hi in _tiles(
        data.draw(st.sampled_from([8, 16])), data.draw(st.sampled_from([64, 128]))
    ):
        box = x[lo[0] : hi[0], lo[1] : hi[1]]
        known = dict(given_scales)
        if not computes:
            known[SCALE] = _cut(parts[1], whole[SCALE], lo, hi)
        made = encode(packing, parts, box, dtype, lo, hi, scales=known, style=style)
        for p in parts:
            np.testing.assert_array_equal(made[p.role], _cut(p, whole[p.role], lo, hi))


def _tiles(rows: int, columns: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [
        ((r, c), (min(r + rows, SHAPE[0]), min(c + columns, SHAPE[1])))
        for r in range(0, SHAPE[0], rows)
        for c in range(0, SHAPE[1], columns)
    ]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("size", [0.0, 2.0**-149, 2.0**-126, 1e-30, 1e30, 2e38])
def test_zero_tiny_and_huge(packing: str, style: Any, size: float) -> None:
    x = np.full(SHAPE, size, np.float32)
    x[:, ::2] = -size
    parts = layout(packing, SHAPE, style)
    held = encode(packing, parts, x, "float32", ZERO, SHAPE, style=style)
    for p in parts[1:]:
        factor = single(held[p.role], p.dtype)
        assert np.isfinite(factor).all()
        assert (factor > 0).all()
    back = decode(packing, parts, held, ZERO, SHAPE)
    assert np.isfinite(back).all()
    if not size:
        assert not back.any()
    if 1e-31 < size < 1e31:
        assert np.abs(back / x - 1).max() < 0.26


def test_three_dimensions_and_five_bits_of_exponent() -> None:
    x = np.random.default_rng(0).standard_normal((3, 8, 64)).astype(np.float32)
    for packing in ("fp8:channel", "fp8:8x32", "int4rows:32", "nvfp4:16", "int8:tensor"):
        parts = layout(packing, x.shape)
        held = encode(packing, parts, x, "float32", (0, 0, 0), x.shape)
        back = decode(packing, parts, held, (0, 0, 0), x.shape)
        assert np.abs(back - x).max() < 0.7
    parts = layout("fp8:tensor", SHAPE, codes="float8_e5m2")
    held = encode(
        "fp8:tensor", parts, x[0, :1, :1].repeat(16, 0).repeat(192, 1), "float32", ZERO, SHAPE
    )
    want = torch.tensor(57344.0).to(torch.float8_e5m2).view(torch.uint8)
    assert (held[CODES] & 0x7F == want.numpy()).all()


def test_given_scales_saturate() -> None:
    x = np.float32([[1000.0, -1000.0] * 32] * 2)
    one = {SCALE: np.float32(1)}
    for packing, top in (("fp8:tensor", 448), ("int8:tensor", 127), ("int4rows:tensor", 7)):
        parts = layout(packing, x.shape)
        held = encode(packing, parts, x, "float32", ZERO, x.shape, scales=one)
        back = decode(packing, parts, held, ZERO, x.shape)
        assert back.max() == top
        assert back.min() in (-top, -top - 1)


@pytest.mark.parametrize(
    ("packing", "shape", "says", "hint"),
    [
        ("int4rows:128", (4, 576), "blocks of 128 do not divide 576 columns", "is 96"),
        ("nvfp4:16", (4, 200), "blocks of 16 do not divide 200", "is 10"),
        ("mxfp8:32", (4, 48), "blocks of 32 do not divide 48", "is 24"),
        ("int4rows:16", (5, 32), "5 rows cannot be stored two a byte", "int4"),
        ("int8:channel", (32,), "has no rows", None),
    ],
)
def test_sizes_that_do_not_fit(packing: str, shape: Any, says: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        layout(packing, shape)
    assert hint is None or hint in str(caught.value.hint)


@given(st.integers(1, 5000), st.integers(1, 300))
def test_the_largest_divisor(size: int, limit: int) -> None:
    found = largest_divisor(size, limit)
    assert found == max(d for d in range(1, min(size, limit) + 1) if math.gcd(d, size) == d)


def test_what_is_refused() -> None:
    x = np.ones(SHAPE, np.float32)
    for packing in ("fp9:tensor", "fp8:", "fp8:0", "mxfp4:16"):
        with pytest.raises(FormatError, match=packing):
            layout(packing, SHAPE)
    parts = layout("int4rows:64", SHAPE)
    with pytest.raises(FormatError, match="fp9"):
        encode("fp9:tensor", parts, x, "float32", ZERO, SHAPE)
    with pytest.raises(UsageError, match="cuts scale of 64"):
        encode("int4rows:64", parts, x[:, :60], "float32", ZERO, (16, 60))
    with pytest.raises(UsageError, match="cuts codes of 2"):
        encode("int4rows:64", parts, x[1:], "float32", (1, 0), SHAPE)
    with pytest.raises(UsageError, match="elements of int8"):
        encode("int4rows:64", parts, x.astype(np.int8), "int8", ZERO, SHAPE)
    parts = layout("fp8:tensor", SHAPE)
    with pytest.raises(UsageError, match="covers more than this box"):
        encode("fp8:tensor", parts, x[:8], "float32", ZERO, (8, 192))
    for odd in (np.nan, np.inf):
        x[3, 3] = odd
        with raises(FormatError, id="nan-weights"):
            encode("fp8:tensor", parts, x, "float32", ZERO, SHAPE)
    x[3, 3] = np.nan
    for packing in ("int8:tensor", "nvfp4:16", "mxfp4:32", "int4:32"):
        parts = layout(packing, SHAPE)
        known = {p.role: np.ones(p.shape, "u1" if "8" in p.dtype else "f4") for p in parts[1:]}
        with raises(FormatError, id="nan-weights"):
            encode(packing, parts, x, "float32", ZERO, SHAPE, scales=known)
