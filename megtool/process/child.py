"""Work in a child process whose memory, time and answers have limits.

For what untrusted input drives: chat templates, and libraries that allocate what a file claims. The
child is a fresh interpreter, so that threads and locks of this process do not matter, and it serves
many requests. Requests are pickles; answers are JSON, so that a child is never trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from megtool.errors import MegtoolError, StorageError

_SIZE = struct.Struct("<Q")
_PART_BYTES = 1 << 20
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from importlib import import_module; import_module(sys.argv[2]).serve_requests()"
)


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of one request, which all requests have alike.

    `memory_bytes` counts from what the child has when it is ready, `cpu_seconds` and `wall_seconds`
    from the start of the request.
    """

    memory_bytes: int
    cpu_seconds: int
    wall_seconds: float
    reply_bytes: int


class LimitError(Exception):
    """A request exceeded a limit, or ended its child; the text says which, as a phrase."""


class ChildProcess:
    """A child that runs the function `serve_requests` of a module. Thread-safe.

    It starts at the first request, and again after a request that exceeded a limit.
    """

    def __init__(self, module: str, limits: ChildLimits) -> None:
        self._module, self._limits = module, limits
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def request(self, value: Any) -> Any:
        """The answer to a request.

        Raises:
            LimitError: it needs more memory, time or answer than allowed.
            StorageError: no process can be started.
        """
        data = pickle.dumps((self._limits, value))
        with self._lock:
            if self._child is None or self._owner != os.getpid():
                self._child, self._owner = self._start(), os.getpid()
            child = self._child
            try:
                answer = _exchange(child, data, self._limits)
            except BaseException:
                self._child = None
                _end(child)
                raise
        return json.loads(answer)

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [p for p in sys.path if os.path.isabs(p)]
        with contextlib.suppress(OSError):  # the working directory may be deleted
            paths = [os.path.abspath(p) for p in sys.path]
        # An editable install is found by a hook of the parent, and not on its path.
        paths.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *2 * [os.pardir])))
        command = [sys.executable, "-I", "-S", "-c", _START, json.dumps(paths), self._module]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as e:
            raise StorageError(
                f"no process can be started: {e.strerror or e}",
                hint="raise the limit of processes (ulimit -u), or end other programs",
            ) from e
        weakref.finalize(self, _end_own, child, os.getpid())
        return child


def _exchange(child: subprocess.Popen[bytes], data: bytes, limits: ChildLimits) -> bytes:
    """Send a request and wait for its answer."""
    deadline = time.monotonic() + limits.wall_seconds
    if child.stdin is None or child.stdout is None:
        raise ValueError("the child has pipes")
    try:
        child.stdin.write(_SIZE.pack(len(data)) + data)
        child.stdin.flush()
    except OSError as e:
        raise LimitError(_explain_end(child)) from e
    (length,) = _SIZE.unpack(_receive(child, child.stdout, _SIZE.size, deadline))
    if length > limits.reply_bytes:
        raise LimitError(f"gives more than {limits.reply_bytes >> 20:,} MiB")
    return _receive(child, child.stdout, length, deadline)


def _receive(
    child: subprocess.Popen[bytes], stream: IO[bytes], length: int, deadline: float
) -> bytes:
    out = bytearray()
    ready = select.poll()
    ready.register(stream, select.POLLIN)
    while len(out) < length:
        left = deadline - time.monotonic()
        if left <= 0 or not ready.poll(left * 1000):
            raise LimitError("does not end")
        part = os.read(stream.fileno(), min(length - len(out), _PART_BYTES))
        if not part:
            raise LimitError(_explain_end(child))
        out += part
    return bytes(out)


def _explain_end(child: subprocess.Popen[bytes]) -> str:
    """Why a child ended in the middle of a request."""
    try:
        status = child.wait(5)
    except subprocess.TimeoutExpired:
        return "does not end"
    if -status in (signal.SIGXCPU, signal.SIGKILL):
        return "takes too long"
    return f"ends its process (status {status})"


def _end_own(child: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        child.kill()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)


# ---- in the child


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer requests from stdin until it closes. For `serve_requests` of a module.

    An error of megtool becomes the answer `{"error": [class name, message]}`, memory that is not
    there `{"limit": text}`; any other value is `{"value": ...}`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # what a library prints does not disturb the answers
    limited = False
    while len(size := source.read(_SIZE.size)) == _SIZE.size:
        limits, value = pickle.loads(source.read(_SIZE.unpack(size)[0]))
        if not limited:
            limit_memory(limits.memory_bytes)
            limited = True
        _limit_time(limits.cpu_seconds)
        try:
            reply = {"value": answer(value)}
            data = json.dumps(reply).encode()
        except MegtoolError as e:
            data = json.dumps({"error": [type(e).__name__, e.message]}).encode()
        except MemoryError:
            data = json.dumps({"limit": "needs too much memory"}).encode()
        data = _SIZE.pack(len(data)) + data
        while data:
            data = data[os.write(sink, data) :]


def limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more of address space, and write no files."""
    import resource

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, used + num_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, hard))


def _limit_time(seconds: int) -> None:
    """Limit the processor time of this process to `seconds` from now."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))
