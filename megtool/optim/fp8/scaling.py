"""The FP8 operands of a linear layer's three products, by recipe.

A weight that is FP8 alone is used as it is (`optim.fp8.fp8_weights`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from megtool.kernels.fp8.cast import (
    Kind,
    Quantized,
    cast_both,
    current_scale,
    quantize_both,
    quantize_squares,
    record_amax,
    scale_from_amax,
)
from megtool.number_formats.delayed_scaling import GRAD_OUTPUT, INPUT, WEIGHT
from megtool.optim.fp8.amax_history import AmaxHistories
from megtool.optim.fp8.config import Fp8Config
from megtool.optim.fp8.weights import find_fp8_weight
from megtool.parallel.collectives import all_max
from megtool.parallel.process_groups import ALONE, Group

BLOCK, MX_BLOCK = 128, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A matrix in FP8: `rows` as it is, `columns` transposed; scaled along what is summed over."""

    rows: Quantized
    columns: Quantized


class StepScope:
    """The passes of one step of the optimizer, over which the casts of weights are kept.

    Outside of `begin` and `end` every pass casts weights anew.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._casts: dict[int, Operand] = {}

    def begin(self) -> None:
        """Begin a step; the weights have their values, or get them before they are used."""
        self._is_open = True

    def end(self) -> None:
        """End a step, and let go of its casts."""
        self._is_open = False
        self._casts.clear()

    def cast(self, owner: object, make: Callable[[], Operand]) -> Operand:
        """The operand of the weight of a layer's scaling, made at its first use in the step."""
        if not self._is_open:
            return make()
        if id(owner) not in self._casts:
            self._casts[id(owner)] = make()
        return self._casts[id(owner)]


class Fp8Scaling(ABC):
    """Casts the tensors of one linear layer to FP8.

    `is_training`: record the amax, if the recipe has a history. The ranks of `group` have other
    rows each of one input: a scale for all of them comes from their common amax. `scope` keeps the
    operand of the weight over the micro-batches of a step.
    """

    group: Group = ALONE

    def __init__(self, scope: StepScope | None = None) -> None:
        self.scope = scope or StepScope()

    @abstractmethod
    def input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        """The operand of the input."""

    def weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        """The operand of the weight."""
        return self.scope.cast(self, partial(self.cast_weight, w_OI, is_training=is_training))

    @abstractmethod
    def cast_weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        """Make the operand of the weight."""

    @abstractmethod
    def gradient(self, g_TO: Tensor) -> Operand:
        """The operand of the output's gradient."""


class TensorwiseScaling(Fp8Scaling):
    """Current scaling: each tensor by its own amax."""

    def __init__(self, settings: Fp8Config, scope: StepScope | None = None) -> None:
        super().__init__(scope)
        self.settings = settings

    def input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        return self._quantize(x_TI, self.settings.forward, self.group)

    def cast_weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        fp8_weight = find_fp8_weight(w_OI)
        if fp8_weight is not None:
            return same_both_ways(fp8_weight.values)
        return self._quantize(w_OI, self.settings.forward, ALONE)

    def gradient(self, g_TO: Tensor) -> Operand:
        return self._quantize(g_TO, self.settings.backward, self.group)

    def _quantize(self, x_MN: Tensor, kind: Kind, group: Group) -> Operand:
        largest, scale, scale_inv = current_scale(x_MN, kind)
        if group.size > 1:
            scale = scale_from_amax(all_max(largest, group), kind)
            scale_inv = scale.reciprocal()
        rows, columns, _ = cast_both(x_MN, scale, kind)
        return Operand(
            rows=Quantized(data=rows, scale_inv=scale_inv),
            columns=Quantized(data=columns, scale_inv=scale_inv),
        )


