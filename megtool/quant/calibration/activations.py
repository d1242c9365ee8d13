"""Inputs of a layer, batch by batch, in memory or in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megtool.errors import FormatError, StorageError
from megtool.quant.calibration.calibration_file_io import array_crc32c
from megtool.storage.files import Files

_DEVICE_MEMORY_DIVISOR = 2
"""Activations may use one part in this many of the free device memory."""


class Activations:
    """Rows `[T, width]` of several batches, which each layer reads and replaces.

    `rows` are the T of the batches. If `begin` gets a `path`, batches are also written to that
    file, or with `spilled` only there: `get` then reads the file of the previous layer. Files are
    read and written, not mapped, so that a full disk raises an error instead of a signal. A file
    contains the batches in order, then their digests.
    """

    def __init__(
        self,
        rows: Sequence[int],
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        spilled: bool = False,
        files: Files | None = None,
    ) -> None:
        self._rows, self._width, self._dtype = list(rows), width, dtype
        self._device, self._spilled = device, spilled
        self._files = Files() if files is None else files
        sizes = [n * width * dtype.itemsize for n in rows]
        self._starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        self._resident: list[Tensor | None] = [None] * len(self._rows)
        self._store = device if self._fits_on_device() else torch.device("cpu")
        self._source: Path | None = None
        self._source_fd = -1
        self._target: Path | None = None
        self._target_fd = -1
        self._digests = np.zeros(len(self._rows), "<u4")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all batches."""
        return int(self._starts[-1])

    def get(self, number: int) -> Tensor:
        """Get a batch on the device; must not be modified."""
        x_TH = self._resident[number]
        if x_TH is None:
            x_TH = self._read(self._source_fd, number)[0]
        return x_TH.to(self._device, non_blocking=True)

    def put(self, number: int, x_TH: Tensor) -> None:
        """Store the output of the layer for a batch.

        Raises:
            StorageError: the disk is full.
        """
        if self._target_fd >= 0:
            data = _bytes(x_TH)
            self._files.pwrite_all(self._target_fd, data, int(self._starts[number]))
            self._digests[number] = array_crc32c(data)
        if not self._spilled:
            self._resident[number] = x_TH.to(self._store)

    def begin(self, path: Path | None) -> None:
        """Write subsequent batches to this file as well."""
        if path is None:
            return
        self._target = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._target_fd = self._files.open_write(self._target)
        self._files.truncate(self._target_fd, self.num_bytes)

    def end(self, path: Path | None) -> None:
        """Finish the file after all batches: fsync and rename."""
        if path is None or self._target is None:
            return
        fd, place = self._target_fd, self._target
        self._files.pwrite_all(fd, self._digests.view(np.uint8), self.num_bytes)
        self._files.call(fd, "flush", os.fsync, fd)
        self._files.close(fd)
        self._target_fd, self._target = -1, None
        self._files.rename(place, path)
        self._files.fsync_dir(path.parent)
        if self._spilled:
            self.open(path)

    def open(self, path: Path) -> None:
        """Read batches from this file."""
        self._close_source()
        self._source, self._source_fd = path, self._files.open_read(path)

    def load(self, path: Path) -> bool:
        """Read batches from a file of an earlier run; False if it is not valid."""
        if self._files.stat(path) is None:
            return False
        fd = self._files.open_read(path)
        try:
            if self._files.fstat(fd).st_size != self.num_bytes + 4 * len(self):
                return False
            digests = np.empty(len(self), "<u4")
            self._files.pread_into(fd, digests.view(np.uint8), self.num_bytes)
            for number, digest in enumerate(digests):
                x_TH, actual = self._read(fd, number)
                if actual != digest:
                    return False
                if not self._spilled:
                    self._resident[number] = x_TH.to(self._store)
        except (FormatError, StorageError):
            return False
        finally:
            self._files.close(fd)
        if self._spilled:
            self.open(path)
        return True

    def close(self) -> None:
        """Release everything; an incomplete file is removed."""
        self._close_source()
        if self._target_fd >= 0 and self._target is not None:
            self._files.close(self._target_fd)
            self._files.remove(self._target)
            self._target_fd, self._target = -1, None
        self._resident = [None] * len(self)

    def _close_source(self) -> None:
        if self._source_fd >= 0:
            self._files.close(self._source_fd)
        self._source_fd = -1

    def _read(self, fd: int, number: int) -> tuple[Tensor, int]:
        """A batch and the digest of its bytes."""
        x_TH = torch.empty(self._rows[number], self._width, dtype=self._dtype)
        data = _bytes(x_TH)
        self._files.pread_into(fd, data, int(self._starts[number]))
        return x_TH, array_crc32c(data)

    def _fits_on_device(self) -> bool:
        """Whether all batches fit into device memory."""
        if self._device.type != "cuda":
            return False
        return self.num_bytes * _DEVICE_MEMORY_DIVISOR < torch.cuda.mem_get_info(self._device)[0]


def _bytes(x: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The bytes of a tensor, copied to the CPU if needed."""
    out: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = (
        x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    )
    return out
