"""What the user sees on stderr: log lines, and a progress bar with bytes, rate and time left.

Library code never prints. It calls a `Progress` as bytes pass, and logs to a logger under
`megtool` (`logging.getLogger(__name__)`): INFO for what a user should know (it resumes, it fell
back), WARNING for what deserves a look, DEBUG for the curious.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from megtool.errors import StorageError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress(Protocol):
    """What library code calls while bytes pass, from any thread.

    `num_bytes` more bytes are done in the stage called `stage` ("copy", "verify"), which has
    `total_bytes` in all; a stage of `COUNTED` counts other things. The first call of a stage may
    say 0 bytes, to show it; a resumed stage starts with the bytes that were already there.
    """

    def __call__(self, stage: str, num_bytes: int, total_bytes: int) -> None:
        """Count `num_bytes` more bytes in `stage`."""


COUNTED = {
    "generate": "tokens",
    "evaluate": "tokens",
    "calibrate": "tokens",
    "solve": "sites",
    "sensitivity": "trials",
    "train": "tokens",
}
"""Stages that count no bytes, and what they count."""


def silent(stage: str, num_bytes: int, total_bytes: int) -> None:
    """The `Progress` that shows nothing."""


class Bar:
    """A `Progress` on stderr: one line a stage with bytes, rate and time left.

    Where stderr is no terminal (a batch job's log), it is a new line every half minute instead, so
    that short work leaves none. It shows nothing when `shown` is false, and imports `rich` only for
    a terminal. Repaints are limited, so workers may call it once per buffer.
    """

    _REPAINT_SECONDS = 0.05
    _LINE_SECONDS = 30.0

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._lines = None if sys.stderr.isatty() else Lines(self._LINE_SECONDS)
        self._lock = threading.Lock()
        self._bar: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._waiting: dict[str, int] = {}
        self._painted = 0.0

    def __call__(self, stage: str, num_bytes: int, total_bytes: int) -> None:
        """Add `num_bytes` to `stage`; see `Progress`."""
        if not self._shown:
            return
        with self._lock:
            if self._lines is not None:
                self._lines.count(stage, num_bytes, total_bytes)
                return
            if self._bar is None:
                self._bar = _rich_bar()
                self._bar.start()
            if stage not in self._tasks:
                self._tasks[stage] = self._bar.add_task(stage, total=total_bytes)
            self._waiting[stage] = self._waiting.get(stage, 0) + num_bytes
            if time.monotonic() - self._painted >= self._REPAINT_SECONDS:
                self._paint()

    def _paint(self) -> None:
        if self._bar is not None:
            for stage, num_bytes in self._waiting.items():
                self._bar.advance(self._tasks[stage], num_bytes)
        self._waiting.clear()
        self._painted = time.monotonic()

    def close(self) -> None:
        """Take the bar off the terminal."""
        with self._lock:
            if self._bar is not None:
                self._paint()
                self._bar.stop()
                self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Lines:
    """Progress as lines of a log: one every `seconds`, and none before they have passed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last_line = time.monotonic()
        self._done: dict[str, int] = {}
        self._began: dict[str, float] = {}

    def count(self, stage: str, num_bytes: int, total_bytes: int) -> None:
        """Add `num_bytes` to `stage`, and write a line where it is time for one."""
        now = time.monotonic()
        began = self._began.setdefault(stage, now)
        done = self._done[stage] = self._done.get(stage, 0) + num_bytes
        if now - self._last_line < self._seconds:
            return
        self._last_line = now
        unit = COUNTED.get(stage)
        format_size = format_bytes if unit is None else "{:,.0f}".format
        things = f" {unit}" if unit else ""
        text = f"{stage}: {format_size(done)} of {format_size(total_bytes)}{things}"
        if done and now > began and total_bytes:
            left = (total_bytes - done) * (now - began) / done
            minutes, seconds = divmod(max(0, round(left)), 60)
            text += f", {done / total_bytes:.0%}, about {minutes}:{seconds:02d} left"
        log_line("", text)


def _rich_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column
    from rich.text import Text

    class Bytes(ProgressColumn):
        def render(self, task: Task) -> Text:
            unit = COUNTED.get(task.description)
            format_size = format_bytes if unit is None else "{:,.0f}".format
            rate = f"{format_size(task.speed)}/s" if task.speed else "-"
            done, total = format_size(task.completed), format_size(task.total or 0)
            return Text(f"{done} of {total}{f' {unit}' if unit else ''}  {rate}")

    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),  # so that the longest line has 76 columns
        Bytes(Column(no_wrap=True)),
        TextColumn("left", markup=False),
        TimeRemainingColumn(),
        console=Console(stderr=True, markup=False, highlight=False),
        transient=True,
        redirect_stdout=False,
    )


