"""Limits on the memory and C stack that a hostile pickle can use before it fails.

No pickle is interpreted here. `check_pickle` walks the opcodes of a small one; `load_guarded` runs
a function with a memory limit and a stack depth that suit a large one.
"""

from __future__ import annotations

import gc
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from megtool.errors import FormatError, StorageError
from megtool.process.threads import BackgroundCall

SMALL_BYTES = 2 << 20
"""Up to this size opcodes are walked first (about 0.2 us each); above, memory is limited."""

_BYTES_PER_BYTE = 24
_SLACK_BYTES = 256 << 20
_STACK_BYTES_PER_TUPLE = 160
_SHALLOW_TUPLES = 20_000

_LINE, _LINES, _LENGTH = -1, -2, -10
_ARGUMENTS = {
    b"(.01NQRabd}el])tsu": 0,
    b"\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94": 0,
    b"Khq\x80": 1,
    b"M": 2,
    b"Jjr": 4,
    b"G\x95": 8,
    b"FILSVgp": _LINE,
    b"c": _LINES,
    b"UC\x8a\x8c": _LENGTH - 1,
    b"TXB\x8b": _LENGTH - 4,
    b"\x8d\x8e\x96": _LENGTH - 8,
}
"""The length of each opcode's argument. Refused: DUP, INST, OBJ, PERSID, EXT, buffers."""

_LEAVES = b"NKMJGFILSVcUC\x8aTXB\x8b\x8c\x8d\x8e\x96\x88\x89\x8f}])"
_POPS = {b"Q": 1, b"\x93": 2, b"\x92": 3}  # and push one leaf


def _table(groups: dict[bytes, int]) -> list[int | None]:
    table: list[int | None] = [None] * 256
    for codes, value in groups.items():
        for code in codes:
            table[code] = value
    return table


_ARGUMENT = _table(_ARGUMENTS)
_SIMPLE = _table({_LEAVES: 0, **_POPS})
_KEY_COST = 256
_MAX_COST = 1 << 20

T = TypeVar("T")
_memory_limit = threading.Lock()


def check_pickle(data: bytes, *, file: str | Path) -> None:
    """Walk the opcodes of a pickle and track only the cost of hashing each value.

    Hashing a tuple hashes all its items: a few dozen pairs nested in pairs, used as a key, would
    take forever, and a million nested pairs overflow the stack.

    Raises:
        FormatError: an opcode that no tensor file needs, an argument past the end, a memo index
            larger than the pickle (which would allocate that much), a key that costs too much to
            hash, or bytes after the end.
    """
    walk = _Walk(data, file)
    stack, memo = walk.stack, walk.memo
    position = start = 0
    end = len(data)
    try:
        while position < end:
            code = data[position]
            kind = _ARGUMENT[code]
            if kind is None:
                raise FormatError(
                    f"pickle opcode {bytes([code])!r} at byte {position} is refused",
                    file=file,
                    error_id="hostile-pickle",
                )
            start = position + 1
            if kind >= 0:
                position = start + kind
            elif kind > _LENGTH:
                position = start
                for _ in range(-kind):
                    position = data.find(b"\n", position) + 1
                    if not position:
                        raise FormatError("pickle ends inside a line of text", file=file)
            else:
                width = _LENGTH - kind
                position = start + width + int.from_bytes(data[start : start + width], "little")
            if position > end:
                raise FormatError(f"pickle argument at byte {start} goes past the end", file=file)
            pops = _SIMPLE[code]
            if pops == 0:
                stack.append(1)
            elif code == _BINPUT and end > _MOST_SHORT:  # most opcodes are these four
                memo[data[start]] = stack[-1]
            elif code == _BINGET:
                stack.append(memo[data[start]])
            elif code == _LONG_BINPUT and (index := _four(data, start)[0]) <= end:
                memo[index] = stack[-1]
            elif code == _LONG_BINGET:
                stack.append(memo[_four(data, start)[0]])
            elif code == _STOP:
                if position != end:
                    raise FormatError(
                        f"{end - position} bytes follow the end of a pickle", file=file
                    )
                return
            else:
                walk.step(code, pops, start, position)
    except LookupError as e:
        raise FormatError(f"pickle is damaged at byte {start - 1}", file=file) from e
    if not data:
        raise FormatError("the file is empty", file=file, error_id="truncated-file")
    raise FormatError("pickle has no end", file=file)


_BINPUT, _BINGET, _LONG_BINPUT, _LONG_BINGET = b"qhrj"
_MOST_SHORT = 255  # what BINPUT can name; in a shorter pickle that may be out of range
_four = struct.Struct("<I").unpack_from
_STOP = ord(".")
_SKIP = frozenset(b"\x80\x95")
_PUT, _GET = frozenset(b"pqr"), frozenset(b"g")
_TUPLE_N = {0x85: 1, 0x86: 2, 0x87: 3}


