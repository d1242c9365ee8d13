"""Options of `finetune`: those of a training run, and where it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megtool.errors import UsageError
from megtool.options.effects import check_effects, requires
from megtool.options.field import argument, group, option
from megtool.options.groups import OUTPUT, SOURCE, DryRun, ForeignObjects, HtmlPage
from megtool.storage.location.path import is_remote
from megtool.train.options.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(DryRun, ForeignObjects, HtmlPage):
    """Train a model from any checkpoint on some text, and write a Megatron checkpoint.

    Options have Megatron's names. Interrupted, the same command resumes with an identical loss
    curve. Several processes are started by torchrun.

    Example: megtool finetune ./SmolLM2-135M-Instruct ./tuned --data chats.jsonl --train-iters 100
    """

    panels: ClassVar = TrainConfig.panels
    rivals: ClassVar = TrainConfig.rivals

    source: Path = argument(SOURCE, "SRC")
    destination: Path = argument(
        "Megatron's save folder to write; a run in it resumes.", "DST", is_written=True
    )

    report_against: tuple[Path, ...] = option(
        OUTPUT,
        "Another run's save folder, whose curves the report shows beside this run's; repeatable.",
        (),
        metavar="RUN",
        needs=(requires("report", "--report FILE.html writes the page with the curves"),),
    )

    train: TrainConfig = group(TrainConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_effects(self)
        if self.train.tensorboard and is_remote(self.destination):
            raise UsageError(
                "--tensorboard writes local files, and DST is in a store",
                hint="log.jsonl in DST holds the same values",
            )
