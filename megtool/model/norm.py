"""The model's norms: root mean square or layer norm, their weights stored as they are or minus one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megtool.config import ModelConfig
from megtool.kernels.norm import layer_norm, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Which norm a model has; the linear layer behind it, or a NormLayer, holds its parameters.

    With `zero_centered` the stored weight w stands for 1 + w.
    """

    kind: str = "rmsnorm"
    eps: float = 1e-5
    zero_centered: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> Norm:
        """The norm before attention, MLP and output layer."""
        return cls(
            kind=config.norm, eps=config.norm_eps, zero_centered=config.zero_centered_norm
        )

    @property
    def has_bias(self) -> bool:
        """Layer norms have a bias, root mean square norms none."""
        return self.kind == "layernorm"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` normalised over its last dimension, in its dtype."""
        if self.kind == "layernorm":
            return layer_norm(x, weight, bias, self.eps, zero_centered=self.zero_centered)
        return rms_norm(x, weight, self.eps, zero_centered=self.zero_centered)


class NormLayer(nn.Module):
    """A norm that holds its own `weight` (and `bias`), of `size` elements."""

    def __init__(
        self,
        norm: Norm,
        size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.norm = norm
        fill = 0.0 if norm.zero_centered else 1.0
        self.weight = nn.Parameter(torch.full((size,), fill, dtype=dtype, device=device))
        bias = torch.zeros(size, dtype=dtype, device=device) if norm.has_bias else None
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalised over its last dimension."""
        return self.norm(x, self.weight, self.bias)
