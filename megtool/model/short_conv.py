"""The causal convolution before a recurrence, with its cache, padding and documents."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megtool.kernels.causal_conv import causal_conv, last_inputs
from megtool.model.forward_context import ForwardContext
from megtool.model.param_attributes import mark


class ShortConv(nn.Module):
    """A short convolution of each of this rank's channels, and silu: Megatron's `conv1d`.

    Parameters: `weight` [C, 1, taps] and `bias` [C], cut over tp by channels. Padding counts as if
    it were not there; tokens of packed documents take in none of other documents.
    """

    def __init__(
        self,
        num_channels: int,
        num_taps: int,
        *,
        bias: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
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
            return causal_conv(x_BSC, weight_CK, bias_C, runs_BS=frame.runs_BS)
        past_BPC = cache.read_state(layer, "conv")
        if real_BS is None:
            if cache.is_revertible:
                cache.write_steps(layer, "conv", _after(past_BPC, x_BSC))
            y_BSC = causal_conv(x_BSC, weight_CK, bias_C, past_BPC=past_BPC)
            cache.write_state(layer, "conv", last_inputs(x_BSC, past_BPC))
            return y_BSC
        # Tokens move up to those of the pass before, over the padding between them.
        order_BS = (~real_BS).to(torch.int8).argsort(stable=True, dim=1)
        x_BSC = x_BSC.gather(1, _like(order_BS, x_BSC))
        if cache.is_revertible:
            cache.write_steps(layer, "conv", _after(past_BPC, x_BSC))
        y_BSC = causal_conv(x_BSC, weight_CK, bias_C, past_BPC=past_BPC)
        cache.write_state(layer, "conv", last_inputs(x_BSC, past_BPC, real_BS.sum(1)))
        return y_BSC.gather(1, _like(order_BS.argsort(1), x_BSC))

    def extra_repr(self) -> str:
        """Shapes of this rank, for people."""
        return f"{self.weight.shape[0]} channels, {self.weight.shape[2]} taps"


def _after(past_BPC: Tensor, x_BSC: Tensor) -> Tensor:
    """Inputs before a pass, and in it; in the dtype of the former."""
    return torch.cat((past_BPC, x_BSC.to(past_BPC.dtype)), 1)


def _like(places_BS: Tensor, x_BSC: Tensor) -> Tensor:
    return places_BS[:, :, None].expand_as(x_BSC)
