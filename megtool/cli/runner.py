"""Runs a verb: its report to stdout, its errors in one line, its exit status."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megtool.commands.verbs import Verb, is_first_rank
from megtool.console import (
    Bar,
    Progress,
    colored,
    echo,
    log_line,
    logged_warnings,
    printing,
    set_up,
)
from megtool.errors import (
    FormatError,
    MegtoolError,
    OutOfMemoryError,
    RunInterrupted,
    StorageError,
    UsageError,
)
from megtool.options.config_file import build_options
from megtool.options.field import find_option, option_fields, replace_options
from megtool.options.groups import ReportOutput
from megtool.report.sections import Report, finite_json

Work = Callable[[Progress], Report]


@dataclass(frozen=True, kw_only=True)
class CommandOutput(ReportOutput):
    """How a command reports.

    `resumes` tells the user that an interrupted run resumes. Of many processes that do the same
    only one `reports`; the others print no report, and no usage errors, which all of them have.
    """

    resumes: bool = False
    reports: bool = True


def run_verb(verb: Verb, values: dict[str, Any]) -> int:
    """Run a verb on the values of its flags, None for those not given, and return the status."""
    output = _output(verb, values)
    config = values.pop("config", None)

    def work(progress: Progress) -> Report:
        options = follow_launcher(build_options(verb.options, values, config))
        report: Report = verb.call(options, {"progress": progress})
        return report

    return run(work, output)


def follow_launcher(options: Any) -> Any:
    """Options that make each process that a launcher started do its share, where a verb can.

    In Python a call does the whole work unless it names a worker: a script that torchrun started
    may call it in one process only.
    """
    has_worker = any(entry.name == "worker" for entry in option_fields(type(options)))
    if has_worker and find_option(options, "worker") is None:
        return replace_options(options, worker="auto")
    return options


def run_generate(verb: Verb, values: dict[str, Any]) -> int:
    """Run `generate`, which prints answers as they come."""
    output = _output(verb, values)

    def work(progress: Progress) -> Report:
        from megtool.cli.screen import callbacks, log_summary

        options = build_options(verb.options, values)
        shown = callbacks(options, progress) if not output.as_json else {}
        report: Report = verb.call(options, {"progress": progress, **shown})
        if "on_text" in shown and is_first_rank():
            echo("")
        log_summary(report)
        return report

    return run(work, output)


def _output(verb: Verb, values: dict[str, Any]) -> CommandOutput:
    """The options of the report, which are taken out of `values`."""
    flags = {name: bool(values.pop(name)) for name in ("as_json", "quiet", "verbose")}
    reports = is_first_rank() or not verb.runs_on_ranks
    return CommandOutput(
        as_json=flags["as_json"],
        quiet=flags["quiet"] or not reports,
        verbose=flags["verbose"],
        resumes=verb.resumes,
        reports=reports,
    )


def run(work: Work, output: CommandOutput | None = None) -> int:
    """Do `work` and return the exit status: the report goes to stdout, all else to stderr.

    With `as_json` an error goes to both.
    """
    output = output or CommandOutput()
    set_up(quiet=output.quiet, verbose=output.verbose)
    try:
        with printing():
            with Bar(shown=not output.quiet) as progress:
                report = work(progress)
            if not output.reports and getattr(report, "worker", None) is None:
                pass
            elif output.as_json:
                echo(json.dumps(finite_json(_with_warnings(report.to_json())), indent=2))
            elif lines := [*report.lines(_terminal_width(), color=colored(sys.stdout))]:
                echo("\n".join(lines))
    except MegtoolError as error:
        if output.verbose:
            traceback.print_exception(error)
        if output.reports or not isinstance(error, UsageError):
            log_line("error", str(error))
        if output.reports and output.as_json:
            _echo_error(error.to_json())
        return error.exit_status
    except _SHORTAGES as error:
        if (shortage := explain_shortage(error)) is None:
            raise
        if output.verbose:
            traceback.print_exception(error)
        log_line("error", str(shortage))
        if output.reports and output.as_json:
            _echo_error(shortage.to_json())
        return shortage.exit_status
    except KeyboardInterrupt as error:
        log_line("error", "interrupted")
        if output.reports and output.as_json:
            _echo_error({"id": "interrupted", "message": "interrupted", "exit_status": 130})
        if isinstance(error, RunInterrupted):
            log_line("hint", error.hint)
        elif output.resumes:
            log_line("hint", "the same command resumes where this one stopped")
        return 130
    return report.exit_status


def _with_warnings(values: dict[str, Any]) -> dict[str, Any]:
    """The data of a report, with the warnings that were logged on the way."""
    if "warnings" in values:
        values["warnings"] = [*dict.fromkeys([*values["warnings"], *logged_warnings()])]
    return values


def _echo_error(values: dict[str, Any]) -> None:
    """Print an error as JSON, unless stdout itself is what failed."""
    with contextlib.suppress(StorageError):
        echo(json.dumps({"error": values}, indent=2))


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


_SHORTAGES = (MemoryError, RuntimeError, OSError, ImportError)
_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc")
_NO_THREAD = ("can't start new thread", "ThreadPoolBuildError")  # Python's, and Rayon's
_NO_MAPPING = ("failed to map segment", "cannot allocate memory in static TLS")


def explain_shortage(error: BaseException) -> MegtoolError | None:
    """Translate a refusal of memory or threads by the system; return None for other errors.

    A value nested deeper than Python's own functions follow it counts as one, too.
    """
    text = str(error)
    if isinstance(error, RecursionError):
        return FormatError(
            "a value in one of the files is nested too deeply",
            hint="-v shows where it was read; no program writes such files",
        )
    is_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if is_memory or any(t in text for t in (*_NO_MEMORY, *_NO_MAPPING)):
        return OutOfMemoryError(
            "the system gives this process no more memory",
            hint="end other programs, raise the limit (ulimit -v, or of the container), or use "
            "fewer --threads",
        )
    is_thread = any(t in text for t in _NO_THREAD)
    if is_thread or getattr(error, "errno", None) == errno.EAGAIN:
        return StorageError(
            "the system starts no more threads or processes",
            hint="raise the limit of processes (ulimit -u), or use fewer --threads",
        )
    return None
