"""Tables of integers in HDF5 files: read in parts, and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError, MissingPackageError, StorageError

Int = NDArray[np.integer[Any]]

_HDF5_ERRORS = (OSError, KeyError, RuntimeError, ValueError, TypeError)
"""What h5py raises on damaged files, by the part that is damaged."""

_DAMAGED = "it is damaged, or its run was interrupted: remove the file and build it again"
_FOREIGN = "the file is not one of Retro's, or is one of another stage: build it again"


def load_h5py() -> Any:
    """The package h5py.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        import h5py
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "Retro's HDF5 files need the h5py package", hint="pip install 'megtool[retro]'"
        ) from e
    return h5py


class Hdf5Table:
    """A two-dimensional array of integers in an HDF5 file, of which only what is asked for is read.

    Raises:
        FormatError: the file is missing, truncated or no HDF5, or has no such array; links to other
            files are not followed.
    """

    def __init__(self, file: Path, name: str, *, num_columns: int | None = None) -> None:
        """Open array `name` of a file; with `num_columns`, rows have to be so long."""
        h5py = load_h5py()
        self.file, self.name = file, name
        array: Any
        dtype: Any
        if not file.is_file():
            raise FormatError(
                "there is no such file",
                file=file,
                hint="build the project to its end, or copy all of it",
                error_id="source-not-found",
            )
        try:
            self._file = h5py.File(file, "r")
            link = self._file.get(name, getlink=True)
            array = self._file[name] if isinstance(link, h5py.HardLink) else None
            is_own = isinstance(array, h5py.Dataset) and not (array.is_virtual or array.external)
            dtype, shape = (array.dtype, array.shape) if is_own else (None, None)
        except _HDF5_ERRORS as e:
            raise FormatError(
                f"not a whole HDF5 file: {e}",
                file=file,
                hint=_DAMAGED,
                error_id="truncated-file" if "truncated" in str(e) else None,
            ) from e
        if not is_own:
            raise FormatError(f"there is no array {name!r} in it", file=file, hint=_FOREIGN)
        # Megatron writes a table without rows as an array of one dimension.
        shape = (0, num_columns or 0) if shape == (0,) else shape
        if shape is None or len(shape) != 2 or dtype.kind not in "iu":
            raise FormatError(
                f"array {name!r} is {dtype} of shape {shape}, not a table of integers",
                file=file,
                hint=_FOREIGN,
            )
        if num_columns not in (None, shape[1]):
            raise FormatError(
                f"rows of array {name!r} have {shape[1]} numbers, and {num_columns} are needed",
                file=file,
                hint=_FOREIGN,
            )
        self.shape: tuple[int, int] = shape
        self._array = array

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, numbers: slice | Int) -> Int:
        """Some rows: a range, or increasing numbers without repetition.

        Raises:
            FormatError: what the file has there cannot be decoded.
        """
        try:
            rows: Int = self._array[numbers] if len(self) else np.empty((0, self.shape[1]), int)
        except _HDF5_ERRORS as e:
            raise FormatError(
                f"array {self.name!r} cannot be read: {e}", file=self.file, hint=_DAMAGED
            ) from e
        return rows

    def scalar(self, name: str) -> int | None:
        """The first number of another array, None if there is none."""
        try:
            return int(self._file[name][0])
        except (*_HDF5_ERRORS, IndexError):
            return None


class Hdf5Output:
    """A new HDF5 file of arrays, each written at once or row by row; a context that closes it.

    Raises:
        StorageError: it cannot be written.
    """

    def __init__(self, file: Path) -> None:
        h5py = load_h5py()
        self.file = file
        try:
            self._file = h5py.File(file, "w")
        except OSError as e:
            raise StorageError(f"cannot write: {e}", file=file) from e

    def write(self, arrays: Mapping[str, Int]) -> None:
        """Add whole arrays."""
        try:
            for name, values in arrays.items():
                self._file.create_dataset(name, data=values)
        except OSError as e:
            raise StorageError(f"cannot write: {e}", file=self.file) from e

    def create(self, name: str, shape: tuple[int, int], dtype: str) -> Any:
        """An array of zeros, to be filled by `array[begin:end] = rows`."""
        return self._file.create_dataset(name, shape, dtype=dtype)

    def __enter__(self) -> Hdf5Output:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._file.close()
        except OSError as e:
            if error[0] is None:
                raise StorageError(f"cannot write: {e}", file=self.file) from e
