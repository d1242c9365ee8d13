"""GGUF block formats (Q4_1, Q8_0, Q6_K, ...) to numbers and back.

The `gguf` package decodes all and encodes those of 32 elements; `kquants` encodes K-quants, and
blocks whose columns have weights.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError, MissingPackageError
from megtool.number_formats.packed_parts import PackedPart

_PREFIX = "gguf:"
NVFP4_ROWS = "gguf:NVFP4"
"""The packing of NVFP4 blocks alone; with a scale of the whole weight it is `NVFP4_BLOCKS`."""
NVFP4_BLOCKS = "nvfp4blocks:16"
_E4M3_NAN = 0x7F


def decode(raw: NDArray[np.uint8], packing: str, cols: int) -> NDArray[np.float32]:
    """Rows of blocks, uint8 `[rows, row_bytes]`, as float32 `[rows, cols]`.

    Raises:
        FormatError: `packing` is none of GGUF's, has no decoder, or does not make such rows.
    """
    want = row_bytes(packing, cols)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != want:
        raise FormatError(
            f"rows of {raw.dtype} {list(raw.shape)} are not {want} bytes each, "
            f"as {cols} columns of {packing!r} take"
        )
    if not raw.size:
        return np.zeros((raw.shape[0], cols), np.float32)
    kind = packing.removeprefix(_PREFIX)
    try:
        out = package().quants.dequantize(raw, package().GGMLQuantizationType[kind])
    except NotImplementedError as e:  # the gguf package's, for types it has no decoder for
        raise FormatError(
            f"the gguf package does not decode {kind}", hint="requantize it, for example to Q8_0"
        ) from e
    return np.ascontiguousarray(out, np.float32).reshape(raw.shape[0], cols)


def encode(
    values: NDArray[np.float32], kind: str, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Rows float32 `[rows, cols]` as blocks of the type `kind` (`Q8_0`): uint8 `[rows, row_bytes]`.

    `importance` float32 `[cols]` weighs the errors of columns, where the type has a search: that is
    K-quants, Q4_0, Q4_1, Q5_0 and Q5_1.

    Raises:
        FormatError: a value is NaN or infinite, or too large for the scales of this type; rows are
            no whole blocks; there is no encoder.
    """
    from megtool.number_formats.kquants import K_QUANTS, WEIGHED, encode_blocks

    want = row_bytes(_PREFIX + kind, values.shape[1])
    if kind not in encodings():
        raise FormatError(
            f"megtool does not encode {kind}", hint=f"it does: {', '.join(encodings())}"
        )
    if not np.isfinite(values).all():
        raise FormatError(
            "elements are NaN or infinite",
            hint="they cannot be quantized: write it as f32 or bf16",
            error_id="nan-weights",
        )
    if not values.size:
        return np.zeros((len(values), want), np.uint8)
    has_search = kind in K_QUANTS or (importance is not None and kind in WEIGHED)
    try:
        with np.errstate(over="raise"):
            if has_search:
                return encode_blocks(np.ascontiguousarray(values), kind, importance)
            out = package().quants.quantize(values, package().GGMLQuantizationType[kind])
    except FloatingPointError as e:
        raise FormatError(
            f"elements of up to {np.abs(values).max():g} are too large for the scales of {kind}",
            hint="write it as f32 or bf16",
        ) from e
    return np.ascontiguousarray(out).view(np.uint8).reshape(values.shape[0], want)


def codes_of_nvfp4(raw: NDArray[np.uint8], part: PackedPart) -> NDArray[np.float32]:
    """NVFP4 blocks, uint8 `[..., blocks, 36]`, as float32 `[..., 64 * blocks]`, each times its own
    scale.
    """
    rows = raw.reshape(-1, raw.shape[-2] * raw.shape[-1])
    elements, _ = block("NVFP4")
    out = decode(rows, NVFP4_ROWS, raw.shape[-2] * elements)
    return out.reshape(*raw.shape[:-2], -1)


def pack_nvfp4(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows of NVFP4 as blocks of GGUF's type of this name, uint8 `[rows, 36 * cols / 64]`.

    `codes` uint8 `[rows, cols / 2]` has the first of two columns in the low nibble, `scales` uint8
    `[rows, cols / 16]` E4M3 numbers. A block has four scales without their sign, and for each of
    them 16 codes, of which the second half lies in high nibbles (`block_nvfp4` of ggml-common.h).

    Raises:
        FormatError: a scale is negative or NaN.
    """
    if (scales >= _E4M3_NAN).any():
        raise FormatError(
            "a scale is negative or NaN, which GGUF's NVFP4 does not hold",
            hint="--outtype bf16 or q8_0 decodes the weights",
        )
    pairs = codes.reshape(-1, 8)
    both = np.stack([pairs & 0xF, pairs >> 4], axis=-1).reshape(-1, 16)
    halves = (both[:, :8] | both[:, 8:] << 4).reshape(-1, 32)
    return np.concatenate([scales.reshape(-1, 4), halves], axis=1).reshape(len(codes), -1)


@functools.cache
def encodings() -> tuple[str, ...]:
    """The types that `encode` makes, including plain ones."""
    from megtool.number_formats.kquants import K_QUANTS

    quants, kinds = package().quants, package().GGMLQuantizationType
    result = []
    for name, (elements, _) in _blocks().items():
        if name in K_QUANTS:
            result.append(name)
            continue
        try:
            quants.quantize(np.ones((1, elements), np.float32), kinds[name])
        except NotImplementedError:  # the gguf package's, for types it has no encoder for
            continue
        result.append(name)
    return tuple(result)


def holds_rows(packing: str) -> bool:
    """Whether a packing is one of GGUF's, whose rows are decoded whole and hold all they need."""
    return packing.startswith(_PREFIX)


def row_bytes(packing: str, cols: int) -> int:
    """Bytes of one row of `cols` elements.

    Raises:
        FormatError: `packing` is none of GGUF's, or `cols` is not a whole number of blocks.
    """
    elements, num_bytes = block(packing.removeprefix(_PREFIX))
    if not packing.startswith(_PREFIX) or cols % elements:
        raise FormatError(
            f"{cols} columns are not a multiple of the block of {packing!r} ({elements} each)"
        )
    return cols // elements * num_bytes


def block(kind: str) -> tuple[int, int]:
    """Elements and bytes of one block of the GGUF type `kind`, for example (32, 20) for `Q4_1`."""
    if kind not in _blocks():
        raise FormatError(
            f"the GGUF type {kind!r} is unknown", hint=f"known: {', '.join(_blocks())}"
        )
    return _blocks()[kind]


@functools.cache
def type_names() -> dict[int, str]:
    """What the numbers in a tensor's header mean: `{3: "Q4_1", ...}`."""
    gguf = package()
    return {int(t): t.name for t in gguf.GGML_QUANT_SIZES}


@functools.cache
def _blocks() -> dict[str, tuple[int, int]]:
    return {t.name: size for t, size in package().GGML_QUANT_SIZES.items()}


@functools.cache
def package() -> Any:
    """The `gguf` package.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "GGUF needs the gguf package", hint="pip install 'megtool[gguf]'"
        ) from e
    return gguf
