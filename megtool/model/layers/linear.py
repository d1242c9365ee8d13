"""Linear layers and embeddings, sharded over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megtool.kernels.wgrad_accumulation import GradientSum, add_weight_gradient, gradient_sum
from megtool.model.layers.hooks import ActivationHook
from megtool.model.layers.norm import NormSpec
from megtool.model.layers.param_attributes import mark
from megtool.parallel.collectives import (
    copy_to,
    gather_columns,
    gather_in_parts,
    gather_rows,
    reduce_from,
    reduce_scatter_rows,
    start_gather,
    start_reduce_scatter,
    start_sum,
)
from megtool.parallel.process_groups import ALONE, Group

# Stands for `x W^T` of rows and a weight, with gradients of its own, where a module's `product` is
# set: training in FP8 does (`megtool.train.features.fp8`).
Product = Callable[[Tensor, Tensor], Tensor]
# Stands for `norm(x) W^T + b`, or for more that follows it, of rows before the norm.
NormProduct = Callable[[Tensor], Tensor]


class ColumnLinear(nn.Module):
    """`y = norm(x) W^T + b`, of which a rank computes `out_features / tp` columns.

    Parameters: `weight` `[out/tp, in]`, `bias` `[out/tp]`, and with a norm `layer_norm_weight` and
    (layernorm) `layer_norm_bias` `[in]`, replicated: Transformer Engine's fused names. Takes
    `x_TH`, of which this rank has `T/tp` rows with `sequence_parallel` and all without, and gives
    all T rows. The backward pass adds up the gradient of x while that of the weight is computed.
    `tap` is handed the rows that are multiplied, as this rank has them
    (`megtool.model.layers.hooks`), and what `adapter` makes of them is added to the output
    (`megtool.model.stacks.lora`). With `overlaps_gather` rows of other ranks are
    multiplied as they arrive. With a `norm_product` (`--kernels te`), which takes neither tap nor
    adapter, `normalize` and `of_sum` leave the norm to it.

    Raises:
        LayoutError: tp does not divide `out_features`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group = ALONE,
        *,
        bias: bool = False,
        norm: NormSpec | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.group, self.norm = group, norm
        self.tap: ActivationHook | None = None
        self.product: Product | None = None
        self.norm_product: NormProduct | None = None
        self.adapter: nn.Module | None = None
        self.sequence_parallel = sequence_parallel and group.size > 1
        self.overlaps_gather = False
        rows = group.part(out_features, "out_features")

        def new(*shape: int, split: bool) -> nn.Parameter:
            parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            partial = self.sequence_parallel and not split
            return mark(parameter, split_dim=0 if split else None, partial=partial)

        has_weight = norm is not None and norm.weighs
        self.layer_norm_weight = new(in_features, split=False) if has_weight else None
        has_shift = norm is not None and norm.has_bias
        self.layer_norm_bias = new(in_features, split=False) if has_shift else None
        self.weight = new(rows, in_features, split=True)
        self.bias = new(rows, split=True) if bias else None

    def forward(self, x_TH: Tensor, *, is_normal: bool = False) -> Tensor:
        """`[T, out/tp]`; `is_normal`: of rows that are normalized already."""
        return self.project(x_TH if is_normal else self.normalize(x_TH))

    def normalize(self, x_TH: Tensor) -> Tensor:
        """The rows after this layer's fused norm, or unchanged if it has none."""
        if self.norm is None or self.norm_product is not None:
            return x_TH
        return self.norm(x_TH, self.layer_norm_weight, self.layer_norm_bias)

    def of_sum(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The output of `normalize` for the sum of both, and that sum."""
        if self.norm is None or self.norm_product is not None:
            return (total := x_TH + residual_TH), total
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        return self.norm.of_sum(x_TH, residual_TH, weight, bias)

    def project(self, x_TH: Tensor) -> Tensor:
        """The product alone, for rows after `normalize`."""
        if self.norm_product is not None:
            return self.norm_product(x_TH)
        if self.tap is not None:
            x_TH = self.tap(x_TH)
        if self.product is not None:
            spread = gather_rows if self.sequence_parallel else copy_to
            y = self.product(spread(x_TH, self.group), self.weight)
            y = y if self.bias is None else y + self.bias
        else:
            y = column_product(
                x_TH,
                self.weight,
                self.bias,
                self.group,
                self.sequence_parallel,
                overlaps_gather=self.overlaps_gather,
            )
        return y if self.adapter is None else y + self.adapter(x_TH)

    def extra_repr(self) -> str:
        """Shapes of this rank, for people."""
        out, inner = self.weight.shape
        return f"{inner} -> {out} of {out * self.group.size}, norm={self.norm}"


class RowLinear(nn.Module):
    """`y = x W^T + b`, of which a rank has `in_features / tp` columns of x and of W.

    Parameters: `weight` `[out, in/tp]`, `bias` `[out]`, replicated and added once, after the sum.
    Takes all T rows and gives all of them, or with `sequence_parallel` this rank's `T/tp`. `tap` is
    handed the rows that are multiplied, of which this rank has some columns.

    Raises:
        LayoutError: tp does not divide `in_features`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group = ALONE,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.group = group
        self.tap: ActivationHook | None = None
        self.product: Product | None = None
        self.adapter: nn.Module | None = None
        self.sequence_parallel = sequence_parallel and group.size > 1
        columns = group.part(in_features, "in_features")
        weight = torch.empty(out_features, columns, dtype=dtype, device=device)
        self.weight = mark(nn.Parameter(weight), split_dim=1)
        self.bias = None
        if bias:
            parameter = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device))
            self.bias = mark(parameter, partial=self.sequence_parallel)

    def forward(self, x_TF: Tensor) -> Tensor:
        """`[T, out]`, or `[T/tp, out]`."""
        if self.tap is not None:
            x_TF = self.tap(x_TF)
        if self.group.size == 1 and self.product is None:
            y = linear(x_TF, self.weight, self.bias)
            return y if self.adapter is None else y + self.adapter(x_TF)
        part = (linear if self.product is None else self.product)(x_TF, self.weight)
        if self.sequence_parallel:
            y = reduce_scatter_rows(part, self.group)
        else:
            y = reduce_from(part, self.group, in_place=self.product is None)
        y = y if self.bias is None else y + self.bias
        return y if self.adapter is None else y + self.adapter(x_TF)

    def extra_repr(self) -> str:
        """Shapes of this rank, for people."""
        out, inner = self.weight.shape
        return f"{inner} of {inner * self.group.size} -> {out}"


