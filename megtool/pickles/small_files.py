"""Small files that are pickles or were written by `torch.save`, to be copied with a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from megtool.errors import FormatError
from megtool.pickles import reader as pickle_reader
from megtool.pickles.payload import is_tar, scan_pickle
from megtool.pickles.rewrite import encode_payloads
from megtool.pickles.storage_stream import STREAM_MAGIC
from megtool.pickles.writer import encode
from megtool.pickles.zip_reader import load_object_bytes
from megtool.pickles.zip_writer import encode_object
from megtool.storage.files import read_file

PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill", ".distcp")
_ZIP, _PROTO = b"PK\3\4", 0x80
_NO_PICKLE = (b"", b"{", b"[", b"#", b"<", b"/", b"-", b'"', b"\n", b" ")
"""What texts begin with, and no opcode."""

_PICKLE_MEMBER = re.compile(rb"\.pkl", re.IGNORECASE)


def is_pickle_file(path: Path) -> bool:
    """Whether a file is unpickled by whoever loads it, by its suffix or its beginning.

    `torch.load` takes a zip with a pickle in it, a tar by the checksum of its first header, and the
    pickle that anything else begins with, whatever its protocol is.
    """
    if path.name.lower().endswith((*PICKLE_SUFFIXES, ".metadata")):
        return True
    with path.open("rb") as f:
        head = f.read(512)
        if head.startswith(_ZIP):
            return _PICKLE_MEMBER.search(head + f.read()) is not None
        if head.startswith(STREAM_MAGIC) or is_tar(head):
            return True
        if head[:1] in _NO_PICKLE:
            return False
        scan = scan_pickle(head + f.read())
    return bool(scan.names) or (scan.is_whole and head[0] == _PROTO)


def recode_pickle_file(path: Path) -> bytes:
    """The contents of such a file, decoded and encoded again.

    Raises:
        FormatError: it names what no checkpoint needs, is damaged, or in a form of before torch
            1.6.
    """
    data = read_file(path)
    if data.startswith(_ZIP):
        return encode_object(load_object_bytes(data, file=path))
    if data.startswith(STREAM_MAGIC) or is_tar(data):
        raise FormatError("written in the format of torch before version 1.6", file=path)
    tree = pickle_reader.decode(data, file=path)
    protocol = 2 if data[:2] == b"\x80\x02" else 3
    return encode(encode_payloads(tree, encode_object), protocol=protocol)
