"""All tensors of a checkpoint as stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megtool.formats import open_checkpoint
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader


def stored_arrays(folder: Path) -> dict[str, Any]:
    """All tensors as stored, in the dtype's view."""
    found = open_checkpoint(folder)
    with CheckpointReader(found, Files()) as reader:
        return {t.name: np.asarray(reader.open_stored(t.name).read()) for t in found.tensors}
