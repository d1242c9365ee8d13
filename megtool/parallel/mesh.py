"""The rank grid: the position of each rank on the tp, cp, ep, dp and pp axes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig

Ranks = NDArray[np.int64]
MEGATRON_ORDER = "tp-cp-ep-dp-pp"
PIPELINE_BEFORE_DATA = "tp-cp-ep-pp-dp"  # Megatron's --use-tp-pp-dp-mapping
_AXES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks on the axes of a layout, the first axis of `order` fastest.

    `order` is Megatron's (`RankGenerator` in `core/parallel_state.py`, megatron-core 0.16): names
    of axes with `-` between them; axes of size 1 may be left out. Dense parameters see the axes
    tp, cp, dp and pp in this order. Experts share the same ranks under another view: etp in the
    place of tp, then ep and expert-dp in theirs; cp is no axis of theirs. All methods take and
    return integers or integer arrays.

    Raises:
        LayoutError: the order names another axis, one twice, or leaves one out whose size is not 1;
            or experts and dense parameters would see other pipeline stages, as they do where pp is
            not last and they have different numbers of replicas.
    """

    sizes: ParallelConfig
    order: str = MEGATRON_ORDER

    def __post_init__(self) -> None:
        names = self.order.lower().split("-")
        if set(names) - set(_AXES) or len(set(names)) != len(names):
            raise LayoutError(
                f"the order of axes is {self.order!r}",
                hint=f"each of {', '.join(_AXES)} once, for example {MEGATRON_ORDER}",
            )
        s = self.sizes
        taken_sizes = {"tp": max(s.tp, s.etp), "cp": s.cp, "ep": s.ep, "pp": s.pp}
        taken_sizes["dp"] = max(s.dp, s.expert_dp)
        for name in _AXES:
            if name not in names and taken_sizes[name] > 1:
                raise LayoutError(
                    f"the order of axes {self.order!r} leaves out {name}={taken_sizes[name]}",
                    hint=f"for example {MEGATRON_ORDER}",
                )
        if s.world_size > s.pp > 1 and not self._same_stages():
            raise LayoutError(
                f"the order of axes {self.order!r} gives experts different pipeline stages from "
                "the "
                f"rest: dp={s.dp}, and ep={s.ep} x etp={s.etp} leave {s.expert_dp} replicas",
                hint="end the order with pp, or give both the same number of replicas",
            )

    def rank(
        self, *, tp: ArrayLike = 0, cp: ArrayLike = 0, dp: ArrayLike = 0, pp: ArrayLike = 0
    ) -> Ranks:
        """The rank at a position of the dense axes."""
        coordinates = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        axes = self._dense()
        return _compose(
            tuple(coordinates[name] for name, _ in axes), tuple(size for _, size in axes)
        )

    def expert_rank(
        self, *, etp: ArrayLike = 0, ep: ArrayLike = 0, edp: ArrayLike = 0, pp: ArrayLike = 0
    ) -> Ranks:
        """The rank at a position of the expert axes."""
        coordinates = {"etp": etp, "ep": ep, "edp": edp, "pp": pp}
        axes = self._expert()
        return _compose(
            tuple(coordinates[name] for name, _ in axes), tuple(size for _, size in axes)
        )

    def position(self, rank: ArrayLike) -> dict[str, Ranks]:
        """Where ranks sit on every axis: `tp cp dp pp`, and `etp ep edp` for their experts."""
        out: dict[str, Ranks] = {}
        for axes in (self._expert(), self._dense()):
            digits = _decompose(rank, tuple(size for _, size in axes))
            out |= dict(zip((name for name, _ in axes), digits, strict=True))
        return out

    def _dense(self) -> list[tuple[str, int]]:
        """The axes of dense parameters, the fastest first."""
        s = self.sizes
        sizes = {"tp": s.tp, "cp": s.cp, "dp": s.dp, "pp": s.pp}
        return [(name, sizes[name]) for name in self._names() if name in sizes]

    def _expert(self) -> list[tuple[str, int]]:
        """The axes of experts, the fastest first."""
        s = self.sizes
        sizes = {"tp": ("etp", s.etp), "ep": ("ep", s.ep), "dp": ("edp", s.expert_dp)}
        sizes["pp"] = ("pp", s.pp)
        return [sizes[name] for name in self._names() if name in sizes]

    def _names(self) -> list[str]:
        names = self.order.lower().split("-")
        return names + [name for name in _AXES if name not in names]

    def _same_stages(self) -> bool:
        """Whether both views give every rank the same stage.

        Megatron asks for equal replicas where pp is not last; what matters is how many ranks one
        step of pp is, and that the number of ranks below pp is the same in both views.
        """
        strides = []
        for axes in (self._dense(), self._expert()):
            pp_index = [name for name, _ in axes].index("pp")
            strides.append(int(np.prod([size for _, size in axes[:pp_index]], dtype=np.int64)))
        return strides[0] == strides[1]


def _compose(digits: tuple[ArrayLike, ...], sizes: tuple[int, ...]) -> Ranks:
    out, step = np.zeros((), np.int64), 1
    for digit, size in zip(digits, sizes, strict=True):
        out = out + np.asarray(digit, np.int64) * step
        step *= size
    return out


def _decompose(rank: ArrayLike, sizes: tuple[int, ...]) -> list[Ranks]:
    quotient, out = np.asarray(rank, np.int64), []
    for size in sizes:
        quotient, digit = np.divmod(quotient, size)
        out.append(digit)
    return out
