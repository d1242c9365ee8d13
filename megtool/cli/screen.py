"""Answers of `generate` on stdout as they come."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from megtool.commands.options.models import GenerateOptions
from megtool.commands.reports.generate import GenerateReport
from megtool.console import Bar, Progress, echo, printable

if TYPE_CHECKING:
    from megtool.commands.reports.generate import Answer

_LOG = logging.getLogger(__name__)


def callbacks(options: GenerateOptions, progress: Progress) -> dict[str, Any]:
    """What `generate` calls as text comes: for one prompt on a terminal, or for a file of them."""
    if options.dry_run:
        return {}
    screen = Screen(progress)
    if options.prompts is not None:
        return {"on_answer": screen.print_answer}
    if sys.stdout.isatty() and len(options.prompt) == 1:
        return {"on_text": screen.print_text}
    return {}


def log_summary(report: object) -> None:
    """Log what the answers took."""
    if isinstance(report, GenerateReport):
        _LOG.info("%s", report.summary())


class Screen:
    """Prints answers to stdout."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def print_text(self, text: str) -> None:
        """Print a part of the only answer; the progress bar is removed."""
        if isinstance(self._progress, Bar):
            self._progress.close()
        echo(printable(text), end="")

    def print_answer(self, answer: Answer) -> None:
        """Print an answer as a line of JSON."""
        echo(printable(answer.line()))
