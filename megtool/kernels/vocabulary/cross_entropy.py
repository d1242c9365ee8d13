"""Cross entropy of a linear head that never holds all logits of all tokens.

The vocabulary is walked in blocks of columns, twice. The forward pass keeps one number a token (the
logarithm of the sum of exponentials); the backward pass multiplies the block again, which costs a
fourth matrix product but lets every token's loss have a gradient of its own, completes a block
of the weight's gradient in one product (walking tokens instead would need a [V, H] sum in fp32),
and keeps only the [T, H] sum of x's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megtool.kernels.dispatch import requested_implementation, use
from megtool.kernels.vocabulary.lm_head import Softmax, Vocabulary, fold, logits, slope
from megtool.kernels.wgrad_accumulation import (
    GradientSum,
    accumulate_product,
    put_product,
    stored_sum,
)


def linear_cross_entropy(
    x_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    vocab_size: int,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
    scale: float = 1.0,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Minus the log-probability of each label under `softmax(x @ weight.T + bias)`: losses_T.

    Losses are fp32 (fp64 for fp64 inputs), 0 where the label is `ignore_index`, NaN (and so are the
    gradients) where it is no number of the vocabulary: checking it aloud would wait for the device.
    Logits are computed in x's dtype, scaled, capped (see `Vocabulary`), and summed in fp32.
    Only the first `vocab_size` rows of the weight count, the rest is padding, whose gradient is 0.
    Gradients have the dtypes of x, weight and bias. `chunk` is the number of columns of a block.

    With `group`, weight and bias are this rank's rows, x, labels and losses are the same on all
    ranks (one MAX and one SUM all-reduce), and **x's gradient is this rank's part of the sum over
    the group**: give x through `copy_to` or `gather_rows`, whose backward passes add the parts.
    """
    vocabulary = Vocabulary(
        size=vocab_size, local=weight_VH.shape[0], softcap=softcap, scale=scale, group=group
    )
    losses_T: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_TH, weight_VH, bias, labels_T, vocabulary, ignore_index, chunk
    )
    return losses_T


def cross_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
    scale: float = 1.0,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The same for logits that exist already: this rank's columns of raw logits; losses_T.

    `vocab_size` None: no column is padding. The gradient has the dtype of the logits, and beside
    it no second [T, V] tensor is made.
    """
    local = logits_TV.shape[1]
    ranks = 1 if group is None else dist.get_world_size(group)
    vocabulary = Vocabulary(
        size=ranks * local if vocab_size is None else vocab_size,
        local=local,
        softcap=softcap,
        scale=scale,
        group=group,
    )
    losses_T: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, labels_T, vocabulary, ignore_index, chunk
    )
    return losses_T


def _finish(
    softmax: Softmax, vocabulary: Vocabulary, kept_T: Tensor, invalid_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses and the logarithms of the totals (NaN for invalid labels) of all ranks together."""
    softmax.reduce(vocabulary)
    log_total_T = softmax.log_total_T.masked_fill_(invalid_T, torch.nan)
    return torch.where(kept_T, log_total_T - softmax.target_T, 0.0), log_total_T


class _LinearCrossEntropy(torch.autograd.Function):
    """Two walks over blocks of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        vocabulary: Vocabulary,
        ignore_index: int,
        chunk: int | None,
    ) -> Tensor:
        column_T, kept_T, invalid_T = vocabulary.place(labels_T, ignore_index)
        softmax = Softmax.start(x_TH.shape[0], x_TH)
        for block in vocabulary.blocks(x_TH.shape[0], x_TH.device, chunk):
            fold(logits(x_TH, weight_VH, bias_V, block), block.start, column_T, vocabulary, softmax)
        losses_T, log_total_T = _finish(softmax, vocabulary, kept_T, invalid_T)
        ctx.save_for_backward(x_TH, weight_VH, bias_V, column_T, kept_T, log_total_T)
        ctx.vocabulary, ctx.chunk, ctx.asked = vocabulary, chunk, requested_implementation()
        ctx.total = stored_sum(weight_VH) if ctx.needs_input_grad[1] else None
        return losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_T: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weight_VH, bias_V, column_T, kept_T, log_total_T = ctx.saved_tensors
        vocabulary: Vocabulary = ctx.vocabulary
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        g_T = torch.where(kept_T, g_T, 0.0)
        # Blocks of x's gradient are added up, so in fp32; a block of the weight's is whole.
        sum_TH = torch.zeros_like(x_TH, dtype=log_total_T.dtype) if wants_x else None
        total: GradientSum | None = ctx.total
        g_weight_VH, overwrite = None, True
        if total is not None:
            g_weight_VH, overwrite = total.begin()
        elif wants_weight:
            g_weight_VH = torch.empty_like(weight_VH)
        g_bias_V = torch.empty_like(bias_V) if bias_V is not None and wants_bias else None
        for g, is_new in ((g_weight_VH, overwrite), (g_bias_V, True)):
            if g is not None and is_new:
                g[vocabulary.num_rows :].zero_()
        for block in vocabulary.blocks(x_TH.shape[0], x_TH.device, ctx.chunk):
            raw_TB = logits(x_TH, weight_VH, bias_V, block)
            with use(ctx.asked):
                slope(raw_TB, block.start, column_T, log_total_T, g_T, vocabulary, out=raw_TB)
            g_TB = raw_TB
            if sum_TH is not None:
                accumulate_product(sum_TH, g_TB, weight_VH[block])
            if g_weight_VH is not None:
                put_product(g_weight_VH[block], g_TB.t(), x_TH, overwrite=overwrite)
            if g_bias_V is not None:
                g_bias_V[block] = g_TB.sum(0, dtype=log_total_T.dtype)
        g_x_TH = None if sum_TH is None else sum_TH.to(x_TH.dtype)
        if total is not None:
            total.end()
            g_weight_VH = None
        return g_x_TH, g_weight_VH, g_bias_V, None, None, None, None


class _CrossEntropy(torch.autograd.Function):
    """The same walks over given logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        vocabulary: Vocabulary,
        ignore_index: int,
        chunk: int | None,
    ) -> Tensor:
        column_T, kept_T, invalid_T = vocabulary.place(labels_T, ignore_index)
        softmax = Softmax.start(logits_TV.shape[0], logits_TV)
        for block in vocabulary.blocks(logits_TV.shape[0], logits_TV.device, chunk):
            fold(logits_TV[:, block], block.start, column_T, vocabulary, softmax)
        losses_T, log_total_T = _finish(softmax, vocabulary, kept_T, invalid_T)
        ctx.save_for_backward(logits_TV, column_T, kept_T, log_total_T)
        ctx.vocabulary, ctx.chunk, ctx.asked = vocabulary, chunk, requested_implementation()
        return losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, column_T, kept_T, log_total_T = ctx.saved_tensors
        vocabulary: Vocabulary = ctx.vocabulary
        g_T = torch.where(kept_T, g_T, 0.0)
        g_TV = torch.empty_like(logits_TV)
        g_TV[:, vocabulary.num_rows :].zero_()
        for block in vocabulary.blocks(logits_TV.shape[0], logits_TV.device, ctx.chunk):
            raw_TB, out_TB = logits_TV[:, block], g_TV[:, block]
            with use(ctx.asked):
                slope(raw_TB, block.start, column_T, log_total_T, g_T, vocabulary, out=out_TB)
        return g_TV, None, None, None, None