class BlockwiseScaling(Fp8Scaling):
    """Scales that are powers of two: for 128 elements along the summed dim, or 128 x 128 of
    weights.

    Inputs and gradients are summed over both dims, and quantized once for each from the original
    values.
    """

    block = BLOCK

    def __init__(self, settings: Fp8Config, scope: StepScope | None = None) -> None:
        super().__init__(scope)
        self.settings = settings

    def input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        return self._both_ways(x_TI, self.settings.forward)

    def cast_weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        fp8_weight = find_fp8_weight(w_OI)
        if fp8_weight is not None:
            return same_both_ways(fp8_weight.values)
        rows, columns = quantize_squares(w_OI, self.settings.forward, block=BLOCK)
        return Operand(rows=rows, columns=columns)

    def gradient(self, g_TO: Tensor) -> Operand:
        return self._both_ways(g_TO, self.settings.backward)

    def _both_ways(self, x_MN: Tensor, kind: Kind) -> Operand:
        rows, columns = quantize_both(x_MN, kind, group=self.block)
        return Operand(rows=rows, columns=columns)


class MxScaling(BlockwiseScaling):
    """MXFP8: a power of two (E8M0) for 32 elements along the summed dim, of every operand."""

    block = MX_BLOCK

    def cast_weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        return self._both_ways(w_OI, self.settings.forward)


class DelayedScaling(Fp8Scaling):
    """One scale for each tensor from earlier steps, or from its own values in the first step.

    Transformer Engine starts with scales of 1, with which small weights lose most of their bits in
    the first step; here the first step is scaled as with `tensorwise`.
    """

    def __init__(
        self, histories: AmaxHistories, module: int, scope: StepScope | None = None
    ) -> None:
        super().__init__(scope)
        self.histories, self.module = histories, module
        self.settings = histories.settings

    def input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        return self._cast(x_TI, "fwd", INPUT, self.settings.forward, is_training)

    def cast_weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        fp8_weight = find_fp8_weight(w_OI)
        if fp8_weight is None:
            return self._cast(w_OI, "fwd", WEIGHT, self.settings.forward, is_training)
        if is_training:
            self.histories.record(self.module, "fwd", WEIGHT, fp8_weight.amax)
        return same_both_ways(fp8_weight.values)

    def gradient(self, g_TO: Tensor) -> Operand:
        return self._cast(g_TO, "bwd", GRAD_OUTPUT, self.settings.backward, True)

    def _cast(
        self, x_MN: Tensor, direction: str, column: int, kind: Kind, is_training: bool
    ) -> Operand:
        histories, module = self.histories, self.module
        if histories.is_fresh[module]:
            margin = self.settings.fp8_margin
            largest, scale, _ = current_scale(x_MN, kind, margin=margin)
            if column != WEIGHT and self.group.size > 1:
                scale = scale_from_amax(all_max(largest, self.group), kind, margin=margin)
        else:
            scale = histories.scale[direction][module, column]
        rows, columns, parts = cast_both(x_MN, scale, kind)
        current = histories.current(module, direction, column) if is_training else None
        # What is saved for backward is no view of the scales, which change at the end of the step.
        scale_inv = record_amax(parts, scale, current)
        return Operand(
            rows=Quantized(data=rows, scale_inv=scale_inv),
            columns=Quantized(data=columns, scale_inv=scale_inv),
        )


def make_scaling(
    settings: Fp8Config,
    *,
    histories: AmaxHistories | None = None,
    module: int = 0,
    scope: StepScope | None = None,
) -> Fp8Scaling:
    """The scaling of a linear layer, which is `module` of `histories` with the recipe `delayed`."""
    if histories is not None:
        return DelayedScaling(histories, module, scope)
    kinds: dict[str | None, Callable[[Fp8Config, StepScope | None], Fp8Scaling]] = {
        "tensorwise": TensorwiseScaling,
        "blockwise": BlockwiseScaling,
        "mxfp8": MxScaling,
    }
    return kinds[settings.fp8_recipe](settings, scope)


def same_both_ways(q: Quantized) -> Operand:
    """Return the operand of a weight in FP8; products of GPUs take its transpose contiguous."""
    data = q.data.transpose(-1, -2)
    if data.is_cuda:
        data = data.contiguous()
    scale_inv = q.scale_inv if q.block == (0, 0) else q.scale_inv.transpose(-1, -2)
    return Operand(rows=q, columns=Quantized(data=data, scale_inv=scale_inv, block=q.block))
