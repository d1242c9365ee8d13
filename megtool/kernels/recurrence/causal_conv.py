"""Short causal convolution of every channel for itself, before a recurrence (Mamba-2, delta net).

Shape suffixes besides those of `model.batch`: C channels, K taps of a channel, P = K - 1 tokens
before a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.kernels.dispatch import Kernel
from megtool.kernels.recurrence import causal_conv_triton, packages


def causal_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None = None,
    *,
    past_BPC: Tensor | None = None,
    runs_BS: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """`y[t] = silu(bias + sum over j of weight[K - 1 - j] * x[t - j])`, [B, S, C] in x's dtype.

    Computed in fp32 and rounded once. What comes before the rows is `past_BPC` (oldest first, zeros
    by default; no gradient). A token takes in tokens of its own run alone (`runs_BS`, int64, as
    `runs_of` numbers them).
    """
    cannot = packages.conv_cannot(x_BSC, weight_CK, past_BPC, runs_BS)
    run = _CAUSAL_CONV.on(x_BSC.device, without=cannot)
    return run(x_BSC, weight_CK, bias_C, past_BPC, runs_BS, silu)


def last_inputs(x_BSC: Tensor, past_BPC: Tensor, counts_B: Tensor | None = None) -> Tensor:
    """The `past_BPC` of the tokens that come next, after the first `counts_B` (default: all) of
    each row; in the dtype of the one there was."""
    size = past_BPC.shape[1]
    if counts_B is None and x_BSC.shape[1] >= size:
        return x_BSC[:, x_BSC.shape[1] - size :].to(past_BPC.dtype)
    both = torch.cat((past_BPC, x_BSC.to(past_BPC.dtype)), 1)
    if counts_B is None:
        return both[:, both.shape[1] - size :]
    places_BP = counts_B[:, None] + torch.arange(size, device=counts_B.device)
    return both.gather(1, places_BP[:, :, None].expand(-1, -1, both.shape[2]))


def runs_of(documents_BS: Tensor) -> Tensor:
    """Numbers of stretches of equal documents, from 0 in every row: [B, S], int64."""
    begins_BS = documents_BS[:, 1:] != documents_BS[:, :-1]
    return F.pad(begins_BS.cumsum(1), (1, 0))


def _causal_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    past_BPC: Tensor | None,
    runs_BS: Tensor | None,
    silu: bool,
) -> Tensor:
    values = (x_BSC, weight_CK, bias_C, past_BPC, runs_BS, silu)
    out: Tensor = _CausalConv.apply(*values)  # type: ignore[no-untyped-call]
    return out


class _CausalConv(torch.autograd.Function):
    """A product and sum for each tap, in place; keeps its input alone for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BSC: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        past_BPC: Tensor | None,
        runs_BS: Tensor | None,
        silu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_BSC, weight_CK, bias_C, past_BPC, runs_BS)
        ctx.silu = silu
        y_BSC = _convolved(x_BSC, weight_CK, bias_C, past_BPC, runs_BS)
        return (F.silu(y_BSC, inplace=True) if silu else y_BSC).to(x_BSC.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_BSC, weight_CK, bias_C, past_BPC, runs_BS = ctx.saved_tensors
        kind = torch.promote_types(x_BSC.dtype, torch.float32)
        g_BSC, x, w = grads[0].to(kind), x_BSC.to(kind), weight_CK.to(kind)
        if ctx.silu:
            y_BSC = _convolved(x_BSC, weight_CK, bias_C, past_BPC, runs_BS)
            g_BSC = torch.ops.aten.silu_backward(g_BSC, y_BSC)
        taps = w.shape[1]
        gw_CK = torch.empty_like(w)
        gx_BSC = g_BSC * w[:, -1]
        gw_CK[:, -1] = _along(g_BSC, x)
        for back in range(1, taps):
            tap = taps - 1 - back
            gw_CK[:, tap] = 0
            if past_BPC is not None:
                head = past_BPC[:, past_BPC.shape[1] - back :][:, : x.shape[1]].to(kind)
                gw_CK[:, tap] += _along(g_BSC[:, : head.shape[1]], head)
            if x.shape[1] <= back:
                continue
            g = g_BSC[:, back:]
            if runs_BS is not None:
                g = g * (runs_BS[:, back:] == runs_BS[:, :-back])[:, :, None]
            gx_BSC[:, :-back].addcmul_(g, w[:, tap])
            gw_CK[:, tap] += _along(g, x[:, :-back])
        gb_C = None if bias_C is None else g_BSC.sum((0, 1)).to(bias_C.dtype)
        return gx_BSC.to(x_BSC.dtype), gw_CK.to(weight_CK.dtype), gb_C, None, None, None


def _convolved(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    past_BPC: Tensor | None,
    runs_BS: Tensor | None,
) -> Tensor:
    """What the activation is given, in fp32 (fp64)."""
    kind = torch.promote_types(x_BSC.dtype, torch.float32)
    x, w = x_BSC.to(kind), weight_CK.to(kind)
    y_BSC = x * w[:, -1] if bias_C is None else torch.addcmul(bias_C.to(kind), x, w[:, -1])
    for back in range(1, w.shape[1]):
        tap_C = w[:, w.shape[1] - 1 - back]
        if past_BPC is not None:
            head = past_BPC[:, past_BPC.shape[1] - back :][:, : x.shape[1]].to(kind)
            y_BSC[:, : head.shape[1]].addcmul_(head, tap_C)
        if x.shape[1] <= back:
            continue
        earlier = x[:, :-back]
        if runs_BS is not None:
            earlier = earlier * (runs_BS[:, back:] == runs_BS[:, :-back])[:, :, None]
        y_BSC[:, back:].addcmul_(earlier, tap_C)
    return y_BSC


def _along(a_BSC: Tensor, b_BSC: Tensor) -> Tensor:
    """The products of each channel, added up over rows and tokens."""
    return (a_BSC * b_BSC).sum((0, 1))


_CAUSAL_CONV = Kernel(
    "causal_conv",
    _causal_conv,
    triton=causal_conv_triton.causal_conv,
    packages={"causal-conv1d": packages.causal_conv},
    preferred=("causal-conv1d",),
)
