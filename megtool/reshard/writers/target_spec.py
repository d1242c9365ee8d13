"""What a reshard was asked for, and what it will write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megtool.checkpoint.catalogue import Destination
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.plan import Dropped, Fill
from megtool.config import ParallelConfig
from megtool.convert.dialects import TargetView
from megtool.dtypes import DType
from megtool.reshard.megatron.amax_report import AmaxReport, AmaxWish


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for.

    `layout` holds fields of ParallelConfig, None (or false) where nothing was said. `optimizer` is
    the format of optimizer state, None for the usual one of the target. `prove_all` compares all
    elements of what is left out as a copy of something else, not some.
    """

    to: str | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    prove_all: bool = False
    core_version: str | None = None
    bridge: bool = False
    dtype: DType | None = None
    max_shard_bytes: int | None = None
    compress: str | None = None
    renames: Sequence[str] = ()
    amax: AmaxWish = field(default_factory=AmaxWish)
    destination: Path = Path()


@dataclass(slots=True, kw_only=True)
class Target:
    """A destination laid out, and how it relates to the canonical tensors.

    A destination that holds a tensor several times places it under further names in
    `side.placements`; `copies` maps each to the canonical one. `moved` and `derived` name objects
    and parts of the common state that travel as they are, or are written anew. `finish(stage,
    threads)` is what is to be done to the staged files once all bytes are in them. `amax` is what
    became of FP8's delayed scaling state, where there is any.
    """

    format: str
    dialect: str
    parallel: ParallelConfig | None
    side: TargetView
    destination: Destination
    fills: list[Fill]
    copies: dict[str, str] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    is_file: bool = False
    sidecar_folder: str = ""
    finish: Callable[[Stage, int], None] | None = None
    amax: AmaxReport | None = None

    def account(
        self, moved: Iterable[str], derived: Iterable[str], dropped: Iterable[Dropped]
    ) -> None:
        """List objects, or parts of the common state, as what becomes of them."""
        self.moved += moved
        self.derived += derived
        self.dropped += dropped

    def store_under(self, names: Mapping[str, Sequence[str]]) -> None:
        """Let each stored tensor be written under all its `names`, the first of which is its own.

        Tensors that are not among them stay as they are.
        """
        placements = dict(self.side.placements)
        for canonical, p in self.side.placements.items():
            for k, name in enumerate(names.get(p.stored, ())[1:], 1):
                alias = f"{canonical}#{k}"
                placements[alias] = replace(p, stored=name)
                self.copies[alias] = canonical
        self.side = replace(self.side, placements=placements)
        self.fills += [
            replace(f, stored=name) for f in self.fills for name in names.get(f.stored, ())[1:]
        ]


def fill_of(placement: Any, value: float) -> Fill:
    """The box of a stored tensor that a placement of padding claims."""
    lo = tuple(placement.base)
    hi = tuple(b + n for b, n in zip(placement.base, placement.shape, strict=True))
    return Fill(stored=placement.stored, lo=lo, hi=hi, value=value)
