"""The command line: one Typer command for every verb of the table in `commands.verbs`."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from types import TracebackType
from typing import Annotated

import typer

from megtool import __version__
from megtool.cli.generate import GroupedHelpCommand, VerbCommand, command_class
from megtool.cli.import_guard import guard_imports
from megtool.cli.runner import run_generate, run_verb
from megtool.commands.verbs import GROUPS, VERBS
from megtool.console import CLOSED_PIPE, echo, log_line, open_standard_streams
from megtool.errors import MegtoolError

EXIT_STATUSES = (
    "Exit status: 0 ok, 1 unexpected, 2 usage, 3 checkpoint, 4 recipe, 5 mapping, "
    "6 missing device or package, 7 differences, 8 training stopped, 130 interrupted."
)

app = typer.Typer(
    name="megtool",
    help="Move model checkpoints between formats and parallel layouts, as fast as a file copy, "
    "and run the models in them.",
    epilog=EXIT_STATUSES,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        echo(f"megtool {__version__}")
        raise typer.Exit


@app.callback()
def _megtool(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def _run_nothing() -> None:
    """Stands for the function of a verb, which its command makes when it is used."""


def _add_commands() -> None:
    groups = {
        name: typer.Typer(name=name, help=text, no_args_is_help=True, rich_markup_mode="rich")
        for name, text in GROUPS.items()
    }
    for verb in VERBS:
        group, _, name = verb.command.rpartition(" ")
        run = run_generate if verb.command == "generate" else run_verb
        parent = groups[group] if group else app
        base = GroupedHelpCommand if name == "finetune" else VerbCommand
        command = command_class(verb, run, base)
        parent.command(name, cls=command, short_help=verb.summary)(_run_nothing)
    for group_app in groups.values():
        app.add_typer(group_app)


_add_commands()


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on `args` (default: the process's) and return its exit status."""
    sys.excepthook = _report_unexpected
    open_standard_streams()
    guard_imports()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    command = typer.main.get_command(app)
    arguments = None if args is None else list(args)
    try:
        status = command.main(arguments, prog_name="megtool", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        if message := error.format_message():
            log_line("error", message)
            log_line("hint", f"{context.command_path if context else 'megtool'} --help")
        return error.exit_code
    except MegtoolError as error:
        log_line("error", str(error))
        return error.exit_status
    except typer.Abort:
        return 130
    except SystemExit as stop:
        cause = stop.__context__
        if isinstance(cause, OSError) and cause.errno in CLOSED_PIPE:
            return 0  # the reader of a help text has seen enough
        raise
    return int(status or 0)


def _report_unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The hook for unexpected errors: one line, and the traceback only if asked for."""
    if logging.getLogger("megtool").isEnabledFor(logging.DEBUG):
        traceback.print_exception(kind, error, trace)
    log_line("error", f"unexpected {kind.__name__}: {error}")
    log_line("hint", f"-v shows where it happened; report it with that and megtool {__version__}")
