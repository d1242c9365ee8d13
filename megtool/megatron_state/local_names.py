"""Convert names of a rank's modules and parameters to names in the whole model, and back.

`model_optim_rng.pt` has names of the module tree: layers are numbered from the first of the chunk,
experts within the rank, and the names of norms depend on the layer implementation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megtool.convert.families.nested import MEGATRON_PREFIX
from megtool.convert.megatron.rank_parameters import Parameter
from megtool.convert.megatron.sections import on_disk

_LAYER = re.compile(
    r"(decoder|encoder|mtp)\.layers\.(\d+)\."
    r"((?:transformer_layer\.|mtp_model_layer\.(?:layers\.\d+\.)?)?)(.+)"
)
_GROUPED = re.compile(r"mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)")
_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)")
_GLOBAL_EXPERT = re.compile(r"mlp\.experts\.experts\.linear_fc([12])\.(weight|bias)")
_SEQUENTIAL_MODULE = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])")
_EXPERT_MODULE = re.compile(r"mlp\.experts\.experts\.(linear_fc[12])")
_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.in_proj.layer_norm_", "input_layernorm."),
    ("mixer.in_proj.layer_norm_", "norm."),
    ("short_conv.in_proj.layer_norm_", "input_layernorm."),
)


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A rank's tensor by its name in the whole model; `expert` counts over all ranks."""

    key: str
    expert: int | None


def to_global(name: str, *, first_layer: int, first_expert: int) -> GlobalName:
    """The global key of a rank's own name for a parameter or a module.

    `first_layer` and `first_expert` are the first ones of the rank's chunk; layers that predict
    further tokens are all in one chunk. That a larger model nests the text model is left out.
    """
    name = name.removeprefix(MEGATRON_PREFIX)
    match = _LAYER.fullmatch(name)
    if match is None:
        return GlobalName(name, None)
    first = 0 if match[1] == "mtp" else first_layer
    head = f"{match[1]}.layers.{first + int(match[2])}.{match[3]}"
    suffix = match[4]
    if inner := _GROUPED.fullmatch(suffix):
        key = f"{head}mlp.experts.experts.linear_fc{inner[1]}.{inner[2]}"
        return GlobalName(key, first_expert + int(inner[3]))
    if inner := _SEQUENTIAL.fullmatch(suffix):
        key = f"{head}mlp.experts.experts.linear_fc{inner[2]}.{inner[3]}"
        return GlobalName(key, first_expert + int(inner[1]))
    if inner := _SEQUENTIAL_MODULE.fullmatch(suffix):
        key = f"{head}mlp.experts.experts.linear_fc{inner[2]}"
        return GlobalName(key, first_expert + int(inner[1]))
    return GlobalName(on_disk(head + suffix), None)


def to_local(
    parameter: Parameter,
    *,
    first_layer: int,
    first_expert: int,
    fused: bool,
    grouped: bool,
    conv_first: bool = False,
) -> str:
    """The name of a parameter in a rank's module tree.

    `fused`: Transformer Engine's layers, whose norms are part of the next linear layer;
    `grouped`: experts are numbered in the weights' names; `conv_first`: the convolution of a
    Mamba mixer is no module of its own.
    """
    match = _LAYER.fullmatch(parameter.module_key)
    if match is None:
        return parameter.module_key
    suffix = match[4]
    if conv_first:
        suffix = suffix.replace("mixer.conv1d.", "mixer.conv1d_")
    expert = parameter.expert - first_expert
    if inner := _GLOBAL_EXPERT.fullmatch(suffix):
        linear, kind = inner[1], inner[2]
        suffix = (
            f"mlp.experts.linear_fc{linear}.{kind}{expert}"
            if grouped
            else f"mlp.experts.local_experts.{expert}.linear_fc{linear}.{kind}"
        )
    elif not fused:
        for fused_prefix, separate_prefix in _NORMS:
            if suffix.startswith(fused_prefix):
                suffix = separate_prefix + suffix.removeprefix(fused_prefix)
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
    if inner := _EXPERT_MODULE.fullmatch(suffix):
        local = "" if grouped else f"local_experts.{(expert or 0) - first_expert}."
        suffix = f"mlp.experts.{local}{inner[1]}"
    first = 0 if match[1] == "mtp" else first_layer
    return f"{match[1]}.layers.{int(match[2]) - first}.{match[3]}{suffix}"
