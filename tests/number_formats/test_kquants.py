"""K-quants that we encode, decoded by the gguf package, against llama.cpp's own quantizer.

The figures are of `ggml_quantize_chunk` of llama.cpp's release 11549 for the same numbers;
`tests/peers/test_llama_cpp_quantize.py` runs it.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from megtool.errors import FormatError
from megtool.number_formats.gguf import encode, encodings
from megtool.number_formats.kquants import K_QUANTS, WEIGHED

LLAMA_CPP = {
    ("Q2_K", False): 1.1025e-01,
    ("Q2_K", True): 7.0718e-02,
    ("Q3_K", False): 3.0918e-02,
    ("Q3_K", True): 2.5474e-02,
    ("Q4_K", False): 6.8550e-03,
    ("Q4_K", True): 5.9307e-03,
    ("Q5_K", False): 1.7565e-03,
    ("Q5_K", True): 1.5525e-03,
    ("Q6_K", False): 4.5577e-04,
    ("Q6_K", True): 3.9616e-04,
    ("Q4_0", True): 1.0091e-02,
    ("Q4_1", True): 5.6919e-03,
    ("Q5_0", True): 2.5078e-03,
    ("Q5_1", True): 1.3251e-03,
}
"""Its errors over the sum of squares, weighed by the importance of columns where it is given."""


def _numbers() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(7)
    values = (generator.standard_t(5, (96, 1024)) * 0.02).astype(np.float32)
    return values, generator.gamma(1, 1, 1024).astype(np.float32)


def _decode(raw: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


def _error(values: np.ndarray, raw: np.ndarray, kind: str, weights: np.ndarray | float) -> float:
    exact = values.astype(np.float64)
    return float((weights * (_decode(raw, kind) - exact) ** 2).sum() / (weights * exact**2).sum())


@pytest.mark.parametrize(("kind", "has_importance"), LLAMA_CPP)
def test_error_is_not_above_that_of_llama_cpp(kind: str, has_importance: bool) -> None:
    values, columns = _numbers()
    raw = encode(values, kind, columns if has_importance else None)
    error = _error(values, raw, kind, columns if has_importance else 1.0)
    assert error < 1.003 * LLAMA_CPP[kind, has_importance]


@pytest.mark.parametrize("kind", [*K_QUANTS, *WEIGHED])
def test_importance_lowers_the_weighed_error(kind: str) -> None:
    values, columns = _numbers()
    plain, weighed = encode(values, kind), encode(values, kind, columns)
    assert _error(values, weighed, kind, columns) < _error(values, plain, kind, columns)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_rows_are_encoded_alike_wherever_they_are(kind: str) -> None:
    values, columns = _numbers()
    values = np.tile(values, (4, 1))
    for importance in (None, columns):
        whole = encode(values, kind, importance)
        alone = encode(values[300:301], kind, importance)
        assert np.array_equal(whole[300:301], alone)


@pytest.mark.parametrize("kind", [*K_QUANTS, *WEIGHED])
def test_rows_of_zeros_constants_and_one_sign(kind: str) -> None:
    values, columns = _numbers()
    values = values[:8].copy()
    values[0] = 0
    values[1] = 0.5
    values[2] = -0.5
    values[3, :512] = 0
    values[4] = np.abs(values[4]) + 1
    values[5] = -np.abs(values[5]) - 1
    values[6] *= 1e-25
    columns[::7] = 0
    for importance in (None, columns):
        found = _decode(encode(values, kind, importance), kind)
        assert np.isfinite(found).all()
        assert (found[0] == 0).all()
        assert (found[3, :512] == 0).all()
        assert np.abs(found[1:3] - values[1:3]).max() < 0.5 / 8
        largest = np.abs(values[4:6]).max()
        assert np.abs(found[4:6] - values[4:6])[:, 1:].max() < largest
        assert np.abs(found[6]).max() < 1e-6


@pytest.mark.parametrize("kind", K_QUANTS)
def test_what_cannot_be_encoded_is_refused(kind: str) -> None:
    values, _ = _numbers()
    assert kind in encodings()
    values[3, 4] = np.nan
    with pytest.raises(FormatError) as told:
        encode(values, kind)
    assert told.value.id == "nan-weights"
    values[3, 4] = 1e30
    with pytest.raises(FormatError, match="too large"):
        encode(values, kind)
    with pytest.raises(FormatError, match="multiple"):
        encode(values[:, :900], kind)
    assert encode(values[:0], kind).shape[0] == 0
