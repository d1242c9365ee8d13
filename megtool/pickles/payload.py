"""Bytes inside a pickle that are themselves a pickle, or a file of `torch.save`.

Extra states of Transformer Engine and ModelOpt are such payloads: whoever loads the checkpoint
unpickles them too. Nothing says which bytes are, so their beginning decides.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megtool.errors import FormatError
from megtool.pickles import reader as pickle_reader
from megtool.pickles.storage_stream import STREAM_MAGIC, parse_storage_stream
from megtool.pickles.zip_reader import load_object_bytes

PAYLOAD_FILE = "bytes in a pickle"

_ZIP, _PROTO, _LAST_PROTOCOL = b"PK\3\4", 0x80, 5
_TREE = re.compile(rb"data\.pkl", re.IGNORECASE)
_MAX_OPCODES = 1 << 20
_MODULE = re.compile(r"\w[\w.-]*")
_NAME = re.compile(r"[^\W\d][\w.]*")
_STANDARD = sys.stdlib_module_names | {"__builtin__"}

_BARE = re.compile(rb"[(.012NQR)\]}abdelostu\x81\x85-\x89\x8f-\x92\x94\x97\x98]+")
"""A run of opcodes without arguments; all but STACK_GLOBAL."""

_USES = re.compile(rb"[.Roabs\x81\x92]")
_LINES = {code: 1 for code in b"FILSVgpP"} | dict.fromkeys(b"ci", 2)
_FIXED = (
    {code: 1 for code in b"Khq\x80\x82"}
    | dict.fromkeys(b"M\x83", 2)
    | dict.fromkeys(b"Jjr\x84", 4)
    | dict.fromkeys(b"G\x95", 8)
)
_COUNTED = (
    {code: 1 for code in b"UC\x8a\x8c"}
    | dict.fromkeys(b"TXB\x8b", 4)
    | dict.fromkeys(b"\x8d\x8e\x96", 8)
)
_UTF8, _TEXT, _LOOKUPS = frozenset(b"\x8cX\x8d"), frozenset(b"\x8cX\x8dUTSV"), frozenset(b"ghj")
_GLOBALS, _EXTENSIONS, _STACK_GLOBAL = frozenset(b"ci"), frozenset(b"\x82\x83\x84"), 0x93


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


def read_payload(
    data: bytes, *, stub_classes: Mapping[tuple[str, str], Any] | None = None
) -> PicklePayload | None:
    """Decode a payload, `stub_classes` as in `reader.decode`; None for bytes that are none.

    Raises:
        FormatError: the bytes would be unpickled, but cannot be read here: damaged, hostile, or
            in a form of before torch 1.6.
    """
    if data.startswith(_ZIP) and _TREE.search(data):
        return PicklePayload(
            "zip", load_object_bytes(data, file=PAYLOAD_FILE, stub_classes=stub_classes)
        )
    if data.startswith(STREAM_MAGIC):
        parse_storage_stream(data, file=PAYLOAD_FILE)
        return None
    if is_tar(data):
        raise FormatError("a file in the format of torch before 1.6", file=PAYLOAD_FILE)
    scan = scan_pickle(data)
    if not scan.names and not (scan.is_whole and data[0] == _PROTO):
        return None
    try:
        tree = pickle_reader.decode(data, file=PAYLOAD_FILE, stub_classes=stub_classes)
        return PicklePayload("pickle", tree)
    except FormatError as e:
        if not scan.names:
            return None
        raise FormatError(
            f"a pickle that names {', '.join(scan.names[:5])}: {e.message}",
            file=PAYLOAD_FILE,
            hint=e.hint,
        ) from e


def is_tar(data: bytes) -> bool:
    """Whether bytes begin with a header that `tarfile` takes: its checksum decides, and no mark."""
    import tarfile

    try:
        tarfile.TarInfo.frombuf(data[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True


def scan_pickle(data: bytes) -> PickleScan:
    """Walk the opcodes of bytes that may be a pickle, up to the first that is none.

    Arguments are skipped by their lengths and lines, as the C unpickler consumes them, and not
    parsed: what one parser refuses, another takes. A pickle runs as it is read, so what comes
    before damage counts too, and what follows its end, because files of `torch.save` are several.

    Elements of a tensor and text look like opcodes now and then. So a name counts if it could be
    one, and if the bytes start with a protocol, do something with a value or reach an end; a module
    of Python's standard library counts always, because it is imported.
    """
    walk = _Walk(data)
    walk.run()
    names = dict.fromkeys(walk.names if walk.is_used else walk.standard)
    if walk.has_extensions and walk.end == len(data):
        names.setdefault("a class by its number")
    return PickleScan(names=tuple(names), is_whole=walk.end == len(data) > 0)


class _Walk:
    """The state of `scan_pickle`: `end` is the position after the first STOP."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.names: dict[str, None] = {}
        self.standard: dict[str, None] = {}
        self.is_used, self.has_extensions = data[:1] == bytes((_PROTO,)), False
        self.end = 0
        self._strings: list[str] = []

    def run(self) -> None:
        """Walk to the end, or to the first byte that cannot be read as an opcode."""
        position: int | None = 0
        count = 0
        while position is not None and position < len(self.data):
            count += 1
            if count > _MAX_OPCODES:
                self.names.setdefault("more than can be checked")
                self.is_used = True
                return
            bare = _BARE.match(self.data, position)
            position = self._step(position) if bare is None else self._skip(bare)

    def _skip(self, bare: re.Match[bytes]) -> int:
        run = bare[0]
        if not self.end and (stop := run.find(b".")) >= 0:
            self.end = bare.start() + stop + 1
        self.is_used |= _USES.search(run) is not None
        if b"2" in run:
            self._strings = [*self._strings, "memo", "memo"][-2:]
        return bare.end()

    def _step(self, position: int) -> int | None:
        data, code = self.data, self.data[position]
        start = position + 1
        if code in _LINES:
            lines, end = self._lines(start, _LINES[code])
            if code in _GLOBALS:
                if len(lines) < 2 or not self._add_line_names(lines):
                    return None
                self.is_used |= code == ord("i")
            text = lines[0]
        elif code == _STACK_GLOBAL:
            if len(self._strings) >= 2:
                self._add_name(*self._strings[-2:], is_certain=True)
            return start
        else:
            width = _COUNTED.get(code, 0)
            length = int.from_bytes(data[start : start + width], "little") if width else None
            length = _FIXED.get(code) if length is None else length
            if length is None:
                return None
            end = start + width + length
            if end > len(data) or (code == _PROTO and data[start] > _LAST_PROTOCOL):
                return None
            text = data[start + width : end] if code in _TEXT else b""
            self.has_extensions |= code in _EXTENSIONS
        if code in _TEXT:
            return end if self._add_string(code, text) else None
        if code in _LOOKUPS:
            self._strings = [*self._strings[-1:], "memo"]
        return end

    def _lines(self, start: int, number: int) -> tuple[list[bytes], int]:
        """The next lines without their ends; the last byte is the end of one that has none."""
        lines = []
        for _ in range(number):
            end = self.data.find(b"\n", start)
            end = end if end >= 0 else max(len(self.data) - 1, start)
            lines.append(self.data[start:end])
            start = end + 1
        return lines, start

    def _add_line_names(self, lines: list[bytes]) -> bool:
        try:
            module, name = (line.decode() for line in lines)
        except UnicodeDecodeError:
            return False
        self._add_name(module, name)
        return True

    def _add_string(self, code: int, text: bytes) -> bool:
        """Note a string; false for one that no unpickler decodes."""
        try:
            decoded = text.decode("utf-8", "surrogatepass" if code in _UTF8 else "replace")
        except UnicodeDecodeError:
            return False
        if code == ord("S"):
            decoded = decoded.strip().strip("'\"")
        elif code == ord("V") and "\\" in decoded:
            decoded = text.decode("raw-unicode-escape", "replace")
        self._strings = [*self._strings[-1:], decoded]
        return True

    def _add_name(self, module: str, name: str, *, is_certain: bool = False) -> None:
        """Note a global; one from the stack is certain, though its strings may be others."""
        dotted = f"{module}.{name}"[:200]
        if _MODULE.fullmatch(module) and _NAME.fullmatch(name):
            self.names.setdefault(dotted)
        elif is_certain:
            self.names.setdefault("a class by strings on its stack")
        if module.partition(".")[0] in _STANDARD:
            self.names.setdefault(dotted)
            self.standard.setdefault(dotted)
