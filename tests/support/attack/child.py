"""Commands in forked children: quick to start, and killed, limited or timed out without harm."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import megtool
from megtool.cli.app import main

UNEXPECTED = 70
"""The status of a child that an exception other than megtool's ended."""

PATIENCE = 600.0
"""Seconds after which a child is one that does not end, on a machine with much other work."""

DOCUMENTED = frozenset((0, 2, 3, 4, 5, 6, 7, 8, 130))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRun:
    """A child that ended. `status` is negative for a signal, None for one that did not end.

    `cpu_seconds` are its processor time and that of its own children, which other work on the
    machine hardly changes.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    cpu_seconds: float
    peak_bytes: int

    @property
    def fault(self) -> str | None:
        """What is wrong about its end: no documented status, a traceback, no sentence."""
        last = " | ".join(self.err.strip().splitlines()[-3:])
        if self.status is None:
            return f"did not end in {self.seconds:.0f} s: {last}"
        if self.status not in DOCUMENTED:
            return f"status {self.status}: {last}"
        if "Traceback" in self.err or "unexpected" in self.err or "Exception ignored" in self.err:
            return f"a traceback: {last}"
        if self.status not in (0, 7) and "error:" not in self.err:
            return f"status {self.status} without a sentence: {last}"
        return None


@dataclass(slots=True, kw_only=True)
class Child:
    """A running child."""

    pid: int
    files: tuple[int, int]
    began: float

    def wait(self, timeout: float = PATIENCE) -> ChildRun:
        """Its end; a child that does not end in time is killed."""
        while True:
            number, status, usage = os.wait4(self.pid, os.WNOHANG)
            if number:
                return self._end(os.waitstatus_to_exitcode(status), usage)
            if time.monotonic() - self.began > timeout:
                os.kill(self.pid, signal.SIGKILL)
                _, _, usage = os.wait4(self.pid, 0)
                return self._end(None, usage)
            time.sleep(0.002)

    def _end(self, status: int | None, usage: resource.struct_rusage) -> ChildRun:
        texts = []
        for fd in self.files:
            os.lseek(fd, 0, os.SEEK_SET)
            texts.append(os.fdopen(fd, "rb").read().decode(errors="replace"))
        return ChildRun(
            status=status,
            out=texts[0],
            err=texts[1],
            seconds=time.monotonic() - self.began,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            peak_bytes=usage.ru_maxrss << 10,
        )


def preload() -> None:
    """Import what commands import, so that children need not."""
    root = Path(megtool.__file__).parent
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root.parent).with_suffix("").parts
        if parts[-1] not in ("__main__", "__init__"):
            importlib.import_module(".".join(parts))
    names = ("matplotlib.pyplot", "tokenizers", "jinja2", "gguf", "tensorstore", "torch")
    for name in (*names, "importlib.readers", "importlib.resources", "typer._adapters"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def start(
    arguments: Sequence[object], *, cwd: Path | None = None, setup: Callable[[], None] | None = None
) -> Child:
    """Start `megtool ARGUMENTS` in a child; `setup` runs in it before."""
    files = []
    for _ in range(2):
        with tempfile.TemporaryFile() as file:
            files.append(os.dup(file.fileno()))
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    pid = os.fork()
    if pid:
        return Child(pid=pid, files=(files[0], files[1]), began=began)
    status = UNEXPECTED
    try:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        if cwd is not None:
            os.chdir(cwd)
        if setup is not None:
            setup()
        _open_streams()
        status = _run(arguments)
    finally:
        os._exit(status)


def _open_streams() -> None:
    """Open stdout and stderr as Python does when it starts."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        try:
            os.fstat(fd)
        except OSError:
            setattr(sys, name, None)
        else:
            former = getattr(sys, name)
            setattr(sys, name, os.fdopen(fd, "w", closefd=False, errors=former.errors))


def _run(arguments: Sequence[object]) -> int:
    try:
        status = main([str(a) for a in arguments])
    except SystemExit as e:
        status = int(e.code or 0)
    except BaseException:
        traceback.print_exc()
        status = UNEXPECTED
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            status = status or UNEXPECTED
    return status


def run(
    arguments: Sequence[object],
    *,
    cwd: Path | None = None,
    setup: Callable[[], None] | None = None,
    timeout: float = PATIENCE,
) -> ChildRun:
    """Run `megtool ARGUMENTS` in a child."""
    return start(arguments, cwd=cwd, setup=setup).wait(timeout)
