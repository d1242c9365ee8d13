"""The Mamba-2 mixer of one layer over this rank's heads: projections, convolution, recurrence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import LayoutError
from megtool.kernels.elementwise.norm import rms_norm
from megtool.kernels.recurrence.ssd import ScanInputs, ssd_scan, ssd_step, ssd_steps
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.layers.norm import NormSpec
from megtool.model.layers.param_attributes import mark, mark_parts
from megtool.model.recurrent.short_conv import ShortConv
from megtool.parallel.context_parallel import share_columns, share_tokens
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig


class GatedNorm(nn.Module):
    """`w * rms_norm(y * silu(z))`, of each of this rank's groups of channels for itself.

    With `norm_first` it is `w * rms_norm(y) * silu(z)`.
    """

    def __init__(
        self,
        num_channels: int,
        num_groups: int,
        eps: float,
        *,
        norm_first: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.num_groups, self.eps, self.norm_first = num_groups, eps, norm_first
        weight = torch.ones(num_channels, dtype=dtype, device=device)
        self.weight = mark(nn.Parameter(weight), split_dim=0)

    def forward(self, y_TC: Tensor, z_TC: Tensor) -> Tensor:
        """Computed in fp32, in y's dtype."""
        kind = torch.promote_types(y_TC.dtype, torch.float32)
        gate_TC, gated_TC = F.silu(z_TC.to(kind)), y_TC.to(kind)
        if not self.norm_first:
            gated_TC = gated_TC * gate_TC
        grouped = gated_TC.view(gated_TC.shape[0], self.num_groups, -1)
        normal_TC = rms_norm(grouped, None, self.eps).flatten(1) * self.weight.to(kind)
        return (normal_TC * gate_TC if self.norm_first else normal_TC).to(y_TC.dtype)