def format_bytes(num_bytes: float) -> str:
    """A size as a person reads it, in powers of 1024: `512 B`, `1.5 KiB`, `4.0 GiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1023.95:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def several(number: int, what: str) -> str:
    """A number of things: `1 file`, `1,200 files`."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def printable(text: str) -> str:
    """`text` without terminal control: names inside a checkpoint may hold escape sequences.

    Newlines and tabs stay; other control characters, marks that turn the reading direction, and
    lone surrogates become `\\x1b` and the like.
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def single_line(text: str) -> str:
    """`printable(text)` in which newlines are escaped, too: it makes no line of its own.

    For what a report lays out: a cell, a row or a line of text may hold a name out of a file.
    """
    return printable(text).replace("\n", r"\n")


_CONTROL = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def set_up(*, quiet: bool = False, verbose: bool = False) -> None:
    """Send megtool's log to stderr: INFO and worse, or errors alone, or everything."""
    logger = logging.getLogger("megtool")
    logger.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    logger.handlers[:] = [_Stderr(quiet=quiet)]
    logger.propagate = False


def logged_warnings() -> list[str]:
    """The warnings that were logged since `set_up`, each once; quiet does not leave any out."""
    handlers = logging.getLogger("megtool").handlers
    return [text for h in handlers if isinstance(h, _Stderr) for text in h.warnings]


def log_line(kind: str, text: str) -> None:
    """Write one `kind: text` line to stderr: `error`, `warning`, `hint`, or "" for no prefix."""
    color = _COLOURS.get(kind, "") if colored(sys.stderr) else ""
    prefix = f"{color}{kind}:{_PLAIN if color else ''} " if kind else ""
    prefix = f"  {prefix}" if kind == "hint" else prefix
    # What follows a line break, which may come out of a file, never looks like a line of megtool's.
    text = re.sub(r"\n(?! )", "\n  ", printable(text))
    try:
        print(prefix + text, file=sys.stderr, flush=True)
    except OSError:  # nobody reads, or the disk is full; the work goes on
        _discard(2)


_COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[33m", "hint": "\x1b[36m"}
_PLAIN = "\x1b[0m"


def colored(stream: TextIO) -> bool:
    """Whether colors belong on `stream`: a terminal that can, and no `NO_COLOR` set."""
    return (
        stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"
    )


class _Stderr(logging.Handler):
    """Looks stderr up for each line, so that lines appear above a bar that has taken it over."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__()
        self.warnings: dict[str, None] = {}
        self._is_quiet = quiet

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self.warnings[record.getMessage()] = None
        if self._is_quiet and record.levelno < logging.ERROR:
            return
        kind = {logging.INFO: ""}.get(record.levelno, record.levelname.lower())
        log_line(kind, record.getMessage())


CLOSED_PIPE = (errno.EPIPE, errno.ESPIPE)
"""What a write to a pipe that nobody reads fails with: ESPIPE, after a part was written."""


def _discard(descriptor: int) -> None:
    """Send what is buffered for stdout or stderr nowhere, or Python fails at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def open_standard_streams() -> None:
    """Give the process the standard streams that it was started without (`>&-`).

    Otherwise the first file that it opens is number 1, and what anything prints goes there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def echo(text: str, end: str = "\n") -> None:
    """Print to stdout; a closed pipe is no failure, a full disk is.

    Raises:
        StorageError: stdout cannot be written.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        _discard(1)
        if error.errno not in CLOSED_PIPE:  # `| head` has read enough: no failure
            raise StorageError(
                f"cannot write to stdout: {error.strerror}",
                hint="the work is done, and only the report is lost",
            ) from error


_AFTER_REPORT: ContextVar[list[Callable[[], None]] | None] = ContextVar("after", default=None)


def after_report(action: Callable[[], None]) -> None:
    """Call `action` when the report is printed; at once if nobody prints it."""
    waiting = _AFTER_REPORT.get()
    if waiting is None:
        action()
    else:
        waiting.append(action)


@contextmanager
def printing() -> Iterator[None]:
    """Print a report inside: what `after_report` gets is called after it, without an error."""
    waiting: list[Callable[[], None]] = []
    token = _AFTER_REPORT.set(waiting)
    try:
        yield
    finally:
        _AFTER_REPORT.reset(token)
    for action in waiting:
        action()
