"""Tables: what engines demand of sizes, keys, schemes and names, line by line with its source.

A line's `since` is the first version that it is known of; `main` is a state of the sources that no
release number is known for, as in `quant.recipes.targets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megtool.lint import citations as at

ENGINES = ("vllm", "sglang", "trtllm")

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What all three engines run as one (`packed_modules_mapping`), by the last part of the name."""

PAIRS = (("gate_proj", "up_proj"), ("w1", "w3"))
"""The two matrices of an expert that are run as one."""

ROWS, COLUMNS = "rows", "columns"
SPLIT: Mapping[str, str] = {
    **dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "qkv_proj"), ROWS
    ),
    **dict.fromkeys(("gate_up_proj", "q_b_proj", "kv_b_proj", "fc_in", "fc1", "lm_head"), ROWS),
    **dict.fromkeys(("query_key_value", "dense_h_to_4h", "embed_out"), ROWS),
    **dict.fromkeys(("o_proj", "down_proj", "w2", "out_proj", "fc_out", "fc2", "dense"), COLUMNS),
    "dense_4h_to_h": COLUMNS,
}
"""Which dimension tensor parallelism cuts; modules not named here are held whole by every rank."""

EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "wpe",
    "word_embeddings",
    "position_embeddings",
    "embed_positions",
    "embed_in",
    "tok_embeddings",
)
ROUTERS = ("gate", "router", "shared_expert_gate")
APART = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower")
"""Parts of names of towers that engines leave alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A `quant_method` that an engine loads."""

    engine: str
    since: str
    form: str
    source: str


MODELOPT_METHODS: Mapping[str, tuple[str, ...]] = {
    "modelopt": ENGINES,
    "modelopt_fp4": ("vllm", "sglang"),
    "modelopt_mixed": ("vllm", "sglang"),
    "modelopt_fp8": ("sglang",),
    "modelopt_mxfp8": ("vllm",),
}
"""Spellings of ModelOpt's `quant_method`, and the engines that have it in their tables of methods
(vLLM's and SGLang's `layers/quantization/__init__.py`, TensorRT-LLM's `_torch/model_config.py`);
`modelopt` alone is known to all."""

