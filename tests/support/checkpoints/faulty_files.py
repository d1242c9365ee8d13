"""Files that count system calls, and fail, fall short or die at the n-th of them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

import numpy as np

from megtool.storage.files import Files

T = TypeVar("T")


class Killed(BaseException):
    """The process is gone: nothing it would still do reaches the system."""


class FaultyFiles(Files):
    """Injects one fault at call number `at` (1 is the first).

    `fault` is an errno, or "short" (half the bytes), "kill" (this and all later calls raise
    `Killed`; the descriptors are closed, as the system would), "torn" (half the bytes, then
    killed), "SIGKILL" (the real one). `lasting` repeats an errno at all later calls of the same
    function, as a full disk does. `calls` are the names of the functions called.
    Nothing is really flushed, for the page cache outlives a process.
    """

    def __init__(self, at: int = 0, fault: int | str = 0, *, lasting: bool = False) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.hit = False
        self._at = at
        self._fault = fault
        self._lasting = lasting
        self._dead = False
        self._first = ""
        self.open_fds: set[int] = set()
        self._counting = threading.Lock()

    def system(self, function: Callable[..., T], /, *args: Any) -> T:
        with self._counting:
            if self._dead:
                raise Killed
            self.calls.append(function.__name__)
            number = len(self.calls)
            if function.__name__ == self._first and not self.hit:
                self._at = number
            again = (
                self._lasting
                and number > self._at
                and self.calls[self._at - 1] == (function.__name__)
            )
            if number == self._at or again:
                self.hit = True
                args = self._strike(function, args)
        if function is os.fsync:
            return None  # type: ignore[return-value]
        try:
            result = function(*args)
        except OSError:
            if self._fault == "torn" and number == self._at:  # such as `lstat` of what is missing
                self._die()
            raise
        if function is os.open:
            self.open_fds.add(int(result))  # type: ignore[call-overload]
        elif function is os.close:
            self.open_fds.discard(args[0])
        if self._fault == "torn" and number == self._at:
            self._die()
        return result

    def killed_at_first(self, name: str) -> Self:
        """Die at the first call of a function, however many other calls threads make before."""
        self._first, self._fault = name, "kill"
        return self

    def _strike(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        match self._fault:
            case "short":
                return halved(function, args)
            case "torn":
                return halved(function, args)
            case "kill":
                self._die()
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case int() as code:
                if function is os.close:
                    os.close(args[0])  # Linux closes whatever it answers
                raise OSError(code, os.strerror(code))
        raise AssertionError(self._fault)

    def _die(self) -> None:
        self._dead = True
        for fd in tuple(self.open_fds):  # other threads may open and close files
            with contextlib.suppress(OSError):
                os.close(fd)
        raise Killed


def halved(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for about half the bytes of a read, write or copy; others as they are."""
    if function is os.pwrite:
        data = np.frombuffer(args[1], np.uint8) if len(args[1]) else args[1]
        return args[0], data[: max(1, len(data) // 2)], args[2]
    if function is os.preadv:
        first = np.frombuffer(args[1][0], np.uint8) if args[1] and args[1][0].nbytes else None
        return args if first is None else (args[0], (first[: max(1, len(first) // 2)],), args[2])
    if function is os.copy_file_range:
        return (*args[:2], max(1, args[2] // 2), *args[3:])
    if function is os.sendfile:
        return (*args[:3], max(1, args[3] // 2))
    return args
