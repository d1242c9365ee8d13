"""The products of experts with FP8 operands, forward and backward.

Every expert has scales of its own, as in Transformer Engine's GroupedLinear: of its weight, of the
rows that it is given and of their gradients. Rows are laid out so that each expert's begin at a
multiple of what blocks and FP8 products need; the layout has a fixed size, and nothing waits for
counts on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megtool.kernels.dispatch import requested_implementation, use
from megtool.kernels.experts.grouped_gemm import add_expert_bias
from megtool.kernels.fp8.cast import (
    Kind,
    Quantized,
    cast_both,
    current_scale,
    quantize_both,
    quantize_squares,
    scale_from_amax,
)
from megtool.kernels.fp8.products import multiply_groups, multiply_rows
from megtool.kernels.wgrad_accumulation import GradientSum, gradient_sum
from megtool.number_formats.delayed_scaling import GRAD_OUTPUT, INPUT, WEIGHT
from megtool.optim.fp8.amax_history import AmaxHistories
from megtool.optim.fp8.config import Fp8Config
from megtool.optim.fp8.scaling import BLOCK, MX_BLOCK, Operand, StepScope, same_both_ways
from megtool.optim.fp8.weights import find_fp8_weight

_ALIGNMENT = 16  # rows of an expert, for FP8 products on CUDA


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Where each of R rows sorted by expert is in a layout of P rows: experts begin at multiples.

    `ids_P` is the expert of each row of the layout (E: of none), and experts end at `ends_E`.
    """

    places_R: Tensor
    ids_P: Tensor
    ends_E: Tensor

    @classmethod
    def of(cls, counts_E: Tensor, num_rows: int, multiple: int) -> ExpertRows:
        """The layout of `counts_E` rows of each expert, `num_rows` in all."""
        device, experts = counts_E.device, counts_E.shape[0]
        stops_E = counts_E.cumsum(0)
        ids_R = torch.searchsorted(stops_E, torch.arange(num_rows, device=device), right=True)
        if multiple == 1:
            places_R = torch.arange(num_rows, device=device)
            return cls(places_R, ids_R, stops_E.to(torch.int32))
        # An expert without rows has filler, so that every sum over rows has some.
        padded_E = ((counts_E + multiple - 1) // multiple).clamp_min(1) * multiple
        ends_E = padded_E.cumsum(0)
        shift_E = (ends_E - padded_E) - (stops_E - counts_E)
        places_R = torch.arange(num_rows, device=device) + shift_E[ids_R]
        total = (-(-num_rows // multiple) + experts) * multiple
        ids_P = torch.full((total,), experts, dtype=ids_R.dtype, device=device)
        return cls(places_R, ids_P.index_copy(0, places_R, ids_R), ends_E.to(torch.int32))

    def spread(self, rows_RI: Tensor) -> Tensor:
        """Rows in the layout, zeros between experts."""
        if self.ids_P.shape[0] == rows_RI.shape[0]:
            return rows_RI
        out = rows_RI.new_zeros(self.ids_P.shape[0], rows_RI.shape[1])
        return out.index_copy_(0, self.places_R, rows_RI)

    def collect(self, rows_PI: Tensor) -> Tensor:
        """The rows of a layout alone."""
        if self.ids_P.shape[0] == self.places_R.shape[0]:
            return rows_PI
        return rows_PI.index_select(0, self.places_R)

    def amaxes(self, rows_PI: Tensor, experts: int) -> Tensor:
        """The largest magnitude of each expert's rows, fp32 [E]; 0 where it has none."""
        # A row counts as a matrix of its own.
        largest_P, _, _ = current_scale(rows_PI.unsqueeze(1), "e4m3")
        out = torch.zeros(experts + 1, device=rows_PI.device)
        return out.scatter_reduce_(0, self.ids_P, largest_P, "amax")[:experts]


class ExpertScaling(ABC):
    """Casts the tensors of the same linear layer of all experts of a rank to FP8.

    `multiple` is what each expert's rows begin at; the other arguments are as in `Fp8Scaling`.
    """

    multiple = 1

    def __init__(self, scope: StepScope | None = None) -> None:
        self.scope = scope or StepScope()

    @abstractmethod
    def input(self, x_PI: Tensor, rows: ExpertRows, *, is_training: bool) -> Operand:
        """The operand of rows in a layout."""

    def weight(self, w_EOI: Tensor, *, is_training: bool) -> Operand:
        """The operand of the weights."""
        return self.scope.cast(self, partial(self.cast_weight, w_EOI, is_training=is_training))

    @abstractmethod
    def cast_weight(self, w_EOI: Tensor, *, is_training: bool) -> Operand:
        """Make the operand of the weights."""

    @abstractmethod
    def gradient(self, g_PO: Tensor, rows: ExpertRows) -> Operand:
        """The operand of the outputs' gradient."""


class TensorwiseExperts(ExpertScaling):
    """One scale for each expert's rows, weight and gradient: by their own amax."""

    def __init__(
        self,
        settings: Fp8Config,
        experts: int,
        device: torch.device | str,
        scope: StepScope | None = None,
    ) -> None:
        super().__init__(scope)
        self.settings, self.experts = settings, experts
        self.multiple = _ALIGNMENT if torch.device(device).type == "cuda" else 1

    def scales(
        self, amaxes_E: Tensor, direction: str, column: int, kind: Kind, *, is_training: bool
    ) -> Tensor:
        """The scale of each expert, fp32 [E]."""
        return scale_from_amax(amaxes_E, kind)

    def note_weights(self, amaxes_E: Tensor, *, is_training: bool) -> None:
        """Note the magnitudes of weights that are FP8 already."""

    def input(self, x_PI: Tensor, rows: ExpertRows, *, is_training: bool) -> Operand:
        return self._rows(x_PI, rows, "fwd", INPUT, self.settings.forward, is_training=is_training)

    def gradient(self, g_PO: Tensor, rows: ExpertRows) -> Operand:
        kind = self.settings.backward
        return self._rows(g_PO, rows, "bwd", GRAD_OUTPUT, kind, is_training=True)

    def cast_weight(self, w_EOI: Tensor, *, is_training: bool) -> Operand:
        kind, fp8_weight = self.settings.forward, find_fp8_weight(w_EOI)
        if fp8_weight is not None:
            self.note_weights(fp8_weight.amax, is_training=is_training)
            return same_both_ways(fp8_weight.values)
        amaxes_E, _, _ = current_scale(w_EOI, kind)
        scale_E = self.scales(amaxes_E, "fwd", WEIGHT, kind, is_training=is_training)
        data, turned, _ = cast_both(w_EOI, scale_E, kind)
        scale_inv = scale_E.reciprocal().view(-1, 1, 1)
        return Operand(
            rows=Quantized(data=data, scale_inv=scale_inv),
            columns=Quantized(data=turned, scale_inv=scale_inv),
        )

    def _rows(
        self,
        x_PI: Tensor,
        rows: ExpertRows,
        direction: str,
        column: int,
        kind: Kind,
        *,
        is_training: bool,
    ) -> Operand:
        amaxes_E = rows.amaxes(x_PI, self.experts)
        scale_E = self.scales(amaxes_E, direction, column, kind, is_training=is_training)
        scale_P1 = torch.cat((scale_E, scale_E.new_ones(1)))[rows.ids_P].unsqueeze(1)
        (data, turned, _), scale_inv = cast_both(x_PI, scale_P1, kind), scale_P1.reciprocal()
        return Operand(
            rows=Quantized(data=data, scale_inv=scale_inv),
            columns=Quantized(data=turned, scale_inv=scale_inv.t()),
        )


class DelayedExperts(TensorwiseExperts):
    """One scale for each expert's tensors from earlier steps; see `DelayedScaling`.

    An expert that no step of the history has given rows is scaled by the amax of its own.
    """

    def __init__(
        self,
        histories: AmaxHistories,
        modules: range,
        device: torch.device | str,
        scope: StepScope | None = None,
    ) -> None:
        super().__init__(histories.settings, len(modules), device, scope)
        self.histories, self.modules = histories, slice(modules.start, modules.stop)

    def scales(
        self, amaxes_E: Tensor, direction: str, column: int, kind: Kind, *, is_training: bool
    ) -> Tensor:
        histories, modules = self.histories, self.modules
        current_E = scale_from_amax(amaxes_E, kind, margin=self.settings.fp8_margin)
        known_E = histories.is_known[direction][modules, column]
        # A copy, since what is saved for backward must not change at the end of the step.
        scale_E = torch.where(known_E, histories.scale[direction][modules, column], current_E)
        if is_training:
            histories.record(modules, direction, column, amaxes_E)
        return scale_E

    def note_weights(self, amaxes_E: Tensor, *, is_training: bool) -> None:
        if is_training:
            self.histories.record(self.modules, "fwd", WEIGHT, amaxes_E)


class BlockwiseExperts(ExpertScaling):
    """Powers of two for blocks along the summed dim: see `BlockwiseScaling` and `MxScaling`."""

    def __init__(self, settings: Fp8Config, scope: StepScope | None = None) -> None:
        super().__init__(scope)
        self.settings = settings
        self.multiple = MX_BLOCK if settings.fp8_recipe == "mxfp8" else BLOCK

    def input(self, x_PI: Tensor, rows: ExpertRows, *, is_training: bool) -> Operand:
        return self._both_ways(x_PI, self.settings.forward)

    def gradient(self, g_PO: Tensor, rows: ExpertRows) -> Operand:
        return self._both_ways(g_PO, self.settings.backward)

    def cast_weight(self, w_EOI: Tensor, *, is_training: bool) -> Operand:
        if self.multiple == MX_BLOCK:
            return self._both_ways(w_EOI, self.settings.forward)
        fp8_weight = find_fp8_weight(w_EOI)
        if fp8_weight is not None:
            return same_both_ways(fp8_weight.values)
        rows, columns = quantize_squares(w_EOI, self.settings.forward, block=BLOCK)
        return Operand(rows=rows, columns=columns)

    def _both_ways(self, x: Tensor, kind: Kind) -> Operand:
        rows, columns = quantize_both(x, kind, group=self.multiple)
        return Operand(rows=rows, columns=columns)


def expert_product(
    rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, scaling: ExpertScaling
) -> Tensor:
    """`x W[e]^T` for rows sorted by expert, in x's dtype, from FP8 operands, and both gradients."""
    has_grad = torch.is_grad_enabled()
    args = (rows_RI, weight_EOI, counts_E, scaling, has_grad, gradient_sum(weight_EOI))
    out: Tensor = _ExpertProduct.apply(*args)  # type: ignore[no-untyped-call]
    return out


def expert_linear(
    rows_RI: Tensor,
    weight_EOI: Tensor,
    counts_E: Tensor,
    bias_EO: Tensor | None,
    *,
    scaling: ExpertScaling,
) -> Tensor:
    """`expert_product`, and each expert's bias."""
    y_RO = expert_product(rows_RI, weight_EOI, counts_E, scaling)
    return y_RO if bias_EO is None else add_expert_bias(y_RO, counts_E, bias_EO)


class _ExpertProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RI: Tensor,
        weight_EOI: Tensor,
        counts_E: Tensor,
        scaling: ExpertScaling,
        is_training: bool,
        total: GradientSum | None,
    ) -> Tensor:
        layout = ExpertRows.of(counts_E, rows_RI.shape[0], scaling.multiple)
        rows = scaling.input(layout.spread(rows_RI), layout, is_training=is_training)
        weight = scaling.weight(weight_EOI, is_training=is_training)
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        saved: list[Tensor | None] = [None] * 4
        if wants_rows:
            saved[:2] = weight.columns.data, weight.columns.scale_inv
        if wants_weight:
            saved[2:] = rows.columns.data, rows.columns.scale_inv
        ctx.save_for_backward(*saved, layout.places_R, layout.ids_P, layout.ends_E)
        ctx.blocks = weight.columns.block, rows.columns.block
        ctx.scaling, ctx.dtype, ctx.asked = scaling, weight_EOI.dtype, requested_implementation()
        ctx.total = total
        ends_E, dtype = layout.ends_E, rows_RI.dtype
        return layout.collect(multiply_groups(rows.rows, weight.rows, ends_E, dtype, fast=True))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, g_RO: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        weight, weight_scale, rows, rows_scale, places_R, ids_P, ends_E = ctx.saved_tensors
        of_weight, of_rows = ctx.blocks
        layout = ExpertRows(places_R, ids_P, ends_E)
        with use(ctx.asked):
            grad = ctx.scaling.gradient(layout.spread(g_RO.contiguous()), layout)
        g_rows_RI = g_weight_EOI = None
        if weight is not None:
            q = Quantized(data=weight, scale_inv=weight_scale, block=of_weight)
            g_rows_RI = layout.collect(multiply_groups(grad.rows, q, ends_E, g_RO.dtype))
        if rows is not None:
            q = Quantized(data=rows, scale_inv=rows_scale, block=of_rows)
            g_weight_EOI = multiply_rows(grad.columns, q, ends_E, ctx.dtype)
            if ctx.total is not None:
                main_EOI, overwrite = ctx.total.begin()
                (main_EOI.copy_ if overwrite else main_EOI.add_)(g_weight_EOI)
                ctx.total.end()
                g_weight_EOI = None
        return g_rows_RI, g_weight_EOI, None, None, None, None


def make_expert_scaling(
    settings: Fp8Config,
    experts: int,
    device: torch.device | str,
    *,
    histories: AmaxHistories | None = None,
    first: int = 0,
    scope: StepScope | None = None,
) -> ExpertScaling:
    """The scaling of a linear layer of a rank's experts, which are modules `first` and on of
    `histories` with the recipe `delayed`."""
    if histories is not None:
        return DelayedExperts(histories, range(first, first + experts), device, scope)
    if settings.fp8_recipe == "tensorwise":
        return TensorwiseExperts(settings, experts, device, scope)
    return BlockwiseExperts(settings, scope)
