"""Weights of GPTQ, AWQ and MLX: integers in 32-bit words, with scales and zero points or biases.

What a weight's tensors are is read from their shapes, so that rules of a config for single modules
(`dynamic` of GPTQModel, overrides of MLX) need no interpretation; the config says only the form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megtool.errors import FormatError
from megtool.formats.header_reader import short_repr
from megtool.formats.safetensors.quantized_parts import (
    AS_STORED_HINT,
    MISSING,
    PackedWeight,
    PartFinder,
)
from megtool.number_formats.decode import BIAS, CODES, GROUPS, SCALE, ZEROS
from megtool.number_formats.packed_parts import WHOLE, PackedPart, PartSpan
from megtool.number_formats.word_codes import WORD_BITS
from megtool.tensors.sharded import GlobalTensor

_FLOATS = ("float16", "bfloat16", "float32")
_MAX_INPUTS = 1 << 24
_GPTQ_FORMS = {"gptq": "gptq", "gptq_v2": "gptq_v2_"}
_AUTO_ROUND_FORMS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}


def packed_form(config: Mapping[str, Any], root: object) -> str:
    """Return how a config of GPTQ, AWQ or auto-round says that words are packed.

    `gptq` (zero points are stored less one), `gptq_v2` (they are not) or `awq`.

    Raises:
        FormatError: it is another form.
    """
    method = str(config.get("quant_method", "")).lower()
    form: object = None
    if method == "awq":
        form = config.get("version", "gemm")
        if str(form).lower() == "gemm" and config.get("bits", config.get("w_bit", 4)) == 4:
            return "awq"
    elif method == "gptq":
        form = config.get("checkpoint_format") or config.get("format") or "gptq"
        is_int32 = config.get("pack_dtype", "int32") == "int32"
        if form in _GPTQ_FORMS and is_int32 and not config.get("is_marlin_format"):
            return str(form)
    else:
        form = config.get("packing_format", "auto_round:auto_gptq")
        if (known := _AUTO_ROUND_FORMS.get(str(form).lower())) is not None:
            return known
    raise FormatError(
        f"{short_repr(config.get('quant_method'))} packs its weights as {short_repr(form)}, which "
        "is not decoded",
        file=str(root),
        hint="GPTQ in 32-bit words (`gptq`, `gptq_v2`), 4-bit AWQ for GEMM and auto-round's forms "
        f"of the two are; the tool that wrote it saves another; {AS_STORED_HINT}",
        error_id="unsupported-quantization",
    )


def find_gptq(stored: PartFinder, t: GlobalTensor, form: str) -> PackedWeight | None:
    """The weight whose words are `NAME.qweight` along the inputs; None for any other tensor.

    Raises:
        FormatError: parts are missing, or their shapes do not belong together.
    """
    base = _base(t)
    if base is None:
        return None
    scales, zeros = _scales_and_zeros(stored, t)
    groups, out = scales.shape
    bits = zeros.shape[1] * WORD_BITS // out if out else 0
    if (
        bits not in (2, 3, 4, 8)
        or t.shape[1] != out
        or zeros.shape != (groups, -(-out * bits // WORD_BITS))
        or t.shape[0] * WORD_BITS % bits
        or (bits == 3 and (out % WORD_BITS or t.shape[0] % 3))
    ):
        raise _mismatch(stored, t, scales, zeros)
    inputs = t.shape[0] * WORD_BITS // bits
    g_idx = stored.find(t.name, "g_idx")
    group = _group_size(stored, t, inputs, groups)
    index = None if g_idx is None else _read_index(stored, g_idx, inputs)
    is_ordered = index is None or bool((index == np.arange(inputs) // group).all())
    if index is not None and not (0 <= int(index.min()) <= int(index.max()) < groups):
        raise stored.error(
            t, f"its g_idx names group {int(index.max())} of {groups}", hint="is it damaged?"
        )
    per = WORD_BITS // bits
    is_stream = bits == 3
    columns = PartSpan(1, group) if is_ordered else PartSpan(WHOLE)
    rows = PartSpan(0)
    if is_stream:
        codes = _part(CODES, t, (inputs // 32, 3, out), PartSpan(1, 32), PartSpan(WHOLE), rows)
        zero_part = _part(
            ZEROS, zeros, (groups, out // 32, 3), columns, PartSpan(0, 32), PartSpan(WHOLE)
        )
    else:
        codes = _part(CODES, t, t.shape, PartSpan(1, per), rows)
        zero_part = _part(ZEROS, zeros, zeros.shape, columns, PartSpan(0, per))
    parts = [
        (codes, t.name),
        (zero_part, zeros.name),
        (_part(SCALE, scales, scales.shape, columns, rows), scales.name),
    ]
    if g_idx is not None and not is_ordered:
        parts.append((_part(GROUPS, g_idx, g_idx.shape, PartSpan(1)), g_idx.name))
    text = f"{group}, act order" if not is_ordered else str(group)
    return PackedWeight(
        name=f"{base}weight",
        shape=(out, inputs),
        packing=f"{_GPTQ_FORMS[form]}{bits}:{text}",
        parts=tuple(parts),
    )


def find_awq(stored: PartFinder, t: GlobalTensor) -> PackedWeight | None:
    """The weight whose words are `NAME.qweight` along the outputs; None for any other tensor.

    Raises:
        FormatError: parts are missing, or their shapes do not belong together.
    """
    base = _base(t)
    if base is None:
        return None
    scales, zeros = _scales_and_zeros(stored, t)
    groups, out = scales.shape
    if out % 8 or t.shape[1] != out // 8 or zeros.shape != (groups, out // 8):
        raise _mismatch(stored, t, scales, zeros)
    inputs = t.shape[0]
    group = _group_size(stored, t, inputs, groups)
    columns = PartSpan(1, group)
    return PackedWeight(
        name=f"{base}weight",
        shape=(out, inputs),
        packing=f"awq4:{group}",
        parts=(
            (_part(CODES, t, t.shape, PartSpan(1), PartSpan(0, 8)), t.name),
            (_part(ZEROS, zeros, zeros.shape, columns, PartSpan(0, 8)), zeros.name),
            (_part(SCALE, scales, scales.shape, columns, PartSpan(0)), scales.name),
        ),
    )


def find_mlx(stored: PartFinder, t: GlobalTensor, config: Mapping[str, Any]) -> PackedWeight | None:
    """The weight of MLX whose words are `NAME.weight`, with `NAME.scales` and `NAME.biases`.

    Raises:
        FormatError: it is of a mode that is not affine, or shapes do not belong together.
    """
    if t.dtype.name != "uint32" or not t.name.endswith("weight") or len(t.shape) < 2:
        return None
    module = t.name.removesuffix("weight").removesuffix(".")
    section = config.get(module)
    settings = {**config, **section} if isinstance(section, dict) else config
    mode = settings.get("mode", "affine")
    if mode != "affine":
        raise stored.error(
            t,
            f"MLX has quantized it in mode {short_repr(mode)}, which is not decoded",
            hint="the affine mode is; mlx_lm.convert --dequantize writes plain weights;",
            error_id="unsupported-quantization",
        )
    scales, biases = stored.find(t.name, "scales"), stored.find(t.name, "biases")
    if scales is None or biases is None:
        raise stored.error(
            t, "its scales or biases are missing", hint="is it complete?", error_id=MISSING
        )
    group = settings.get("group_size", 64)
    if type(group) is not int or not 0 < group < _MAX_INPUTS:
        raise stored.error(t, f"its group_size is {short_repr(group)}")
    inputs = scales.shape[-1] * group if scales.shape else 0
    bits = t.shape[-1] * WORD_BITS // inputs if inputs else 0
    if (
        scales.shape != biases.shape
        or scales.shape[:-1] != t.shape[:-1]
        or bits not in (2, 3, 4, 5, 6, 8)
        or t.shape[-1] * WORD_BITS != inputs * bits
        or (bits in (3, 5, 6) and inputs % WORD_BITS)
        or scales.dtype.name not in _FLOATS
        or len(t.shape) > 2
    ):
        raise stored.error(
            t,
            f"words {list(t.shape)}, scales {list(scales.shape)} and biases {list(biases.shape)} "
            f"in groups of {group} do not belong together",
            hint="do the files belong together?",
        )
    rows, last = PartSpan(0), PartSpan(1, group)
    if bits in (3, 5, 6):
        shape = (t.shape[0], inputs // WORD_BITS, bits)
        codes = _part(CODES, t, shape, rows, PartSpan(1, WORD_BITS), PartSpan(WHOLE))
    else:
        codes = _part(CODES, t, t.shape, rows, PartSpan(1, WORD_BITS // bits))
    return PackedWeight(
        name=t.name,
        shape=(t.shape[0], inputs),
        packing=f"mlx{bits}:{group}",
        parts=(
            (codes, t.name),
            (_part(SCALE, scales, scales.shape, rows, last), scales.name),
            (_part(BIAS, biases, biases.shape, rows, last), biases.name),
        ),
    )


def _base(t: GlobalTensor) -> str | None:
    is_words = t.name.endswith("qweight") and t.dtype.name == "int32" and len(t.shape) == 2
    return t.name.removesuffix("qweight") if is_words else None


def _part(role: str, t: GlobalTensor, shape: tuple[int, ...], *spans: PartSpan) -> PackedPart:
    return PackedPart(role=role, dtype=t.dtype.name, shape=shape, spans=spans)


def _scales_and_zeros(stored: PartFinder, t: GlobalTensor) -> tuple[GlobalTensor, GlobalTensor]:
    scales, zeros = stored.find(t.name, "scales"), stored.find(t.name, "qzeros")
    for name, part in (("scales", scales), ("qzeros", zeros)):
        if part is None:
            raise stored.error(
                t, f"its {name} are missing", hint="is the download complete?", error_id=MISSING
            )
    if scales is None or zeros is None:
        raise AssertionError
    is_known = scales.dtype.name in _FLOATS and zeros.dtype.name == "int32"
    if not is_known or len(scales.shape) != 2 or len(zeros.shape) != 2 or not scales.shape[0]:
        raise _mismatch(stored, t, scales, zeros)
    return scales, zeros


def _mismatch(
    stored: PartFinder, t: GlobalTensor, scales: GlobalTensor, zeros: GlobalTensor
) -> FormatError:
    return stored.error(
        t,
        f"words {list(t.shape)}, scales of {scales.dtype} {list(scales.shape)} and zero points of "
        f"{zeros.dtype} {list(zeros.shape)} do not belong together",
        hint="do the files belong together?",
    )


def _group_size(stored: PartFinder, t: GlobalTensor, inputs: int, groups: int) -> int:
    """The number of inputs that share a scale: one that the config names, or an even share."""
    sizes = (*stored.granularity.groups, inputs)
    size = next((g for g in sizes if -(-inputs // g) == groups), None)
    if size is None and inputs % groups == 0:
        size = inputs // groups
    if size is None:
        raise stored.error(t, f"{groups} groups of {inputs} inputs are of no size that is declared")
    return size


def _read_index(stored: PartFinder, g_idx: GlobalTensor, inputs: int) -> Any:
    """The group of each input."""
    if g_idx.dtype.name != "int32" or g_idx.shape != (inputs,) or not 0 < inputs <= _MAX_INPUTS:
        raise stored.error(
            g_idx, f"{g_idx.dtype} {list(g_idx.shape)} names no groups of {inputs} inputs"
        )
    return np.frombuffer(stored.read(g_idx)[0], "<i4")
