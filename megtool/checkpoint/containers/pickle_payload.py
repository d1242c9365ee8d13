"""Bytes inside a pickle that are themselves a pickle, or a file of `torch.save`.

Extra states of Transformer Engine and ModelOpt are such payloads: whoever loads the checkpoint
unpickles them too. Nothing says which bytes are, so their beginning decides.
"""

from __future__ import annotations

import io
import pickletools
import re
from dataclasses import dataclass
from typing import Any, Literal

from megtool.checkpoint.containers import pickle_reader
from megtool.checkpoint.containers.storage_stream import STREAM_MAGIC, parse_storage_stream
from megtool.checkpoint.containers.zip_reader import load_object_bytes
from megtool.errors import FormatError

PAYLOAD_FILE = "bytes in a pickle"

_ZIP, _PROTO = b"PK\3\4", 0x80
_TREE = b"data.pkl"
_TAR, _TAR_AT = b"ustar", 257
_MAX_OPCODES = 1 << 20
_NAME = re.compile(r"[^\W\d][\w.]*")
_STRINGS = frozenset(
    {
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "UNICODE",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
    }
)
_USES = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "BUILD", "SETITEM", "APPEND"})
_EXTENSIONS = frozenset({"EXT1", "EXT2", "EXT4"})
_LOOKUPS = frozenset({"GET", "BINGET", "LONG_BINGET", "DUP"})


@dataclass(frozen=True, slots=True)
class PicklePayload:
    """The decoded tree of a payload, and the container it was in."""

    kind: Literal["pickle", "zip"]
    tree: Any


@dataclass(frozen=True, slots=True)
class PickleScan:
    """The globals that bytes name as far as they are a pickle, and whether they are one exactly."""

    names: tuple[str, ...]
    is_whole: bool


def read_payload(data: bytes) -> PicklePayload | None:
    """Decode a payload; None for bytes that are none.

    Raises:
        FormatError: the bytes would be unpickled, but cannot be read here: damaged, hostile, or
            in a form of before torch 1.6.
    """
    if data.startswith(_ZIP) and _TREE in data:
        return PicklePayload("zip", load_object_bytes(data, file=PAYLOAD_FILE))
    if data.startswith(STREAM_MAGIC):
        parse_storage_stream(data, file=PAYLOAD_FILE)
        return None
    if data[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        raise FormatError("a file in the format of torch before 1.6", file=PAYLOAD_FILE)
    scan = scan_pickle(data)
    if not scan.names and not (scan.is_whole and data[0] == _PROTO):
        return None
    try:
        return PicklePayload("pickle", pickle_reader.decode(data, file=PAYLOAD_FILE))
    except FormatError as e:
        if not scan.names:
            return None
        raise FormatError(
            f"a pickle that names {', '.join(scan.names[:5])}: {e.message}",
            file=PAYLOAD_FILE,
            hint=e.hint,
        ) from e


def scan_pickle(data: bytes) -> PickleScan:
    """Walk the opcodes of bytes that may be a pickle, up to the first that is none.

    A pickle runs as it is read, so what comes before damage counts too. Elements of a tensor and
    text look like opcodes now and then, so only names that are identifiers count, and without a
    protocol in front only if something is done with them.
    """
    names: dict[str, None] = {}
    strings: list[str] = []
    count, end, has_extensions, is_used = 0, -1, False, data[:1] == bytes((_PROTO,))
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            count += 1
            if count > _MAX_OPCODES:
                names.setdefault("more than can be checked")
                break
            if opcode.name in ("GLOBAL", "INST"):
                module, _, name = str(argument).partition(" ")
                _add_name(names, module, name)
                is_used |= opcode.name == "INST"
            elif opcode.name in _USES:
                is_used = True
            elif opcode.name == "STACK_GLOBAL" and len(strings) >= 2:
                _add_name(names, strings[-2], strings[-1])
            elif opcode.name in _EXTENSIONS:
                has_extensions = True
            elif opcode.name in _STRINGS:
                strings = [*strings[-1:], str(argument)]
            elif opcode.name in _LOOKUPS:
                strings = [*strings[-1:], "memo"]
            elif opcode.name == "STOP":
                end, is_used = count, True
    except (ValueError, LookupError, OverflowError, MemoryError):
        pass
    is_whole = end == count and data[-1:] == b"."
    if is_whole and has_extensions:
        names.setdefault("a class by its number")
    return PickleScan(names=tuple(names) if is_used else (), is_whole=is_whole)


def _add_name(names: dict[str, None], module: str, name: str) -> None:
    if _NAME.fullmatch(module) and _NAME.fullmatch(name):
        names.setdefault(f"{module}.{name}"[:200])
