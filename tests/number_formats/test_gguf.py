"""The decoder against the gguf package's quantizer, and what it refuses."""

import gguf
import numpy as np
import pytest

from megtool.errors import FormatError
from megtool.number_formats.gguf import block, decode, row_bytes, type_names

QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_decodes_what_the_package_encodes(kind):
    x = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind])
    out = decode(raw, f"gguf:{kind}", 96)
    assert out.dtype == np.float32
    assert out.shape == x.shape
    assert raw.shape[1] == row_bytes(f"gguf:{kind}", 96)
    assert np.abs(out - x).max() < (0.02 if kind == "Q8_0" else 0.4)


def test_any_range_of_rows_decodes_to_the_same_numbers():
    x = np.random.default_rng(1).standard_normal((33, 64)).astype(np.float32)
    raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q4_1)
    whole = decode(raw, "gguf:Q4_1", 64)
    for lo, hi in [(0, 1), (5, 22), (32, 33), (7, 7)]:
        assert np.array_equal(decode(raw[lo:hi], "gguf:Q4_1", 64), whole[lo:hi])


def test_every_decodable_type_decodes_arbitrary_bytes():
    rng = np.random.default_rng(2)
    decoded = 0
    with np.errstate(all="ignore"):
        for kind in type_names().values():
            elements, num_bytes = block(kind)
            if elements == 1:
                continue
            raw = rng.integers(0, 256, (3, 2 * num_bytes), dtype=np.uint8)
            try:
                want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
            except NotImplementedError:
                with pytest.raises(FormatError, match="does not decode"):
                    decode(raw, f"gguf:{kind}", 2 * elements)
                continue
            out = decode(raw, f"gguf:{kind}", 2 * elements)
            assert np.array_equal(out, want.reshape(out.shape), equal_nan=True)
            decoded += 1
    assert decoded >= 15


@pytest.mark.parametrize(
    ("packing", "cols", "shape", "says"),
    [
        ("gguf:Q9_9", 32, (1, 20), "GGUF type 'Q9_9' is unknown"),
        ("Q4_1", 32, (1, 20), "not a multiple of the block"),
        ("gguf:Q4_1", 33, (1, 20), "not a multiple of the block"),
        ("gguf:Q4_1", 64, (1, 20), "not 40 bytes"),
        ("gguf:Q4_1", 32, (20,), "not 20 bytes"),
    ],
)
def test_refuses(packing, cols, shape, says):
    with pytest.raises(FormatError, match=says):
        decode(np.zeros(shape, np.uint8), packing, cols)
