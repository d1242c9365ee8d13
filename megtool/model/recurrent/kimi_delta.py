"""Kimi delta attention: a delta rule whose state decays element by element of a key."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import LayoutError
from megtool.kernels.recurrence.delta_rule import gated_delta_step, gated_delta_steps
from megtool.kernels.recurrence.kimi_delta import kimi_delta_rule
from megtool.model.attention.mla import DownLinear
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.layers.norm import NormLayer, NormSpec
from megtool.model.layers.param_attributes import mark, mark_parts
from megtool.model.recurrent.delta_net import head_columns, head_places, split_heads
from megtool.model.recurrent.short_conv import ShortConv
from megtool.parallel.context_parallel import share_columns, share_tokens
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig


class KimiDeltaAttention(nn.Module):
    """The Kimi delta attention of one layer, of rows that are normalized.

    Parameters have the names of Megatron's development branch: `dt_bias` [heads * key size] and
    `A_log` [heads], `in_proj`, whose rows are [query, key, value], `conv1d` of the three,
    `out_norm` of each head's output, `out_proj`, `beta_proj`, and two projections one after the
    other of each gate: `f_a_proj` and `f_b_proj` of decays, `g_a_proj` and `g_b_proj` of the
    output. Tensor parallelism cuts all but the first of both by heads, context parallelism
    exchanges tokens for heads. Source: Kimi Linear, https://arxiv.org/abs/2510.26692, section 4.

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
        heads, tp, cp = config.delta.linear_num_value_heads, groups.tp, groups.cp.size
        if heads % (tp.size * cp):
            raise LayoutError(
                f"{heads} heads of Kimi delta attention cannot be split over tp={tp.size}"
                + (f" and cp={cp}" if cp > 1 else ""),
                hint=f"{'tp * cp' if cp > 1 else 'tp'} divides them",
            )
        self.layer, self.heads = layer, heads // tp.size
        keys, values = config.delta.linear_key_head_dim, config.delta.linear_value_head_dim
        self.sizes, hidden = (keys, keys, values), config.hidden_size
        self.parts = tuple(self.heads * size for size in self.sizes)

        def cut(size: int) -> nn.Parameter:
            return mark(nn.Parameter(torch.empty(size, dtype=dtype, device=device)), split_dim=0)

        def up(size: int, out: int) -> ColumnLinear:
            return ColumnLinear(
                size, out, tp, sequence_parallel=sequence_parallel, dtype=dtype, device=device
            )

        def down(size: int) -> DownLinear:
            return DownLinear(
                hidden, size, tp, sequence_parallel=sequence_parallel, dtype=dtype, device=device
            )

        self.dt_bias, self.A_log = cut(self.heads * keys), cut(self.heads)
        self.in_proj = up(hidden, sum(self.parts) * tp.size)
        mark_parts(self.in_proj.weight, self.parts)
        self.conv1d = ShortConv(
            sum(self.parts), config.delta.linear_conv_kernel, bias=False, dtype=dtype, device=device
        )
        # Every rank sees its own heads.
        self.out_norm = NormLayer(
            NormSpec.of(config), values, partial=tp.size > 1, dtype=dtype, device=device
        )
        self.out_proj = RowLinear(
            heads * values,
            hidden,
            tp,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.beta_proj = up(hidden, heads)
        self.f_a_proj, self.f_b_proj = down(keys), up(keys, heads * keys)
        self.g_a_proj, self.g_b_proj = down(values), up(values, heads * values)

    def forward(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The output that is added to the residual (before its scale), in x_TH's rows."""
        b, s, cp = frame.num_rows, frame.num_tokens, frame.cp
        qkv, beta, alpha, gate = (
            rows.view(b, s, -1)
            for rows in (
                self.in_proj(x_TH),
                self.beta_proj(x_TH),
                self.f_b_proj(self.f_a_proj(x_TH)),
                self.g_b_proj(self.g_a_proj(x_TH)),
            )
        )
        if cp.size == 1:
            out_BSNP = self._mix(qkv, beta, alpha, frame)
        else:
            parts = torch.split(qkv, list(self.parts), 2)
            own = share_columns(head_columns((*parts, beta, alpha), cp.size), cp)
            shares = [sum(self.parts) // cp.size, beta.shape[2] // cp.size]
            qkv, beta, alpha = torch.split(own, [*shares, own.shape[2] - sum(shares)], 2)
            out = self._mix(qkv, beta, alpha, frame)
            out_BSNP = share_tokens(out.flatten(2), cp).view(b, s, self.heads, -1)
        kind = torch.promote_types(x_TH.dtype, torch.float32)
        opened = torch.sigmoid(gate.to(kind)).reshape(out_BSNP.shape)
        gated = (self.out_norm(out_BSNP.to(kind)) * opened).to(x_TH.dtype)
        out_TH: Tensor = self.out_proj(gated.reshape(b * s, -1))
        return out_TH

    def _mix(
        self, qkv_BSC: Tensor, beta_BSN: Tensor, alpha_BSC: Tensor, frame: ForwardContext
    ) -> Tensor:
        """The output of some heads, [B, S, N, P], over whole rows: all of this rank's, or with
        context parallelism its share of them.
        """
        cp, cache = frame.cp, frame.cache
        kind = torch.promote_types(qkv_BSC.dtype, torch.float32)
        channels = None if cp.size == 1 else head_places(self.parts, cp, qkv_BSC.device)
        mixed = self.conv1d(qkv_BSC, frame, self.layer, channels=channels)
        query, key, value = (
            split_heads(x, size)
            for x, size in zip(
                torch.split(mixed, [x // cp.size for x in self.parts], 2), self.sizes, strict=True
            )
        )
        heads = slice(n := cp.rank * beta_BSN.shape[2], n + beta_BSN.shape[2])
        beta, alpha = torch.sigmoid(beta_BSN.to(kind)), split_heads(alpha_BSC, self.sizes[0])
        bias_ND = self.dt_bias.view(self.heads, -1)[heads]
        step = F.softplus(alpha.to(kind) + bias_ND.to(kind))
        decay = -self.A_log[heads].to(kind).exp()[:, None] * step
        if (real_BS := frame.real_BS) is not None:  # padding leaves the state as it is
            beta, decay = beta * real_BS[:, :, None], decay * real_BS[:, :, None, None]
        if cache is None:
            return kimi_delta_rule(query, key, value, decay, beta, runs_BS=frame.runs_BS)[0]
        state = cache.read_state(self.layer, "recurrent")
        if cache.is_revertible:
            out, steps, state = gated_delta_steps(query, key, value, decay, beta, state)
            cache.write_steps(self.layer, "recurrent", steps)
        elif value.shape[1] == 1:
            inputs = (x[:, 0] for x in (query, key, value, decay, beta, state[:, None]))
            out, state = gated_delta_step(*inputs)
            out = out[:, None]
        else:
            out, state = kimi_delta_rule(query, key, value, decay, beta, state_BNDP=state)
        cache.write_state(self.layer, "recurrent", state)
        return out
