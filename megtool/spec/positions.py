"""Fields of positions: rotary, learned and relative embeddings, and slopes of scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megtool.errors import MappingError
from megtool.spec.checks import check_choice, check_part, is_list, is_number
from megtool.spec.facts import fact

POSITIONS = ("rope", "learned", "relative", "alibi", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionPart:
    """How the model knows where a token stands."""

    max_positions: int = fact(
        "tokens",
        2048,
        hf="max_position_embeddings",
        megatron="max_position_embeddings",
        changes_function=False,
        least=1,
    )
    """Length that the model was made for. It changes the function only through a rotary scaling
    that is worked out from it; of learned positions it is their number."""
    position_embedding: str = fact(
        "name", "rope", hf="position_embedding_type", megatron="position_embedding_type"
    )
    """One of `POSITIONS`; Hugging Face's classes mostly imply it."""
    position_offset: int = fact("positions", 0, hf=None, megatron=None)
    """Number of the first learned position."""
    rotary_percent: float = fact(
        "share", 1.0, hf="partial_rotary_factor", megatron="rotary_percent", limits="positive"
    )
    """Share of a head's elements that turn."""
    rope_interleaved: bool = fact(
        "flag", False, hf="rope_interleave", megatron="rotary_interleaved"
    )
    """Neighboring elements turn as a pair, not one of each half."""
    rope_reversed: bool = fact("flag", False, hf=None, megatron=None)
    """Heads turn backwards."""
    rope_base: float = fact(
        "base", 10000.0, hf="rope_theta", megatron="rotary_base", limits="positive"
    )
    """Base of the wavelengths of rotary embedding."""
    rope_local_base: float | None = fact(
        "base", None, hf="rope_local_base_freq", megatron="rotary_base_local"
    )
    """The base in layers with a window; None: as in the others."""
    rope_scaling: Mapping[str, Any] | None = fact(
        "table", None, hf="rope_scaling", megatron="use_rope_scaling"
    )
    """Scaling of wavelengths: a kind (`rope_type`) and its numbers, by Hugging Face's names.
    Megatron has args for Llama 3's and YaRN's."""
    no_rope_layers: tuple[int, ...] | None = fact(
        "flags by layer", None, hf="no_rope_layers", megatron="no_rope_freq"
    )
    """A 1 for every layer without rotary embedding."""
    relative_num_buckets: int = fact(
        "buckets",
        0,
        hf="relative_attention_num_buckets",
        megatron="relative_attention_num_buckets",
    )
    """Biases of relative positions that each head has."""
    relative_max_distance: int = fact(
        "tokens",
        0,
        hf="relative_attention_max_distance",
        megatron="relative_attention_max_distance",
    )
    """Tokens that are so far apart, or farther, share the last bias."""
    relative_per_layer: bool = fact("flag", False, hf=None, megatron=None)
    """Each layer has relative biases of its own; otherwise those of a stack share them."""
    alibi_bias_max: float = fact(
        "exponent", 8.0, hf="alibi_bias_max", megatron="alibi_bias_max", limits="positive"
    )
    """With `alibi` a score is less by the distance of its key times a slope, one over two to a
    number that grows from head to head up to this one."""

    def __post_init__(self) -> None:
        check_part(self)
        check_choice("position_embedding", self.position_embedding, POSITIONS)


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
    if factor is not None and not (is_number(factor) and factor > 0):
        raise MappingError(f"rope_scaling has the factor {factor!r}", hint="a positive number")
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if factors is None:
            continue
        if not is_list(factors) or not all(is_number(f) and f > 0 for f in factors):
            raise MappingError(
                f"{name} of rope_scaling is {str(factors)[:80]}", hint="a list of positive numbers"
            )
        if len(factors) != rotary_size // 2:
            raise MappingError(
                f"{name} of rope_scaling has {len(factors)} numbers",
                hint=f"{rotary_size // 2}: one for each pair of the {rotary_size} elements of a "
                "head that turn",
            )
