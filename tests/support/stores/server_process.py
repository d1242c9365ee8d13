"""A server in a process of its own on free ports of the loopback interface."""

from __future__ import annotations

import contextlib
import ctypes
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

START_SECONDS = 60
PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def find_executable(name: str) -> Path:
    """The program `name` that was installed beside this Python, whether or not it exists."""
    return Path(sys.executable).parent / name


PORTS = range(20_000, 32_768)
"""Below those that Linux gives out by itself, so that no connection takes one before a server."""


def find_free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nobody listens on now."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def _die_with_parent() -> None:
    """Runs in the child: a worker that is killed leaves no server behind."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class ServerNotReadyError(Exception):
    """The server ended, or did not answer in time; holds the end of its log."""


class ServerProcess:
    """A context that starts `command`, waits until `is_ready()` answers, and kills it at the end.

    `is_ready` raises nothing and returns False while the server is not up. It has to recognize
    this very server (by its credentials), for another process may have taken the port.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        folder: Path,
        is_ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.command = [str(word) for word in command]
        self.folder = folder
        self.log = folder / "server.log"
        self._is_ready = is_ready
        self._environment = dict(environment or {})

    def __enter__(self) -> ServerProcess:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                tail = self.log.read_text(errors="replace")[-2000:]
                raise ServerNotReadyError(f"{self.command[0]} is not ready:\n{tail}")
            time.sleep(0.1)
        return self

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
