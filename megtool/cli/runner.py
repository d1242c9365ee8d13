"""Running a verb: its report to stdout, its errors in one line, its exit status."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from megtool.console import Bar, Progress, printable, say, set_up
from megtool.errors import MegtoolError, StorageError, UsageError


class Report(Protocol):
    """What every command returns. It may also have an `exit_status`."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""

    def lines(self) -> Iterator[str]:
        """The report as a person reads it."""


def apart(said: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A verb's options that were given, named as its function names them; and those of `run`."""
    given = {k: v for k, v in said.items() if v is not None}
    return given, {k: given.pop(k) for k in ("as_json", "quiet", "verbose")}


def run(
    work: Callable[[Progress], Report],
    *,
    as_json: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    resumes: bool = False,
    speaks: bool = True,
) -> int:
    """Do `work` under the common manners and return the exit status.

    The report goes to stdout, everything else to stderr. `resumes` says that an interrupted run
    goes on when it is started again. A process that does not speak (one of many that do the same)
    prints no report, and no error of usage, which all of them have.
    """
    set_up(quiet=quiet, verbose=verbose)
    try:
        with Bar(shown=not quiet) as progress:
            report = work(progress)
        if not speaks:
            pass
        elif as_json:
            put(json.dumps(_plain(report.to_json()), indent=2))
        elif lines := [printable(line) for line in report.lines()]:
            put("\n".join(lines))
    except MegtoolError as error:
        if verbose:
            traceback.print_exception(error)
        if speaks or not isinstance(error, UsageError):
            say("error", str(error))
        return error.exit_status
    except KeyboardInterrupt:
        say("error", "interrupted")
        if resumes:
            say("hint", "the same command resumes where this one stopped")
        return 130
    return int(getattr(report, "exit_status", 0))


def _plain(value: Any) -> Any:
    """`value` with numbers that JSON cannot hold as strings: `"nan"`, `"inf"`, `"-inf"`."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def put(text: str, end: str = "\n") -> None:
    """Print to stdout; a reader who has gone is no failure, a full disk is."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is buffered
        if not isinstance(error, BrokenPipeError):  # `| head` has seen enough: no failure
            raise StorageError(
                f"cannot write to stdout: {error.strerror}",
                hint="the work is done, and only the report is lost",
            ) from error
