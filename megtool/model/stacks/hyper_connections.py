"""Hyper-connections: several residuals side by side, mixed by weights that depend on them (mHC).

Source: transformers' `deepseek_v4`; megatron-core's development branch (0.20),
`transformer/hyper_connection.py`. A token's residuals are one row, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.kernels.elementwise.norm import rms_norm
from megtool.model.layers.param_attributes import mark
from megtool.spec.model_config import ModelConfig


class _Mapping(nn.Module):
    def __init__(
        self, rows: int, columns: int, *, partial: bool, device: torch.device | str
    ) -> None:
        super().__init__()
        weight = torch.empty(rows, columns, dtype=torch.float32, device=device)
        self.weight = mark(nn.Parameter(weight), partial=partial)


class HyperConnection(nn.Module):
    """What a branch reads of the residuals, and how its output and they make the next ones.

    All weights are float32, and whole on every rank; `partial`: this rank sees a part of the
    tokens alone (see `param_attributes.mark`).
    """

    def __init__(
        self, config: ModelConfig, *, partial: bool = False, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config, n = config, config.residual.hyper_streams
        rows, columns = (2 + n) * n, n * config.hidden_size
        self.mapping_proj = _Mapping(rows, columns, partial=partial, device=device)
        self.bias = _vector(rows, partial, device)
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            _vector(1, partial, device) for _ in range(3)
        )

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the branch is given x_TH, the shares of its output post_TN, and mix_TNM."""
        config, n = self.config, self.config.residual.hyper_streams
        rows = rms_norm(x_TH.float(), None, config.norms.norm_eps)
        sizes = [n, n, n * n]
        parts = torch.split(F.linear(rows, self.mapping_proj.weight), sizes, -1)
        scales = (self.alpha_pre, self.alpha_post, self.alpha_res)
        pre, post, mix = (
            part * scale + bias
            for part, scale, bias in zip(parts, scales, torch.split(self.bias, sizes), strict=True)
        )
        eps = config.residual.hyper_eps
        mix_TNM = mix.view(-1, n, n).softmax(-1) + eps
        mix_TNM = mix_TNM / (mix_TNM.sum(-2, keepdim=True) + eps)
        for _ in range(config.residual.hyper_iterations - 1):
            mix_TNM = mix_TNM / (mix_TNM.sum(-1, keepdim=True) + eps)
            mix_TNM = mix_TNM / (mix_TNM.sum(-2, keepdim=True) + eps)
        read_TH = read_streams(x_TH, pre.sigmoid() + eps)
        return read_TH, 2 * post.sigmoid(), mix_TNM

    def add(self, x_TH: Tensor, branch_TH: Tensor, post_TN: Tensor, mix_TNM: Tensor) -> Tensor:
        """The residuals behind a branch."""
        x_TNH = x_TH.view(x_TH.shape[0], self.config.residual.hyper_streams, -1)
        mixed = torch.matmul(mix_TNM.to(x_TH.dtype).transpose(-1, -2), x_TNH)
        return (post_TN.to(x_TH.dtype)[..., None] * branch_TH[:, None] + mixed).flatten(1)


def read_streams(x_TH: Tensor, shares_TN: Tensor) -> Tensor:
    """One row of several side by side, by shares."""
    x_TNH = x_TH.view(*shares_TN.shape, -1)
    return (shares_TN[..., None] * x_TNH).sum(1).to(x_TH.dtype)


class HyperHead(nn.Module):
    """What makes one residual of several before the last norm; a base of the module that has it.

    `before_read` is called before the parameters are used: it may put them there.
    """

    before_read: Callable[[], None] | None = None

    def init_head(
        self, config: ModelConfig, *, partial: bool = False, device: torch.device | str
    ) -> None:
        """Make the parameters, under Megatron's names."""
        n = config.residual.hyper_streams
        self.hyper_config = config
        weight = torch.empty(n, n * config.hidden_size, dtype=torch.float32, device=device)
        self.hc_head_fn = mark(nn.Parameter(weight), partial=partial)
        self.hc_head_base = _vector(n, partial, device)
        self.hc_head_scale = _vector(1, partial, device)

    def read_head(self, x_TH: Tensor) -> Tensor:
        """One residual of several, x_TH."""
        if self.before_read is not None:
            self.before_read()
        config = self.hyper_config
        rows = rms_norm(x_TH.float(), None, config.norms.norm_eps)
        shares_TN = F.linear(rows, self.hc_head_fn) * self.hc_head_scale + self.hc_head_base
        return read_streams(x_TH, shares_TN.sigmoid() + config.residual.hyper_eps)


def _vector(size: int, partial: bool, device: torch.device | str) -> nn.Parameter:
    zeros = torch.zeros(size, dtype=torch.float32, device=device)
    return mark(nn.Parameter(zeros), partial=partial)
