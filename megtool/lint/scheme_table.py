"""Scheme table: the kinds of compressed-tensors groups that engines load, each with its source.

`since` is as in `tables`: the first version that it is known of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megtool.lint import citations as at


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One kind of compressed-tensors group that an engine loads.

    `inputs` are of `none`, `token` and `tensor` (static, one scale a tensor), `dynamic` (of any
    strategy), `group` and `tensor_group`. Without `experts` it is for dense modules alone.
    """

    engine: str
    since: str
    formats: tuple[str, ...]
    type: str
    bits: tuple[int, ...]
    strategies: tuple[str, ...]
    inputs: tuple[str, ...]
    group_sizes: tuple[int, ...] = ()
    experts: bool = True
    source: str


_FLOAT = ("float-quantized", "naive-quantized")
_INT = ("int-quantized", "naive-quantized")

SCHEMES = (
    Scheme(
        engine="vllm",
        since="0.9.0",
        formats=("pack-quantized",),
        type="int",
        bits=(4, 8),
        strategies=("channel", "group"),
        inputs=("none",),
        source=at.VLLM_COMPRESSED,
    ),
    Scheme(
        engine="vllm",
        since="0.9.0",
        formats=_FLOAT,
        type="float",
        bits=(8,),
        strategies=("tensor", "channel"),
        inputs=("none", "dynamic", "token", "tensor"),
        source=at.VLLM_COMPRESSED,
    ),
    Scheme(
        engine="vllm",
        since="0.11.0",
        formats=_FLOAT,
        type="float",
        bits=(8,),
        strategies=("block",),
        inputs=("none", "dynamic", "token", "tensor", "group"),
        source=at.VLLM_COMPRESSED,
    ),
    Scheme(
        engine="vllm",
        since="0.9.0",
        formats=_INT,
        type="int",
        bits=(8,),
        strategies=("tensor", "channel"),
        inputs=("token", "tensor"),
        source=at.VLLM_COMPRESSED,
    ),
    Scheme(
        engine="vllm",
        since="0.9.0",
        formats=("nvfp4-pack-quantized",),
        type="float",
        bits=(4,),
        strategies=("tensor_group",),
        inputs=("none", "tensor_group"),
        group_sizes=(16,),
        source=at.VLLM_COMPRESSED,
    ),
    Scheme(
        engine="vllm",
        since="main",
        formats=("mxfp4-pack-quantized",),
        type="float",
        bits=(4,),
        strategies=("group",),
        inputs=("none", "group", "dynamic"),
        group_sizes=(32,),
        source=at.VLLM_COMPRESSED_MAIN,
    ),
    Scheme(
        engine="vllm",
        since="main",
        formats=("mxfp8-quantized",),
        type="float",
        bits=(8,),
        strategies=("group",),
        inputs=("none", "group", "dynamic"),
        group_sizes=(32,),
        source=at.VLLM_COMPRESSED_MAIN,
    ),
    Scheme(
        engine="sglang",
        since="0.5",
        formats=("pack-quantized",),
        type="int",
        bits=(4, 8),
        strategies=("channel", "group"),
        inputs=("none",),
        source=at.SGLANG_COMPRESSED,
    ),
    Scheme(
        engine="sglang",
        since="0.5",
        formats=_FLOAT,
        type="float",
        bits=(8,),
        strategies=("tensor", "channel"),
        inputs=("none", "dynamic", "token", "tensor"),
        source=at.SGLANG_COMPRESSED,
    ),
    Scheme(
        engine="sglang",
        since="0.5",
        formats=_INT,
        type="int",
        bits=(8,),
        strategies=("tensor", "channel"),
        inputs=("token", "tensor"),
        experts=False,
        source=at.SGLANG_COMPRESSED,
    ),
    Scheme(
        engine="sglang",
        since="main",
        formats=_FLOAT,
        type="float",
        bits=(8,),
        strategies=("block",),
        inputs=("dynamic", "token", "tensor", "group"),
        source=at.SGLANG_COMPRESSED_MAIN,
    ),
    Scheme(
        engine="sglang",
        since="main",
        formats=("nvfp4-pack-quantized",),
        type="float",
        bits=(4,),
        strategies=("tensor_group",),
        inputs=("tensor_group",),
        group_sizes=(16,),
        source=at.SGLANG_COMPRESSED_MAIN,
    ),
    Scheme(
        engine="trtllm",
        since="main",
        formats=_FLOAT,
        type="float",
        bits=(8,),
        strategies=("channel",),
        inputs=("token",),
        source=at.TRTLLM_COMPRESSED,
    ),
    Scheme(
        engine="trtllm",
        since="main",
        formats=_FLOAT,
        type="float",
        bits=(8,),
        strategies=("block",),
        inputs=("group",),
        source=at.TRTLLM_COMPRESSED,
    ),
    Scheme(
        engine="trtllm",
        since="main",
        formats=("nvfp4-pack-quantized",),
        type="float",
        bits=(4,),
        strategies=("tensor_group",),
        inputs=("tensor_group",),
        group_sizes=(16,),
        source=at.TRTLLM_COMPRESSED,
    ),
    Scheme(
        engine="trtllm",
        since="main",
        formats=("mxfp4-pack-quantized",),
        type="float",
        bits=(4,),
        strategies=("group",),
        inputs=("none",),
        group_sizes=(32,),
        source=at.TRTLLM_COMPRESSED,
    ),
)

PER_GROUP_FORMATS: Mapping[str, str] = {
    "vllm": "0.11.0",
    "trtllm": "main",
}
"""Since when engines heed the `format` of a group (`mixed-precision`), by the sources above."""
