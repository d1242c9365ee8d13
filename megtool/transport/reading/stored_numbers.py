"""Small stored tensors, mostly single scales, as numbers."""

from __future__ import annotations

from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.number_formats.small_floats import single
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.transport.reading.reader import CheckpointReader

MAX_SMALL_ELEMENTS = 1 << 20
"""A tensor of more is not small; it is read by a feed."""


class StoredNumbers:
    """Reads small tensors of a catalogue as numbers. Use in `with`."""

    def __init__(self, catalogue: Catalogue, files: Files | None = None) -> None:
        self._reader = CheckpointReader(catalogue, files or Files())

    def read(self, name: str) -> NDArray[np.float32]:
        """A stored tensor as float32, in its shape.

        Raises:
            FormatError: it is too large to be read while planning.
        """
        tensor = self._reader.catalogue[name]
        if tensor.numel > MAX_SMALL_ELEMENTS:
            raise FormatError(f"{tensor.numel} elements are no small tensor", tensor=name)
        out = np.zeros(tensor.numel, np.float32)
        with closing(self._reader.open_stored(name).tiles()) as tiles:
            for first, tile in tiles:
                out[first : first + tile.size] = single(tile, tensor.dtype.name)
        return out.reshape(tensor.shape)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def __enter__(self) -> StoredNumbers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
