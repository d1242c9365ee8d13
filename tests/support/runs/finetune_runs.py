"""Runs of `finetune` on one process: a text in lines, a short run, and the curve it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megtool import finetune
from megtool.commands.reports.finetune import FinetuneReport
from megtool.train.run_log import read_log

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


def interrupt_and_resume(
    model: Path, data: Path, folder: Path, options: list[str], *, steps: int, lines: int
) -> None:
    """The same command in `ref`, and in `out`, where it is killed after some lines of its log and
    then given again."""
    command = [sys.executable, "-m", "megtool", "finetune", str(model)]
    options = [*options, "--data", str(data), "--seq-length", "32", "--train-iters", str(steps)]
    options += ["--lr", "1e-3", "--global-batch-size", "2", "--save-interval", "5"]
    options += ["--threads", "1", "-q"]
    subprocess.run([*command, folder / "ref", *options], check=True)
    with subprocess.Popen([*command, folder / "out", *options]) as run:
        while len(read_log(folder / "out/log.jsonl")) < lines and run.poll() is None:
            time.sleep(0.002)
        os.kill(run.pid, signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    subprocess.run([*command, folder / "out", *options], check=True)


def curve(folder: Path) -> list[tuple[Any, ...]]:
    """What two runs that are the same have the same, line by line."""
    keys = ("iteration", "loss", "eval_loss", "grad_norm", "lr", "consumed_samples", "loss_scale")
    return [tuple(x.get(k) for k in keys) for x in read_log(folder / "log.jsonl")]
