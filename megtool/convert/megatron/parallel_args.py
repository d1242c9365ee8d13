"""Megatron's parallel-layout args as a `ParallelConfig`, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megtool.convert.megatron.hybrid_pattern import pattern_of
from megtool.errors import LayoutError, MappingError
from megtool.options.layout import LayoutOptions, ParallelConfig
from megtool.parallel.pipeline_split import layout_text

_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
}
_OUTER = {
    "first_stage_layers": "decoder_first_pipeline_num_layers",
    "last_stage_layers": "decoder_last_pipeline_num_layers",
}
_ACCOUNTS = {
    "account_for_embedding": "account_for_embedding_in_pipeline_split",
    "account_for_loss": "account_for_loss_in_pipeline_split",
}
_LAYOUT = "pipeline_model_parallel_layout"
# Releases 0.8 to 0.13 had stages of an encoder, besides which `pp` counted the decoder's. Before,
# `pp` counted all, and the other arg said which was the decoder's first.
_ENCODER, _SPLIT_RANK = "encoder_pipeline_model_parallel_size", "pipeline_model_parallel_split_rank"
OWN_SPLIT = (*_OUTER, *_ACCOUNTS, "pipeline_layout", "encoder_pp")
"""Fields that split a certain number of layers."""

_SPLIT = ("vpp", *OWN_SPLIT)
# How megatron-core numbers its LayerType, which pickles as its number (transformer/enums.py).
_LAYER_TYPES = {1: "embedding", 2: "loss", 3: "encoder", 4: "decoder", 5: "mtp"}


def layout_args(parallel: ParallelConfig, num_layers: int | None = None) -> dict[str, Any]:
    """All args of a parallel layout, as plain values.

    Megatron takes the number of virtual stages in one of two ways, and an uneven split only in the
    second: `num_layers_per_virtual_pipeline_stage` (which needs `num_layers`) or
    `num_virtual_stages_per_pipeline_rank`. With an explicit layout it wants neither. What does not
    apply is None, so that a previous layout's args do not survive.
    """
    p = parallel
    is_virtual = p.vpp > 1 and p.pipeline_layout is None
    is_even = p.first_stage_layers is None and p.last_stage_layers is None
    counted = p.account_for_embedding + p.account_for_loss
    by_layers = is_virtual and is_even and num_layers is not None
    each = ((num_layers or 0) + counted) // (p.pp * p.vpp)
    return {
        **{name: getattr(p, axis) for axis, name in _AXES.items()},
        _AXES["pp"]: p.pp - p.encoder_pp,
        _ENCODER: p.encoder_pp,
        _SPLIT_RANK: None,
        _AXES["vpp"]: p.vpp if p.vpp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": each if by_layers else None,
        "num_virtual_stages_per_pipeline_rank": p.vpp if is_virtual and not by_layers else None,
        **{name: getattr(p, field) for field, name in (_OUTER | _ACCOUNTS).items()},
        _LAYOUT: p.pipeline_layout,
        "world_size": p.world_size,
    }


def layout_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """The layout in a checkpoint's args (`vars(namespace)`), as ParallelConfig's fields.

    Only what is there and of the right type; nothing is checked against anything else. An explicit
    layout may be text, lists of names, or megatron-core's own object as inert data; another thing
    is kept as text that ParallelConfig refuses, for whoever needs no layout.
    """
    out: dict[str, Any] = {}
    for field, name in (_AXES | _OUTER).items():
        value = args.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            out[field] = value
    out |= {field: True for field, name in _ACCOUNTS.items() if args.get(name) is True}
    for name in (_ENCODER, _SPLIT_RANK):
        value = args.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            out["encoder_pp"] = value
            if name == _ENCODER:
                out["pp"] = out.get("pp", 1) + value
            break
    explicit = _explicit(args.get(_LAYOUT))
    if explicit is not None:
        out["pipeline_layout"] = explicit
    with suppress(MappingError):  # whoever reads the model's configuration says what is wrong
        pattern = pattern_of(args)
        if pattern is not None and pattern.is_cut and not len(pattern.chunks) % out.get("pp", 1):
            out = {k: v for k, v in out.items() if k not in _SPLIT}
            out["vpp"] = len(pattern.chunks) // out.get("pp", 1)
            out["pipeline_layout"] = pattern.layout()
    if out.get("pp", 1) == 1:  # Megatron ignores how one stage is split
        out = {k: v for k, v in out.items() if k not in _SPLIT}
    return out


def parallel_from_args(args: Mapping[str, Any]) -> ParallelConfig:
    """The layout at which a checkpoint was saved, according to its args.

    Raises:
        LayoutError: the args contradict each other.
    """
    return ParallelConfig(**layout_fields(args))


def merged_layout(current: Mapping[str, Any], options: LayoutOptions) -> ParallelConfig:
    """The layout of the options; fields that are not given keep their values in `current`.

    `current` is `layout_fields` of the source. Its `dp` is never kept: the smallest is used. Its
    `etp` follows `tp` where the two were equal. How it splits layers over stages is kept only if
    the number of stages stays and no option changes the split.

    Raises:
        LayoutError: see `ParallelConfig`.
    """
    explicit = options.explicit()
    for axis in _AXES:
        if explicit.get(axis) == 0:  # ParallelConfig would read it as not given
            raise LayoutError(f"{axis} is 0", hint="parallel sizes are positive integers")
    inherited = {k: v for k, v in current.items() if k != "dp"}
    if inherited.get("etp") == inherited.get("tp", 1):
        inherited.pop("etp", None)
    if explicit.get("pp", inherited.get("pp", 1)) != inherited.get(
        "pp", 1
    ) or explicit.keys() & set(_SPLIT):
        inherited = {k: v for k, v in inherited.items() if k not in _SPLIT}
    return ParallelConfig(**(inherited | explicit))


def _explicit(value: Any) -> str | None:
    """An explicit pipeline layout as text, from the ways args hold it."""
    state = getattr(value, "state", None)
    if isinstance(state, dict):  # megatron-core's PipelineParallelLayerLayout, not executed
        value = state.get("input_data")
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, list) and all(isinstance(row, list | tuple) for row in value):
        with suppress(LayoutError):
            return layout_text([_name(layer) for layer in row] for row in value)
    return f"{value!r:.60}"


def _name(layer: Any) -> str:
    """The name of a layer in a list: text, or megatron-core's LayerType as inert data."""
    args = getattr(layer, "args", None)
    if isinstance(args, tuple) and args:
        return str(_LAYER_TYPES.get(args[-1], args[-1]) if isinstance(args[-1], int) else args[-1])
    return str(layer)
