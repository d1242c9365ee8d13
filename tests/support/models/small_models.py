"""Small modules with Megatron's parameter names and marks, and a way to train them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megtool.optim.optimizer import Optimizer, StepResult


class Small(nn.Module):
    """Two linear layers with biases and a norm; 7 -> 12 -> 5."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.fc1 = nn.Linear(7, 12)
        self.norm = nn.LayerNorm(12)
        self.fc2 = nn.Linear(12, 5)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * 0.3 + (p.dim() == 1))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.tanh(self.norm(self.fc1(x))))
        return out


def batches(steps: int, rows: int = 8, seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, the same for everyone who asks."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(rows, 7, generator=g), torch.randn(rows, 5, generator=g) * 3


def sum_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)).float() - y).square().sum()


def train_step(
    optimizer: Optimizer,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    lr: float = 1e-2,
    weight_decay: float = 0.1,
    microbatches: int = 1,
    labels: float = 1.0,
) -> StepResult:
    """The whole protocol for one batch, whose rows are cut into microbatches."""
    optimizer.zero_grad()
    optimizer.begin(microbatches)
    for rows, wanted in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        optimizer.scale_loss(sum_loss(model, rows, wanted)).backward()
    optimizer.finish(torch.tensor(labels))
    return optimizer.step(lr, weight_decay)
