"""Options of the commands of `megtool adapter`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megtool.options.execution import WITHOUT_CHECKS, ExecutionOptions
from megtool.options.field import REQUIRED, Options, argument, group, option
from megtool.options.groups import INPUT, OUTPUT, SourceOptions

ADAPTER = "An adapter: a folder of PEFT, or a checkpoint of Megatron-Bridge or ModelOpt."


@dataclass(frozen=True, kw_only=True)
class InspectAdapterOptions(Options):
    """Show which weights an adapter changes, with rank and scale, from its headers alone.

    Example: megtool adapter inspect ./my-adapter
    """

    source: Path = argument(ADAPTER, "SRC")
    modules: bool = option(OUTPUT, "List every weight instead of folding the layers.", False)
    iteration: str | None = option(
        INPUT, "Iteration of a save folder; default: the latest.", metavar="N"
    )


@dataclass(frozen=True, kw_only=True)
class ConvertAdapterOptions(Options):
    """Write an adapter in another program's format: the same function of the same base model.

    Nothing is computed where both formats have the same matrices. Those of projections that a
    format fuses are put side by side: the rank is the sum of theirs.

    Example: megtool adapter convert ./my-adapter ./bridge-adapter --to bridge --base ./base
    """

    not_offered: ClassVar = WITHOUT_CHECKS | {"memory", "threads", "unsafe_store", "worker"}

    source: Path = argument(ADAPTER, "SRC")
    destination: Path = argument(
        "The folder to write; it appears when complete.", "DST", is_written=True
    )
    to: Literal["peft", "bridge", "modelopt"] = option(
        OUTPUT,
        "The format: that of PEFT, Megatron-Bridge or ModelOpt's LoRA for Megatron.",
        REQUIRED,
    )
    base: Path = option(
        INPUT,
        "The checkpoint that the adapter belongs to, in any format.",
        REQUIRED,
        metavar="CHECKPOINT",
    )
    reading: SourceOptions = group(SourceOptions)
    execution: ExecutionOptions = group(ExecutionOptions)
