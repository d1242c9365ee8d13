"""The rank grid: which rank sits where on the tp, cp, ep, dp and pp axes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megtool.config import ParallelConfig

Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in Megatron's default order: tp fastest, then cp, then dp, and pp slowest.

    Experts share the same ranks under another view: expert-tp fastest, then ep, then expert-dp,
    and pp slowest. All methods take and return integers or integer arrays.
    """

    sizes: ParallelConfig

    def rank(
        self, *, tp: ArrayLike = 0, cp: ArrayLike = 0, dp: ArrayLike = 0, pp: ArrayLike = 0
    ) -> Ranks:
        """The rank at a position of the dense axes."""
        s = self.sizes
        return _compose((tp, cp, dp, pp), (s.tp, s.cp, s.dp, s.pp))

    def expert_rank(
        self, *, etp: ArrayLike = 0, ep: ArrayLike = 0, edp: ArrayLike = 0, pp: ArrayLike = 0
    ) -> Ranks:
        """The rank at a position of the expert axes."""
        s = self.sizes
        return _compose((etp, ep, edp, pp), (s.etp, s.ep, s.expert_dp, s.pp))

    def position(self, rank: ArrayLike) -> dict[str, Ranks]:
        """Where ranks sit on every axis: `tp cp dp pp`, and `etp ep edp` for their experts."""
        s = self.sizes
        dense = _decompose(rank, (s.tp, s.cp, s.dp, s.pp))
        expert = _decompose(rank, (s.etp, s.ep, s.expert_dp, s.pp))
        return dict(
            zip(("tp", "cp", "dp", "pp", "etp", "ep", "edp"), dense + expert[:3], strict=True)
        )


def _compose(digits: tuple[ArrayLike, ...], sizes: tuple[int, ...]) -> Ranks:
    out, step = np.zeros((), np.int64), 1
    for digit, size in zip(digits, sizes, strict=True):
        out = out + np.asarray(digit, np.int64) * step
        step *= size
    return out


def _decompose(rank: ArrayLike, sizes: tuple[int, ...]) -> list[Ranks]:
    rest, out = np.asarray(rank, np.int64), []
    for size in sizes:
        rest, digit = np.divmod(rest, size)
        out.append(digit)
    return out
