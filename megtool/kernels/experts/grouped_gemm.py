"""Grouped linear layers for experts: permute tokens, multiply, unpermute; dropless.

A router names K experts for every token. `permute` lays the T*K assignments out as rows sorted by
expert (stable: by token within an expert), `grouped_linear` multiplies each expert's rows by that
expert's weight, `unpermute` sums each token's K rows by their probabilities. No row is dropped, an
expert may get none, and nothing but the loop of `grouped_linear` waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megtool.kernels.dispatch import Kernel, requested_implementation, use
from megtool.kernels.experts import grouped_gemm_triton
from megtool.kernels.wgrad_accumulation import GradientSum, gradient_sum, put_product


def permute(x_TH: Tensor, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once per expert it goes to, sorted by expert.

    Returns rows_RH (R = T*K), row_ids_R (int64; the assignment `token * K + k` that each row is)
    and counts_E (int64; rows per expert, on the device). Differentiable in x.
    """
    flat = experts_TK.reshape(-1)
    row_ids_R = torch.argsort(flat, stable=True)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts_E.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    num = experts_TK.shape[1]
    rows_RH: Tensor = _Permute.apply(x_TH, row_ids_R, num)  # type: ignore[no-untyped-call]
    return rows_RH, row_ids_R, counts_E


def unpermute(rows_RH: Tensor, row_ids_R: Tensor, probs_TK: Tensor) -> Tensor:
    """Sum each token's rows times their probabilities: x_TH in the rows' dtype, summed in fp32.

    Differentiable in rows and probs (whose gradient has the dtype of probs).
    """
    x_TH: Tensor = _Unpermute.apply(rows_RH, row_ids_R, probs_TK)  # type: ignore[no-untyped-call]
    return x_TH


def grouped_linear(
    x_RH: Tensor, weight_EFH: Tensor, counts_E: Tensor, bias_EF: Tensor | None = None
) -> Tensor:
    """`x @ weight[e].T + bias[e]` for rows sorted by expert e, counts_E of them each: y_RF."""
    offsets_E = counts_E.cumsum(0)
    y_RF: Tensor
    if x_RH.shape[0] > 0 and x_RH.dtype == weight_EFH.dtype and multiplies_grouped(weight_EFH):
        ends_E = offsets_E.to(torch.int32)
        values = (x_RH, weight_EFH, ends_E, gradient_sum(weight_EFH))
        y_RF = _GroupedLinear.apply(*values)  # type: ignore[no-untyped-call]
    else:
        y_RF = _loop_linear(x_RH, weight_EFH, counts_E)
    return y_RF if bias_EF is None else add_expert_bias(y_RF, counts_E, bias_EF)


def add_expert_bias(y_RF: Tensor, counts_E: Tensor, bias_EF: Tensor) -> Tensor:
    """`y + bias[e]` for rows sorted by expert e, counts_E of them each."""
    rows = torch.arange(y_RF.shape[0], device=y_RF.device)
    return y_RF + bias_EF[torch.searchsorted(counts_E.cumsum(0), rows, right=True)]


def invert(row_ids_R: Tensor) -> Tensor:
    """Where each assignment's row is: the inverse permutation of `row_ids_R`."""
    rows = torch.arange(row_ids_R.numel(), device=row_ids_R.device)
    return torch.empty_like(row_ids_R).scatter_(0, row_ids_R, rows)


# A token has exactly K rows, so the transpose of copying rows is a gather as well: no atomic
# additions, hence the same bits in every run.


def _sum_rows(rows_RH: Tensor, inverse_R: Tensor, num: int, probs_TK: Tensor | None) -> Tensor:
    """Each token's `num` rows, times probs where given, summed in fp32 (fp64 for fp64): x_TH."""
    wide = torch.promote_types(rows_RH.dtype, torch.float32)
    rows_TKH = rows_RH[inverse_R].view(-1, num, rows_RH.shape[1]).to(wide)
    if probs_TK is not None:
        rows_TKH = rows_TKH * probs_TK.to(wide).unsqueeze(-1)
    return rows_TKH.sum(1).to(rows_RH.dtype)


def _spread_rows(
    g_TH: Tensor, rows_RH: Tensor, row_ids_R: Tensor, probs_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `_sum_rows` with probs: of the rows, and of probs (in their dtypes)."""
    wide = torch.promote_types(rows_RH.dtype, torch.float32)
    g_RH = g_TH[row_ids_R // probs_TK.shape[1]].to(wide)
    g_rows_RH = (g_RH * probs_TK.to(wide).reshape(-1)[row_ids_R].unsqueeze(1)).to(rows_RH.dtype)
    g_probs_R = (g_RH * rows_RH.to(wide)).sum(1)
    g_probs_TK = torch.empty_like(g_probs_R).scatter_(0, row_ids_R, g_probs_R)
    return g_rows_RH, g_probs_TK.view_as(probs_TK).to(probs_TK.dtype)


def _copy_rows(x_TH: Tensor, row_ids_R: Tensor, num: int) -> Tensor:
    """The token of every row, `row_ids // num`: rows_RH."""
    return x_TH.index_select(0, row_ids_R // num)


_COPY_ROWS = Kernel("permute", _copy_rows, triton=grouped_gemm_triton.copy_rows)
_SUM_ROWS = Kernel("unpermute", _sum_rows, triton=grouped_gemm_triton.sum_rows)
_SPREAD_ROWS = Kernel("gradient of unpermute", _spread_rows, triton=grouped_gemm_triton.spread_rows)


class _Permute(torch.autograd.Function):
    """Rows of tokens by assignment; backward sums each token's rows."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, row_ids_R: Tensor, num: int) -> Tensor:
        ctx.save_for_backward(row_ids_R)
        ctx.num, ctx.asked = num, requested_implementation()
        return _COPY_ROWS.on(x_TH.device)(x_TH, row_ids_R, num)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_RH: Tensor) -> tuple[Tensor, None, None]:
        (row_ids_R,) = ctx.saved_tensors
        with use(ctx.asked):
            run = _SUM_ROWS.on(g_RH.device)
            return run(g_RH.contiguous(), invert(row_ids_R), ctx.num, None), None, None


