"""The command line: options and help only; each verb calls its function in `commands`."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Protocol

import typer

from megtool import __version__
from megtool.errors import MegtoolError
from megtool.log import Bar, Progress, printable, say, set_up

app = typer.Typer(
    name="megtool",
    help="Move model checkpoints between formats and parallel layouts, as fast as a file copy.",
    epilog="Exit status: 0 ok, 1 unexpected, 2 usage, 3 checkpoint, 4 recipe, 5 mapping, "
    "6 missing device or package, 7 differences, 130 interrupted.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _option(panel: str, what: str, *flags: str, metavar: str | None = None, **extra: Any) -> Any:
    """An option in one of the panels into which --help sorts them."""
    return typer.Option(*flags, help=what, metavar=metavar, rich_help_panel=panel, **extra)


def _input(what: str, *flags: str, metavar: str) -> Any:
    return _option("Input", what, *flags, metavar=metavar)


def _layout(what: str, *flags: str) -> Any:
    return _option("Parallel layout", what, *flags, metavar="N", min=1)


def _output(what: str, *flags: str, metavar: str | None = None, **extra: Any) -> Any:
    return _option("Output", what, *flags, metavar=metavar, **extra)


def _dangerous(what: str, *flags: str) -> Any:
    return _option("Dangerous", what, *flags)


def _place(what: str, metavar: str) -> Any:
    return typer.Argument(help=what, metavar=metavar, show_default=False)


Source = Annotated[Path, _place("A checkpoint: a folder, a save folder, or a single file.", "SRC")]
Family = Annotated[
    str | None,
    _input("The model family, if the checkpoint names none.", "--family", metavar="NAME"),
]
Like = Annotated[
    Path | None,
    _input("A Hugging Face folder to take config and tokenizer from.", "--like", metavar="FOLDER"),
]
Iteration = Annotated[
    str | None,
    _input("Iteration of a save folder; default: the latest.", "--iteration", metavar="N"),
]
Json = Annotated[bool, _output("Print the report as JSON.", "--json")]
Quiet = Annotated[bool, _output("No progress and no warnings.", "--quiet", "-q")]
Verbose = Annotated[bool, _output("More messages, and tracebacks.", "--verbose", "-v")]


def _version(asked: bool) -> None:
    if asked:
        print(f"megtool {__version__}")
        raise typer.Exit


@app.callback()
def _megtool(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command("inspect")
def _inspect(
    source: Source,
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    tensors: Annotated[
        bool, _output("List every tensor instead of folding the layers.", "--tensors")
    ] = False,
    stats: Annotated[
        bool,
        _output("Read the data: min, max, mean, std, zeros, NaN, Inf of each tensor.", "--stats"),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Show what a checkpoint holds, from its headers alone.

    Example: megtool inspect ./SmolLM2-135M-Instruct --tensors
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.inspect import inspect

        return inspect(
            source,
            tensors=tensors,
            stats=stats,
            iteration=iteration,
            family=family,
            like=like,
            progress=progress,
        )

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)


@app.command("reshard")
def _reshard(
    source: Source,
    destination: Annotated[Path, _place("The folder to write; it appears when complete.", "DST")],
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    select: Annotated[
        list[str] | None,
        _input("Only tensors of these names; repeatable.", "--select", metavar="GLOB"),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        _input("No tensors of these names; repeatable.", "--exclude", metavar="GLOB"),
    ] = None,
    rename: Annotated[
        list[str] | None,
        _input("Write under another name; repeatable.", "--rename", metavar="OLD=NEW"),
    ] = None,
    tp: Annotated[
        int | None,
        _layout("Tensor-parallel ranks; like the other axes, the source's unless given.", "--tp"),
    ] = None,
    pp: Annotated[int | None, _layout("Pipeline-parallel ranks.", "--pp")] = None,
    vpp: Annotated[int | None, _layout("Virtual pipeline stages per rank.", "--vpp")] = None,
    ep: Annotated[int | None, _layout("Expert-parallel ranks.", "--ep")] = None,
    dp: Annotated[int | None, _layout("Data-parallel ranks.", "--dp")] = None,
    to: Annotated[
        str | None,
        _output(
            "hf, safetensors, torch_dist or dcp; default: the source's own (hf for GGUF).",
            "--to",
            metavar="FORMAT",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        _output(
            "Cast model weights (bfloat16, float16, float32, ...), never optimizer state.",
            "--dtype",
            metavar="NAME",
        ),
    ] = None,
    max_shard_size: Annotated[
        str, _output("Largest safetensors file.", "--max-shard-size", metavar="SIZE")
    ] = "5GB",
    digest: Annotated[
        Literal["all", "buffered", "none"],
        _output("Digest all bytes, or those that pass a buffer, or none.", "--digest"),
    ] = "buffered",
    threads: Annotated[
        int | None,
        _output("Copying threads; default: one a core.", "--threads", metavar="N", min=1),
    ] = None,
    memory: Annotated[
        str,
        _output("Most memory for buffers (384 KiB a thread is least).", "--memory", metavar="SIZE"),
    ] = "128MiB",
    strict: Annotated[bool, _output("Fail if a tensor would be dropped.", "--strict")] = False,
    dry_run: Annotated[
        bool, _output("Print the plan and write nothing.", "--dry-run", "-n")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    overwrite: Annotated[
        bool, _dangerous("Replace DST, which stays valid until the new one is.", "--overwrite")
    ] = False,
    fsync: Annotated[
        bool, _dangerous("Make the result survive a power cut.", "--fsync/--no-fsync")
    ] = True,
) -> int:
    """Copy a checkpoint into another format, parallel layout or dtype.

    An interrupted run resumes when the same command is given again.

    Example: megtool reshard ./SmolLM2-135M-Instruct ./out --to torch_dist --tp 3 --pp 2
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.reshard import reshard

        return reshard(
            source,
            destination,
            to=to,
            tp=tp,
            pp=pp,
            vpp=vpp,
            ep=ep,
            dp=dp,
            dtype=dtype,
            family=family,
            like=like,
            select=select or [],
            exclude=exclude or [],
            rename=rename or [],
            max_shard_size=max_shard_size,
            threads=threads,
            memory=memory,
            digest=digest,
            strict=strict,
            overwrite=overwrite,
            dry_run=dry_run,
            fsync=fsync,
            iteration=iteration,
            progress=progress,
        )

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)


