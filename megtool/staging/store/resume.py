"""What earlier runs of a plan have left in a store, and whether it is theirs.

Parts of an upload are those that the store lists. An object that was put whole is known by its
version, which the journal has. One that the journal does not name is not trusted for its size: its
bytes are made again, and compared with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from megtool.staging.store.journal import UnitRecord
from megtool.storage.location.path import StorePath
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.objects.small_object import read_object
from megtool.storage.objects.writer import ObjectWriter
from megtool.storage.stores.protocol import ObjectInfo, ObjectMissingError


class EarlierObjects:
    """Uploads and objects of earlier runs, by number of the file.

    `folder` has the ids of uploads, `ids`. `versions` are those of objects that were put whole, and
    `doubtful` are objects that may be of another program.
    """

    def __init__(self, folder: StorePath) -> None:
        self._folder = folder
        self.ids: dict[int, str] = {}
        self.versions: dict[int, str] = {}
        self.doubtful: set[ObjectPath] = set()

    def clear(self) -> None:
        """Forget everything."""
        self.ids.clear()
        self.versions.clear()
        self.doubtful.clear()

    def path(self, number: int) -> StorePath:
        """Where the id of the upload of a file is."""
        return self._folder / str(number)

    def read_ids(self) -> None:
        """Read the ids of uploads.

        Raises:
            StorageError: the store refused.
        """
        for info in self._folder.store.list(self._folder.key).objects:
            name = info.key.rpartition("/")[2]
            if name.isdecimal():
                data = read_object(self._folder / name, info)
                if data is not None:
                    self.ids[int(name)] = data.decode(errors="replace")

    def note(self, records: Iterable[UnitRecord]) -> None:
        """Take versions from records of the journal."""
        for record in records:
            self.versions.update(record.objects)

    def adopt(self, writer: ObjectWriter, number: int, *, is_publishing: bool) -> None:
        """Let a writer take what is uploaded of its object.

        `is_publishing`: objects may have appeared at the destination.

        Raises:
            StorageError: the store refused.
        """
        path, upload_id = writer.path, self.ids.get(number)
        if upload_id is not None:
            with contextlib.suppress(ObjectMissingError):
                writer.adopt(path.store.list_parts(path.key, upload_id))
                writer.upload_id = upload_id
                return
        if is_publishing:
            info = path.store.head(path.key)
            if info is not None and info.size == writer.size:
                if self._is_own(writer, number, info):
                    writer.adopt_object(info)
                    return
                self.doubtful.add(path)
        if upload_id is not None:  # aborted by somebody: begin a new one
            path.store.delete([self.path(number).key])

    def _is_own(self, writer: ObjectWriter, number: int, info: ObjectInfo) -> bool:
        upload_id = self.ids.get(number)
        if upload_id is not None:
            return writer.path.store.is_made_of(info, upload_id)
        return not info.size or info.version == self.versions.get(number)
