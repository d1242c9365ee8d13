"""Options of the commands of `megtool amax`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megtool.options.execution import WITHOUT_CHECKS, ExecutionOptions
from megtool.options.field import argument, group, option
from megtool.options.groups import (
    INPUT,
    OUTPUT,
    SOURCE,
    DryRun,
    ForeignObjects,
    ScanShare,
    SourceOptions,
    ThreadCount,
)


@dataclass(frozen=True, kw_only=True)
class InspectAmaxOptions(ThreadCount, ScanShare):
    """Show every module's FP8 scaling, and what is wrong with it.

    Reads Transformer Engine's extra states of any release, without it and without running their
    pickles, and the amax buffers of ModelOpt's quantizers. Exit status 7 if something is wrong.

    Example: megtool amax inspect ./checkpoints/fp8-run
    """

    source: Path = argument(SOURCE, "SRC")
    weights: bool = option(INPUT, "Compare with the weights, which are read.", True)
    modules: bool = option(OUTPUT, "List every module and finding.", False)
    iteration: str | None = option(
        INPUT, "Iteration of a save folder; default: the latest.", metavar="N"
    )


@dataclass(frozen=True, kw_only=True)
class RewriteAmaxOptions(ForeignObjects):
    """What `amax fix` and `amax strip` take."""

    not_offered: ClassVar = WITHOUT_CHECKS

    source: Path = argument(SOURCE, "SRC")
    destination: Path = argument(
        "The new checkpoint; it appears when complete.", "DST", is_written=True
    )
    reading: SourceOptions = group(SourceOptions)
    execution: ExecutionOptions = group(ExecutionOptions)


@dataclass(frozen=True, kw_only=True)
class FixAmaxOptions(RewriteAmaxOptions):
    """Rebuild FP8 scaling that contradicts the weights, and copy everything else.

    Histories and scales that belong to another weight, such as the random one that training started
    from, are computed from the weights; rows that a change of dtype left behind are corrected, NaN
    and Inf removed. `megtool reshard --amax rebuild` does the same on the way to another layout.

    Example: megtool amax fix ./checkpoints/fp8-run ./checkpoints/fp8-fixed
    """


@dataclass(frozen=True, kw_only=True)
class StripAmaxOptions(RewriteAmaxOptions):
    """Leave out extra states that hold nothing, if Megatron loads without them.

    Example: megtool amax strip ./checkpoints/fp8-run ./checkpoints/lean
    """


@dataclass(frozen=True, kw_only=True)
class DeriveAmaxOptions(DryRun):
    """Make a calibration file from FP8 training's amax histories: no data, no model run.

    `megtool quantize SRC DST --recipe fp8 --calibration FILE` takes it.

    Example: megtool amax derive ./checkpoints/fp8-run fp8.calibration
    """

    source: Path = argument(SOURCE, "SRC")
    destination: Path = argument("The calibration file to write.", "FILE", is_written=True)
    reading: SourceOptions = group(SourceOptions)
    overwrite: bool = option("Dangerous", "Replace FILE.", False, flags=("--overwrite",))
