"""The configuration of FP8 in linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megtool.errors import UsageError
from megtool.kernels.fp8.cast import LARGEST, Kind

Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
Format = Literal["hybrid", "e4m3"]
Algorithm = Literal["max", "most_recent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """How operands of products are scaled, with Megatron's names and Transformer Engine's meaning.

    `delayed`: a scale for each tensor from the amax of earlier steps (`amax_history_len` of them,
    by `amax_compute_algo`), divided by 2^`margin`. `tensorwise`: from the tensor's own amax.
    `blockwise`: a power of two for each 1x128 elements of inputs and gradients (along the summed
    dim), and each 128x128 of weights. `mxfp8`: for each 32 elements along the summed dim, of every
    operand. `hybrid` has gradients in e5m2 and all other operands in e4m3.
    The first `start_in_bf16` and the last `end_in_bf16` layers of the model are not in FP8.

    Raises:
        UsageError: a value is out of its range; the hint names the option.
    """

    recipe: Recipe = "delayed"
    format: Format = "hybrid"
    amax_history_len: int = 1024
    amax_compute_algo: Algorithm = "max"
    margin: int = 0
    start_in_bf16: int = 0
    end_in_bf16: int = 0

    def __post_init__(self) -> None:
        for field, options, option in (
            ("recipe", get_args(Recipe), "fp8-recipe"),
            ("format", get_args(Format), "fp8-format"),
            ("amax_compute_algo", get_args(Algorithm), "fp8-amax-compute-algo"),
        ):
            if getattr(self, field) not in options:
                raise UsageError(
                    f"FP8 {field} is {getattr(self, field)!r}",
                    hint=f"--{option} has to be one of {', '.join(options)}",
                )
        for field, least, option in (
            ("amax_history_len", 1, "fp8-amax-history-len"),
            ("start_in_bf16", 0, "num-layers-at-start-in-bf16"),
            ("end_in_bf16", 0, "num-layers-at-end-in-bf16"),
        ):
            if getattr(self, field) < least:
                raise UsageError(
                    f"FP8 {field} is {getattr(self, field)}",
                    hint=f"--{option} has to be {least} or more",
                )
        if abs(self.margin) >= 64:
            raise UsageError(
                f"the FP8 margin is {self.margin}", hint="--fp8-margin is a power of two, below 64"
            )

    @property
    def forward(self) -> Kind:
        """The format of inputs and weights."""
        return "e4m3"

    @property
    def backward(self) -> Kind:
        """The format of gradients."""
        return "e5m2" if self.format == "hybrid" else "e4m3"

    @property
    def largest(self) -> tuple[float, float]:
        """The largest values of both formats."""
        return LARGEST[self.forward], LARGEST[self.backward]
