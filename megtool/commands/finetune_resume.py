"""Finetune place: what a run goes on from, and whether that is the run it is taken for."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.formats.save_folder import TRACKER, folder_name
from megtool.checkpoint.megatron_metadata import saved_args
from megtool.errors import DestinationError, TrainingError, UsageError
from megtool.reshard.open_source import require_decoder
from megtool.reshard.source import CheckpointSource
from megtool.train.config import TrainConfig
from megtool.train.train_state import TrainState

_LOG = logging.getLogger(__name__)

CACHE_FOLDER = "data"
"""Where encoded data is kept in DST."""

# What decides about the shapes of a model's tensors; the rest may be told in other words by the
# checkpoint of another tool.
_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "moe_ffn_hidden_size",
    "shared_ffn_hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "tied_embeddings",
    "norm",
    "gated",
)


def check_apart(source: Path, folder: Path) -> None:
    """Refuse a DST that has SRC in it, which the run would write over, or that lies in SRC, and one
    that cannot be made.

    Raises:
        UsageError: one of both has the other in it.
        DestinationError: a part of its path is no folder, or nothing can be written there.
    """
    mine, theirs = folder.resolve(), source.resolve()
    if theirs.is_relative_to(mine):
        what = "DST is SRC" if theirs == mine else "SRC lies in DST"
        raise UsageError(
            f"{what}: {source}",
            file=folder,
            hint="to go on with the run in DST, give the SRC that it began with; to begin another "
            "from a model that it made, give another DST",
        )
    if mine.is_relative_to(theirs):
        raise UsageError(f"DST lies in SRC: {source}", file=folder, hint="give a DST beside SRC")
    there = next(path for path in (mine, *mine.parents) if os.path.exists(path))
    if not there.is_dir() and there != mine:
        raise DestinationError(f"{there} is no folder", file=folder, hint="give another DST")
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        raise DestinationError(f"nothing can be written in {there}", file=folder)


def begun_of(folder: Path, settings: TrainConfig) -> Path | None:
    """The checkpoint to go on from; None at the beginning of a run.

    Raises:
        DestinationError: the folder holds something else, a run that is not to go on, or one whose
            iterations are not whole.
    """
    from megtool.train.checkpointing.retention import (
        FRESH_RUN_FILE,
        RUN_FILE,
        list_iterations,
        find_newest_iteration,
        read_tracker,
    )
    from megtool.train.checkpointing.staged_iteration import STAGING

    newest, tracked = find_newest_iteration(folder), read_tracker(folder)
    if newest is not None and not settings.resume:
        raise DestinationError(
            f"iteration {newest} of a run lies there, and --no-resume begins anew",
            file=folder,
            hint="give another DST, or remove this one",
        )
    known = (folder / RUN_FILE).exists()
    own = {CACHE_FOLDER, STAGING, FRESH_RUN_FILE}
    held = {p.name for p in folder.iterdir()} - own if folder.is_dir() else set()
    if (held and not known) or (folder.exists() and not folder.is_dir()):
        raise DestinationError(
            "it holds something that is no run of `megtool finetune`",
            file=folder,
            hint="give a DST that is not there yet; --load CKPT goes on from a checkpoint",
        )
    if newest is None and (tracked is not None or list_iterations(folder)):
        what = "an iteration" if tracked is None else f"iteration {tracked}"
        raise DestinationError(
            f"{what} of a run should lie there, and none is whole",
            file=folder,
            hint="bring it back, or remove DST to begin anew; --load CKPT goes on from another",
        )
    return settings.load if newest is None else folder / folder_name(newest)


def tell_of_tracker(folder: Path, begun: Path) -> None:
    """Warn of a tracker that names another iteration than the run in its folder goes on from."""
    from megtool.train.checkpointing.retention import read_tracker

    tracked = read_tracker(folder)
    if tracked is not None and begun not in (folder / folder_name(tracked), folder):
        _LOG.warning(
            "%s names iteration %d, which is not in %s: the run goes on from %s",
            TRACKER,
            tracked,
            folder,
            begun.name,
        )


def check_loaded(runnable: CheckpointSource, loaded: CheckpointSource, train_iters: int) -> None:
    """Hold what `--load` names against SRC, and against the steps there are to do.

    Raises:
        TrainingError: it is of another model.
        UsageError: all steps are done in it.
    """
    path = loaded.path
    mine, theirs = asdict(runnable.config), asdict(require_decoder(loaded).config)
    for name in _SHAPE:
        is_untold = name.endswith("ffn_hidden_size") and not (mine[name] and theirs[name])
        if mine[name] != theirs[name] and not is_untold:
            raise TrainingError(
                f"--load {path} is of another model than SRC: its {name} is {theirs[name]!r}, and "
                f"SRC's {mine[name]!r}",
                file=path,
                hint="give the SRC that its run began with",
            )
    if (iteration := iteration_of(loaded.catalogue)) >= train_iters:
        raise UsageError(
            f"--load {path} is of step {iteration}, and the run has {train_iters}",
            hint="more --train-iters go on from it; as SRC, without --load, it begins a new run",
        )


def iteration_of(catalogue: Catalogue) -> int:
    """The step that a checkpoint was saved after; 0 where it does not say."""
    value = catalogue.metadata.get("iteration")
    return value if isinstance(value, int) else 0


def batch_before(before: Mapping[str, Any] | None, loaded: CheckpointSource | None) -> int | None:
    """The rows of a step of the run that goes on: its checkpoint says, else what DST keeps."""
    found = None if loaded is None else saved_args(loaded.catalogue).get("global_batch_size")
    if found is None and before is not None:
        found = before.get("global_batch_size")
    return found if isinstance(found, int) and found > 0 else None


def with_batch(settings: TrainConfig, before: int | None) -> TrainConfig:
    """The settings with the rows of a step that the run had so far, where none are given.

    Raises:
        UsageError: micro batches do not divide them.
    """
    if before is None or settings.global_batch_size is not None:
        return settings
    if before % settings.micro_batch_size:
        raise UsageError(
            f"steps of the run have {before} rows, no multiple of --micro-batch-size "
            f"{settings.micro_batch_size}",
            hint="a --micro-batch-size that divides them; --global-batch-size N changes its steps",
        )
    return replace(settings, global_batch_size=before)


def rescaled(standing: TrainState, before: int | None, now: int) -> TrainState:
    """Where a run is whose steps have another number of rows from now on.

    Schedules count samples, of which a step has as many as it has rows.
    """
    if before is None or before == now:
        return standing
    return replace(standing, num_steps=round(standing.num_steps / before * now))
