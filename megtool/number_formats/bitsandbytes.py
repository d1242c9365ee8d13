"""NF4, FP4 and LLM.int8 as bitsandbytes stores them.

Four bits: two codes a byte along the rows, the first in the high bits; a code names a value of a
table of 16, and each block of the flat weight has its largest magnitude (`absmax`) as scale. With
double quantization that is a code of a table of 256, times the scale of a block of 256 blocks, plus
an offset. LLM.int8: integers times the largest magnitude of the row over 127. Sources: bitsandbytes
0.50, `functional.py` (`QuantState`, `dequantize_4bit`, `int8_vectorwise_dequant`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.number_formats.packed_parts import Index, PackedPart

INT8_STEP = np.float32(7.874015718698502e-3)
"""1/127, as the library writes it."""


def codes_of_four_bits(values: NDArray[Any], _part: PackedPart) -> NDArray[np.float32]:
    """Two codes a byte along the rows, the first in the high bits."""
    raw = np.ascontiguousarray(values).view(np.uint8)
    out = np.empty((*raw.shape[:-1], raw.shape[-1] * 2), np.float32)
    out[..., 0::2] = raw >> np.uint8(4)
    out[..., 1::2] = raw & np.uint8(15)
    return out


def looked_up_values(codes: NDArray[np.float32], table: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values of codes in a table of 16."""
    return np.asarray(table, np.float32).reshape(-1)[codes.astype(np.uint8)]


def nested_scales(
    codes: NDArray[np.uint8],
    table: NDArray[np.float32],
    scales: NDArray[np.float32],
    state: bytes,
    part: PackedPart,
    window: tuple[Index, Index],
) -> NDArray[np.float32]:
    """The scales of blocks, from a window of their codes and the scales of all blocks of blocks.

    Raises:
        FormatError: the state is damaged, or there are too few scales.
    """
    known = parse_state(state)
    index = np.ravel_multi_index(
        np.ix_(*(np.arange(a, b) for a, b in zip(*window, strict=True))), part.shape
    )
    flat = scales.reshape(-1)
    nested = index // int(known["nested_blocksize"])
    if nested.size and int(nested.max()) >= len(flat):
        raise FormatError(f"it has {len(flat)} scales of scales, which are too few")
    values = table.reshape(-1)[codes.reshape(index.shape)] * flat[nested]
    return values + np.float32(known["nested_offset"])


@lru_cache(maxsize=256)
def parse_state(state: bytes) -> Mapping[str, Any]:
    """The settings of a weight: `quant_type`, `blocksize`, `shape`, and those of its scales.

    Raises:
        FormatError: they are no JSON object, or of other types.
    """
    try:
        value = json.loads(state)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"the state of its quantization is no JSON: {e}") from e
    known: dict[str, type | tuple[type, ...]] = {
        "quant_type": str,
        "blocksize": int,
        "shape": list,
        "nested_blocksize": int,
        "nested_offset": (int, float),
    }
    if not isinstance(value, dict) or not isinstance(value.get("shape"), list):
        raise FormatError("the state of its quantization names no shape")
    for name, kind in known.items():
        if name in value and (isinstance(value[name], bool) or not isinstance(value[name], kind)):
            raise FormatError(f"{name} of its quantization is {value[name]!r:.40}")
    for name in ("blocksize", "nested_blocksize"):
        if name in value and not 0 < value[name] < 1 << 31:
            raise FormatError(f"{name} of its quantization is {value[name]}")
    return value
