"""Options of a run's parallel layout: sizes, the split of tokens and layers, and exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megtool.options.field import LAYOUT, layout_size, option
from megtool.options.groups import ContextParallelism
from megtool.options.layout import LayoutOptions, ParallelConfig


@dataclass(frozen=True, kw_only=True)
class TrainLayoutOptions(LayoutOptions, ContextParallelism):
    """The layout of the ranks that train, which torchrun starts.

    Raises:
        LayoutError: the sizes do not fit each other.
    """

    restated: ClassVar = {
        "tp": layout_size("tp", 1, note=", started by torchrun"),
        "pp": layout_size("pp", 1),
        "ep": layout_size("ep", 1),
        "cp": layout_size("cp", 1, alias="--context-parallel-size"),
        "dp": layout_size("dp", note="; default: all remaining processes"),
    }
    shown_after: ClassVar = {"encoder_pp": "pp", "sequence_parallel": "dp"}

    sequence_parallel: bool = option(
        LAYOUT, "Split tokens over the --tp ranks between layers.", False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.layout

    @property
    def layout(self) -> ParallelConfig:
        """The parallel layout; `dp` is the least that fits until `fit` fills the processes."""
        return ParallelConfig(**self.explicit() | self.context_layout)
