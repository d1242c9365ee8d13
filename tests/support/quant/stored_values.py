"""Values of a checkpoint by canonical names."""

from __future__ import annotations

from pathlib import Path

import torch

from megtool.source.open import WITHOUT_QUANTIZERS, open_source
from megtool.storage.files import Files
from megtool.transport.cast import numeric_values
from megtool.transport.reading.reader import CheckpointReader


def canonical(folder: Path, module: str, *, state: str = "") -> torch.Tensor:
    """A canonical weight of a folder, decoded, or as Megatron has it before it is rounded; or a
    state of it, such as `main`."""
    opened, name = open_source(folder, tensors=WITHOUT_QUANTIZERS), f"{module}.weight"
    name = f"{state}:{name}" if state else name
    with CheckpointReader(opened.catalogue, Files()) as reader:
        view = reader.open_canonical(opened.view.placements[name])
        values = numeric_values(view.read().reshape(-1), view.dtype)
        return torch.from_numpy(values.copy()).float().reshape(opened.view.canonical[name].shape)
