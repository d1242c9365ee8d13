"""Finetune after: what a run leaves beside its checkpoints: the curve, and the exported model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from megtool.checkpoint.formats.save_folder import folder_name
from megtool.console import Progress
from megtool.errors import MissingPackageError
from megtool.train.config import TrainConfig

_LOG = logging.getLogger(__name__)


def draw(
    folder: Path, losses: Sequence[tuple[int, float]], evaluations: Sequence[tuple[int, float]]
) -> str | None:
    """Draw the curve, if that can be done; returns its path."""
    from megtool.train.loss_plot import PLOT_FILE, plot_loss

    path = folder / PLOT_FILE
    try:
        plot_loss(path, losses, evaluations, title=folder.name)
    except MissingPackageError as e:
        _LOG.warning("%s: %s", e.message, e.hint)
        return None
    return str(path)


def export(
    folder: Path, saved: int | None, settings: TrainConfig, progress: Progress
) -> str | None:
    """Write DST/hf where it is asked for; returns its path."""
    from megtool.commands.reshard import reshard

    if settings.to != "hf" or saved is None:
        return None
    written = folder / "hf"
    reshard(
        folder / folder_name(saved),
        written,
        to="hf",
        optimizer="none",
        family=settings.family,
        like=settings.like,
        overwrite=True,
        fsync=settings.fsync,
        progress=progress,
    )
    return str(written)
