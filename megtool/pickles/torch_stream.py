"""Files of torch.save from before release 1.6, or without its zip container since.

Five pickles (a number, a version, the machine, the tree, the keys of its storages), then of each
storage the number of elements in eight bytes, and their bytes. Source: `_legacy_save` of
torch/serialization.py.
"""

from __future__ import annotations

import io
import pickletools
from pathlib import Path
from typing import Any

from megtool.dtypes import from_storage
from megtool.errors import FormatError
from megtool.pickles import reader as pickle_reader
from megtool.storage.files import Files
from megtool.storage.objects.open_objects import is_object

_FILES = Files()
_FIRST_BYTES = 1 << 20
_MAX_PICKLE_BYTES = 256 << 20
_COUNT_BYTES = 8
_PICKLES = 5
_PROTOCOL = 1001


class TorchStream:
    """Such a file, open for reading; offsets are absolute.

    `place_storages` has to be called with the decoded tree before members can be located, because
    only the tree says how long the elements of a storage are.

    Raises:
        FormatError: the pickles are damaged or too long, or the machine was not little-endian.
    """

    def __init__(self, fd: int, size: int, *, file: Path) -> None:
        self._fd, self._size, self.file = fd, size, file
        self._members: dict[str, tuple[int, int]] = {}
        *heads, self._tree, keys = self._read_pickles()
        _, protocol, machine = (pickle_reader.decode(part, file=file) for part in heads)
        if protocol != _PROTOCOL or not isinstance(machine, dict):
            raise self._error(f"its protocol is {protocol!r:.40}, and not {_PROTOCOL}")
        if machine.get("little_endian") is not True:
            raise self._error("it was written on a machine with big-endian numbers")
        listed = pickle_reader.decode(keys, file=file)
        if not isinstance(listed, list) or not all(isinstance(k, str) for k in listed):
            raise self._error("its list of storages is damaged")
        self._keys: list[str] = listed

    def prefetch(self) -> None:
        """Do nothing: where the counts of elements lie is known from the tree."""

    def read_pickle(self) -> bytes:
        """Return the pickle of the tree."""
        return self._tree

    def place_storages(self, tree: Any) -> None:
        """Find out where each storage begins.

        Raises:
            FormatError: the tree and the file do not agree on the storages and their sizes.
        """
        sizes: dict[str, tuple[int, int]] = {}
        for node in pickle_reader.find_references(tree):
            key, numel, width = self._read_reference(node.id)
            if sizes.setdefault(key, (numel, width)) != (numel, width):
                raise self._error(f"storage {key!r} has two sizes")
        if missing := sizes.keys() ^ set(self._keys):
            raise self._error(f"storage {min(missing)!r} is not both listed and used")
        offset, counts = self._start, []
        for key in self._keys:
            numel, width = sizes[key]
            counts.append((offset, numel, key))
            self._members[f"data/{key}"] = offset + _COUNT_BYTES, numel * width
            offset += _COUNT_BYTES + numel * width
        if offset != self._size or len(self._members) != len(self._keys):
            raise FormatError(
                f"its storages end at byte {offset:,}, and the file has {self._size:,}",
                file=self.file,
                hint="the file is truncated or damaged: copy it again",
                error_id="truncated-file" if offset > self._size else None,
            )
        if is_object(self._fd):
            _FILES.prefetch_open(
                self._fd, [(start, start + _COUNT_BYTES) for start, _, _ in counts]
            )
        for start, numel, key in counts:
            stored = int.from_bytes(self._read(start, _COUNT_BYTES), "little")
            if stored != numel:
                raise self._error(f"storage {key!r} has {stored} elements, and {numel} are used")

    def locate(self, name: str) -> tuple[int, int]:
        """Return the offset and the size of a storage, called `data/KEY`.

        Raises:
            FormatError: there is no such storage.
        """
        if name not in self._members:
            raise self._error(f"it has no {name!r}")
        return self._members[name]

    def read(self, name: str) -> bytes:
        """Return the bytes of a storage."""
        return self._read(*self.locate(name))

    def _read_reference(self, pid: Any) -> tuple[str, int, int]:
        """Return key, number of elements and bytes of an element of a storage."""
        is_whole = (
            isinstance(pid, tuple)
            and len(pid) == 6
            and pid[0] == "storage"
            and pickle_reader.is_global(pid[1])
            and isinstance(pid[2], str)
            and type(pid[4]) is int
            and 0 <= pid[4] < 1 << 60
        )
        if not is_whole or pid[5] is not None:
            raise self._error("a storage is a view of another, or its reference is damaged")
        is_bytes = pid[1].qualname == "UntypedStorage"
        return pid[2], pid[4], 1 if is_bytes else from_storage(pid[1].qualname, self.file).itemsize

    def _read_pickles(self) -> list[bytes]:
        length = min(_FIRST_BYTES, self._size)
        while True:
            stream = io.BytesIO(self._read(0, length))
            parts: list[bytes] = []
            try:
                while len(parts) < _PICKLES:
                    begin = stream.tell()
                    for _ in pickletools.genops(stream):
                        pass
                    parts.append(stream.getvalue()[begin : stream.tell()])
                self._start = stream.tell()
                return parts
            except (ValueError, LookupError, ArithmeticError) as e:
                if length == self._size or length >= _MAX_PICKLE_BYTES:
                    raise self._error(f"its pickles are damaged or too long: {e!s:.120}") from e
            length = min(length * 8, self._size, _MAX_PICKLE_BYTES)

    def _read(self, offset: int, size: int) -> bytes:
        data = bytearray(size)
        _FILES.pread_into(self._fd, memoryview(data), offset)
        return bytes(data)

    def _error(self, message: str) -> FormatError:
        return FormatError(f"it is not a readable file of torch.save: {message}", file=self.file)
