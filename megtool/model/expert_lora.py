"""LoRA for the linear layers of experts: the matrices of all experts in one tensor.

An expert's part of a row is `B A x` of its own A and B, as PEFT adapts a parameter that holds all
experts. Ranks of an etp group have parts of every expert: results, and gradients of rows, are sums
over them that the mixture makes anyway, so that only the matrices which all of them hold need
gradients of their own added up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megtool.kernels.grouped_gemm import grouped_linear
from megtool.model.param_attributes import mark
from megtool.parallel.collectives import copy_to
from megtool.parallel.process_groups import Group

if TYPE_CHECKING:
    from megtool.model.lora import LoraSettings
    from megtool.model.moe import ExpertLinear


class ExpertAdapter(nn.Module):
    """The LoRA matrices for a layer of all local experts: `lora_A` `[E, rank, in]`, `lora_B` `[E,
    out, rank]`.

    Where etp cuts the outputs (`split_dim` 1) B is cut as they are, else A as the inputs are.
    """

    def __init__(self, linear: ExpertLinear, ep: Group, settings: LoraSettings) -> None:
        super().__init__()
        self.ep, self.etp, self.split_dim = ep, linear.group, linear.split_dim
        self.scale, weight = settings.scale, linear.weight
        experts, out, inner = weight.shape

        def new(*shape: int, split: int | None) -> nn.Parameter:
            parameter = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
            return mark(parameter, split_dim=split if self.etp.size > 1 else None, expert=True)

        column = self.is_column
        self.lora_A = new(experts, settings.rank, inner, split=None if column else 2)
        self.lora_B = new(experts, out, settings.rank, split=1 if column else None)

    @property
    def is_column(self) -> bool:
        """Ranks of an etp group have other outputs each, not other inputs."""
        return self.split_dim == 1

    @torch.no_grad()
    def reset(self, seed: int, name: str) -> None:
        """Initialize, as `megtool.model.lora.Adapter` does; each expert has its own values."""
        from megtool.model.lora import drawn

        if self.lora_A.is_meta:  # shapes alone
            return
        experts, rank, inner = self.lora_A.shape
        full_inner = inner if self.is_column else inner * self.etp.size
        begin = 0 if self.is_column else self.etp.rank * inner
        for e in range(experts):
            number = self.ep.rank * experts + e
            matrix = drawn(rank, full_inner, f"{seed} {name}.{number}")
            self.lora_A[e].copy_(matrix[:, begin : begin + inner])
        self.lora_B.zero_()

    def forward(self, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        """The addition to the rows of the layer's result, which are sorted by expert."""
        lora_A: Tensor = self.lora_A
        lora_B: Tensor = self.lora_B
        if self.is_column:
            lora_A = copy_to(lora_A, self.etp)
        else:
            lora_B = copy_to(lora_B, self.etp)
        h_RK = grouped_linear(rows_RI, lora_A, counts_E) * self.scale
        return grouped_linear(h_RK, lora_B, counts_E)

    def delta(self) -> Tensor:
        """The addition to the layer's weight, float32, on this rank."""
        return self.lora_B.detach().float() @ self.lora_A.detach().float() * self.scale

    def extra_repr(self) -> str:
        """Shapes of this rank, human-readable."""
        experts, rank, _ = self.lora_A.shape
        return f"{experts} experts, rank={rank}, scale={self.scale:g}"
