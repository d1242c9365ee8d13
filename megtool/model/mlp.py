"""The MLP of one layer: two projections with an activation between them, gated or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megtool.kernels.activation import activate, gated
from megtool.model.linear import ColumnLinear, RowLinear
from megtool.model.norm import NormSpec
from megtool.model_config import ModelConfig
from megtool.parallel.process_groups import ProcessGroups


def activated(x_TF: Tensor, config: ModelConfig) -> Tensor:
    """The activation between an MLP's two projections, gated or not."""
    kind = config.activation
    if not config.gated:
        return activate(x_TF, kind)
    if config.mlp_gate_scale != 1:
        gate_TF, up_TF = x_TF.chunk(2, -1)
        x_TF = torch.cat((gate_TF * config.mlp_gate_scale, up_TF), -1)
    return gated(x_TF, kind, limit=config.activation_limit, offset=config.glu_offset)


class Mlp(nn.Module):
    """A dense MLP; its norm is part of `linear_fc1`, whose rows are gate, then up.

    The layer applies that norm, together with the addition before it (`TransformerLayer.mlp_norm`).
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
        self.linear_fc1 = ColumnLinear(
            config.hidden_size,
            config.ffn_hidden_size * (2 if config.gated else 1),
            groups.tp,
            bias=config.mlp_bias,
            norm=None if config.shared_norm else NormSpec.before_branches(config),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.linear_fc2 = RowLinear(
            config.ffn_hidden_size,
            config.hidden_size,
            groups.tp,
            bias=config.mlp_bias,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TH: Tensor) -> Tensor:
        """The MLP output that is added to the residual (before its scale), for rows after its
        norm.
        """
        inner = activated(self.linear_fc1(x_TH, is_normal=True), self.config)
        out: Tensor = self.linear_fc2(inner)
        return out if self.config.mlp_out_scale == 1 else out * self.config.mlp_out_scale
