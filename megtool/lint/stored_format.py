"""How ModelOpt's unified export stores each format, and the tensors of one module against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from megtool.lint.folder_view import BRANCH, StoredTensor
from megtool.quant.recipes.formats import FORMATS
from megtool.report.finding import Finding, error

_E4M3 = "float8_e4m3fn"
_FLOATS = ("float32", "bfloat16", "float16")
_LOADABLE = {"float32": _FLOATS, "uint8": ("uint8", "float8_e8m0fnu")}
"""Types that loaders convert without loss, by the type that ModelOpt writes."""

_NOT_LOADED = "no engine loads it"
_UNKNOWN_NAME = "vLLM refuses names that it does not know"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The tensors that engines expect of a format.

    `codes` is the type of `weight`, of which a byte holds `columns` columns or `rows` rows; `scale`
    is the type of `weight_scale`. `has_second` and `has_inputs` say whether there is a
    `weight_scale_2` and an `input_scale`, `has_branch` whether there are SVDQuant's matrices.
    """

    codes: str
    scale: str
    columns: int = 1
    rows: int = 1
    has_second: bool = False
    has_inputs: bool = False
    has_branch: bool = False

    @property
    def scales(self) -> dict[str, bool]:
        """Whether each scale is there, and each matrix of SVDQuant."""
        return {
            "weight_scale": True,
            "weight_scale_2": self.has_second,
            "input_scale": self.has_inputs,
            **dict.fromkeys(BRANCH, self.has_branch),
        }


_NVFP4 = StoredFormat(codes="uint8", scale=_E4M3, columns=2, has_second=True, has_inputs=True)
_MXFP4 = StoredFormat(codes="uint8", scale="uint8", columns=2)

STORED_FORMATS: Mapping[str, StoredFormat] = {
    "FP8": StoredFormat(codes=_E4M3, scale="float32", has_inputs=True),
    "FP8_PER_CHANNEL_PER_TOKEN": StoredFormat(codes=_E4M3, scale="float32"),
    "FP8_PB_WO": StoredFormat(codes=_E4M3, scale="float32"),
    "W8A8_SQ_PER_CHANNEL": StoredFormat(codes="int8", scale="float32", has_inputs=True),
    "W8A16": StoredFormat(codes="int8", scale="float32"),
    "W4A16_AWQ": StoredFormat(codes="uint8", scale="float32", rows=2),
    "W4A8_AWQ": StoredFormat(
        codes="uint8", scale="float32", rows=2, has_second=True, has_inputs=True
    ),
    "MXFP8": StoredFormat(codes=_E4M3, scale="uint8"),
    "MXFP4": _MXFP4,
    "W4A8_MXFP4_FP8": _MXFP4,
    "NVFP4": _NVFP4,
    "NVFP4_SVD": replace(_NVFP4, has_branch=True),
    "W4A16_NVFP4": StoredFormat(codes="uint8", scale=_E4M3, columns=2, has_second=True),
    "W4A8_NVFP4_FP8": _NVFP4,
}
"""By `quant_algo`. Shapes of scales follow `NumberFormat.scaling`."""


def scale_shape(algo: str, shape: tuple[int, int], group_size: int = 0) -> tuple[int, ...]:
    """The shape of `weight_scale` for a weight `[out, in]`; a `group_size` of 0 stands for the
    format's own."""
    rows, columns = shape
    size = group_size or next(iter(FORMATS[algo].groups), 1)
    shapes: dict[str, tuple[int, ...]] = {
        "tensor": (),
        "channel": (rows,),
        "group": (rows, ceil(columns / size)),
        "block": (ceil(rows / size), 1, ceil(columns / size), 1),
    }
    return shapes[FORMATS[algo].scaling]


def check_scale_names(
    module: str, tensors: Mapping[str, StoredTensor], algo: str
) -> Iterator[Finding]:
    """Scales that a format needs and the module lacks, or the other way round."""
    for last, is_needed in STORED_FORMATS[algo].scales.items():
        if is_needed and last not in tensors:
            text = f"{last} is missing, which {algo} needs"
            effect = "engines stop, or continue with an uninitialized scale"
            yield error("scale-missing", module, text, effect)
        elif not is_needed and last in tensors:
            text = f"has {last}, which {algo} does not have"
            yield error("scale-extra", module, text, _UNKNOWN_NAME)


def check_types(
    module: str, tensors: Mapping[str, StoredTensor], algo: str, *, is_strict: bool
) -> Iterator[Finding]:
    """Codes and scales of another type than the format's; scales must have the very type that
    ModelOpt writes if `is_strict`, otherwise one that loaders convert without loss."""
    stored = STORED_FORMATS[algo]
    types: dict[str, tuple[str, ...]] = {"weight": (stored.codes,), "weight_scale": (stored.scale,)}
    if not is_strict:
        types["weight_scale"] = _LOADABLE.get(stored.scale, (stored.scale,))
    for last, allowed in types.items():
        t = tensors.get(last)
        if t is not None and t.dtype not in allowed:
            yield error(
                "dtype", module, f"{last} is {t.dtype}, {algo} has {allowed[0]}", _NOT_LOADED
            )
    for last in ("weight_scale_2", "input_scale"):
        t = tensors.get(last)
        if t is not None and t.dtype not in (("float32",) if is_strict else _FLOATS):
            text = f"{last} is {t.dtype}, not float32"
            yield error("shape", module, text, "engines expect one float32")


def check_shapes(
    module: str,
    tensors: Mapping[str, StoredTensor],
    algo: str,
    shape: tuple[int, int],
    group_size: int,
    *,
    is_strict: bool,
) -> Iterator[Finding]:
    """Scales of another shape than the format has for a weight `[out, in]`; a single value may have
    the shape `[1]` unless `is_strict`."""
    expected = {"weight_scale": scale_shape(algo, shape, group_size)}
    expected |= {"weight_scale_2": (), "input_scale": ()}
    for last, due in expected.items():
        t = tensors.get(last)
        if t is None or t.shape == due or (not is_strict and {t.shape, due} == {(), (1,)}):
            continue
        text = f"{last} is {list(t.shape)}, {algo} has {list(due)}"
        yield error("shape", module, text, _NOT_LOADED)
