"""Norm layers of a model: RMSNorm or LayerNorm, weights stored as they are or minus one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megtool.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megtool.model.param_attributes import mark
from megtool.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """The kind of a model's norm; the linear layer after it, or a NormLayer, has its parameters.

    With `zero_centered` the stored weight w stands for 1 + w.
    """

    kind: str = "rmsnorm"
    eps: float = 1e-5
    zero_centered: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> NormSpec:
        """The norm before attention, MLP and output layer."""
        return cls(kind=config.norm, eps=config.norm_eps, zero_centered=config.zero_centered_norm)

    @property
    def has_bias(self) -> bool:
        """Layer norms have a bias, root mean square norms none."""
        return self.kind == "layernorm"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` normalized over its last dimension, in its dtype."""
        if self.kind == "layernorm":
            return layer_norm(x, weight, bias, self.eps, zero_centered=self.zero_centered)
        return rms_norm(x, weight, self.eps, zero_centered=self.zero_centered)

    def of_sum(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`x + residual` normalized, and that sum."""
        zero_centered = self.zero_centered
        if self.kind == "layernorm":
            return add_layer_norm(x, residual, weight, bias, self.eps, zero_centered=zero_centered)
        return add_rms_norm(x, residual, weight, self.eps, zero_centered=zero_centered)


class NormLayer(nn.Module):
    """A norm with its own `weight` (and `bias`) of `size` elements.

    `partial`: this rank sees a part of the tokens, or heads, alone (see `parameters.mark`).
    """

    def __init__(
        self,
        norm: NormSpec,
        size: int,
        *,
        partial: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.norm = norm
        fill = 0.0 if norm.zero_centered else 1.0
        weight = torch.full((size,), fill, dtype=dtype, device=device)
        self.weight = mark(nn.Parameter(weight), partial=partial)
        self.bias = None
        if norm.has_bias:
            bias = torch.zeros(size, dtype=dtype, device=device)
            self.bias = mark(nn.Parameter(bias), partial=partial)

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalized over its last dimension."""
        return self.norm(x, self.weight, self.bias)

    def normalize(self, x: Tensor) -> Tensor:
        """As a call."""
        out: Tensor = self(x)
        return out

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x + residual` normalized, and that sum."""
        return self.norm.of_sum(x, residual, self.weight, self.bias)