@app.command("verify")
def _verify(
    a: Annotated[Path, _place("A checkpoint of any format.", "A")],
    b: Annotated[Path | None, _place("Another, in any format and layout.", "B")] = None,
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    atol: Annotated[
        float,
        _option("Tolerance", "Absolute difference that counts as equal.", "--atol", min=0),
    ] = 0.0,
    rtol: Annotated[
        float,
        _option("Tolerance", "Difference relative to B that counts as equal.", "--rtol", min=0),
    ] = 0.0,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Check one checkpoint against its digests, or two against each other.

    Exit status 7 when they differ.

    Example: megtool verify ./SmolLM2-135M-Instruct ./out
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.verify import verify

        return verify(
            a,
            b,
            atol=atol,
            rtol=rtol,
            family=family,
            like=like,
            iteration=iteration,
            progress=progress,
        )

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)


@app.command("demo")
def _demo(
    folder: Annotated[
        Path | None, _place("Where to work; a temporary folder unless given.", "FOLDER")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Take a real model through every format and layout, and back to the same bytes.

    Example: megtool demo
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.demo import demo

        return demo(folder)

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)


class Report(Protocol):
    """What every command returns. It may also have an `exit_status`."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""

    def lines(self) -> Iterator[str]:
        """The report as a person reads it."""


def run(
    work: Callable[[Progress], Report],
    *,
    as_json: bool = False,
    quiet: bool = False,
    verbose: bool = False,
    resumes: bool = False,
) -> int:
    """Do `work` under the common manners and return the exit status.

    The report goes to stdout, everything else to stderr. `resumes` says that an interrupted run
    goes on when it is started again.
    """
    set_up(quiet=quiet, verbose=verbose)
    try:
        with Bar(shown=not quiet) as progress:
            report = work(progress)
        if as_json:
            _print(json.dumps(_plain(report.to_json()), indent=2))
        else:
            _print("\n".join(printable(line) for line in report.lines()))
    except MegtoolError as error:
        if verbose:
            traceback.print_exception(error)
        say("error", str(error))
        return error.exit_status
    except KeyboardInterrupt:
        say("error", "interrupted")
        if resumes:
            say("hint", "the same command resumes where this one stopped")
        return 130
    return int(getattr(report, "exit_status", 0))


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on `args` (the process's own unless given) and return its status."""
    sys.excepthook = _unexpected
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    command = typer.main.get_command(app)
    given = None if args is None else list(args)
    try:
        status = command.main(given, prog_name="megtool", standalone_mode=False)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        if message := error.format_message():
            say("error", message)
            say("hint", f"{context.command_path if context else 'megtool'} --help")
        return error.exit_code
    except typer.Abort:
        return 130
    return int(status or 0)


def _plain(value: Any) -> Any:
    """`value` with numbers that JSON cannot hold as strings: `"nan"`, `"inf"`, `"-inf"`."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has seen enough (`| head`): that is no failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The hook for what no one foresaw: one line, and the traceback only if asked for."""
    if logging.getLogger("megtool").isEnabledFor(logging.DEBUG):
        traceback.print_exception(kind, error, trace)
    say("error", f"unexpected {kind.__name__}: {error}")
    say("hint", "-v shows where it happened; please report it with that")
