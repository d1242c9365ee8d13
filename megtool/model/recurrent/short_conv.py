"""Causal short convolutions: before a recurrence, or as a mixer of their own (LFM2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megtool.errors import LayoutError
from megtool.kernels.recurrence.causal_conv import causal_conv, last_inputs
from megtool.model.forward_context import ForwardContext
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.layers.norm import NormSpec
from megtool.model.layers.param_attributes import mark, mark_parts
from megtool.parallel.context_parallel import share_columns, share_tokens
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig


class ShortConv(nn.Module):
    """A short convolution of each of this rank's channels, and `silu`: Megatron's `conv1d`.

    Parameters: `weight` [C, 1, taps] and `bias` [C], cut over tp by channels. Padding counts as if
    it were not there; tokens of packed documents take in none of other documents.
    """

    def __init__(
        self,
        num_channels: int,
        num_taps: int,
        *,
        bias: bool,
        silu: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.silu = silu
        weight = torch.empty(num_channels, 1, num_taps, dtype=dtype, device=device)
        self.weight = mark(nn.Parameter(weight), split_dim=0)
        self.bias = None
        if bias:
            shift = torch.empty(num_channels, dtype=dtype, device=device)
            self.bias = mark(nn.Parameter(shift), split_dim=0)

    def forward(
        self,
        x_BSC: Tensor,
        frame: ForwardContext,
        layer: int,
        *,
        channels: Tensor | None = None,
    ) -> Tensor:
        """Whole rows, convolved and activated; of padding, something finite.

        `channels` (int64) are those of this rank that x has, in its order; default: all.
        """
        weight_CK = self.weight.squeeze(1)
        bias_C: Tensor | None = self.bias
        if channels is not None:
            weight_CK = weight_CK.index_select(0, channels)
            bias_C = None if bias_C is None else bias_C.index_select(0, channels)
        cache, real_BS = frame.cache, frame.real_BS
        if cache is None:
            if real_BS is not None:
                x_BSC = x_BSC * real_BS[:, :, None]
            return causal_conv(x_BSC, weight_CK, bias_C, runs_BS=frame.runs_BS, silu=self.silu)
        past_BPC = cache.read_state(layer, "conv")
        if real_BS is None:
            if cache.is_revertible:
                cache.write_steps(layer, "conv", _after(past_BPC, x_BSC))
            y_BSC = causal_conv(x_BSC, weight_CK, bias_C, past_BPC=past_BPC, silu=self.silu)
            cache.write_state(layer, "conv", last_inputs(x_BSC, past_BPC))
            return y_BSC
        # Tokens move up to those of the pass before, over the padding between them.
        order_BS = (~real_BS).to(torch.int8).argsort(stable=True, dim=1)
        x_BSC = x_BSC.gather(1, _like(order_BS, x_BSC))
        if cache.is_revertible:
            cache.write_steps(layer, "conv", _after(past_BPC, x_BSC))
        y_BSC = causal_conv(x_BSC, weight_CK, bias_C, past_BPC=past_BPC, silu=self.silu)
        cache.write_state(layer, "conv", last_inputs(x_BSC, past_BPC, real_BS.sum(1)))
        return y_BSC.gather(1, _like(order_BS.argsort(1), x_BSC))

    def extra_repr(self) -> str:
        """Shapes of this rank, for people."""
        return f"{self.weight.shape[0]} channels, {self.weight.shape[2]} taps"


class GatedShortConv(nn.Module):
    """The gated short convolution of one layer, `out(C * conv(B * x))`; its norm is part of
    `in_proj`.

    Parameters: `in_proj`, whose rows are [B, C, x], `conv1d`, and `out_proj`. Tensor parallelism
    cuts each of the three by channels. With context parallelism tokens are exchanged for channels.
    Source: LFM2 Technical Report, https://arxiv.org/abs/2511.23404, section 2.

    Raises:
        LayoutError: channels do not go evenly over the ranks.
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
        hidden, tp, cp = config.hidden_size, groups.tp.size, groups.cp.size
        if hidden % (tp * cp):
            raise LayoutError(
                f"{hidden} channels of gated short convolutions cannot be split over tp={tp}"
                + (f" and cp={cp}" if cp > 1 else ""),
                hint=f"{'tp * cp' if cp > 1 else 'tp'} divides hidden_size",
            )
        self.layer, self.num_channels = layer, hidden // tp
        self.in_proj = ColumnLinear(
            hidden,
            3 * hidden,
            groups.tp,
            bias=config.short_conv.short_conv_bias,
            norm=NormSpec.before_mixer(config, layer),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        mark_parts(self.in_proj.weight, (self.num_channels,) * 3)
        self.conv1d = ShortConv(
            self.num_channels,
            config.short_conv.short_conv_taps,
            bias=config.short_conv.short_conv_bias,
            silu=False,
            dtype=dtype,
            device=device,
        )
        self.out_proj = RowLinear(
            hidden,
            hidden,
            groups.tp,
            bias=config.short_conv.short_conv_bias,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TH: Tensor, frame: ForwardContext) -> Tensor:
        """The output that is added to the residual x_TH (before its scale), in x_TH's rows."""
        b, s, cp = frame.num_rows, frame.num_tokens, frame.cp
        before_BSC, behind_BSC, x_BSC = self.in_proj(x_TH).view(b, s, -1).chunk(3, 2)
        given_BSC = before_BSC * x_BSC
        if cp.size == 1:
            y_BSC = self.conv1d(given_BSC, frame, self.layer)
        else:
            share = self.num_channels // cp.size
            first = cp.rank * share
            channels = torch.arange(first, first + share, device=given_BSC.device)
            own_BSC = share_columns(given_BSC.contiguous(), cp)
            own_BSC = self.conv1d(own_BSC, frame, self.layer, channels=channels)
            y_BSC = share_tokens(own_BSC, cp).view(b, s, -1)
        if frame.cache is not None and frame.cache.is_revertible:
            frame.cache.write_steps(self.layer, "recurrent", y_BSC.new_zeros(b, s, 0, 0, 0))
        out_TH: Tensor = self.out_proj((behind_BSC * y_BSC).reshape(b * s, -1))
        return out_TH


def _after(past_BPC: Tensor, x_BSC: Tensor) -> Tensor:
    """Inputs before a pass, and in it; in the dtype of the former."""
    return torch.cat((past_BPC, x_BSC.to(past_BPC.dtype)), 1)


def _like(places_BS: Tensor, x_BSC: Tensor) -> Tensor:
    return places_BS[:, :, None].expand_as(x_BSC)
