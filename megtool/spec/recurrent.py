"""Fields of mixers other than attention: Mamba-2, delta rules and short convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from megtool.errors import MappingError
from megtool.spec.checks import check_part, is_number
from megtool.spec.facts import fact


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaPart:
    """Mamba-2 mixers."""

    mamba_num_heads: int = fact("heads", 0, hf="mamba_n_heads", megatron="mamba_num_heads")
    """Heads of a mixer."""
    mamba_head_dim: int = fact("elements", 0, hf="mamba_d_head", megatron="mamba_head_dim")
    """Size of a head."""
    mamba_state_dim: int = fact("elements", 0, hf="mamba_d_state", megatron="mamba_state_dim")
    """Size of the state of each element of a head."""
    mamba_num_groups: int = fact("groups", 0, hf="mamba_n_groups", megatron="mamba_num_groups")
    """Groups of heads that share B and C."""
    mamba_conv_kernel: int = fact("tokens", 4, hf="mamba_d_conv", megatron=None, from_family=False)
    """Taps of the convolution before the recurrence; Megatron's has 4."""
    mamba_norm: bool = fact("flag", True, hf="mamba_rms_norm", megatron="rmsnorm")
    """The output is normalized."""
    mamba_norm_eps: float = fact(
        "number", 0.0, hf=None, megatron=None, from_family=False, limits="not negative"
    )
    """Added in this norm; 0: `norm_eps`, as in the other norms. Megatron's is always 1e-5."""
    mamba_norm_first: bool = fact("flag", False, hf="mamba_norm_before_gate", megatron=None)
    """The output is normalized before its gate, not after."""
    mamba_in_scales: tuple[float, ...] | None = fact(
        "factors", None, hf="ssm_multipliers", megatron=None
    )
    """Multiply the five parts of the input projection: z, x, B, C and dt."""
    mamba_step_limit: tuple[float, float] | None = fact(
        "steps", None, hf="time_step_limit", megatron=None
    )
    """The least and the largest step dt."""
    mamba_out_scale: float = fact("factor", 1.0, hf="ssm_out_multiplier", megatron=None)
    """Multiplies the output where mixers run side by side."""

    def __post_init__(self) -> None:
        check_part(self)
        scales = self.mamba_in_scales
        if scales is not None and (len(scales) != 5 or not all(map(is_number, scales))):
            raise MappingError(
                f"mamba_in_scales is {str(scales)[:80]}",
                hint="a finite number for z, x, B, C and dt",
            )
        limit = self.mamba_step_limit
        if limit is not None and not (len(limit) == 2 and 0 <= limit[0] < limit[1]):
            raise MappingError(
                f"mamba_step_limit is {str(limit)[:80]}", hint="the least step and a larger one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPart:
    """Gated delta nets, or Kimi delta attention: a model has one of the two."""

    linear_num_key_heads: int = fact(
        "heads", 0, hf="linear_num_key_heads", megatron="linear_num_key_heads"
    )
    """Heads of queries and keys."""
    linear_num_value_heads: int = fact(
        "heads", 0, hf="linear_num_value_heads", megatron="linear_num_value_heads"
    )
    """Heads of values."""
    linear_key_head_dim: int = fact(
        "elements", 0, hf="linear_key_head_dim", megatron="linear_key_head_dim"
    )
    """Size of a query, and of a key, of one head."""
    linear_value_head_dim: int = fact(
        "elements", 0, hf="linear_value_head_dim", megatron="linear_value_head_dim"
    )
    """Size of a value of one head."""
    linear_conv_kernel: int = fact(
        "tokens", 4, hf="linear_conv_kernel_dim", megatron="linear_conv_kernel_dim"
    )
    """Taps of the convolution before the recurrence."""

    def __post_init__(self) -> None:
        check_part(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvPart:
    """Gated short convolutions."""

    short_conv_taps: int = fact("tokens", 0, hf="conv_L_cache", megatron="short_conv_kernel_dim")
    """Tokens that a convolution covers."""
    short_conv_bias: bool = fact("flag", False, hf="conv_bias", megatron="short_conv_bias")
    """Convolutions and their projections have biases."""

    def __post_init__(self) -> None:
        check_part(self)
