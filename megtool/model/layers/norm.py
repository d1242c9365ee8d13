"""Norm layers of a model: RMSNorm or LayerNorm, weights stored as they are or minus one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megtool.kernels.elementwise.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megtool.model.layers.param_attributes import mark
from megtool.parallel.collectives import copy_to, reduce_from
from megtool.parallel.process_groups import Group
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """The kind of a model's norm; the linear layer after it, or a NormLayer, has its parameters.

    With `zero_centered` the stored weight w stands for 1 + w. A layer norm `shifts` by a bias.
    A norm that does not `weigh` has neither.
    """

    kind: str = "rmsnorm"
    eps: float = 1e-5
    zero_centered: bool = False
    shifts: bool = True
    weighs: bool = True

    @classmethod
    def of(cls, config: ModelConfig) -> NormSpec:
        """The norm before attention, MLP and output layer."""
        return cls(
            kind=config.norms.norm,
            eps=config.norms.norm_eps,
            zero_centered=config.norms.zero_centered_norm,
            shifts=config.norms.norm_bias,
            weighs=config.norms.norm_weight,
        )

    @classmethod
    def of_latents(cls, config: ModelConfig) -> NormSpec:
        """The norm of the low-rank vectors of latent attention."""
        return replace(cls.of(config), eps=config.latent.latent_norm_eps or config.norms.norm_eps)

    @classmethod
    def before_branches(cls, config: ModelConfig) -> NormSpec | None:
        """The norm before attention and MLP, if the model has any there."""
        return cls.of(config) if config.norms.pre_norms else None

    @classmethod
    def before_attention(cls, config: ModelConfig, layer: int) -> NormSpec | None:
        """The norm before a layer's attention, if it has any there and feeds nothing else."""
        if layer in layer_sets.parallel_layers(config):
            return None
        return cls.before_branches(config) if layer or config.norms.first_attn_norm else None

    @classmethod
    def before_mixer(cls, config: ModelConfig, layer: int) -> NormSpec | None:
        """The norm before a layer's recurrent mixer, if it feeds nothing else."""
        return None if layer in layer_sets.parallel_layers(config) else cls.of(config)

    @property
    def has_bias(self) -> bool:
        """Layer norms may have a bias, root mean square norms have none."""
        return self.kind == "layernorm" and self.shifts and self.weighs

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """`x` normalized over its last dimension, in its dtype."""
        weight = self._unit(x) if weight is None else weight
        if self.kind == "layernorm":
            return layer_norm(x, weight, bias, self.eps, zero_centered=self.zero_centered)
        return rms_norm(x, weight, self.eps, zero_centered=self.zero_centered)

    def of_sum(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`x + residual` normalized, and that sum."""
        weight = self._unit(x) if weight is None else weight
        zero_centered = self.zero_centered
        if self.kind == "layernorm":
            return add_layer_norm(x, residual, weight, bias, self.eps, zero_centered=zero_centered)
        return add_rms_norm(x, residual, weight, self.eps, zero_centered=zero_centered)

    def _unit(self, x: Tensor) -> Tensor:
        """The weight that changes nothing."""
        return x.new_full(x.shape[-1:], 0.0 if self.zero_centered else 1.0)


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
        self.weight: nn.Parameter | None = None
        if norm.weighs:
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


class NoNorm(nn.Module):
    """What stands where a layer has no norm: rows come back as they are."""

    def normalize(self, x: Tensor) -> Tensor:
        """The rows."""
        return x

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x + residual`, twice."""
        return (total := x + residual), total


class HeadsNorm(nn.Module):
    """A norm of queries or keys whose `weight` differs from head to head.

    The weight is whole on every rank: `[num_heads * size]` where all heads of a token are
    normalized at once (`at_once`), and ranks add up their squares; `[num_heads, size]` where each
    head is for itself. A rank has `heads` of them, from `first` on; `copies` ranks have the same.
    """

    def __init__(
        self,
        norm: NormSpec,
        shape: tuple[int, ...],
        group: Group,
        *,
        first: int,
        heads: int,
        copies: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.norm, self.group, self.copies = norm, group, copies
        self.at_once, self.own = len(shape) == 1, slice(first, first + heads)
        fill = 0.0 if norm.zero_centered else 1.0
        weight = torch.full(shape, fill, dtype=dtype, device=device)
        self.weight = mark(nn.Parameter(weight), partial=group.size > 1)

    def forward(self, x_BSND: Tensor) -> Tensor:
        """This rank's heads, normalized."""
        size = x_BSND.shape[-1]
        weight_ND = self.weight.view(-1, size)[self.own]
        if not self.at_once:
            unit = torch.full_like(weight_ND[0], 0.0 if self.norm.zero_centered else 1.0)
            return self._scaled(self.norm(x_BSND, unit.detach()), weight_ND)
        if self.group.size == 1:
            return self.norm(x_BSND.flatten(2), self.weight).view_as(x_BSND)
        kind = torch.promote_types(x_BSND.dtype, torch.float32)
        x = x_BSND.to(kind)
        squares = x.square().sum((-2, -1), keepdim=True)
        squares = copy_to(reduce_from(squares, self.group), self.group) / self.copies
        x = x * torch.rsqrt(squares / self.weight.numel() + self.norm.eps)
        return self._scaled(x, weight_ND).to(x_BSND.dtype)

    def _scaled(self, x: Tensor, weight_ND: Tensor) -> Tensor:
        weight_ND = weight_ND + 1 if self.norm.zero_centered else weight_ND
        return x * weight_ND.to(x.dtype)
