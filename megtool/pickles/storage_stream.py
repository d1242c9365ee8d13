"""Storages as `torch.save` wrote them before release 1.6, read without torch.

`pickle.dumps` of a tensor still nests one: `torch.storage._load_from_bytes` of five pickles (a
number, a version, the machine, the storage, its key), the number of elements, and their bytes.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path

from megtool.dtypes import from_storage
from megtool.errors import FormatError
from megtool.pickles import reader as pickle_reader
from megtool.pickles.reader import PersistentRef

STREAM_HEAD = (
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}q\x00("
    b"X\x10\x00\x00\x00protocol_versionq\x01M\xe9\x03X\r\x00\x00\x00little_endianq\x02\x88"
    b"X\n\x00\x00\x00type_sizesq\x03}q\x04(X\x05\x00\x00\x00shortq\x05K\x02"
    b"X\x03\x00\x00\x00intq\x06K\x04X\x04\x00\x00\x00longq\x07K\x04uu."
)
"""The first three pickles, as torch writes them on a little-endian machine."""

STREAM_MAGIC = STREAM_HEAD[:15]

_TORCH_PICKLES = re.compile(
    rb"\x80\x02\(X\x07\0\0\0storageq\0ctorch\n(\w+Storage)\nq\x01X[\x01-\x14]\0\0\0\d+q\x02"
    rb"X.\0\0\0(?:cpu|cuda:\d+)q\x03(?:K.|M..|J....)Ntq\x04Q(?:q\x05)?\."
    rb"\x80\x02\]q\0\(?X[\x01-\x14]\0\0\0\d+q\x01[ae]\.",
    re.DOTALL,
)
"""The last two pickles as torch writes them; other forms are decoded, ten times slower."""


@dataclass(frozen=True, slots=True)
class StorageStream:
    """One storage: the name of its class in `torch`, and its bytes."""

    storage: str
    data: bytes


def parse_storage_stream(data: bytes, *, file: str | Path) -> StorageStream:
    """Read the storage of a stream.

    Raises:
        FormatError: damaged, hostile, or more than one storage.
    """
    if not data.startswith(STREAM_MAGIC):
        raise FormatError("a tensor in an extra state has a storage in an unknown form", file=file)
    if data.startswith(STREAM_HEAD) and (match := _TORCH_PICKLES.match(data, len(STREAM_HEAD))):
        return _read_elements(data, match.end(), match[1].decode(), file)
    import pickletools

    stream = io.BytesIO(data)
    parts: list[bytes] = []
    try:
        while len(parts) < 5:
            begin = stream.tell()
            for _ in pickletools.genops(stream):
                pass
            parts.append(data[begin : stream.tell()])
    except (ValueError, LookupError) as e:
        raise FormatError(f"a storage in an extra state is damaged: {e}", file=file) from e
    trees = [pickle_reader.decode(part, file=file) for part in parts]
    node = trees[-2]
    pid = node.id if isinstance(node, PersistentRef) else None
    if (
        not (isinstance(pid, tuple) and len(pid) > 4 and pickle_reader.is_global(pid[1]))
        or pid[0] != "storage"
        or pid[1].module != "torch"
        or trees[-1] != [pid[2]]
    ):
        raise FormatError("a storage in an extra state is in an unknown form", file=file)
    return _read_elements(data, stream.tell(), pid[1].qualname, file)


def _read_elements(data: bytes, offset: int, storage: str, file: str | Path) -> StorageStream:
    """The elements of a stream whose pickles end at `offset`: a count, then their bytes."""
    offset += 8
    count = int.from_bytes(data[offset - 8 : offset], "little")
    if len(data) != offset + count * from_storage(storage, file).itemsize:
        raise FormatError(
            f"a storage in an extra state claims {count} elements in {max(len(data) - offset, 0)} "
            "bytes",
            file=file,
        )
    return StorageStream(storage, data[offset:])
