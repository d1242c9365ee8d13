"""Keeping: which iterations of a run stay, and by what a run is known again."""

from __future__ import annotations

import contextlib
import hashlib
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
from megtool.train.config import TrainConfig

RUN_FILE = "finetune.json"
FRESH_RUN_FILE = f".{RUN_FILE}.new"
"""`RUN_FILE` while it is written."""
_ITERATION = re.compile(r"iter_(\d{7,})")

# Options that decide about the loss curve, beside the data's own: a resumed run that has others
# goes on, and is told.
_CURVE = (
    "micro_batch_size",
    "optimizer",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_warmup_iters",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
    "clip_grad",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "sgd_momentum",
    "muon_momentum",
    "exp_avg_dtype",
    "store_param_remainders",
    "grad_reduce_in_bf16",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_losses_of_checkpoint",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "fp8_recipe",
    "fp8_format",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_margin",
    "fp8_param_gather",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "sequence_parallel",
    "eval_iters",
    "lr_mult",
    "wd_mult",
    "freeze",
    "lora_dropout",
    "hidden_dropout",
    "attention_dropout",
    "teacher",
    "distill_temperature",
    "distill_weight",
)


def read_tracker(folder: Path) -> int | None:
    """The iteration that a save folder's tracker names, be it there or not; None without one."""
    try:
        text = (folder / TRACKER).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def has_iteration(folder: Path, iteration: int) -> bool:
    """Whether a save folder holds an iteration whole."""
    return (folder / folder_name(iteration) / ".metadata").is_file()  # it is written last


def find_newest_iteration(folder: Path) -> int | None:
    """The iteration that a save folder's tracker names, where it is there, else the newest that is.

    None where there is none.
    """
    named = read_tracker(folder)
    if named is not None and has_iteration(folder, named):
        return named
    return max((n for n in list_iterations(folder) if has_iteration(folder, n)), default=None)


def list_iterations(folder: Path) -> list[int]:
    """The numbers of all iterations in a save folder, whole or not, ascending."""
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _ITERATION.fullmatch(name)))


def prune_checkpoints(folder: Path, keep: int) -> list[int]:
    """Remove all iterations but the newest `keep` of those that are complete; returns which.

    What the tracker names, and what is newer, stays.
    """
    newest = find_newest_iteration(folder)
    if newest is None:
        return []
    old = [n for n in list_iterations(folder) if n <= newest][:-keep]
    for number in old:
        shutil.rmtree(folder / folder_name(number), ignore_errors=True)
    return old


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What makes a run the same when it is started again: its model, its data, and LoRA.

    `curve` holds options that decide about the loss curve; they may change. `source` is a
    fingerprint of what it began with, and `names` say what the data are called.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)
    curve: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    names: tuple[str, ...] = ()

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        data: Mapping[str, Any],
        settings: TrainConfig,
        curve: Mapping[str, Any],
        *,
        source: str = "",
    ) -> RunIdentity:
        """A run's identity: `data` says which it is.

        `curve` is what decides about it beside settings, such as the number of steps.
        """
        from megtool.train.features.protocol import lora_settings  # which imports this file

        model = {k: v for k, v in asdict(config).items() if k != "extra"}
        lora = lora_settings(settings)
        training = {
            "lora_rank": settings.lora_rank,
            "lora_target": None if lora is None else sorted(lora.roles),
            "lora_alpha": None if lora is None else lora.alpha,
            "qat": settings.qat,
            "calibration": _file_digest(settings.calibration),
            "optimizer": settings.optimizer,
        }
        decides = {name: getattr(settings, name) for name in _CURVE} | dict(curve)
        plain = json.loads(json.dumps([model, dict(data), training, decides], default=str))
        return cls(
            model=plain[0],
            data=plain[1],
            training=plain[2],
            curve=plain[3],
            source=source,
            names=tuple(settings.data),
        )

    def write(self, folder: Path) -> None:
        """Keep it in a folder.

        Raises:
            StorageError: it cannot be written.
        """
        path = folder / RUN_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fresh = folder / FRESH_RUN_FILE
            fresh.write_text(json.dumps(asdict(self), indent=1) + "\n")
            os.replace(fresh, path)
        except OSError as e:
            with contextlib.suppress(OSError):
                (folder / FRESH_RUN_FILE).unlink(missing_ok=True)
            raise StorageError(f"cannot write: {e.strerror or e}", file=path) from e

    @classmethod
    def read(cls, folder: Path) -> RunIdentity | None:
        """What is kept in a folder; None where there is nothing.

        Raises:
            FormatError: it is something else.
        """
        path = folder / RUN_FILE
        try:
            content = json.loads(path.read_text())
            return cls(**(content | {"names": tuple(content.get("names", ()))}))
        except FileNotFoundError:
            return None
        except OSError as e:
            raise StorageError(f"cannot read: {e.strerror or e}", file=path) from e
        except (ValueError, TypeError) as e:
            raise FormatError("it does not say what run this is", file=path) from e

    def find_changes(self, previous: RunIdentity, folder: Path) -> list[str]:
        """Hold it against what the folder's run was started with; returns what else has changed.

        Raises:
            TrainingError: the model or the data are others; or, with LoRA, what it began with.
        """
        for kind, current, stored in (
            ("model", self.model, previous.model),
            ("data", self.data, previous.data),
            ("way of training", self.training, previous.training),
        ):
            names = [n for n in current if current[n] != stored.get(n)]
            if names:
                n = names[0]
                previous_value, current_value = stored.get(n), current[n]
                if n == "digest" and previous.names != self.names:
                    n, previous_value, current_value = "--data", ", ".join(previous.names), ", ".join(self.names)
                raise TrainingError(
                    f"the run in {folder} has another {kind}: {n} was {_short(previous_value)}, "
                    f"and is {_short(current_value)}",
                    file=folder / RUN_FILE,
                    hint="give what it was started with, or another DST",
                )
        changed = [
            f"{n} was {_short(previous.curve.get(n))}, and is {_short(self.curve[n])}"
            for n in self.curve
            if n in previous.curve and self.curve[n] != previous.curve[n]
        ]
        if self.source and previous.source and self.source != previous.source:
            if self.training.get("lora_rank") is not None:
                raise TrainingError(
                    f"the run in {folder} has adapters for another model: the weights of SRC are "
                    "others than those it began with",
                    file=folder / RUN_FILE,
                    hint="give the SRC that it was started with, or another DST",
                )
            changed.append("the weights of SRC are others than those it began with")
        return changed


def _file_digest(path: Path | None) -> str | None:
    """What a file holds, in short.

    Raises:
        StorageError: it cannot be read.
    """
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise StorageError(f"cannot read: {e.strerror or e}", file=path) from e


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
