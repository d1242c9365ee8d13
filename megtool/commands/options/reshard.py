"""Options of `megtool reshard`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megtool.options.execution import ExecutionOptions
from megtool.options.field import argument, group
from megtool.options.groups import SOURCE, HtmlPage
from megtool.options.selection import SourceSelection
from megtool.options.target import TargetOptions


@dataclass(frozen=True, kw_only=True)
class ReshardOptions(HtmlPage):
    """Copy a checkpoint into another format, parallel layout or dtype.

    An interrupted run resumes when the same command is given again.

    Example: megtool reshard ./SmolLM2-135M-Instruct ./out --to torch_dist --tp 3 --pp 2
    """

    shown_after: ClassVar = {
        "rename": "exclude",
        "drop_objects": "dry_run",
        "verify_master_weights": "verify",
    }

    source: Path = argument(SOURCE, "SRC")
    selection: SourceSelection = group(SourceSelection)
    target: TargetOptions = group(TargetOptions)
    execution: ExecutionOptions = group(ExecutionOptions)
