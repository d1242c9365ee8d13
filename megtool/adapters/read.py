"""Open an adapter, in whichever form it is."""

from __future__ import annotations

import logging
from pathlib import Path

from megtool.adapters.bridge import is_bridge, read_bridge
from megtool.adapters.modelopt import is_modelopt, read_modelopt
from megtool.adapters.peft import is_peft, read_peft
from megtool.adapters.stored_adapter import StoredAdapter
from megtool.errors import FormatError, UsageError
from megtool.formats import open_checkpoint
from megtool.storage.location.path import location

_LOG = logging.getLogger(__name__)


def read_adapter(path: str | Path, *, iteration: int | str | None = None) -> StoredAdapter:
    """The adapter in a folder, from headers and small files alone. Its notes are logged.

    `iteration` is one of a save folder, by default the latest.

    Raises:
        FormatError: there is no adapter, or a damaged one.
        MappingError: it is more than a low-rank update of each weight.
        UsageError: it has no such iteration.
    """
    adapter = _read(location(path), iteration)
    for note in adapter.notes:
        _LOG.warning("%s", note)
    return adapter


def _read(folder: Path, iteration: int | str | None) -> StoredAdapter:
    if is_peft(folder):
        if iteration is not None:
            raise UsageError(
                f"PEFT's adapters have no iterations, so there is no iteration {iteration}",
                file=folder,
                hint="leave out --iteration",
            )
        return read_peft(folder)
    catalogue = open_checkpoint(folder, iteration=iteration)
    if is_bridge(catalogue):
        return read_bridge(catalogue)
    if is_modelopt(catalogue):
        return read_modelopt(catalogue)
    raise FormatError(
        "the checkpoint has no adapter",
        file=folder,
        hint="PEFT's has adapter_config.json, Megatron-Bridge's `*.adapter.linear_in.weight`, "
        "ModelOpt's `*.lora_a_NAME.weight`",
        error_id="not-an-adapter",
    )
