"""Where a run starts: the checkpoint it resumes from, and the folder it writes to."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.console import Progress
from megtool.errors import DestinationError, TrainingError, UsageError
from megtool.formats.save_folder import TRACKER, folder_name
from megtool.megatron_state.saved_objects import saved_args
from megtool.model.stacks.decoder import Decoder
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import (
    EVERYTHING,
    WITHOUT_QUANTIZERS,
    open_source,
    require_decoder,
)
from megtool.staging.destination.store_check import check_surroundings
from megtool.storage.files import Files
from megtool.storage.local_copy import local_work_folder
from megtool.storage.location.path import StorePath, resolve_links
from megtool.tensors.catalogue import Catalogue
from megtool.train.checkpointing.protocol import TrainState
from megtool.train.checkpointing.resume import resume
from megtool.train.checkpointing.retention import (
    find_newest_iteration,
    list_interrupted,
    list_iterations,
    read_tracker,
)
from megtool.train.checkpointing.staged_iteration import STAGING
from megtool.train.options.config import TrainConfig
from megtool.train.run_identity import FRESH_RUN_FILE, RUN_FILE, RunIdentity

if TYPE_CHECKING:
    from torch import Tensor

    from megtool.optim.optimizer import Optimizer

_LOG = logging.getLogger(__name__)

CACHE_FOLDER = "data"
"""The cache of tokenized data in DST."""


def cache_folder(folder: Path) -> Path:
    """Where tokenized data is kept: in DST, or in a temporary folder if DST is in a store."""
    return local_work_folder(folder, "data", folder / CACHE_FOLDER)


# Keys that determine the shapes of a model's tensors; checkpoints of other tools may differ in the
# others.
_SHAPE_KEYS = (
    "num_layers",
    "num_decoder_layers",
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
    "index_num_heads",
    "index_head_dim",
    "tied_embeddings",
    "norm",
    "gated",
)


def check_folders(source: Path, folder: Path) -> None:
    """Check that neither of SRC and DST contains the other, and that DST can be created.

    Raises:
        UsageError: one contains the other.
        DestinationError: a part of the path is not a folder, or cannot be written.
    """
    target, origin = resolve_links(folder), resolve_links(source)
    if origin.is_relative_to(target):
        problem = "DST is SRC" if origin == target else "SRC is inside DST"
        raise UsageError(
            f"{problem}: {source}",
            file=folder,
            hint="to resume the run in DST, give the SRC that it started from; to start another "
            "from its result, give another DST",
        )
    if target.is_relative_to(origin):
        raise UsageError(f"DST is inside SRC: {source}", file=folder, hint="give another DST")
    if isinstance(target, StorePath):
        check_surroundings(target, [])
        return
    existing = next(path for path in (target, *target.parents) if os.path.exists(path))
    if not existing.is_dir() and existing != target:
        raise DestinationError(f"{existing} is not a folder", file=folder, hint="give another DST")
    if existing.is_dir() and not os.access(existing, os.W_OK | os.X_OK):
        raise DestinationError(
            f"nothing can be written in {existing}",
            file=folder,
            error_id="destination-not-writable",
        )


def find_checkpoint(folder: Path, settings: TrainConfig) -> Path | None:
    """The checkpoint that a run resumes from; None for a new run.

    Raises:
        DestinationError: the folder holds something else, a run that must not be resumed, or one
            without a complete iteration; or its cache is a link.
    """
    if settings.rows.data_cache_path is None and cache_folder(folder).parent == folder:
        _check_cache(folder / CACHE_FOLDER)
    newest, tracked = find_newest_iteration(folder), read_tracker(folder)
    if newest is not None and not settings.resume:
        raise DestinationError(
            f"it has iteration {newest} of a run, and --no-resume starts a new one",
            file=folder,
            hint="give another DST, or remove this one",
            error_id="destination-exists",
        )
    is_run = (folder / RUN_FILE).exists()
    ignored = {CACHE_FOLDER, STAGING, FRESH_RUN_FILE}
    names = {p.name for p in folder.iterdir()} - ignored if folder.is_dir() else set()
    if (names and not is_run) or (folder.exists() and not folder.is_dir()):
        raise DestinationError(
            "it holds something other than a run of `megtool finetune`",
            file=folder,
            hint="give a DST that does not exist yet; --load CKPT resumes from a checkpoint",
            error_id="destination-exists",
        )
    iterations = set(list_iterations(folder)) - set(list_interrupted(folder))
    if newest is None and (tracked is not None or iterations):
        missing = "an iteration" if tracked is None else f"iteration {tracked}"
        raise DestinationError(
            f"it should have {missing} of a run, and no iteration is complete",
            file=folder,
            hint="restore it, or remove DST to start anew; --load CKPT resumes from another one",
        )
    return settings.load if newest is None else folder / folder_name(newest)


def _check_cache(cache: Path) -> None:
    """Refuse a cache of tokenized data in DST that a run cannot have made."""
    files = Files()
    if files.lstat(cache) is None:
        return
    files.check_own_folder(cache)
    for name in files.names(cache):
        files.check_own_folder(cache / name)


def warn_stale_tracker(folder: Path, checkpoint: Path) -> None:
    """Warn if the tracker names another iteration than the run in its folder resumes from."""
    tracked = read_tracker(folder)
    if tracked is not None and checkpoint not in (folder / folder_name(tracked), folder):
        _LOG.warning(
            "%s names iteration %d, which is not in %s: the run resumes from %s",
            TRACKER,
            tracked,
            folder,
            checkpoint.name,
        )


def _require_model(source: CheckpointSource) -> CheckpointSource:
    """The source itself, of a model of any kind that is trained."""
    return require_decoder(source, encoders=True, two_stacks=True, labels=True)


def check_loaded(source: CheckpointSource, loaded: CheckpointSource, train_iters: int) -> None:
    """Check that the checkpoint of `--load` has the model of SRC, and that steps remain.

    Raises:
        TrainingError: it has another model.
        UsageError: all steps are done.
    """
    path = loaded.path
    whole, part = source.config, _require_model(loaded).config
    for name in _SHAPE_KEYS:
        expected, actual = whole.get(name), part.get(name)
        is_unknown = name.endswith("ffn_hidden_size") and not (expected and actual)
        if expected != actual and not is_unknown:
            raise TrainingError(
                f"--load {path} has another model than SRC: its {name} is {actual!r}, and "
                f"SRC's is {expected!r}",
                file=path,
                hint="give the SRC that its run started from",
                error_id="foreign-run",
            )
    if (iteration := iteration_of(loaded.catalogue)) >= train_iters:
        raise UsageError(
            f"--load {path} is at step {iteration}, and the run has {train_iters} steps",
            hint="raise --train-iters to resume; as SRC, without --load, it starts a new run",
        )


def iteration_of(catalogue: Catalogue) -> int:
    """The step that a checkpoint was saved after; 0 if it does not say."""
    value = catalogue.metadata.get("iteration")
    return value if isinstance(value, int) else 0


def saved_batch_size(
    identity: RunIdentity | None, checkpoint: CheckpointSource | None
) -> int | None:
    """The global batch size of the run that is resumed, by its checkpoint or its identity."""
    size = None if checkpoint is None else saved_args(checkpoint.catalogue).get("global_batch_size")
    if size is None and identity is not None:
        size = identity.curve.get("global_batch_size")
    return size if isinstance(size, int) and size > 0 else None


def with_batch_size(settings: TrainConfig, previous: int | None) -> TrainConfig:
    """The options with the global batch size that the run had, if they give none.

    Raises:
        UsageError: micro batches do not divide it.
    """
    if previous is None or settings.global_batch_size is not None:
        return settings
    if previous % settings.micro_batch_size:
        raise UsageError(
            f"the run has a global batch size of {previous}, not a multiple of "
            f"--micro-batch-size {settings.micro_batch_size}",
            hint="give a --micro-batch-size that divides it, or another --global-batch-size",
        )
    return replace(settings, global_batch_size=previous)


def rescale_state(state: TrainState, previous: int | None, batch_size: int) -> TrainState:
    """The state of a run whose global batch size changes: schedules count samples, not steps."""
    if previous is None or previous == batch_size:
        return state
    return replace(state, num_steps=round(state.num_steps / previous * batch_size))


def open_checkpoint(path: Path, settings: TrainConfig) -> CheckpointSource:
    """The checkpoint to resume from, with its optimizer.

    Raises:
        MegtoolError: it cannot be opened, or is not a decoder.
    """
    options = replace(settings.source, iteration=None)
    tensors = WITHOUT_QUANTIZERS if settings.qat is not None else EVERYTHING
    return _require_model(open_source(path, options, tensors=tensors))


def load_train_state(
    source: CheckpointSource,
    stages: Sequence[Decoder],
    optimizer: Optimizer,
    *,
    batch_size: int,
    own_states: Mapping[tuple[str, str], Tensor],
    threads: int | None,
    progress: Progress,
) -> TrainState:
    """Load the optimizer's state of a checkpoint; returns the progress of its run.

    `batch_size` is the number of samples of each of its steps, if it does not count samples;
    `own_states` are those of parameters that features have added (`resume`).

    Raises:
        MappingError: the state is of another model, or incomplete.
        CheckpointError: it cannot be read.
    """
    resumed = resume(
        source, stages, optimizer, own_states=own_states, threads=threads, progress=progress
    )
    if not resumed.has_optimizer and stages[0].groups.rank == 0:
        _LOG.warning("%s has no optimizer state: moments start at zero", source.path)
    scheduler: Mapping[str, Any] = resumed.scheduler or {}
    samples = resumed.iteration * batch_size
    return TrainState(
        iteration=resumed.iteration,
        consumed_samples=resumed.consumed_train_samples or samples,
        num_steps=int(scheduler.get("num_steps", samples)),
    )


def claim_folder(
    folder: Path, settings: TrainConfig, checkpoint: Path | None, identity: RunIdentity, rank: int
) -> None:
    """Write the run's identity to its folder, while it is locked.

    Raises:
        DestinationError: another run has saved an iteration in it meanwhile.
    """
    newest = find_newest_iteration(folder)
    current = settings.load if newest is None else folder / folder_name(newest)
    if current != checkpoint:
        raise DestinationError(
            "its newest iteration is another one than when this run started",
            file=folder,
            hint="the same command resumes from it",
        )
    if rank == 0:
        identity.write(folder)
