"""Quantization formats by the names that engines use, with sizes and packings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Scaling = Literal["tensor", "channel", "group", "block"]
BlockScales = Literal["", "static", "four_over_six"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """How a linear module is stored and run: a `quant_algo` of Hugging Face checkpoints.

    `weights` and `inputs` are descriptions. A weight [out, in] has `bits` per element; there is one
    scale of `scale_bytes` per tensor, per row (`channel`), per `group` columns of a row, or per
    `group` x `group` block. `extra_bytes` are additional float32 scalars (the global scale, the
    input scale). `groups` are the group sizes that engines support, the default first; empty if
    there are no groups. `smooths`: a `pre_quant_scale` may be stored. `calibrates`: input scales
    come from data. `has_branch`: two 16-bit matrices of a low rank are added (SVDQuant), and a
    `pre_quant_scale` is always stored.
    """

    algo: str
    weights: str
    inputs: str
    bits: int
    scaling: Scaling
    scale_bytes: int
    extra_bytes: int = 0
    groups: tuple[int, ...] = ()
    smooths: bool = False
    calibrates: bool = False
    has_branch: bool = False

    def num_bytes(
        self, shape: Sequence[int], group: int, *, smoothed: bool = False, rank: int = 0
    ) -> int:
        """Bytes of a weight [out, in] with its scales, and with matrices of a low `rank`; partial
        groups count as full groups."""
        rows, columns = shape
        scales = {
            "tensor": 1,
            "channel": rows,
            "group": rows * math.ceil(columns / (group or 1)),
            "block": math.ceil(rows / (group or 1)) * math.ceil(columns / (group or 1)),
        }[self.scaling]
        smooth = 2 * columns if smoothed and self.smooths else 0
        branch = 2 * rank * (rows + columns) if self.has_branch else 0
        codes = math.ceil(rows * columns * self.bits / 8)
        return codes + scales * self.scale_bytes + self.extra_bytes + smooth + branch


_E4M3, _FP4 = "FP8 (e4m3)", "FP4 (e2m1)"

_LIST = (
    NumberFormat(
        algo="FP8",
        weights=f"{_E4M3}, a scale a tensor",
        inputs=f"{_E4M3}, a calibrated scale a tensor",
        bits=8,
        scaling="tensor",
        scale_bytes=4,
        extra_bytes=4,
        calibrates=True,
    ),
    NumberFormat(
        algo="FP8_PER_CHANNEL_PER_TOKEN",
        weights=f"{_E4M3}, a scale a row",
        inputs=f"{_E4M3}, scaled token by token as they come",
        bits=8,
        scaling="channel",
        scale_bytes=4,
    ),
    NumberFormat(
        algo="FP8_PB_WO",
        weights=f"{_E4M3}, a scale for 128 x 128 elements",
        inputs="as they are, or scaled by the engine",
        bits=8,
        scaling="block",
        scale_bytes=4,
        groups=(128,),
    ),
    NumberFormat(
        algo="W8A8_SQ_PER_CHANNEL",
        weights="INT8, a scale a row",
        inputs="INT8, a calibrated scale a tensor",
        bits=8,
        scaling="channel",
        scale_bytes=4,
        extra_bytes=4,
        smooths=True,
        calibrates=True,
    ),
    NumberFormat(
        algo="W8A16",
        weights="INT8, a scale a row",
        inputs="as they are",
        bits=8,
        scaling="channel",
        scale_bytes=4,
    ),
    NumberFormat(
        algo="W4A16_AWQ",
        weights="INT4, a scale a group of columns",
        inputs="as they are",
        bits=4,
        scaling="group",
        scale_bytes=4,
        groups=(128, 64, 32, 256),
        smooths=True,
    ),
    NumberFormat(
        algo="W4A8_AWQ",
        weights="INT4, a scale a group of columns, and one more in FP8",
        inputs=f"{_E4M3}, a calibrated scale a tensor",
        bits=4,
        scaling="group",
        scale_bytes=4,
        extra_bytes=8,
        groups=(128, 64, 32, 256),
        smooths=True,
        calibrates=True,
    ),
    NumberFormat(
        algo="MXFP8",
        weights=f"{_E4M3}, a power of two for 32 columns",
        inputs="MXFP8, scaled as they come",
        bits=8,
        scaling="group",
        scale_bytes=1,
        groups=(32,),
    ),
    NumberFormat(
        algo="MXFP4",
        weights=f"{_FP4}, a power of two for 32 columns",
        inputs="MXFP4, scaled as they come",
        bits=4,
        scaling="group",
        scale_bytes=1,
        groups=(32,),
    ),
    NumberFormat(
        algo="W4A8_MXFP4_FP8",
        weights=f"{_FP4}, a power of two for 32 columns",
        inputs=f"{_E4M3}",
        bits=4,
        scaling="group",
        scale_bytes=1,
        groups=(32,),
    ),
    NumberFormat(
        algo="NVFP4",
        weights=f"{_FP4}, a scale in FP8 for 16 columns, and one more a tensor",
        inputs="NVFP4, with a calibrated scale a tensor",
        bits=4,
        scaling="group",
        scale_bytes=1,
        extra_bytes=8,
        groups=(16,),
        smooths=True,
        calibrates=True,
    ),
    NumberFormat(
        algo="NVFP4_SVD",
        weights=f"{_FP4} as in NVFP4, and two matrices of a low rank in 16 bits (SVDQuant)",
        inputs="NVFP4, with a calibrated scale a tensor; as they are for the matrices",
        bits=4,
        scaling="group",
        scale_bytes=1,
        extra_bytes=8,
        groups=(16,),
        smooths=True,
        calibrates=True,
        has_branch=True,
    ),
    NumberFormat(
        algo="W4A16_NVFP4",
        weights=f"{_FP4}, a scale in FP8 for 16 columns, and one more a tensor",
        inputs="as they are",
        bits=4,
        scaling="group",
        scale_bytes=1,
        extra_bytes=4,
        groups=(16, 32),
    ),
    NumberFormat(
        algo="W4A8_NVFP4_FP8",
        weights=f"{_FP4}, a scale in FP8 for 32 columns, and one more a tensor",
        inputs=f"{_E4M3}, a calibrated scale a tensor",
        bits=4,
        scaling="group",
        scale_bytes=1,
        extra_bytes=8,
        groups=(32,),
        calibrates=True,
    ),
)

FORMATS: Mapping[str, NumberFormat] = MappingProxyType({f.algo: f for f in _LIST})
"""By `quant_algo`; MXFP4 is `mxfp4` and FP8_PB_WO `fp8_pb_wo` in files ModelOpt writes."""

ALGO_SPELLING: Mapping[str, str] = MappingProxyType({"FP8_PB_WO": "fp8_pb_wo"})
"""Algorithms that files spell in lower case: TensorRT-LLM compares case-sensitively, vLLM does
not."""

SMOOTHED_ALGOS: Mapping[str, str] = MappingProxyType({"NVFP4": "NVFP4_AWQ"})
"""Algorithms with another name if they have a `pre_quant_scale`, so that loaders without support
for it reject the checkpoint."""

PLAIN_ALGOS: Mapping[str, str] = MappingProxyType({s: plain for plain, s in SMOOTHED_ALGOS.items()})
"""The plain formats of these names."""

KV_BITS: Mapping[str, float] = MappingProxyType({"FP8": 8.0, "NVFP4": 4.5})
"""Bits per element of the KV cache by `kv_cache_quant_algo`; NVFP4 has a scale byte per 16."""

PACKINGS: Mapping[str, str] = {
    "FP8": "fp8:tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8:channel",
    "FP8_PB_WO": "fp8:128x128",
    "W8A8_SQ_PER_CHANNEL": "int8:channel",
    "W8A16": "int8:channel",
    "W4A16_AWQ": "int4rows:{group}",
    "W4A8_AWQ": "int4rows:{group}",
    "MXFP8": "mxfp8:32",
    "MXFP4": "mxfp4:32",
    "W4A8_MXFP4_FP8": "mxfp4:32",
    "NVFP4": "nvfp4:{group}",
    "NVFP4_SVD": "nvfp4:{group}",
    "W4A16_NVFP4": "nvfp4:{group}",
    "W4A8_NVFP4_FP8": "nvfp4:{group}",
}
"""The packing of the codes of each format, as `megtool.number_formats.layout` names it."""

INPUT_PACKINGS: Mapping[str, str] = {
    "FP8": "fp8:tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8:token",
    "W8A8_SQ_PER_CHANNEL": "int8:tensor",
    "W4A8_AWQ": "fp8:tensor",
    "MXFP8": "mxfp8:32",
    "MXFP4": "mxfp4:32",
    "W4A8_MXFP4_FP8": "fp8:token",
    "NVFP4": "nvfp4:16",
    "NVFP4_SVD": "nvfp4:16",
    "W4A8_NVFP4_FP8": "fp8:tensor",
}
"""How engines quantize the inputs of a format, if they do: with a calibrated scale (`tensor`), or
dynamically (`token` and groups; NVFP4's block scales only)."""

ENGINE_INPUTS: Mapping[str, str] = MappingProxyType({**INPUT_PACKINGS, "FP8_PB_WO": "fp8:128"})
"""How engines round inputs when they run, whatever the files say of them: `INPUT_PACKINGS`, and
under FP8_PB_WO every 128 columns of a token by their own amax (vLLM's
`ModelOptFp8PbWoLinearMethod`, and DeepSeek's own kernels)."""

SMOOTHING_METHODS = ("smoothquant", "awq", "awq_lite", "awq_full", "svdquant")
"""Algorithms that store a `pre_quant_scale` where no preceding norm can absorb it; `svdquant`
always stores one."""

DEFAULT_RANK = 32
"""Of SVDQuant's matrices, as in ModelOpt 0.47 (`SVDQuantConfig.lowrank`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFormat:
    """A format of a recipe: for linear modules, for the KV cache, or a choice.

    Exactly one of `algo` (of `FORMATS`), `kv_algo` (of `KV_BITS`) and `choose` (names of formats of
    the recipe, or `keep`) is set. `group_size` is 0 for formats without groups; `bits` is the
    budget of a choice, the average over the modules that it decides. `constant`: the scale of a KV
    cache is 1 instead of calibrated. `input_amax`: fixed amax of inputs (0: calibrated). `method`
    overrides the recipe's algorithm. `round_twice`, for `FP8` only: quotients are rounded to the
    dtype of the weight first, which gives the same bytes as ModelOpt's export. `block_scales`, for
    NVFP4 weights of ModelOpt's recipes: scales of blocks are kept and may be chosen (`static`), and
    are at most 256 before that (`four_over_six`); else they follow the weight.
    """

    name: str
    algo: str = ""
    kv_algo: str = ""
    choose: tuple[str, ...] = ()
    group_size: int = 0
    bits: float = 0.0
    constant: bool = False
    input_amax: float = 0.0
    method: str = ""
    round_twice: bool = False
    block_scales: BlockScales = ""
    line: int = 0

    @property
    def label(self) -> str:
        """The name that engines use."""
        if self.choose:
            return "of " + ", ".join(self.choose)
        return f"KV {self.kv_algo}" if self.kv_algo else self.algo

    @property
    def number(self) -> NumberFormat:
        """The entry of `FORMATS`."""
        return FORMATS[self.algo]


def chooses_codes(format: RecipeFormat) -> bool:
    """Whether the codes of weights in a format need not be the nearest ones: integers and FP4."""
    return packing_of(format).startswith(("int", "nvfp4", "mxfp4"))


def can_smooth(format: RecipeFormat, *, fold: bool) -> bool:
    """Whether inputs can have a smoothing scale: the format stores a `pre_quant_scale`, or, for FP4
    weights, norms absorb it (`fold`)."""
    return format.number.smooths or (fold and packing_of(format).startswith(("nvfp4", "mxfp4")))


def packing_of(format: RecipeFormat) -> str:
    """The packing of a format's codes, such as `int4rows:128`."""
    return PACKINGS[format.algo].format(group=format.group_size)


def largest_group(columns: Sequence[int], most: int) -> int:
    """The largest power of two that is at most `most` and divides all of `columns` (0: none).

    Engines support only powers of two, so a divisor such as 96 is of no use.
    """
    common = math.gcd(*columns)
    best = 1 << max(most.bit_length() - 1, 0)
    while best > 1 and common % best:
        best //= 2
    return best if best > 1 else 0
