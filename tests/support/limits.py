"""Child processes under the limits of the system, and what they needed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PACE_SECONDS = 0.06
"""What the loop of `measure_pace` takes on an idle core."""


def measure_pace(clock: Callable[[], float]) -> float:
    """Return how many times longer than on an idle core a loop takes at this moment, at least 1."""
    number, start = 0, clock()
    for i in range(1_000_000):
        number = (number * 31 + i) % 1_000_003
    return max(1.0, (clock() - start) / PACE_SECONDS)


def is_within(
    seconds: float, budget: float, clock: Callable[[], float] = time.process_time
) -> bool:
    """Return whether something took less than its budget at the pace that the machine has now.

    On a machine with other work even the seconds of a core grow, because hardware threads share it.
    """
    return seconds < budget or seconds < budget * measure_pace(clock)


@dataclass(frozen=True, kw_only=True)
class LimitedRun:
    """A child process that ended: its status, output, seconds, and the most memory it had."""

    status: int
    out: str
    err: str
    seconds: float
    peak_bytes: int


def _peak_bytes(pid: int) -> int:
    """The most memory of a running process; its rusage would have that of the parent's fork too."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10
    except (OSError, IndexError):
        return 0


def run_limited(
    arguments: Sequence[object],
    *,
    address_bytes: int | None = None,
    processes: int | None = None,
    timeout: float = 120,
    user: int | None = None,
    **environment: str,
) -> LimitedRun:
    """Run Python on `arguments` under limits; a child that does not end in `timeout` is an error.

    Raises:
        TimeoutError: it did not end.
    """

    def limit() -> None:
        if address_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))
        if processes is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdout=out,
            stderr=err,
            env=os.environ | environment,
            preexec_fn=limit,
            user=user,
        )
        peak = 0
        try:
            while True:
                peak = max(peak, _peak_bytes(child.pid))
                number, status, _ = os.wait4(child.pid, os.WNOHANG)
                if number:
                    break
                if time.monotonic() - start > timeout:
                    raise TimeoutError(f"{arguments} did not end in {timeout} seconds")
                time.sleep(0.01)
        except BaseException:
            child.kill()
            child.wait()
            raise
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - start
        out.seek(0)
        err.seek(0)
        return LimitedRun(
            status=child.returncode,
            out=out.read().decode(errors="replace"),
            err=err.read().decode(errors="replace"),
            seconds=seconds,
            peak_bytes=peak,
        )
