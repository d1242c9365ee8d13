"""Amax: FP8's delayed scaling looked over, put right, made use of, and cleared away."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from megtool.quant.static_scales import derive_amax
from megtool.reshard.fp8_state.inspect import inspect_amax
from megtool.reshard.fp8_state.rewrite import Options, rewrite
from megtool.reshard.report import ReshardReport

__all__ = ["derive_amax", "fix_amax", "inspect_amax", "strip_amax"]


def fix_amax(
    source: str | Path, destination: str | Path, **options: Unpack[Options]
) -> ReshardReport:
    """Write `source` to `destination` with FP8 scaling that its weights do not contradict.

    The weights of all modules with a state are read once. Where a weight's scale does not reach it,
    or is that of another weight (the random one that training began with), its history and scale
    are those of the weight as it is; so are rows that a change of dtype left in histories of
    Transformer Engine 1.x. Numbers that are none leave the histories, and scales that contradict
    theirs are computed again. All else is copied. `reshard(amax="rebuild")` does the same on the
    way to another layout.

    Raises:
        UsageError: there is no FP8 state in it.
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    return rewrite(Path(source), Path(destination), "rebuild", **options)


def strip_amax(
    source: str | Path, destination: str | Path, **options: Unpack[Options]
) -> ReshardReport:
    """Write `source` to `destination` without the extra states that hold nothing.

    Those that Megatron asks for under its default strictness stay, as small as they can be.

    Raises:
        UsageError: there are no extra states in it.
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    return rewrite(Path(source), Path(destination), "strip", **options)
