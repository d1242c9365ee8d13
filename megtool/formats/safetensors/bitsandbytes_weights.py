"""Weights of bitsandbytes: NF4 and FP4 with their states, and LLM.int8."""

from __future__ import annotations

from typing import Any

from megtool.errors import FormatError
from megtool.formats.header_reader import DAMAGED
from megtool.formats.safetensors.quantized_parts import MISSING, PackedWeight, PartFinder
from megtool.number_formats.bitsandbytes import parse_state
from megtool.number_formats.decode import (
    CODES,
    NESTED_SCALE,
    SCALE,
    SCALE_TABLE,
    STATE,
    TABLE,
)
from megtool.number_formats.packed_parts import WHOLE, PackedPart, PartSpan
from megtool.tensors.sharded import GlobalTensor

_STATE_SUFFIXES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_MAX_STATE_BYTES = 64 << 10
_BYTES = ("uint8", "bfloat16", "float16", "float32")
"""`bnb_4bit_quant_storage`: the dtype of the tensor that holds the bytes."""


def find_bitsandbytes(stored: PartFinder, t: GlobalTensor) -> PackedWeight | None:
    """The weight of four or eight bits whose codes a tensor is; None for any other tensor.

    Raises:
        FormatError: parts are missing, or do not belong together.
    """
    if not t.name.endswith("weight"):
        return None
    state = _sibling(stored, t.name, *_STATE_SUFFIXES)
    if state is not None:
        return _four_bits(stored, t, state)
    if t.dtype.name == "int8":
        scale = stored.find(t.name, "SCB")
        if scale is None or len(t.shape) != 2 or scale.shape != t.shape[:1]:
            raise stored.error(
                t,
                "its SCB, the scale of each row, is missing or of another shape",
                error_id=MISSING,
            )
        stored.find(t.name, "weight_format")  # 0: row-major, the one form that is saved
        return PackedWeight(
            name=t.name,
            shape=t.shape,
            packing="int8rows:channel",
            parts=(
                (_part(CODES, t.dtype.name, t.shape, PartSpan(0), PartSpan(1)), t.name),
                (_part(SCALE, scale.dtype.name, scale.shape, PartSpan(0)), scale.name),
            ),
        )
    return None


def _sibling(stored: PartFinder, name: str, *suffixes: str) -> GlobalTensor | None:
    """The part of a weight whose name is the weight's with a suffix, counted as used."""
    for suffix in suffixes:
        if name + suffix in stored.catalogue.index:
            stored.used.add(name + suffix)
            return stored.catalogue[name + suffix]
    return None


def _part(role: str, kind: str, shape: tuple[int, ...], *spans: PartSpan) -> PackedPart:
    return PackedPart(role=role, dtype=kind, shape=shape, spans=spans)


def _four_bits(stored: PartFinder, t: GlobalTensor, state: GlobalTensor) -> PackedWeight:
    known = _read_state(stored, state)
    shape, block = tuple(known["shape"]), known.get("blocksize", 64)
    kind = str(known.get("quant_type"))
    absmax, table = (_sibling(stored, t.name, s) for s in (".absmax", ".quant_map"))
    if absmax is None or table is None:
        raise stored.error(t, "its absmax or quant_map is missing", error_id=MISSING)
    if (
        len(shape) != 2
        or any(type(n) is not int or not 0 < n < 1 << 31 for n in shape)
        or kind not in ("nf4", "fp4")
        or t.dtype.name not in _BYTES
        or t.num_bytes * 2 != shape[0] * shape[1]
        or table.shape != (16,)
        or table.dtype.name != "float32"
        or absmax.shape != (-(-shape[0] * shape[1] // block),)
    ):
        raise stored.error(
            t,
            f"codes of {t.dtype} {list(t.shape)} and absmax {list(absmax.shape)} are no {kind} "
            f"weight of {list(shape)} in blocks of {block}",
            hint="do the files belong together?",
        )
    rows, columns = shape
    if columns % 2 or (columns % block and block % columns):
        raise stored.error(
            t,
            f"blocks of {block} of the flat weight cut through rows of {columns}, which is not "
            "decoded",
            hint="load it with transformers, call dequantize() and save it;",
            error_id="unsupported-quantization",
        )
    scale_shape: tuple[int, ...]
    spans: tuple[PartSpan, ...]
    if columns % block == 0:
        scale_shape, spans = (rows, columns // block), (PartSpan(0), PartSpan(1, block))
    else:
        scale_shape, spans = (absmax.shape[0],), (PartSpan(0, block // columns),)
    parts = [
        (_part(CODES, "uint8", (rows, columns // 2), PartSpan(0), PartSpan(1, 2)), t.name),
        (_part(SCALE, absmax.dtype.name, scale_shape, *spans), absmax.name),
        (_part(TABLE, "float32", (16,), PartSpan(WHOLE)), table.name),
    ]
    if absmax.dtype.name == "uint8":
        parts += _nested(stored, t, state, known)
    elif absmax.dtype.name != "float32":
        raise stored.error(t, f"its absmax is {absmax.dtype}")
    return PackedWeight(
        name=t.name, shape=(rows, columns), packing=f"{kind}:{block}", parts=tuple(parts)
    )


def _nested(
    stored: PartFinder, t: GlobalTensor, state: GlobalTensor, known: Any
) -> list[tuple[PackedPart, str]]:
    """The parts of double quantization."""
    scale, table = (_sibling(stored, t.name, s) for s in (".nested_absmax", ".nested_quant_map"))
    if scale is None or table is None or not {"nested_blocksize", "nested_offset"} <= known.keys():
        raise stored.error(
            t, "its nested_absmax, nested_quant_map or nested_offset is missing", error_id=MISSING
        )
    is_known = scale.dtype.name == table.dtype.name == "float32"
    if not is_known or table.shape != (256,) or len(scale.shape) != 1:
        raise stored.error(
            t, f"nested_absmax {list(scale.shape)} and nested_quant_map {list(table.shape)}"
        )
    return [
        (_part(SCALE_TABLE, "float32", (256,), PartSpan(WHOLE)), table.name),
        (_part(NESTED_SCALE, "float32", scale.shape, PartSpan(WHOLE)), scale.name),
        (_part(STATE, "uint8", state.shape, PartSpan(WHOLE)), state.name),
    ]


def _read_state(stored: PartFinder, state: GlobalTensor) -> Any:
    if state.dtype.name != "uint8" or len(state.shape) != 1 or state.num_bytes > _MAX_STATE_BYTES:
        raise stored.error(state, f"{state.dtype} {list(state.shape)} is no state of a weight")
    data, path = stored.read(state)
    try:
        return parse_state(data)
    except FormatError as e:
        e.file, e.tensor, e.hint = str(path), state.name, DAMAGED
        raise
