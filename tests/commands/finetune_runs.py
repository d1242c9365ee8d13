"""Runs of `finetune` on one process: a text in lines, a short run, and the curve it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megtool.commands.finetune import finetune
from megtool.commands.finetune_report import FinetuneReport
from megtool.train.log import read_log

TEXT = "When in the Course of human events, it becomes necessary for one people to dissolve. "


def save_lines(folder: Path) -> Path:
    """Twenty texts of different lengths, a line each."""
    file = folder / "text.jsonl"
    rows = [{"text": f"{n} {TEXT * (1 + n % 3)}"} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def tune(model: Path | str, folder: Path | str, data: Path | str, **more: Any) -> FinetuneReport:
    """A run of six steps, unless `more` says otherwise."""
    options = {
        "seq_length": 32,
        "train_iters": 6,
        "global_batch_size": 2,
        "lr": 1e-3,
        "threads": 1,
        "fsync": False,
    } | more
    report = finetune(model, folder, data=[str(data)], **options)
    assert isinstance(report, FinetuneReport)
    return report


def curve(folder: Path) -> list[tuple[Any, ...]]:
    """What two runs that are the same have the same, line by line."""
    keys = ("iteration", "loss", "eval_loss", "grad_norm", "lr", "consumed_samples", "loss_scale")
    return [tuple(x.get(k) for k in keys) for x in read_log(folder / "log.jsonl")]