class MambaMixer(nn.Module):
    """The Mamba-2 mixer of one layer; its norm is part of `in_proj`, or the layer's own.

    Parameters have Megatron's names: `dt_bias`, `A_log` and `D` [heads], `in_proj`, whose rows are
    [z, x, B, C, dt], `conv1d` of x, B and C, `norm` before `out_proj`. Tensor parallelism cuts each
    of the five, and of the three, by heads and groups. With context parallelism tokens are
    exchanged for heads: a rank runs its share of the heads over whole rows, and ranks that share a
    group have a copy of its B and C each.

    Steps (dt) are clamped to the configuration's `mamba_step_limit`, those of single tokens with a
    cache too; transformers and mamba_ssm clamp those of longer texts alone. transformers 5.23 has
    Nemotron-H's limit from another key (`time_step_min`, 0.001), unlike the code that its models
    ship with, and Megatron, which has no limit.

    Raises:
        LayoutError: heads and groups do not go evenly over the ranks.
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
        check_mamba_heads(config, groups.tp.size, groups.cp.size)
        self.config, self.layer, tp = config, layer, groups.tp.size
        self.num_heads = config.mamba.mamba_num_heads // tp
        self.num_groups = config.mamba.mamba_num_groups // tp
        inner = self.num_heads * config.mamba.mamba_head_dim
        state = self.num_groups * config.mamba.mamba_state_dim
        self.parts = (inner, inner, state, state, self.num_heads)

        def of_heads() -> nn.Parameter:
            parameter = torch.empty(self.num_heads, dtype=dtype, device=device)
            return mark(nn.Parameter(parameter), split_dim=0)

        self.dt_bias, self.A_log, self.D = of_heads(), of_heads(), of_heads()
        self.in_proj = ColumnLinear(
            config.hidden_size,
            sum(self.parts) * tp,
            groups.tp,
            norm=NormSpec.before_mixer(config, layer),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        mark_parts(self.in_proj.weight, self.parts)
        self.conv1d = ShortConv(
            inner + 2 * state, config.mamba.mamba_conv_kernel, bias=True, dtype=dtype, device=device
        )
        self.norm: GatedNorm | None = None
        if config.mamba.mamba_norm:
            self.norm = GatedNorm(
                inner,
                self.num_groups,
                config.mamba.mamba_norm_eps or config.norms.norm_eps,
                norm_first=config.mamba.mamba_norm_first,
                dtype=dtype,
                device=device,
            )
        self.out_proj = RowLinear(
            inner * tp,
            config.hidden_size,
            groups.tp,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The output that is added to the residual x_TH (before its scale), in x_TH's rows."""
        b, s, inner = frame.num_rows, frame.num_tokens, self.parts[0]
        projected_TC = self._scaled(self.in_proj(x_TH))
        z_BSC, given_BSC = projected_TC.view(b, s, -1).tensor_split([inner], 2)
        if frame.cp.size == 1:
            y_BSC = self._mix(given_BSC, frame)
        else:
            columns = self._columns_by_rank(frame.cp.size).to(given_BSC.device)
            own_BSC = share_columns(given_BSC.index_select(2, columns), frame.cp)
            y_BSC = share_tokens(self._mix(own_BSC, frame), frame.cp)
        y_TC, z_TC = y_BSC.reshape(b * s, inner), z_BSC.reshape(b * s, inner)
        gated_TC = y_TC * F.silu(z_TC) if self.norm is None else self.norm(y_TC, z_TC)
        out: Tensor = self.out_proj(gated_TC)
        return out

    def _scaled(self, projected_TC: Tensor) -> Tensor:
        """The five parts of the projection times their scales."""
        scales = self.config.mamba.mamba_in_scales
        if scales is None:
            return projected_TC
        parts = torch.split(projected_TC, list(self.parts), 1)
        scaled = [part_TC * scale for part_TC, scale in zip(parts, scales, strict=True)]
        return torch.cat(scaled, 1)

    def _mix(self, given_BSC: Tensor, frame: ForwardContext) -> Tensor:
        """The output of some heads, [B, S, heads * D], over whole rows: all of this rank's, or with
        context parallelism its share of them. `given_BSC` is x, B, C and dt of these.
        """
        config, cp = self.config, frame.cp
        heads = self.num_heads // cp.size
        share = slice(cp.rank * heads, (cp.rank + 1) * heads)
        channels = None
        if cp.size > 1:
            columns = self._columns_of(cp.size, cp.rank)
            channels = columns[: columns.shape[0] - heads].to(given_BSC.device)
        taken_BSC, dt_BSN = given_BSC.tensor_split([given_BSC.shape[2] - heads], 2)
        mixed_BSC = self.conv1d(taken_BSC, frame, self.layer, channels=channels)
        inner = heads * config.mamba.mamba_head_dim
        state_size = (mixed_BSC.shape[2] - inner) // 2
        x, b, c = mixed_BSC.split((inner, state_size, state_size), 2)
        kind = torch.promote_types(mixed_BSC.dtype, torch.float32)
        dt_BSN = F.softplus(dt_BSN.to(kind) + self.dt_bias[share].to(kind))
        if config.mamba.mamba_step_limit is not None:
            dt_BSN = dt_BSN.clamp(*config.mamba.mamba_step_limit)
        if frame.real_BS is not None:  # padding leaves the state as it is
            dt_BSN = dt_BSN * frame.real_BS[:, :, None]
        inputs = ScanInputs(
            x.view(*x.shape[:2], heads, -1),
            dt_BSN,
            -self.A_log[share].to(kind).exp(),
            b.view(*b.shape[:2], -1, config.mamba.mamba_state_dim),
            c.view(*c.shape[:2], -1, config.mamba.mamba_state_dim),
            self.D[share],
            runs_BS=frame.runs_BS,
        )
        if frame.cache is None:
            return ssd_scan(inputs)[0].flatten(2)
        before = frame.cache.read_state(self.layer, "recurrent")
        if frame.cache.is_revertible:
            y_BSND, steps, state = ssd_steps(inputs, before)
            frame.cache.write_steps(self.layer, "recurrent", steps)
        elif mixed_BSC.shape[1] == 1:
            y_BSND, state = ssd_step(inputs, before)
        else:
            y_BSND, state = ssd_scan(inputs._replace(state_BNDZ=before))
        frame.cache.write_state(self.layer, "recurrent", state)
        return y_BSND.flatten(2)

    def _columns_by_rank(self, cp: int) -> Tensor:
        """The columns of x, B, C and dt that each rank of a cp group works on, rank by rank."""
        return torch.cat([self._columns_of(cp, rank) for rank in range(cp)])

    def _columns_of(self, cp: int, rank: int) -> Tensor:
        """Those of one rank: of its heads, and of the groups that these are in."""
        _, inner, state, _, heads = self.parts
        size = self.config.mamba.mamba_state_dim
        num = max(1, self.num_groups // cp)
        first = rank * self.num_groups // cp
        groups = torch.arange(first * size, (first + num) * size)
        own = torch.arange(rank * inner // cp, (rank + 1) * inner // cp)
        steps = torch.arange(rank * heads // cp, (rank + 1) * heads // cp)
        starts = (inner, inner + state, inner + 2 * state)
        return torch.cat((own, starts[0] + groups, starts[1] + groups, starts[2] + steps))


def check_mamba_heads(config: ModelConfig, tp: int, cp: int = 1) -> None:
    """Refuse a layout that does not share out the heads and groups of Mamba-2 mixers.

    Raises:
        LayoutError: tp does not divide heads and groups, or cp not the heads of a rank, or a rank
            would have parts of groups; the hint has sizes that do.
    """
    heads, groups = config.mamba.mamba_num_heads, config.mamba.mamba_num_groups
    fits = [n for n in range(1, groups + 1) if not heads % n and not groups % n]
    if tp not in fits:
        raise LayoutError(
            f"{heads} heads and {groups} groups of Mamba-2 mixers cannot be split over tp={tp}",
            hint=f"tp divides both: {', '.join(map(str, fits))}",
        )
    heads, groups = heads // tp, groups // tp
    alike = [n for n in range(1, heads + 1) if not heads % n and _shares(groups, n)]
    if cp not in alike:
        raise LayoutError(
            f"{heads} heads and {groups} groups of Mamba-2 mixers on each rank cannot be shared "
            f"out over cp={cp}",
            hint=f"sizes of cp that do: {', '.join(map(str, alike))}",
        )


def _shares(groups: int, cp: int) -> bool:
    """Whole groups for each rank, or whole ranks for each group."""
    return not groups % cp or not cp % groups
