"""Codes out of one packing and into another: nothing changes but their places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.dtypes import dtype
from megtool.errors import FormatError, UsageError
from megtool.number_formats.decode import CODES, decode
from megtool.number_formats.element_codes import neutral, numbers, stored
from megtool.number_formats.layout import layout
from megtool.number_formats.packed_parts import PackedPart, trimmed

SAME = (
    ("int4", "int4rows"),
    ("int8", "int8words"),
    ("mxfp4", "nvfp4"),
    ("fp8", "mxfp8"),
)


def codes_part(name: str, shape: tuple[int, int]) -> PackedPart:
    how = {"fp8": "tensor", "int8": "channel", "int8words": "channel", "nvfp4": "16"}.get(
        name, "32"
    )
    padded = (shape[0], -(-shape[1] // 32) * 32)
    found = layout(f"{name}:{how}", padded)[0]
    if padded == shape:
        return found
    per = found.spans[1].per
    held = (found.shape[0], -(-shape[1] // per))
    return PackedPart(role=CODES, dtype=found.dtype, shape=held, spans=found.spans)


@given(
    pair=st.sampled_from([p for pair in SAME for p in (pair, pair[::-1], (pair[0],) * 2)]),
    rows=st.integers(1, 9).map(lambda n: 2 * n),
    columns=st.integers(1, 40).map(lambda n: 2 * n),
    seed=st.integers(0, 1 << 16),
)
def test_there_and_back_is_the_identity(
    pair: tuple[str, str], rows: int, columns: int, seed: int
) -> None:
    shape = (rows, columns)
    a, b = (codes_part(name, shape) for name in pair)
    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns), np.uint8)
    if "4" in pair[0]:
        raw &= 15
    if pair[0].startswith("int4"):
        raw = (raw.view(np.int8) - 8).view(np.uint8)
    if pair[0].startswith("int"):
        raw = raw.view(np.int8)
    first = stored(raw, pair[0], a)
    assert first.shape == a.shape
    assert first.dtype == dtype(a.dtype).view
    out = trimmed(neutral(first, a, pair[0]), a, (0, 0), shape)
    assert np.array_equal(out, raw)
    assert out.dtype == raw.dtype
    second = stored(out, pair[1], b)
    assert second.shape == b.shape
    again = trimmed(neutral(second, b, pair[1]), b, (0, 0), shape)
    assert stored(again, pair[0], a).tobytes() == first.tobytes()


@given(
    name=st.sampled_from(["int4", "int4rows", "int8", "int8words", "mxfp4", "nvfp4", "fp8"]),
    rows=st.integers(1, 5).map(lambda n: 2 * n),
    columns=st.integers(1, 30).map(lambda n: 2 * n),
    seed=st.integers(0, 1 << 16),
)
def test_codes_mean_what_decoding_says(name: str, rows: int, columns: int, seed: int) -> None:
    part = codes_part(name, (rows, columns))
    size = int(np.prod(part.shape)) * dtype(part.dtype).itemsize
    window = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    window = window.view(dtype(part.dtype).view).reshape(part.shape)
    found = trimmed(neutral(window, part, name), part, (0, 0), (rows, columns))
    want = decode(name, [part], {CODES: window}, (0, 0), (rows, columns))
    assert np.array_equal(values(found, name), want, equal_nan=True)


def values(codes: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    import torch

    if numbers(name) == "fp8":
        bits = torch.from_numpy(np.ascontiguousarray(codes))
        return bits.view(torch.float8_e4m3fn).float().numpy()
    if numbers(name) == "fp4":
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        return np.where(codes >= 8, -table[codes & 7], table[codes & 7])
    return codes.astype(np.float32)


def test_gpt_oss_blocks_come_and_go() -> None:
    from megtool.number_formats.packed_parts import WHOLE, PartSpan

    spans = (PartSpan(0), PartSpan(2), PartSpan(1, 32), PartSpan(WHOLE))
    part = PackedPart(role=CODES, dtype="uint8", shape=(2, 6, 3, 16), spans=spans)
    window = np.random.default_rng(0).integers(0, 256, part.shape, np.uint8)
    found = neutral(window, part, "mxfp4")
    assert found.shape == (2, 6, 96)
    assert np.array_equal(stored(found, "mxfp4", part), window)


@pytest.mark.parametrize(("name", "shape"), [("int4rows", (3, 4)), ("nvfp4", (2, 3))])
def test_what_cannot_be_paired_is_refused(name: str, shape: tuple[int, int]) -> None:
    part = codes_part(name, (4, 32))
    with pytest.raises(UsageError, match="two a byte"):
        stored(np.zeros(shape, np.int8), name, part)


def test_an_unknown_packing_is_refused() -> None:
    with pytest.raises(FormatError, match="unknown packing"):
        numbers("int3:32")


@pytest.mark.peers
def test_words_are_those_of_compressed_tensors() -> None:
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import (
        pack_to_int32,
        unpack_from_int32,
    )

    for bits, name in ((4, "int4"), (8, "int8words")):
        for columns in (32, 37):
            half = 1 << (bits - 1)
            codes = np.random.default_rng(bits).integers(-half, half, (6, columns)).astype(np.int8)
            part = codes_part(name, (6, columns))
            packed = pack_to_int32(torch.from_numpy(codes), bits).numpy()
            assert np.array_equal(stored(codes, name, part), packed)
            found = trimmed(neutral(packed, part, name), part, (0, 0), (6, columns))
            assert np.array_equal(found, codes)
            back = unpack_from_int32(torch.from_numpy(packed), bits, torch.Size(codes.shape))
            assert np.array_equal(found, back.numpy())


@pytest.mark.peers
def test_pairs_of_fp4_are_those_of_both() -> None:
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("modelopt")
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import (
        pack_fp4_to_uint8,
        unpack_fp4_from_uint8,
    )
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    codes = np.random.default_rng(0).integers(0, 16, (4, 64)).astype(np.uint8)
    part = codes_part("nvfp4", (4, 64))
    numbers_of = torch.from_numpy(values(codes, "nvfp4"))
    window = stored(codes, "nvfp4", part)
    assert np.array_equal(pack_fp4_to_uint8(numbers_of).numpy(), window)
    back = unpack_fp4_from_uint8(torch.from_numpy(window), 4, 64, dtype=torch.float32)
    assert np.array_equal(back.numpy(), numbers_of.numpy())
    nonzero = torch.where(numbers_of == 0, 0.0, numbers_of)  # its zeros have one sign
    made = NVFP4QTensor._cast_fp4(nonzero.clone())
    plus = np.where(codes == 8, 0, codes).astype(np.uint8)
    assert np.array_equal(
        (made[..., 1::2] << 4 | made[..., 0::2]).numpy(), stored(plus, "nvfp4", part)
    )


@pytest.mark.peers
def test_row_pairs_are_those_of_modelopt() -> None:
    pytest.importorskip("modelopt")
    import torch
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8

    codes = np.random.default_rng(0).integers(-8, 8, (8, 128)).astype(np.int8)
    part = codes_part("int4rows", (8, 128))
    # Under a scale of 1 the exporter rounds whole numbers to themselves.
    packed = pack_int4_in_uint8(torch.from_numpy(codes).float(), torch.ones(8, 1), 128)
    assert np.array_equal(stored(codes, "int4rows", part), packed.numpy())
    assert np.array_equal(neutral(packed.numpy(), part, "int4rows"), codes)
