"""RoPE frequency factors of GGUF as rope_scaling of a config.json, and back.

llama.cpp's converter writes Llama 3's scaling and Phi-3's as tensors of factors alone, one number a
frequency. Phi-3's are the very lists of its config.json. Llama 3's are computed by four numbers,
which are found here by the factors they give: others that gave the same would be the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import MappingError

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

LLAMA3 = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (LLAMA3, LONG, SHORT)
"""Tensors that hold factors."""

_LOW, _HIGH = 1.0, 4.0
"""Of all published models; factors say no more of them than their ratios to the length."""

_LENGTH = 8192
_NEAR = 1e-5  # converters compute in float32


def llama3_factors(
    base: float, half: int, *, factor: float, low: float, high: float, length: float
) -> Floats:
    """Llama 3's factors of `half` frequencies, by its published formula.

    Wavelengths beyond the original `length` (over `low`) are stretched by `factor`, short ones
    kept, and those between interpolated.
    """
    ramp = ((length * _turns(base, half) - low) / (high - low)).clip(0, 1)
    return np.asarray(1 / ((1 - ramp) / factor + ramp), np.float32)


def _turns(base: float, half: int) -> Doubles:
    """Turns of each frequency a position."""
    return np.asarray(1 / base ** (np.arange(half) / half) / (2 * math.pi), np.float64)


def llama3_scaling(factors: Floats, base: float) -> dict[str, Any] | None:
    """The rope_scaling that yields these factors; None if all are one.

    Raises:
        MappingError: none was found that does.
    """
    expected = np.asarray(factors, np.float64).reshape(-1)
    if np.allclose(expected, 1, rtol=_NEAR):
        return None
    factor, half = float(expected.max()), len(expected)
    for low, high, length in _ramps(expected, _turns(base, half)):
        computed = llama3_factors(base, half, factor=factor, low=low, high=high, length=length)
        if np.allclose(computed, expected, rtol=_NEAR):
            return {
                "rope_type": "llama3",
                "factor": float(str(np.float32(factor))),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    raise MappingError(
        f"no llama3 scaling of rotary embedding gives the factors in {LLAMA3!r}",
        tensor=LLAMA3,
        hint="--like HF_FOLDER takes rope_scaling from its config.json",
    )


def _ramps(expected: Doubles, turns: Doubles) -> Iterator[tuple[float, float, int]]:
    """Candidates for low_freq_factor, high_freq_factor and the original length, the likeliest
    first.

    Between them the share of a frequency that is kept grows in proportion to its turns.
    """
    yield _LOW, _HIGH, _LENGTH
    factor = expected.max()
    is_between = (expected > 1 + _NEAR) & (expected < factor * (1 - _NEAR))
    if not is_between.any():  # any length that puts the ramp between two frequencies does
        unscaled = turns[expected <= 1 + _NEAR]
        if len(unscaled):
            yield _LOW, _HIGH, math.ceil(_HIGH / unscaled.min())
        return
    share = (1 / expected[is_between] - 1 / factor) / (1 - 1 / factor)
    yield _LOW, _HIGH, round(np.median((share * (_HIGH - _LOW) + _LOW) / turns[is_between]))
    if is_between.sum() > 1:
        slope, start = np.polyfit(turns[is_between], share, 1)
        width = _LENGTH / float(slope)
        yield -float(start) * width, (1 - float(start)) * width, _LENGTH


def longrope_scaling(
    long: Floats, short: Floats, *, length: int, most: int, temperature: float | None
) -> dict[str, Any]:
    """Phi-3's rope_scaling, of a model for `most` positions trained for `length` before.

    `temperature` is what attention is scaled by, if a file says it; it is kept where it is not the
    usual one.
    """
    out: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [float(str(x)) for x in np.asarray(long, np.float32).reshape(-1)],
        "short_factor": [float(str(x)) for x in np.asarray(short, np.float32).reshape(-1)],
        "original_max_position_embeddings": length,
    }
    usual = longrope_temperature(most, length)
    if temperature is not None and not math.isclose(temperature, usual, rel_tol=1e-5):
        out["attention_factor"] = float(str(np.float32(temperature)))
    return out


def longrope_temperature(most: int, length: int) -> float:
    """The default attention scale of LongRoPE."""
    factor = most / length
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
