"""What ModelConfig asks of the numbers that a forward pass computes with, and of lists by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megtool.errors import MappingError

POSITIVE = ("softmax_scale", "rope_local_base")  # or None
NOT_NEGATIVE = ("attn_softcap", "logit_softcap", "activation_limit")
FINITE = (
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "router_scaling",
    "glu_offset",
    "attn_temperature_scale",
)


def check_numbers(config: Any) -> None:
    """Refuse scales, caps and limits that no forward pass can use; `config` is a ModelConfig.

    Raises:
        MappingError: the message names the field.
    """
    for name in POSITIVE:
        value = getattr(config, name)
        if value is not None and not (_is_number(value) and value > 0):
            raise MappingError(f"{name} is {value!r}", hint="a positive number, or nothing")
    for name in NOT_NEGATIVE:
        value = getattr(config, name)
        if not (_is_number(value) and value >= 0):
            raise MappingError(f"{name} is {value!r}", hint="a positive number, or 0 for none")
    for name in FINITE:
        if not _is_number(value := getattr(config, name)):
            raise MappingError(f"{name} is {value!r}", hint="a finite number")


def check_layers(config: Any) -> None:
    """Refuse lists that are not one flag for each layer, and layers counted in steps of none.

    Layers of multi-token prediction may have flags, too.

    Raises:
        MappingError: the message names the field.
    """
    counts = (config.num_layers, config.num_layers + config.num_mtp_layers)
    skip, without = config.window_skip_freq, config.no_rope_layers
    flags = f"one 0 or 1 for each of {config.num_layers} layers"
    is_step = isinstance(skip, int) and not isinstance(skip, bool) and skip > 0
    if skip is not None and not is_step and not _are_flags(skip, counts):
        raise MappingError(f"window_skip_freq is {skip!r}", hint=f"a positive int, or {flags}")
    if without is not None and not _are_flags(without, counts):
        raise MappingError(f"no_rope_layers is {without!r}", hint=flags)


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


def _are_flags(value: object, counts: tuple[int, ...]) -> bool:
    """Zeros and ones (or false and true), as many as one of `counts`."""
    return isinstance(value, Sequence) and len(value) in counts and all(v in (0, 1) for v in value)
