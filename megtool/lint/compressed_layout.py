"""Compressed layout: compressed-tensors' codes and scales, of the types and shapes that are said.

The group that a module belongs to says how many bits its codes have and what has a scale; its
tensors must be of the types and shapes that the library makes of these words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from megtool.lint import citations as at
from megtool.lint.compressed_schemes import targeted
from megtool.lint.context import Linear, Subject
from megtool.lint.rules import Fault, Rule, View
from megtool.tensors.box import numel

_CODES: Mapping[tuple[str, int, bool], str] = {
    **{("int", bits, True): "int32" for bits in range(1, 9)},
    **{("int", bits, False): "int8" for bits in range(1, 9)},
    ("float", 8, False): "float8_e4m3fn",
    ("float", 4, True): "uint8",
}
"""The type of codes by what a group says: kind, bits, and whether its format packs them."""

_FLOATS = ("float32", "bfloat16", "float16")
_POWERS = ("uint8", "float8_e8m0fnu")
_BLOCK = (128, 128)
_SINGLE = ("input_scale", "weight_global_scale", "input_global_scale")


def _layout(subject: Subject, view: View) -> Iterator[Fault]:
    whole = str(subject.said.get("format", ""))
    for one in subject.coded():
        group = targeted(subject.said, one)
        weights = group.get("weights") if group is not None else None
        if group is None or not isinstance(weights, dict):
            continue
        for text in _faults(one, weights, str(group.get("format") or whole)):
            yield Fault(module=one.name, text=text)
        for last in _SINGLE:
            t = one.tensors.get(last)
            if t is not None and (t.dtype not in _FLOATS or numel(t.shape) != 1):
                text = f"{last} is {t.dtype} {list(t.shape)}, not one float32"
                yield Fault(module=one.name, text=text)


def _faults(one: Linear, weights: Mapping[str, Any], form: str) -> Iterator[str]:
    packed = "weight_packed" in one.tensors
    codes = one.tensors["weight_packed" if packed else "weight"]
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits")
    want = _CODES.get((kind, bits if isinstance(bits, int) else 0, packed))
    if want is None or want != codes.dtype:
        has = want or "none so packed"
        yield f"codes are {codes.dtype}, and {kind} of {bits} bits has {has}"
        return  # its shape says nothing then
    rows, columns = one.shape
    if want == "int32" and isinstance(bits, int) and "weight_shape" in one.tensors:
        words = (rows, ceil(columns / (32 // bits)))
        if codes.shape != words:
            yield f"weight_packed is {list(codes.shape)}, {bits} bits have {list(words)}"
    scale = one.tensors.get("weight_scale")
    if scale is None:
        return  # told as what is missing
    types = _scale_types(kind, int(bits or 0), weights, form)
    if scale.dtype not in types:
        yield f"weight_scale is {scale.dtype}, and {form or 'the format'} has {types[0]}"
    shapes = _scale_shapes(rows, columns, weights)
    if shapes and scale.shape not in shapes:
        strategy = weights.get("strategy") or "tensor"
        size = f" of {weights.get('group_size')}" if "group" in str(strategy) else ""
        yield (
            f"weight_scale is {list(scale.shape)}, and a scale a {strategy}{size} has "
            f"{list(shapes[0])}"
        )


def _scale_types(kind: str, bits: int, weights: Mapping[str, Any], form: str) -> tuple[str, ...]:
    """NVFP4's scales are FP8 themselves, those of MX formats powers of two."""
    if form.startswith("nvfp4") or weights.get("strategy") == "tensor_group":
        return ("float8_e4m3fn",)
    grouped = weights.get("strategy") == "group"
    if form.startswith("mxfp") or (kind == "float" and grouped and bits in (4, 8)):
        return _POWERS
    return _FLOATS


def _scale_shapes(
    rows: int, columns: int, weights: Mapping[str, Any]
) -> tuple[tuple[int, ...], ...]:
    """The shapes a scale may have; none where nothing is known."""
    strategy, size = str(weights.get("strategy") or "tensor"), weights.get("group_size")
    if strategy == "tensor":
        return ((1,), ())
    if strategy == "channel":
        return ((rows, 1), (rows,))
    if strategy in ("group", "tensor_group") and type(size) is int and size > 0:
        return ((rows, ceil(columns / size)),)
    if strategy == "block":
        block = weights.get("block_structure") or _BLOCK
        if (
            isinstance(block, list | tuple)
            and len(block) == 2
            and all(type(b) is int and b > 0 for b in block)
        ):
            return ((ceil(rows / block[0]), ceil(columns / block[1])),)
    return ()


RULES = (
    Rule(
        id="layout",
        forms=("compressed-tensors",),
        sources=dict.fromkeys(("vllm", "sglang", "trtllm"), at.COMPRESSED_FORMATS),
        meaning="loaders stop at shapes that do not fit, and take other types for other numbers",
        hint="config_groups must say what the tensors are",
        check=_layout,
    ),
)