class _Walk:
    """The state of `check_pickle`: a stack and a memo of costs."""

    def __init__(self, data: bytes, file: str | Path) -> None:
        self.stack: list[int] = []
        self._marks: list[int] = []
        self.memo: dict[int, int] = {}
        self._data, self._file = data, file

    def step(self, code: int, pops: int | None, start: int, end: int) -> None:
        """Handle one opcode that is not a leaf; its argument is `data[start:end]`."""
        stack = self.stack
        if pops is not None:
            self._pop(pops)
            stack.append(1)
        elif code in _PUT:
            self.memo[self._index(code, start, end)] = stack[-1]
        elif code == 0x94:
            self.memo[len(self.memo)] = stack[-1]
        elif code in _GET:
            stack.append(self.memo[self._index(code, start, end)])
        elif code in _TUPLE_N:
            stack.append(self._cost(self._pop(_TUPLE_N[code])))
        elif code == ord("("):
            self._marks.append(len(stack))
        elif code == ord("t"):
            stack.append(self._cost(self._since_mark()))
        elif code in b"R\x81":
            stack.append(self._pop(2)[1])
        elif code in b"ab0":
            self._pop(1) if code != ord("0") or stack else self._marks.pop()
        elif code == ord("s"):
            self._check_keys(self._pop(2)[:1])
        elif code in b"ud":
            self._check_keys(self._since_mark()[::2])
        elif code in b"\x90\x91":
            self._check_keys(self._since_mark())
        elif code in b"el1":
            self._since_mark()
        elif code not in _SKIP:
            raise LookupError(code)
        if code in b"dl\x91":
            stack.append(1)

    def _pop(self, count: int) -> list[int]:
        if len(self.stack) < count:
            raise LookupError("empty stack")
        out = self.stack[-count:]
        del self.stack[-count:]
        return out

    def _since_mark(self) -> list[int]:
        mark = self._marks.pop()
        out = self.stack[mark:]
        del self.stack[mark:]
        return out

    @staticmethod
    def _cost(parts: list[int]) -> int:
        return min(1 + sum(parts), _MAX_COST)

    def _check_keys(self, costs: list[int]) -> None:
        if max(costs, default=0) > _KEY_COST:
            raise FormatError("pickle uses a deeply nested tuple as a key", file=self._file)

    def _index(self, code: int, start: int, end: int) -> int:
        argument = self._data[start:end]
        if code in b"pg":
            digits = argument.strip()
            index = int(digits) if digits.isdigit() and len(digits) < 12 else len(self._data) + 1
        else:
            index = int.from_bytes(argument, "little")
        if index > len(self._data):
            raise FormatError(f"pickle memo index {index} is out of range", file=self._file)
        return index


def load_guarded(load: Callable[[], T], data: bytes, *, file: str | Path) -> T:
    """Call `load`, which decodes `data`, so that a bad pickle fails with an exception.

    Small pickles are walked first. For large ones the address space is limited to a multiple of
    their size while `load` runs, and the garbage collector is off, because it would visit millions
    of objects repeatedly. Hashing nested tuples recurses in C without a check, so a pickle with
    many tuples is decoded on a stack deep enough for all of them nested.
    """
    if len(data) <= SMALL_BYTES or not _can_limit():
        check_pickle(data, file=file)
        return load()
    num_tuples = sum(data.count(code) for code in (b"t", b"\x85", b"\x86", b"\x87"))
    stack = num_tuples * _STACK_BYTES_PER_TUPLE if num_tuples > _SHALLOW_TUPLES else 0
    with _limited(len(data) * _BYTES_PER_BYTE + _SLACK_BYTES + stack), _uncollected():
        return _on_stack(load, stack)


def _on_stack(load: Callable[[], T], stack: int) -> T:
    if not stack:
        return load()
    old = threading.stack_size(stack // 4096 * 4096 + (1 << 20))
    try:
        call = BackgroundCall(load)
    except StorageError as e:
        raise MemoryError(f"no thread can have a stack of {stack >> 20:,} MiB") from e
    finally:
        threading.stack_size(old)
    return call.result()


@contextmanager
def _uncollected() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _can_limit() -> bool:
    return Path("/proc/self/statm").exists()


@contextmanager
def _limited(extra: int) -> Iterator[None]:
    """Limit the process to `extra` more bytes of address space; one caller at a time."""
    import resource

    with _memory_limit:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + extra
        if soft != resource.RLIM_INFINITY:
            limit = min(limit, soft)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
