"""The FP8 operands of a linear layer's three products, by recipe.

A weight that is FP8 alone is used as it is (`optim.fp8.fp8_weights`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megtool.kernels.fp8.cast import (
    Kind,
    Quantized,
    amax,
    cast_fp8,
    quantize_blocks,
    quantize_tensor,
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


class Fp8Scaling(ABC):
    """Casts the tensors of one linear layer to FP8.

    `is_training`: record the amax, if the recipe has a history. The ranks of `group` have other
    rows each of one input: a scale for all of them comes from their common amax.
    """

    group: Group = ALONE

    @abstractmethod
    def input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        """The operand of the input."""

    @abstractmethod
    def weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        """The operand of the weight."""

    @abstractmethod
    def gradient(self, g_TO: Tensor) -> Operand:
        """The operand of the output's gradient."""


class TensorwiseScaling(Fp8Scaling):
    """Current scaling: each tensor by its own amax."""

    def __init__(self, settings: Fp8Config) -> None:
        self.settings = settings

    def input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        return self._quantize(x_TI, self.settings.forward)

    def weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        fp8_weight = find_fp8_weight(w_OI)
        if fp8_weight is not None:
            return _same_both_ways(fp8_weight.values)
        return _same_both_ways(quantize_tensor(w_OI, self.settings.forward))

    def gradient(self, g_TO: Tensor) -> Operand:
        return self._quantize(g_TO, self.settings.backward)

    def _quantize(self, rows: Tensor, kind: Kind) -> Operand:
        scale = scale_from_amax(all_max(amax(rows), self.group), kind)
        data, _ = cast_fp8(rows, scale, kind)
        return _same_both_ways(Quantized(data=data, scale_inv=scale.reciprocal()))


class BlockwiseScaling(Fp8Scaling):
    """Scales that are powers of two: for 128 elements along the summed dim, or 128 x 128 of
    weights.

    Inputs and gradients are summed over both dims, and quantized once for each from the original
    values.
    """

    block = BLOCK

    def __init__(self, settings: Fp8Config) -> None:
        self.settings = settings

    def input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        return self._both_ways(x_TI, self.settings.forward)

    def weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        block, fp8_weight = (BLOCK, BLOCK), find_fp8_weight(w_OI)
        if fp8_weight is not None:
            q = fp8_weight.values
        else:
            q = quantize_blocks(w_OI, self.settings.forward, block=block, power_of_two=True)
        turned = Quantized(data=q.data.t(), scale_inv=q.scale_inv.t(), block=block)
        return Operand(rows=q, columns=turned)

    def gradient(self, g_TO: Tensor) -> Operand:
        return self._both_ways(g_TO, self.settings.backward)

    def _both_ways(self, x_MN: Tensor, kind: Kind) -> Operand:
        rows, columns = (
            quantize_blocks(x, kind, block=(1, self.block), power_of_two=True)
            for x in (x_MN, x_MN.t())
        )
        return Operand(rows=rows, columns=columns)


class MxScaling(BlockwiseScaling):
    """MXFP8: a power of two (E8M0) for 32 elements along the summed dim, of every operand."""

    block = MX_BLOCK

    def weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        return self._both_ways(w_OI, self.settings.forward)


class DelayedScaling(Fp8Scaling):
    """One scale for each tensor from earlier steps, or from its own values in the first step.

    Transformer Engine starts with scales of 1, with which small weights lose most of their bits in
    the first step; here the first step is scaled as with `tensorwise`.
    """

    def __init__(self, histories: AmaxHistories, module: int) -> None:
        self.histories, self.module = histories, module
        self.settings = histories.settings

    def input(self, x_TI: Tensor, *, is_training: bool) -> Operand:
        return self._cast(x_TI, "fwd", INPUT, self.settings.forward, is_training)

    def weight(self, w_OI: Tensor, *, is_training: bool) -> Operand:
        fp8_weight = find_fp8_weight(w_OI)
        if fp8_weight is None:
            return self._cast(w_OI, "fwd", WEIGHT, self.settings.forward, is_training)
        if is_training:
            self.histories.record(self.module, "fwd", WEIGHT, fp8_weight.amax)
        return _same_both_ways(fp8_weight.values)

    def gradient(self, g_TO: Tensor) -> Operand:
        return self._cast(g_TO, "bwd", GRAD_OUTPUT, self.settings.backward, True)

    def _cast(
        self, x_MN: Tensor, direction: str, column: int, kind: Kind, is_training: bool
    ) -> Operand:
        histories, module = self.histories, self.module
        if histories.is_fresh[module]:
            largest = amax(x_MN) if column == WEIGHT else all_max(amax(x_MN), self.group)
            scale = scale_from_amax(largest, kind, margin=self.settings.fp8_margin)
        else:
            # A copy, since what is saved for backward must not change at the end of the step.
            scale = histories.scale[direction][module, column].clone()
        data, largest = cast_fp8(x_MN, scale, kind)
        if is_training:
            histories.record(module, direction, column, largest)
        return _same_both_ways(Quantized(data=data, scale_inv=scale.reciprocal()))


def make_scaling(
    settings: Fp8Config, *, histories: AmaxHistories | None = None, module: int = 0
) -> Fp8Scaling:
    """The scaling of a linear layer, which is `module` of `histories` with the recipe `delayed`."""
    if histories is not None:
        return DelayedScaling(histories, module)
    kinds: dict[str | None, Callable[[Fp8Config], Fp8Scaling]] = {
        "tensorwise": TensorwiseScaling,
        "blockwise": BlockwiseScaling,
        "mxfp8": MxScaling,
    }
    return kinds[settings.fp8_recipe](settings)


def _same_both_ways(q: Quantized) -> Operand:
    return Operand(rows=q, columns=Quantized(data=q.data.t(), scale_inv=q.scale_inv))
