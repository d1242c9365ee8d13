"""Element by element: master weights against weights, and Adam's two moments against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megtool.audit.element_sums import Workspace
from megtool.audit.save_facts import (
    FIRST_MOMENT,
    MAIN,
    SECOND_MOMENT,
    WEIGHT,
    PairFacts,
    TrainingFacts,
)
from megtool.dtypes import DType
from megtool.transport.cast import numeric_values
from megtool.transport.strided import Array

_DEFAULT_BETAS = (0.9, 0.999)
_SLACK = 1.1  # moments may be rounded to 16 bits
_TINY = 1e-30  # squares below it may have lost their bits

Chunk = tuple[str, Array, DType]


@dataclass(frozen=True, slots=True)
class PairCheck:
    """What may not be.

    Adam's moments are sums of the same gradients: m = (1 - b1) sum(b1^i g_i) and
    v = (1 - b2) sum(b2^i g_i^2). By the Cauchy-Schwarz inequality m^2 is at most limit * v,
    `limit` = (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2)), for any gradients, wherever b1^2 < b2.
    `has_masters` is false where weights are quantized: how those are rounded is not known.
    """

    limit: float
    has_masters: bool

    @classmethod
    def of(cls, training: TrainingFacts) -> PairCheck:
        """The check for a run's settings; Adam's usual ones where a save does not say them."""
        first, second = training.betas or _DEFAULT_BETAS
        limit = math.inf
        if 0 <= first < 1 and 0 < second < 1 and first * first < second:
            limit = (1 - first) ** 2 / ((1 - second) * (1 - first * first / second))
        return cls(limit * _SLACK, not training.is_low_precision)

    def add(self, facts: PairFacts, chunks: Sequence[Chunk], workspace: Workspace) -> None:
        """Compare the same elements of several states, as stored."""
        by_state = {state: (array, kind) for state, array, kind in chunks}
        weight, main = by_state.get(WEIGHT), by_state.get(MAIN)
        if weight is not None and main is not None and self.has_masters:
            self._compare_masters(facts, *main, *weight, workspace)
        first, second = by_state.get(FIRST_MOMENT), by_state.get(SECOND_MOMENT)
        if first is not None and second is not None and math.isfinite(self.limit):
            self._compare_moments(facts, first, second, workspace)

    def _compare_masters(
        self,
        facts: PairFacts,
        main: Array,
        main_kind: DType,
        weight: Array,
        kind: DType,
        workspace: Workspace,
    ) -> None:
        if main_kind.name != "float32" or kind.name not in ("bfloat16", "float16", "float32"):
            return
        facts.compared_masters += main.size
        if kind.name == "bfloat16":
            bits = main.view("<u4")
            rounded, _ = workspace.scratch(main.size)
            np.right_shift(bits, 16, out=rounded)
            np.bitwise_and(rounded, 1, out=rounded)
            np.add(rounded, 0x7FFF, out=rounded)
            np.add(rounded, bits, out=rounded)
            np.right_shift(rounded, 16, out=rounded)
            differ = rounded != weight.view("<u2")
        elif kind.name == "float16":
            with np.errstate(over="ignore"):
                differ = main.view("<f4").astype("<f2").view("<u2") != weight.view("<u2")
        else:
            differ = main.view("<u4") != weight.view("<u4")
        if differ.any():
            a = numeric_values(main[differ], main_kind)
            b = numeric_values(weight[differ], kind)
            is_same = (a == b) | (np.isnan(a) & np.isnan(b))  # zeros of either sign
            facts.unequal_masters += int((~is_same).sum())

    def _compare_moments(
        self,
        facts: PairFacts,
        first: tuple[Array, DType],
        second: tuple[Array, DType],
        workspace: Workspace,
    ) -> None:
        kinds = (first[1], second[1])
        if any(not k.is_float or k.itemsize < 2 for k in kinds):
            return
        m = numeric_values(*first).astype("<f4", copy=False)
        v = numeric_values(*second).astype("<f4", copy=False)
        facts.compared_moments += m.size
        with np.errstate(all="ignore"):
            squares, limits = (a.view("<f4") for a in workspace.scratch(m.size))
            np.multiply(m, m, out=squares)
            np.multiply(v, np.float32(self.limit), out=limits)
            limits += np.float32(_TINY)
            facts.large_first_moments += int(np.count_nonzero(squares > limits))
