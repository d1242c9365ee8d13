"""Keeping: which iterations of a run stay, and by what a run is known again."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megtool.checkpoint.formats.save_folder import TRACKER, folder_name
from megtool.config import ModelConfig
from megtool.errors import FormatError, StorageError, TrainingError
from megtool.train.settings import TrainSettings

RUN_FILE = "finetune.json"
_ITERATION = re.compile(r"iter_(\d{7,})")

# Options that decide about the loss curve, beside the data's own: a resumed run that has others
# goes on, and is told.
_CURVE = (
    "micro_batch_size",
    "global_batch_size",
    "optimizer",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_warmup_iters",
    "weight_decay",
    "clip_grad",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "lr_mult",
    "wd_mult",
    "freeze",
    "lora_dropout",
    "teacher",
    "distill_temperature",
    "distill_weight",
)


def newest_iteration(folder: Path) -> int | None:
    """The iteration that a save folder's tracker names; None without one."""
    try:
        text = (folder / TRACKER).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and (folder / folder_name(int(text))).is_dir() else None


def forget_old(folder: Path, keep: int) -> list[int]:
    """Remove all iterations but the newest `keep` of those that are complete; returns which.

    What the tracker names, and what is newer, stays.
    """
    newest = newest_iteration(folder)
    if newest is None:
        return []
    numbers = sorted(
        int(found[1]) for path in folder.iterdir() if (found := _ITERATION.fullmatch(path.name))
    )
    old = [n for n in numbers if n <= newest][:-keep]
    for number in old:
        shutil.rmtree(folder / folder_name(number), ignore_errors=True)
    return old


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes a run the same when it is started again: its model, its data, and LoRA.

    `curve` holds options that decide about the loss curve; they may change.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)
    curve: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, config: ModelConfig, data: Mapping[str, Any], settings: TrainSettings, steps: int
    ) -> Identity:
        """A run's identity: `data` says which it is, `steps` how many there are."""
        model = {k: v for k, v in asdict(config).items() if k != "extra"}
        training = {
            "lora_rank": settings.lora_rank,
            "lora_target": settings.lora_target if settings.lora_rank else None,
            "lora_alpha": settings.lora_alpha,
            "qat": settings.qat,
            "optimizer": settings.optimizer,
        }
        curve = {name: getattr(settings, name) for name in _CURVE} | {"train_iters": steps}
        plain = json.loads(json.dumps([model, dict(data), training, curve], default=str))
        return cls(model=plain[0], data=plain[1], training=plain[2], curve=plain[3])

    def write(self, folder: Path) -> None:
        """Keep it in a folder.

        Raises:
            StorageError: it cannot be written.
        """
        path = folder / RUN_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f".{RUN_FILE}.new")
            fresh.write_text(json.dumps(asdict(self), indent=1) + "\n")
            os.replace(fresh, path)
        except OSError as e:
            raise StorageError(f"cannot write: {e.strerror or e}", file=path) from e

    @classmethod
    def read(cls, folder: Path) -> Identity | None:
        """What is kept in a folder; None where there is nothing.

        Raises:
            FormatError: it is something else.
        """
        path = folder / RUN_FILE
        try:
            found = json.loads(path.read_text())
            return cls(**found)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise StorageError(f"cannot read: {e.strerror or e}", file=path) from e
        except (ValueError, TypeError) as e:
            raise FormatError("it does not say what run this is", file=path) from e

    def check(self, before: Identity, folder: Path) -> list[str]:
        """Hold it against what the folder's run was started with; returns what else has changed.

        Raises:
            TrainingError: the model or the data are others.
        """
        for what, mine, theirs in (
            ("model", self.model, before.model),
            ("data", self.data, before.data),
            ("way of training", self.training, before.training),
        ):
            names = [n for n in {**theirs, **mine} if mine.get(n) != theirs.get(n)]
            if names:
                n = names[0]
                raise TrainingError(
                    f"the run in {folder} has another {what}: {n} was {_short(theirs.get(n))}, "
                    f"and is {_short(mine.get(n))}",
                    file=folder / RUN_FILE,
                    hint="give what it was started with, or another DST",
                )
        return [
            f"{n} was {_short(before.curve.get(n))}, and is {_short(self.curve[n])}"
            for n in self.curve
            if n in before.curve and self.curve[n] != before.curve[n]
        ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
