"""Rank names: what a rank's own modules call a parameter, against its name in the whole model.

`model_optim_rng.pt` keeps names of the module tree: layers count from the first of the chunk,
experts are numbered within the rank, and norms are called as the layer implementation has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megtool.convert.rank_parameters import Parameter

_LAYER = re.compile(
    r"(decoder|encoder|mtp)\.layers\.(\d+)\.((?:transformer_layer\.|mtp_model_layer\.)?)(.+)"
)
_GROUPED = re.compile(r"mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)")
_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)")
_GLOBAL_EXPERT = re.compile(r"mlp\.experts\.experts\.linear_fc([12])\.(weight|bias)")
_SEQUENTIAL_MODULE = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])")
_EXPERT_MODULE = re.compile(r"mlp\.experts\.experts\.(linear_fc[12])")
_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@dataclass(frozen=True, slots=True)
class Global:
    """A rank's tensor by its name in the whole model; `expert` counts over all ranks."""

    key: str
    expert: int | None


def to_global(name: str, *, first_layer: int, first_expert: int) -> Global:
    """The global key of a rank's own name for a parameter or a module.

    `first_layer` and `first_expert` are those the rank's chunk begins with; layers that predict
    further tokens are all in one chunk.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return Global(name, None)
    first = 0 if match[1] == "mtp" else first_layer
    head = f"{match[1]}.layers.{first + int(match[2])}.{match[3]}"
    suffix = match[4]
    if found := _GROUPED.fullmatch(suffix):
        key = f"{head}mlp.experts.experts.linear_fc{found[1]}.{found[2]}"
        return Global(key, first_expert + int(found[3]))
    if found := _SEQUENTIAL.fullmatch(suffix):
        key = f"{head}mlp.experts.experts.linear_fc{found[2]}.{found[3]}"
        return Global(key, first_expert + int(found[1]))
    if found := _SEQUENTIAL_MODULE.fullmatch(suffix):
        key = f"{head}mlp.experts.experts.linear_fc{found[2]}"
        return Global(key, first_expert + int(found[1]))
    return Global(head + suffix, None)


def to_local(
    parameter: Parameter, *, first_layer: int, first_expert: int, fused: bool, grouped: bool
) -> str:
    """The name a rank's own modules give a parameter.

    `fused`: Transformer Engine's layers, which hold the norms in the linear layers behind them;
    `grouped`: experts numbered in the weights' names.
    """
    match = _LAYER.fullmatch(parameter.module_key)
    if match is None:
        return parameter.module_key
    suffix = match[4]
    expert = parameter.expert - first_expert
    if found := _GLOBAL_EXPERT.fullmatch(suffix):
        linear, kind = found[1], found[2]
        suffix = (
            f"mlp.experts.linear_fc{linear}.{kind}{expert}"
            if grouped
            else f"mlp.experts.local_experts.{expert}.linear_fc{linear}.{kind}"
        )
    elif not fused:
        for of_linear, own in _NORMS:
            if suffix.startswith(of_linear):
                suffix = own + suffix.removeprefix(of_linear)
    first = 0 if match[1] == "mtp" else first_layer
    return f"{match[1]}.layers.{int(match[2]) - first}.{match[3]}{suffix}"


def module_to_local(
    module: str, expert: int | None, *, first_layer: int, first_expert: int, grouped: bool
) -> str:
    """The name of a rank's own module, from the one in the whole model (layers one by one).

    `grouped`: all experts of a rank are one module.
    """
    match = _LAYER.fullmatch(module)
    if match is None:
        return module
    suffix = match[4]
    if found := _EXPERT_MODULE.fullmatch(suffix):
        local = "" if grouped else f"local_experts.{(expert or 0) - first_expert}."
        suffix = f"mlp.experts.{local}{found[1]}"
    first = 0 if match[1] == "mtp" else first_layer
    return f"{match[1]}.layers.{int(match[2]) - first}.{match[3]}{suffix}"