class _Unpermute(torch.autograd.Function):
    """The weighted sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, row_ids_R: Tensor, probs_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RH, row_ids_R, probs_TK)
        ctx.asked = requested_implementation()
        run = _SUM_ROWS.on(rows_RH.device)
        return run(rows_RH.contiguous(), invert(row_ids_R), probs_TK.shape[1], probs_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_TH: Tensor) -> tuple[Tensor, None, Tensor]:
        rows_RH, row_ids_R, probs_TK = ctx.saved_tensors
        with use(ctx.asked):
            run = _SPREAD_ROWS.on(rows_RH.device)
            g_rows_RH, g_probs_TK = run(g_TH.contiguous(), rows_RH, row_ids_R, probs_TK)
        return g_rows_RH, None, g_probs_TK


class _GroupedLinear(torch.autograd.Function):
    """`F.grouped_mm` with gradients laid out as it wants them (it refuses expanded ones)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RH: Tensor,
        weight_EFH: Tensor,
        offsets_E: Tensor,
        total: GradientSum | None,
    ) -> Tensor:
        ctx.save_for_backward(x_RH, weight_EFH, offsets_E)
        ctx.total = total
        return F.grouped_mm(x_RH.contiguous(), weight_EFH.transpose(1, 2), offs=offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_RF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RH, weight_EFH, offsets_E = ctx.saved_tensors
        g_RF, g_x_RH, g_weight_EFH = g_RF.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            g_x_RH = F.grouped_mm(g_RF, weight_EFH, offs=offsets_E)
        if ctx.total is not None:
            _add_weight_gradients(ctx.total, g_RF, x_RH, offsets_E)
        elif ctx.needs_input_grad[1]:
            g_weight_EFH = F.grouped_mm(g_RF.t(), x_RH.contiguous(), offs=offsets_E)
        return g_x_RH, g_weight_EFH, None, None


def _add_weight_gradients(
    total: GradientSum, g_RF: Tensor, x_RH: Tensor, offsets_E: Tensor
) -> None:
    """Add every expert's `g.T @ x`, one after the other; on CUDA all are one product before."""
    main_EFH, overwrite = total.begin()
    if not g_RF.is_cpu:  # the host knows no counts there
        put = main_EFH.copy_ if overwrite else main_EFH.add_
        put(F.grouped_mm(g_RF.t(), x_RH.contiguous(), offs=offsets_E))
    else:
        start = 0
        for main_FH, stop in zip(main_EFH, offsets_E.tolist(), strict=True):
            if overwrite or stop > start:
                g_SF, x_SH = g_RF[start:stop], x_RH[start:stop]
                put_product(main_FH, g_SF.t(), x_SH, overwrite=overwrite)
            start = stop
    total.end()


def waits_for_host(weight_EFH: Tensor) -> bool:
    """Whether `grouped_linear` reads the counts on the host, and no graph can be captured of it.

    So do the loop, and `F.grouped_mm` on GPUs that it has no kernel for (other than sm_90, sm_100).
    """
    if not multiplies_grouped(weight_EFH):
        return True
    on_gpu = weight_EFH.is_cuda
    return on_gpu and torch.cuda.get_device_capability(weight_EFH.device)[0] not in (9, 10)


def multiplies_grouped(weight_EFH: Tensor) -> bool:
    """Whether `F.grouped_mm` takes it: bf16, off CUDA fp32 and fp16 too, rows of 16 bytes."""
    wide = {torch.bfloat16, torch.float16, torch.float32}
    takes = {torch.bfloat16} if weight_EFH.is_cuda else wide
    rows = (weight_EFH.shape[1], weight_EFH.shape[2])
    return (
        hasattr(F, "grouped_mm")
        and weight_EFH.dtype in takes
        and all(n * weight_EFH.element_size() % 16 == 0 for n in rows)
        and weight_EFH.is_contiguous()
    )


def _loop_linear(x_RH: Tensor, weight_EFH: Tensor, counts_E: Tensor) -> Tensor:
    """The same, one expert after the other; waits for counts_E to reach the host."""
    parts = torch.split(x_RH, counts_E.tolist())
    used = [part @ weight.t() for part, weight in zip(parts, weight_EFH, strict=True)]
    return torch.cat(used)
