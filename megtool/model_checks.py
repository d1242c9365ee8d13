"""Checks of a model's configuration: numbers, sizes by layer, rotary scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megtool.errors import MappingError

if TYPE_CHECKING:
    from megtool.model_config import ModelConfig

VARYING = ("num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size")
"""Fields that `layer_sizes` may have."""

_POSITIVE_OR_NONE = ("softmax_scale", "rope_local_base")  # or None
_NOT_NEGATIVE = ("attn_softcap", "logit_softcap", "activation_limit")
_FINITE = (
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "router_scaling",
    "glu_offset",
    "attn_temperature_scale",
    "mamba_out_scale",
    "attn_in_scale",
    "attn_out_scale",
    "mlp_gate_scale",
    "mlp_out_scale",
)


def check_int(name: str, value: object, least: int) -> None:
    """Refuse what is no integer, or a smaller one.

    Raises:
        MappingError: the message names the field.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MappingError(f"{name} is {value!r}", hint=f"an integer of at least {least}")


def check_numbers(config: ModelConfig) -> None:
    """Refuse scales, caps and limits that no forward pass can use; `config` is a ModelConfig.

    Raises:
        MappingError: the message names the field.
    """
    for name in _POSITIVE_OR_NONE:
        value = getattr(config, name)
        if value is not None and not (_is_number(value) and value > 0):
            raise MappingError(f"{name} is {value!r}", hint="a positive number, or nothing")
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if not (_is_number(value) and value >= 0):
            raise MappingError(f"{name} is {value!r}", hint="a positive number, or 0 for none")
    for name in _FINITE:
        if not _is_number(value := getattr(config, name)):
            raise MappingError(f"{name} is {value!r}", hint="a finite number")
    parts = config.mamba_in_scales
    if parts is not None and (len(parts) != 5 or not all(map(_is_number, parts))):
        raise MappingError(
            f"mamba_in_scales is {str(parts)[:80]}", hint="a finite number for z, x, B, C and dt"
        )


def check_sizes(config: ModelConfig) -> None:
    """Refuse sizes by layer that are not one positive number for each, or that do not fit.

    Raises:
        MappingError: the message names the field.
    """
    if (sizes := config.layer_sizes) is None:
        return
    if not isinstance(sizes, Mapping) or set(sizes) - set(VARYING):
        raise MappingError(
            f"layer_sizes is {str(sizes)[:80]}",
            hint=f"numbers by layer, of {', '.join(VARYING)}",
        )
    if config.num_mtp_layers or config.kv_lora_rank:
        raise MappingError(
            "sizes vary by layer in a model with latent attention or multi-token prediction",
            hint="such a model has neither",
            error_id="unsupported-model",
        )
    for name, numbers in sizes.items():
        if not isinstance(numbers, tuple) or len(numbers) != config.num_layers:
            raise MappingError(
                f"{name} of layer_sizes is {str(numbers)[:80]}",
                hint=f"one number for each of {config.num_layers} layers",
            )
        for number in numbers:
            check_int(f"{name} of a layer", number, 1)
        if max(numbers) > getattr(config, name):
            raise MappingError(f"a layer has {name}={max(numbers)}, and the model says less")


def check_indexer(config: ModelConfig, counts: tuple[int, ...]) -> None:
    """Refuse indexers without sizes, and layers that share a choice which nobody has made.

    Raises:
        MappingError: the message names the field.
    """
    shared = config.shared_index_layers
    if shared is not None and (not are_flags(shared, counts) or shared[0]):
        raise MappingError(
            f"shared_index_layers is {str(shared)[:80]}",
            hint=f"one 0 or 1 for each of {config.num_layers} layers, and 0 for the first",
        )
    if not config.index_num_heads:
        return
    for name in ("kv_lora_rank", "q_lora_rank", "index_topk"):
        if not getattr(config, name):
            raise MappingError(
                f"{name} is 0, but there are {config.index_num_heads} heads of an indexer",
                hint="an indexer reads the compressed queries of latent attention",
            )
    if config.index_head_dim < config.qk_rope_head_dim:
        raise MappingError(
            f"index_head_dim is {config.index_head_dim}, less than the "
            f"{config.qk_rope_head_dim} elements that turn",
            hint="at least qk_rope_head_dim",
        )


def check_rope_scaling(scaling: Mapping[str, Any] | None, rotary_size: int) -> None:
    """Refuse factors that are no positive numbers, or not one for each of `rotary_size / 2` pairs.

    A factor of None is left to be worked out from the numbers of positions.

    Raises:
        MappingError: the message names the field and the key in it.
    """
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        raise MappingError(f"rope_scaling is {scaling!r}", hint="a table of a kind and its numbers")
    factor = scaling.get("factor")
    if factor is not None and not (_is_number(factor) and factor > 0):
        raise MappingError(f"rope_scaling has the factor {factor!r}", hint="a positive number")
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if factors is None:
            continue
        if not _is_list(factors) or not all(_is_number(f) and f > 0 for f in factors):
            raise MappingError(
                f"{name} of rope_scaling is {str(factors)[:80]}", hint="a list of positive numbers"
            )
        if len(factors) != rotary_size // 2:
            raise MappingError(
                f"{name} of rope_scaling has {len(factors)} numbers",
                hint=f"{rotary_size // 2}: one for each pair of the {rotary_size} elements of a "
                "head that turn",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def are_flags(value: object, counts: tuple[int, ...]) -> bool:
    """Zeros and ones (or false and true), as many as one of `counts`."""
    return isinstance(value, Sequence) and len(value) in counts and all(v in (0, 1) for v in value)
