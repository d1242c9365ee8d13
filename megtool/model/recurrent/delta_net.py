"""Gated delta net: linear attention that corrects a state of constant size (Qwen3-Next)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import LayoutError
from megtool.kernels.recurrence.delta_rule import (
    gated_delta_rule,
    gated_delta_step,
    gated_delta_steps,
)
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.hooks import ActivationHook
from megtool.model.layers.linear import ColumnLinear, RowLinear, column_product
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.layers.param_attributes import mark, mark_parts
from megtool.model.recurrent.short_conv import ShortConv
from megtool.parallel.context_parallel import share_columns, share_tokens
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig


class GatedDeltaNet(nn.Module):
    """The gated delta net of one layer; its norm is part of `in_proj`.

    Parameters have Megatron's names: `dt_bias` and `A_log` [value heads], `in_proj`, whose rows are
    [query, key, value, z, beta, alpha], `conv1d` of the first three, `out_norm` of each head's
    output, and `out_proj`. Tensor parallelism cuts each of the six, and of the three, by heads.
    With context parallelism tokens are exchanged for heads: a rank runs its share of the heads over
    whole rows. `gate_tap` is handed the input of betas and alphas.

    Raises:
        LayoutError: the heads do not go evenly over the ranks.
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
        check_heads(config, groups.tp.size, groups.cp.size)
        self.layer, tp = layer, groups.tp.size
        self.key_heads = config.delta.linear_num_key_heads // tp
        self.value_heads = config.delta.linear_num_value_heads // tp
        self.sizes = (config.delta.linear_key_head_dim,) * 2 + (config.delta.linear_value_head_dim,)
        keys, values = self.key_heads * self.sizes[0], self.value_heads * self.sizes[2]
        self.gate_tap: ActivationHook | None = None
        self.parts = (keys, keys, values, values, self.value_heads, self.value_heads)

        def of_heads() -> nn.Parameter:
            parameter = torch.empty(self.value_heads, dtype=dtype, device=device)
            return mark(nn.Parameter(parameter), split_dim=0)

        self.dt_bias, self.A_log = of_heads(), of_heads()
        self.in_proj = ColumnLinear(
            config.hidden_size,
            sum(self.parts) * tp,
            groups.tp,
            norm=NormSpec.of(config),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        mark_parts(self.in_proj.weight, self.parts)
        self.conv1d = ShortConv(
            2 * keys + values,
            config.delta.linear_conv_kernel,
            bias=False,
            dtype=dtype,
            device=device,
        )
        # Every rank sees its own heads.
        self.out_norm = NormLayer(
            NormSpec.of(config),
            config.delta.linear_value_head_dim,
            partial=tp > 1,
            dtype=dtype,
            device=device,
        )
        self.out_proj = RowLinear(
            values * tp,
            config.hidden_size,
            groups.tp,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The output that is added to the residual x_TH (before its scale), in x_TH's rows."""
        b, s = frame.num_rows, frame.num_tokens
        rows_BSX = self._project(x_TH).view(b, s, -1)
        if frame.cp.size == 1:
            sizes = [sum(self.parts[:3]), *self.parts[3:]]
            qkv, z, beta, alpha = torch.split(rows_BSX, sizes, 2)
            out_BSNP = self._mix(qkv, beta, alpha, frame)
        else:
            *parts, z, beta, alpha = torch.split(rows_BSX, list(self.parts), 2)
            given = head_columns((*parts, beta, alpha), frame.cp.size)
            own = share_columns(given, frame.cp)
            shares = [x // frame.cp.size for x in self.parts]
            qkv, beta, alpha = torch.split(own, [sum(shares[:3]), *shares[4:]], 2)
            out = self._mix(qkv, beta, alpha, frame)
            out_BSNP = share_tokens(out.flatten(2), frame.cp).view(b, s, self.value_heads, -1)
        kind = torch.promote_types(x_TH.dtype, torch.float32)
        gate = F.silu(z.to(kind)).reshape(out_BSNP.shape)
        gated = (self.out_norm(out_BSNP) * gate).to(x_TH.dtype)
        out_TH: Tensor = self.out_proj(gated.reshape(b * s, -1))
        return out_TH

    def _project(self, x_TH: Tensor) -> Tensor:
        """The rows of all six parts; taps see the input of the first four, and of the gates."""
        linear, num_gates = self.in_proj, 2 * self.value_heads
        if linear.tap is None and self.gate_tap is None:
            out: Tensor = linear(x_TH)
            return out
        x_TH = linear.normalize(x_TH)
        rows = linear.project(x_TH)
        if self.gate_tap is not None:
            x_TH = self.gate_tap(x_TH)
        weight = linear.weight[-num_gates:]
        gates = column_product(x_TH, weight, None, linear.group, linear.sequence_parallel)
        if linear.adapter is not None:
            gates = gates + linear.adapter(x_TH)[..., -num_gates:]
        return torch.cat((rows[..., :-num_gates], gates), -1)

    def _mix(
        self, qkv_BSC: Tensor, beta_BSN: Tensor, alpha_BSN: Tensor, frame: ForwardContext
    ) -> Tensor:
        """The output of some heads, [B, S, N, P], over whole rows: all of this rank's, or with
        context parallelism its share of them.
        """
        cp = frame.cp
        kind = torch.promote_types(qkv_BSC.dtype, torch.float32)
        sizes = [x // cp.size for x in self.parts[:3]]
        channels = None if cp.size == 1 else head_places(self.parts[:3], cp, qkv_BSC.device)
        mixed = self.conv1d(qkv_BSC, frame, self.layer, channels=channels)
        query, key, value = (
            split_heads(x, size)
            for x, size in zip(torch.split(mixed, sizes, 2), self.sizes, strict=True)
        )
        heads = slice(n := cp.rank * beta_BSN.shape[2], n + beta_BSN.shape[2])
        beta = torch.sigmoid(beta_BSN.to(kind))
        step = F.softplus(alpha_BSN.to(kind) + self.dt_bias[heads].to(kind))
        decay = -self.A_log[heads].to(kind).exp() * step
        if frame.real_BS is not None:  # padding leaves the state as it is
            beta, decay = (x * frame.real_BS[:, :, None] for x in (beta, decay))
        if frame.cache is None:
            return gated_delta_rule(query, key, value, decay, beta, runs_BS=frame.runs_BS)[0]
        state = frame.cache.read_state(self.layer, "recurrent")
        if frame.cache.is_revertible:
            out, steps, state = gated_delta_steps(query, key, value, decay, beta, state)
            frame.cache.write_steps(self.layer, "recurrent", steps)
        elif value.shape[1] == 1:
            inputs = (x[:, 0] for x in (query, key, value, decay, beta, state[:, None]))
            out, state = gated_delta_step(*inputs)
            out = out[:, None]
        else:
            out, state = gated_delta_rule(query, key, value, decay, beta, state_BNDP=state)
        frame.cache.write_state(self.layer, "recurrent", state)
        return out


def check_heads(config: ModelConfig, tp: int, cp: int = 1) -> None:
    """Refuse a layout that does not share out the heads of gated delta nets.

    Raises:
        LayoutError: tp * cp does not divide both kinds of heads; the hint has sizes that do.
    """
    heads = (config.delta.linear_num_key_heads, config.delta.linear_num_value_heads)
    if any(n % (tp * cp) for n in heads):
        fits = [str(n) for n in range(1, min(heads) + 1) if not any(h % n for h in heads)]
        raise LayoutError(
            f"{heads[0]} key heads and {heads[1]} value heads of gated delta nets cannot be split "
            f"over tp={tp}" + (f" and cp={cp}" if cp > 1 else ""),
            hint=f"{'tp * cp' if cp > 1 else 'tp'} divides both: {', '.join(fits)}",
        )


def split_heads(x_BSC: Tensor, size: int) -> Tensor:
    """The columns as heads of a size, [B, S, N, size]."""
    return x_BSC.reshape(*x_BSC.shape[:2], -1, size)


def head_columns(parts: Sequence[Tensor], cp: int) -> Tensor:
    """The columns of all parts, those of the first rank's heads first."""
    shares = [x.reshape(*x.shape[:2], cp, -1) for x in parts]
    return torch.cat(shares, 3).flatten(2)


def head_places(parts: Sequence[int], cp: Group, device: torch.device) -> Tensor:
    """The places of a rank's heads among all columns of the parts."""
    places, start = [], 0
    for size in parts:
        first = start + cp.rank * size // cp.size
        places.append(torch.arange(first, first + size // cp.size, device=device))
        start += size
    return torch.cat(places)