METHODS = (
    Method(engine="vllm", since="0.9.0", form="modelopt", source=at.VLLM_MODELOPT),
    Method(engine="vllm", since="0.9.0", form="compressed-tensors", source=at.VLLM_COMPRESSED),
    Method(engine="vllm", since="0.9.0", form="fp8", source=at.VLLM_FP8),
    Method(engine="vllm", since="0.11.0", form="mxfp4", source=at.VLLM_MXFP4),
    Method(engine="sglang", since="0.5", form="modelopt", source=at.SGLANG_MODELOPT),
    Method(engine="sglang", since="0.5", form="compressed-tensors", source=at.SGLANG_COMPRESSED),
    Method(engine="sglang", since="0.5", form="fp8", source=at.SGLANG_FP8),
    Method(engine="sglang", since="0.5", form="mxfp4", source=at.SGLANG_MXFP4),
    Method(engine="trtllm", since="1.0.0", form="modelopt", source=at.TRTLLM_MODELOPT),
    Method(engine="trtllm", since="1.0.0", form="fp8", source=at.TRTLLM_CONFIG),
    Method(engine="trtllm", since="main", form="compressed-tensors", source=at.TRTLLM_COMPRESSED),
    Method(engine="trtllm", since="main", form="mxfp4", source=at.TRTLLM_CONFIG),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A size of every rank's part of a matrix must be a multiple: of `of`, or of the group (0).

    `when` is `always`, `cut` (that dimension is cut over ranks) or `joined` (cut, or the module is
    run as one with others).
    """

    engine: str
    form: str
    algos: tuple[str, ...]
    dimension: Literal["rows", "columns"]
    of: int
    when: Literal["always", "cut", "joined"] = "always"
    source: str


_NV = ("NVFP4", "W4A16_NVFP4")
_AWQ = ("W4A16_AWQ", "W4A8_AWQ")
_V, _S, _T = at.VLLM_MODELOPT, at.SGLANG_MODELOPT, at.TRTLLM_LINEAR


def _limit(
    engine: str,
    form: str,
    algos: tuple[str, ...],
    dimension: Literal["rows", "columns"],
    of: int,
    source: str,
    when: Literal["always", "cut", "joined"] = "always",
) -> Limit:
    return Limit(
        engine=engine,
        form=form,
        algos=algos,
        dimension=dimension,
        of=of,
        source=source,
        when=when,
    )


LIMITS = (
    _limit("vllm", "modelopt", _NV, "columns", 16, _V),
    _limit("vllm", "modelopt", _NV, "columns", 0, _V),
    _limit("vllm", "modelopt", ("FP8_PB_WO",), "rows", 128, _V),
    _limit("vllm", "modelopt", ("FP8_PB_WO",), "columns", 128, _V),
    _limit("vllm", "modelopt", ("MXFP8",), "columns", 32, _V),
    _limit("sglang", "modelopt", _NV, "columns", 16, _S),
    _limit("sglang", "modelopt", _NV, "columns", 0, _S),
    _limit("trtllm", "modelopt", _NV, "columns", 16, _T),
    _limit("trtllm", "modelopt", _AWQ, "columns", 0, _T),
    _limit("trtllm", "modelopt", _AWQ, "rows", 2, _T),
    _limit("trtllm", "modelopt", ("FP8_PB_WO",), "rows", 128, _T, "cut"),
    _limit("trtllm", "modelopt", ("FP8_PB_WO",), "columns", 128, _T, "cut"),
    _limit("vllm", "fp8", ("FP8_PB_WO",), "rows", 0, at.VLLM_FP8, "joined"),
    _limit("vllm", "fp8", ("FP8_PB_WO",), "columns", 0, at.VLLM_FP8, "cut"),
    _limit("sglang", "fp8", ("FP8_PB_WO",), "rows", 0, at.SGLANG_FP8, "joined"),
    _limit("sglang", "fp8", ("FP8_PB_WO",), "columns", 0, at.SGLANG_FP8, "cut"),
    _limit("trtllm", "fp8", ("FP8_PB_WO",), "rows", 128, _T, "cut"),
    _limit("trtllm", "fp8", ("FP8_PB_WO",), "columns", 128, _T, "cut"),
    *(
        _limit(engine, "compressed-tensors", algos, "columns", 0, source)
        for engine, source in (
            ("vllm", at.VLLM_COMPRESSED),
            ("sglang", at.SGLANG_COMPRESSED),
            ("trtllm", at.TRTLLM_LINEAR),
        )
        for algos in (_NV, ("W4A16_AWQ", "MXFP4", "MXFP8"))
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The group sizes that an engine has kernels for."""

    engine: str
    algos: tuple[str, ...]
    sizes: tuple[int, ...]
    source: str


GROUPS = (
    Groups(engine="vllm", algos=_NV, sizes=(16,), source=at.VLLM_MODELOPT),
    Groups(engine="sglang", algos=_NV, sizes=(16,), source=at.SGLANG_MODELOPT),
    Groups(engine="trtllm", algos=_NV, sizes=(16,), source=at.TRTLLM_LINEAR),
    Groups(engine="trtllm", algos=_AWQ, sizes=(64, 128), source=at.TRTLLM_LINEAR),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Keys that an engine stops without where it reads `quantization` of hf_quant_config.json
    (`file`) or `quantization_config` of config.json (`inline`). With `filled` null, 0 and an empty
    list are as bad."""

    engine: str
    algos: tuple[str, ...] = ()
    where: Literal["file", "inline"]
    keys: tuple[str, ...]
    filled: bool = False
    source: str


_THREE = ("group_size", "kv_cache_quant_algo", "exclude_modules")

KEYS = (
    Keys(engine="vllm", where="inline", keys=("quant_algo",), filled=True, source=_V),
    Keys(engine="vllm", where="file", keys=("quant_algo",), filled=True, source=_V),
    Keys(engine="vllm", algos=_NV, where="file", keys=_THREE, source=_V),
    Keys(engine="sglang", where="inline", keys=("quant_algo",), filled=True, source=_S),
    Keys(engine="sglang", where="file", keys=("quant_algo",), filled=True, source=_S),
    Keys(
        engine="sglang", algos=("NVFP4",), where="inline", keys=("group_size", "ignore"), source=_S
    ),
    Keys(
        engine="sglang",
        algos=("NVFP4",),
        where="file",
        keys=("group_size", "exclude_modules"),
        filled=True,
        source=at.SGLANG_MODELOPT_2025,
    ),
    Keys(
        engine="sglang",
        algos=("NVFP4",),
        where="file",
        keys=("kv_cache_quant_algo",),
        source=at.SGLANG_MODELOPT_2025,
    ),
    Keys(
        engine="trtllm", where="file", keys=("quant_algo",), filled=True, source=at.TRTLLM_LOADING
    ),
)
