"""Decodes encoded chunks of zarr arrays with zarr-python or tensorstore."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.formats.zarr_chunks import ZarrArray
from megtool.errors import FormatError, MissingPackageError

LIBRARY_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,  # includes NotImplementedError
    TypeError,
    ValueError,
)
"""What the libraries raise for invalid bytes or metadata."""


class ChunkDecoder:
    """Reads boxes of arrays with zarr-python, or with tensorstore if zarr-python lacks the dtype.

    Arrays are opened once. Any thread may call.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opened: dict[str, Callable[[tuple[slice, ...]], NDArray[Any]]] = {}
        self._lock = threading.Lock()

    def __call__(self, array: ZarrArray, lo: Sequence[int], hi: Sequence[int]) -> NDArray[Any]:
        """The elements of the box `lo:hi`, little-endian.

        Raises:
            FormatError: the library cannot decode the chunk.
            MissingPackageError: the library is not installed.
        """
        box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        try:
            with self._lock:
                read = self._opened.get(array.name)
                if read is None:
                    read = self._opened[array.name] = self._open(array)
            elements = np.asarray(read(box))
            if elements.dtype.byteorder == ">":
                elements = elements.astype(elements.dtype.newbyteorder("<"))
        except LIBRARY_ERRORS as e:
            raise FormatError(
                f"elements {list(lo)} to {list(hi)} cannot be decoded: {str(e)[:200]}",
                file=self._root / array.folder,
                tensor=array.name,
                hint="the chunk is damaged, or its codec is not installed",
            ) from e
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        if elements.shape != shape or elements.dtype.itemsize != array.metadata.dtype.itemsize:
            raise FormatError(
                f"decoded to {elements.dtype} {list(elements.shape)}, not {array.metadata.dtype} "
                f"{list(shape)}",
                file=self._root / array.folder,
                tensor=array.name,
            )
        return elements

    def _open(self, array: ZarrArray) -> Callable[[tuple[slice, ...]], NDArray[Any]]:
        folder = self._root / array.folder
        version = array.metadata.version
        if array.metadata.is_zarr_python_dtype:
            stored_array = zarr_package().open_array(
                store=str(folder), mode="r", zarr_format=version
            )
            return lambda box: np.asarray(stored_array[box])
        spec = {
            "driver": "zarr" if version == 2 else "zarr3",
            "kvstore": {"driver": "file", "path": str(folder)},
        }
        return open_tensorstore(spec)


def open_tensorstore(spec: dict[str, Any]) -> Callable[[tuple[slice, ...]], NDArray[Any]]:
    """A function that reads boxes of an existing tensorstore."""
    store = tensorstore_package().open(spec, open=True, read=True).result()
    return lambda box: np.asarray(store[box].read().result())


def zarr_package() -> Any:
    """Import zarr-python.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import zarr
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "decoding compressed zarr chunks needs zarr", hint="pip install 'megtool[zarr]'"
        ) from e
    return zarr


def tensorstore_package() -> Any:
    """Import tensorstore.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import tensorstore
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "decoding these chunks needs tensorstore", hint="pip install 'megtool[zarr]'"
        ) from e
    return tensorstore
