"""The MLP of one layer: two projections with an activation between them, gated or not."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.kernels.elementwise.activation import activate, gated
from megtool.model.layers.linear import ColumnLinear, NormProduct, RowLinear
from megtool.model.layers.norm import NormSpec
from megtool.model.layers.param_attributes import mark
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig

XIELU = "xielu"


def activated(x_TF: Tensor, config: ModelConfig) -> Tensor:
    """The activation between an MLP's two projections, gated or not."""
    kind = config.mlp.activation
    if not config.mlp.gated:
        return activate(x_TF, kind)
    if config.mlp.mlp_gate_scale != 1:
        gate_TF, up_TF = x_TF.chunk(2, -1)
        x_TF = torch.cat((gate_TF * config.mlp.mlp_gate_scale, up_TF), -1)
    return gated(x_TF, kind, limit=config.mlp.activation_limit, offset=config.mlp.glu_offset)


class XIelu(nn.Module):
    """xIELU (arXiv 2411.13010): a parabola above 0, and below it an exponential, both by numbers
    that are trained. A rank that sees a part of the columns alone is `partial`.
    """

    def __init__(
        self, *, partial: bool, dtype: torch.dtype, device: torch.device | str = "meta"
    ) -> None:
        super().__init__()

        def number(value: float, *shape: int, is_trained: bool) -> nn.Parameter:
            filled = torch.full(shape, value, dtype=dtype, device=device)
            return mark(nn.Parameter(filled, requires_grad=is_trained), partial=partial)

        # softplus(alpha) is 0.8 above 0, and 0.3 (and beta) below it.
        self.alpha_p = number(math.log(math.expm1(0.8)), 1, is_trained=True)
        self.alpha_n = number(math.log(math.expm1(0.3)), 1, is_trained=True)
        self.beta = number(0.5, is_trained=False)
        self.eps = number(-1e-6, is_trained=False)

    def forward(self, x_TF: Tensor) -> Tensor:
        """The activation of each element."""
        beta, eps = self.beta.detach(), self.eps.detach()
        above, below = F.softplus(self.alpha_p), beta + F.softplus(self.alpha_n)
        below_TF = (torch.expm1(torch.min(x_TF, eps)) - x_TF) * below
        return torch.where(x_TF > 0, above * x_TF * x_TF, below_TF) + beta * x_TF


class Mlp(nn.Module):
    """A dense MLP; its norm is part of `linear_fc1`, whose rows are gate, then up.

    The layer applies that norm, together with the addition before it (`TransformerLayer.mlp_norm`).
    A `norm_product` stands for norm, projections and activation; `linear_fc1` has it as well, and
    leaves the norm to it.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        groups: ProcessGroups,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.norm_product: NormProduct | None = None
        self.linear_fc1 = ColumnLinear(
            config.hidden_size,
            config.mlp.ffn_hidden_size * (2 if config.mlp.gated else 1),
            groups.tp,
            bias=config.mlp.mlp_bias,
            norm=None if config.norms.shared_norm else NormSpec.before_branches(config),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.activation_func: XIelu | None = None
        if config.mlp.activation == XIELU:
            is_partial = groups.tp.size > 1
            self.activation_func = XIelu(partial=is_partial, dtype=dtype, device=device)
        self.linear_fc2 = RowLinear(
            config.mlp.ffn_hidden_size,
            config.hidden_size,
            groups.tp,
            bias=config.mlp.mlp_bias,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TH: Tensor) -> Tensor:
        """The MLP output that is added to the residual (before its scale), for rows after its
        norm.
        """
        if self.norm_product is not None:
            out = self.norm_product(x_TH)
        else:
            inner = self.linear_fc1(x_TH, is_normal=True)
            if self.activation_func is None:
                inner = activated(inner, self.config)
            else:
                inner = self.activation_func(inner)
            out = self.linear_fc2(inner)
        return out if self.config.mlp.mlp_out_scale == 1 else out * self.config.mlp.mlp_out_scale
