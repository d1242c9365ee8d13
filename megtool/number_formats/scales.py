"""Scales computed from amax, by the rules of the projects whose checkpoints engines load.

Each rule is one function that names its source; `RULES` has them by style. All compute in float32,
as their sources do, so that scales are equal to the last bit. No rule gives zero, NaN or infinity:
under a zero amax any scale will do, and the one of the source is used where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.number_formats.layout import Style
from megtool.number_formats.rounding import rounded, small_codes
from megtool.number_formats.small_floats import E2M1, E4M3, SmallFloat, eight_bit

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_SMALLEST = np.float32(2.0**-9)  # the smallest number above zero of E4M3
_EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def modelopt_scale(amax: Floats, largest: float, dtype: str = "float32") -> Floats:
    """`amax / largest`, 1 for zeros: FP8 (448), INT8 (127), INT4 (7), whatever has the scale.

    Source: modelopt `export/quant_utils.py` get_scaling_factor, and `TensorQuantizer.export_amax`,
    which takes the largest code for an amax of zero. (Its FP8 per tensor leaves zero, and so
    divides zero by zero; and float16 rows below 2^-14 have the scale of that.)
    """
    tiny = np.finfo(np.float32).tiny
    out = np.maximum(np.where(amax == 0, np.float32(largest), amax), tiny) / np.float32(largest)
    return np.maximum(
        rounded(out.astype(np.float32), dtype), np.finfo(np.float32).smallest_subnormal
    )


def compressed_scale(amax: Floats, largest: float, dtype: str = "float32") -> Floats:
    """`amax` over half the range (448, 127.5, 7.5) in `dtype`, its epsilon for zeros.

    Source: compressed-tensors `quantization/utils/helpers.py` calculate_qparams, symmetric. Of
    integers that have one code more below zero than above, half the range is half a code more.
    """
    half = largest if largest == E4M3.largest else largest + 0.5
    out = rounded((amax / np.float32(half)).astype(np.float32), dtype)
    return np.where(out == 0, np.float32(_EPSILON[dtype]), out)


def modelopt_exponent(amax: Floats, kind: SmallFloat) -> Bytes:
    """The smallest power of two that brings `amax` within range, as E8M0 (a byte, biased by 127).

    Source: modelopt `qtensor/mxfp8_tensor.py` and `mxfp4_tensor.py`: ceil(log2(amax / largest)),
    here without a logarithm, whose own rounding can miss a power of two by a last place.
    """
    share, exponent = np.frexp(amax / np.float32(kind.largest))
    exponent = np.where(share == 0.5, exponent - 1, exponent)
    exponent = np.where(share == 0, -127, exponent)
    out: Bytes = (np.clip(exponent, -127, 127) + 127).astype(np.uint8)
    return out


def compressed_exponent(amax: Floats, kind: SmallFloat) -> Bytes:
    """The power of two nearest below `amax`, or above it from 1.75 times on, over that of the
    largest code: of FP4, the top of a block is cut by up to a seventh, and its steps are finer.

    Source: compressed-tensors `quantization/utils/mxfp_utils.py` generate_mx_scales.
    """
    bits = np.ascontiguousarray(amax).view(np.uint32).astype(np.int64)
    exponent = ((bits + (1 << 21)) >> 23) - int(np.log2(kind.largest))
    out: Bytes = np.clip(exponent, 0, 254).astype(np.uint8)
    return out


def modelopt_second(amax: Floats) -> Floats:
    """NVFP4's scale of the whole tensor, `amax / (6 * 448)`; 1 for zeros.

    Source: modelopt `qtensor/nvfp4_tensor.py` get_weights_scaling_factor_2.
    """
    out = (amax / np.float32(E2M1.largest * E4M3.largest)).astype(np.float32)
    return np.where(out == 0, np.float32(1), out)


def modelopt_block(amax: Floats, second: Floats) -> Bytes:
    """NVFP4's block scales, E4M3: `amax / (6 * second)` within 2^-9 and 448; 1 for zeros.

    Source: modelopt `qtensor/nvfp4_tensor.py` get_weights_scaling_factor.
    """
    out = amax / (np.float32(E2M1.largest) * second)
    out = np.where(out == 0, np.float32(1), out)
    return small_codes(np.maximum(out, _SMALLEST), E4M3)


def compressed_divisor(amax: Floats) -> Floats:
    """NVFP4's global scale, by which is divided: `448 * 6 / amax`; 1 where that overflows.

    Source: compressed-tensors `quantization/utils/helpers.py` generate_gparam. torch divides a
    number by a tensor by multiplying with the reciprocal, which is off by a last place for many.
    """
    with np.errstate(over="ignore"):
        share = np.float32(1) / np.maximum(amax, np.finfo(np.float32).tiny)
        out = np.asarray(share * np.float32(E4M3.largest * E2M1.largest), np.float32)
    return np.where(np.isfinite(out), out, np.float32(1))


def compressed_block(amax: Floats, divisor: Floats) -> Bytes:
    """NVFP4's block scales, E4M3: `divisor * (amax / 6)`; 0.125 for what rounds to zero.

    Source: compressed-tensors `quantization/utils/helpers.py` calculate_qparams.
    """
    out = small_codes((divisor * (amax / np.float32(E2M1.largest))).astype(np.float32), E4M3)
    return np.where(out == 0, np.flatnonzero(eight_bit("float8_e4m3fn") == 0.125)[0], out).astype(
        np.uint8
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a project computes scales: plain ones, powers of two, and NVFP4's two levels."""

    scale: Callable[[Floats, float, str], Floats]
    exponent: Callable[[Floats, SmallFloat], Bytes]
    second: Callable[[Floats], Floats]
    block: Callable[[Floats, Floats], Bytes]


RULES: Mapping[Style, Rules] = {
    "modelopt": Rules(
        scale=modelopt_scale,
        exponent=modelopt_exponent,
        second=modelopt_second,
        block=modelopt_block,
    ),
    "compressed-tensors": Rules(
        scale=compressed_scale,
        exponent=compressed_exponent,
        second=compressed_divisor,
        block=compressed_block,
    ),
}
