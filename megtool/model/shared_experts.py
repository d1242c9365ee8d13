"""Shared experts: the MLP that every token passes, next to the routed experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.config import ModelConfig
from megtool.model.linear import ColumnLinear, RowLinear
from megtool.model.mlp import activated
from megtool.model.param_attributes import mark
from megtool.parallel.process_groups import ProcessGroups


class SharedExperts(nn.Module):
    """An MLP of `shared_ffn_hidden_size`, sharded over tp; a gate may scale its output per token.

    Takes and gives x_TH, of which a rank has all rows, or with `sequence_parallel` its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: ProcessGroups,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.config = config
        hidden, ffn = config.hidden_size, config.shared_ffn_hidden_size
        self.gate_weight = None
        if config.shared_expert_gate:
            weight = torch.empty(1, hidden, dtype=dtype, device=device)
            is_partial = sequence_parallel and groups.tp.size > 1
            self.gate_weight = mark(nn.Parameter(weight), partial=is_partial)
        self.linear_fc1 = ColumnLinear(
            hidden,
            ffn * (2 if config.gated else 1),
            groups.tp,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.linear_fc2 = RowLinear(
            ffn,
            hidden,
            groups.tp,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TH: Tensor) -> Tensor:
        """The MLP of each token, times the sigmoid of its gate where there is one."""
        out: Tensor = self.linear_fc2(activated(self.linear_fc1(x_TH), self.config))
        if self.gate_weight is not None:
            out = out * F.linear(x_TH, self.gate_weight).sigmoid()
        return out
