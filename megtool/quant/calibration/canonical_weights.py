"""Weights by canonical module name, read from a checkpoint in any format and layout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megtool.errors import CalibrationError
from megtool.quant.algorithms.pre_quant_scale import NormWeights
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.transport.cast import numeric_values
from megtool.transport.reading.reader import CheckpointReader

_TILE = 1 << 20


class CanonicalWeights:
    """Reads a module's weight, float32 `[out, in]` on the CPU, on each call.

    Nothing is cached, and results do not depend on the parallel layout. Use in `with`; not thread
    safe.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self._side = source.view
        self._reader = CheckpointReader(source.catalogue, Files())

    def __call__(self, module: str) -> Tensor:
        """Read a weight.

        Raises:
            CalibrationError: it has NaN or Inf.
            StorageError: it cannot be read.
        """
        name = f"{module}.weight"
        view = self._reader.open_canonical(self._side.placements[name])
        shape = self._side.canonical[name].shape  # a view may split dimensions
        out = np.empty(shape, np.float32)
        flat = out.reshape(-1)
        for offset, tile in view.tiles(_TILE):
            values = flat[offset : offset + tile.size]
            values[:] = numeric_values(tile, view.dtype)
            if not np.isfinite(values).all():
                position = offset + int(np.argmin(np.isfinite(values)))
                index = [int(i) for i in np.unravel_index(position, shape)]
                raise CalibrationError(
                    f"element {index} of the weight is {flat[position]}",
                    tensor=name,
                    hint="`megtool inspect SRC --stats` counts them; use an intact checkpoint, or "
                    "one of an earlier iteration",
                )
        return torch.from_numpy(out)

    def norm(self, module: str) -> NormWeights:
        """Read the weights of a norm, and how they are stored.

        Raises:
            CalibrationError: see above.
        """
        config, name = self._side.config, f"{module}.weight"
        return NormWeights(
            weight=self(module),
            dtype=self._side.canonical[name].dtype.name,
            zero_centered=config is not None and config.norms.zero_centered_norm,
        )

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def __enter__(self) -> CanonicalWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
