"""A data set of tokens for a store: written to a temporary folder, then uploaded, index last."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from megtool.data.dataset_writer import DATA, INDEX, DatasetFiles, add_suffix, dataset_prefix
from megtool.errors import DestinationError, MegtoolError
from megtool.staging.destination.store_check import check_surroundings
from megtool.staging.store.object_upload import ObjectUpload, write_file
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath, location
from megtool.storage.objects.part_buffers import PartBuffers
from megtool.storage.objects.probe import probe_store

_LOG = logging.getLogger(__name__)


class DatasetUpload:
    """`prefix`.bin and `prefix`.idx in a store, with the methods of `DatasetFiles`.

    The temporary folder needs space for both. They appear when both are uploaded. Where they
    replace others, the old index goes before and the new one comes last, so a data set is never of
    two runs. If the store fails, the temporary folder stays, and a log message names it.
    """

    def __init__(self, prefix: StorePath, files: Files, *, overwrite: bool = False) -> None:
        self.prefix = dataset_prefix(prefix)
        self.staged = Path()
        self._target, self._files, self._overwrite = prefix, files, overwrite
        self._folder = ""

    def check(self) -> None:
        """Refuse a destination that exists, or that cannot be written.

        Raises:
            DestinationError: one of the objects exists and may not be replaced, or the store is
                only read.
            StorageError: the store refused.
        """
        if not self.prefix.name:
            raise DestinationError(f"{str(self.prefix)!r} is not the name of an object")
        check_surroundings(self._object(DATA), ())
        for path in (self._object(DATA), self._object(INDEX)):
            if not self._overwrite and path.is_file():
                raise DestinationError(
                    "already exists",
                    file=path,
                    hint="name another destination, or replace it: --overwrite",
                    error_id="destination-exists",
                )

    def commit(self, *, fsync: bool = True) -> int:
        """Upload both files; returns their bytes.

        Raises:
            DestinationError: something appeared there meanwhile.
            StorageError: the store refused.
        """
        self.check()
        num_bytes, num_objects, buffers = 0, 0, PartBuffers()
        uploads: list[ObjectUpload] = []
        try:
            for suffix in (DATA, INDEX):
                staged, path = add_suffix(self.staged, suffix), self._object(suffix)
                size = staged.stat().st_size
                uploads.append(ObjectUpload(path, size, buffers, create=not self._overwrite))
                self._fill(path, staged)
                uploads[-1].finish()
                num_bytes += size
            if self._overwrite:
                self._target.store.delete([self._object(INDEX).key])
            for upload in uploads:
                upload.close()
                num_objects += 1
        except BaseException:
            _LOG.warning("the data set is complete in %s: copy it from there", self._folder)
            self._folder = ""
            with contextlib.suppress(MegtoolError):
                for upload in uploads:
                    upload.abort()
                if num_objects and not self._overwrite:  # data without an index
                    self._target.store.delete([self._object(DATA).key])
            raise
        finally:
            buffers.close()
        for suffix in (DATA, INDEX):
            self._files.refresh(self._object(suffix))
        return num_bytes

    def _object(self, suffix: str) -> StorePath:
        return self._target.with_name(add_suffix(self.prefix, suffix).name)

    def _fill(self, path: StorePath, staged: Path) -> None:
        target = self._files.open_write(path)
        try:
            write_file(staged, target, self._files)
        finally:
            self._files.close(target)

    def __enter__(self) -> Self:
        self.check()
        probe_store(self._target.with_name(f".{self.prefix.name}.megtool"))
        self._folder = tempfile.mkdtemp(prefix="megtool-tokens-")
        self.staged = location(self._folder) / self.prefix.name
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def stage_dataset(
    prefix: Path, files: Files, *, overwrite: bool = False
) -> DatasetFiles | DatasetUpload:
    """A data set that is to be written, on a disk or in a store."""
    if isinstance(prefix, StorePath):
        return DatasetUpload(prefix, files, overwrite=overwrite)
    return DatasetFiles(prefix, files, overwrite=overwrite)