class VocabEmbedding(nn.Module):
    """Word embeddings; each rank has `padded_vocab / tp` rows: `weight` `[V/tp, H]`.

    Raises:
        LayoutError: tp does not divide the padded vocabulary.
    """

    def __init__(
        self,
        padded_vocab: int,
        hidden: int,
        group: Group = ALONE,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "meta",
    ) -> None:
        super().__init__()
        self.group = group
        self.sequence_parallel = sequence_parallel and group.size > 1
        rows = group.part(padded_vocab, "padded_vocab")
        weight = torch.empty(rows, hidden, dtype=dtype, device=device)
        self.weight = mark(nn.Parameter(weight), split_dim=0, embedding=True)

    def forward(self, tokens_T: Tensor) -> Tensor:
        """`[T, H]`, or with sequence parallelism this rank's `[T/tp, H]`."""
        if self.group.size == 1:
            return F.embedding(tokens_T, self.weight)
        rows = self.weight.shape[0]
        local_T = tokens_T - self.group.rank * rows
        foreign_T = (local_T < 0) | (local_T >= rows)
        x_TH = F.embedding(local_T.masked_fill(foreign_T, 0), self.weight)
        x_TH = x_TH.masked_fill(foreign_T.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter_rows(x_TH, self.group)
        return reduce_from(x_TH, self.group, in_place=True)

    def extra_repr(self) -> str:
        """Shapes of this rank, for people."""
        rows, hidden = self.weight.shape
        return f"{rows} of {rows * self.group.size} rows x {hidden}"


def vocab_logits(
    x_TH: Tensor,
    weight_VH: Tensor,
    group: Group = ALONE,
    *,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    sequence_parallel: bool = False,
    gather: bool = True,
) -> Tensor:
    """Logits from this rank's rows of the output layer: `[T, V/tp]`, or gathered `[T, V]`.

    `vocab_size` cuts the padding off gathered ones. Gathered logits are for a computation that
    every rank does alike: the gradient of each is taken from its own.
    """
    y_TV = column_product(x_TH, weight_VH, bias, group, sequence_parallel and group.size > 1)
    if not gather:
        return y_TV
    return gather_columns(y_TV, group)[..., :vocab_size]


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`x W^T + b`; the weight's gradient goes into its `GradientSum`, where it has one."""
    total = gradient_sum(weight_OI)
    if total is None:
        return F.linear(x_TI, weight_OI, bias_O)
    out: Tensor = _Linear.apply(x_TI, weight_OI, bias_O, total)  # type: ignore[no-untyped-call]
    return out


def column_product(
    x_TH: Tensor,
    weight_OH: Tensor,
    bias_O: Tensor | None,
    group: Group,
    sequence_parallel: bool = False,
    *,
    overlaps_gather: bool = False,
) -> Tensor:
    """`x W^T + b` with this rank's rows of W; x is the same on all ranks, or split by rows.

    Forward with `sequence_parallel`: the rows are gathered, and with `overlaps_gather` multiplied
    as they arrive. Backward: the sum (or the sum and scatter) of x's gradient is under way while
    the weight's is computed, and gathered rows are gathered again rather than kept, under way while
    x's gradient is computed.
    """
    if group.size == 1:
        return linear(x_TH, weight_OH, bias_O)
    gathers = (sequence_parallel, overlaps_gather)
    values = (x_TH, weight_OH, bias_O, group, gathers, gradient_sum(weight_OH))
    out: Tensor = _Column.apply(*values)  # type: ignore[no-untyped-call]
    return out


def multiply_as_gathered(
    x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None, group: Group
) -> Tensor:
    """`x W^T + b` of all ranks' rows; each rank's are multiplied while others are on their way."""
    rows, width = x_TH.shape[0], weight_OH.shape[0]
    y_TO = x_TH.new_empty(group.size * rows, width)
    for rank, part_TH in gather_in_parts(x_TH, group):
        place = y_TO[rank * rows : (rank + 1) * rows]
        if bias_O is None:
            torch.mm(part_TH, weight_OH.T, out=place)
        else:
            torch.addmm(bias_O, part_TH, weight_OH.T, out=place)
    return y_TO


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_OH: Tensor,
        bias_O: Tensor | None,
        group: Group,
        gathers: tuple[bool, bool],
        total: GradientSum | None,
    ) -> Tensor:
        ctx.save_for_backward(x_TH, weight_OH)
        sequence_parallel, overlaps_gather = gathers
        ctx.group, ctx.sequence_parallel, ctx.total = group, sequence_parallel, total
        if sequence_parallel and overlaps_gather and x_TH.dim() == 2:
            return multiply_as_gathered(x_TH, weight_OH, bias_O, group)
        if sequence_parallel:
            x_TH, work = start_gather(x_TH, group)
            work.wait()
        return F.linear(x_TH, weight_OH, bias_O)

    @staticmethod
    def backward(
        ctx: Any, g_TO: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x_TH, weight_OH = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        gathering = None
        if ctx.sequence_parallel and wants_weight:
            x_TH, gathering = start_gather(x_TH, ctx.group)
        gx_TH, summing = None, None
        if wants_x:
            gx_TH = g_TO.matmul(weight_OH)
            if ctx.sequence_parallel:
                gx_TH, summing = start_reduce_scatter(gx_TH, ctx.group)
            else:
                summing = start_sum(gx_TH, ctx.group)
        if gathering is not None:
            gathering.wait()
        gw_OH = None
        if wants_weight and ctx.total is not None:
            add_weight_gradient(ctx.total, g_TO, x_TH)
        elif wants_weight:
            gw_OH = g_TO.flatten(0, -2).T.matmul(x_TH.flatten(0, -2))
        gb_O = g_TO.flatten(0, -2).sum(0) if wants_bias else None
        if summing is not None:
            summing.wait()
        return gx_TH, gw_OH, gb_O, None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, total: GradientSum
    ) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.total = total
        return F.linear(x_TI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_TO: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x_TI, weight_OI = ctx.saved_tensors
        gx_TI = g_TO.matmul(weight_OI) if ctx.needs_input_grad[0] else None
        add_weight_gradient(ctx.total, g_TO, x_TI)
        gb_O = g_TO.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gx_TI, None, gb_O, None
