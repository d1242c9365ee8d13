"""The command line: options and help only; each verb calls its function in `commands`."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from megtool import __version__
from megtool.cli.amax import amax_app
from megtool.cli.export import _export
from megtool.cli.finetune import Sections, _finetune
from megtool.cli.lint import _lint
from megtool.cli.model import _evaluate, _generate
from megtool.cli.options import (
    AccountForEmbedding,
    AccountForLoss,
    Amax,
    AmaxHistory,
    AverageWith,
    Bridge,
    Compress,
    CoreVersion,
    Cp,
    Digest,
    Dp,
    DryRun,
    Dtype,
    Ep,
    Etp,
    Exclude,
    Family,
    FirstStageLayers,
    Fsync,
    Iteration,
    Json,
    LastStageLayers,
    Layers,
    Like,
    MaxShardSize,
    Memory,
    Optimizer,
    OptimizerOnly,
    Overwrite,
    PipelineLayout,
    Pp,
    ProveAll,
    Quiet,
    Rename,
    Select,
    Source,
    Split,
    Strict,
    TeRelease,
    Threads,
    To,
    Tp,
    Verbose,
    Vpp,
    Weights,
    option,
    output,
    place,
    source_option,
)
from megtool.cli.quantize import _quantize
from megtool.cli.recipe import recipe_app
from megtool.cli.runner import Report, apart, put, run
from megtool.console import Progress, say
from megtool.errors import MegtoolError

app = typer.Typer(
    name="megtool",
    help="Move model checkpoints between formats and parallel layouts, as fast as a file copy, "
    "and run the models in them.",
    epilog="Exit status: 0 ok, 1 unexpected, 2 usage, 3 checkpoint, 4 recipe, 5 mapping, "
    "6 missing device or package, 7 differences, 8 training stopped, 130 interrupted.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        put(f"megtool {__version__}")
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
        bool, output("List every tensor instead of folding the layers.", "--tensors")
    ] = False,
    stats: Annotated[
        bool,
        output("Read the data: min, max, mean, std, zeros, NaN, Inf of each tensor.", "--stats"),
    ] = False,
    threads: Threads = None,
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
            threads=threads,
            progress=progress,
        )

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)


@app.command("reshard")
def _reshard(
    source: Source,
    destination: Annotated[Path, place("The folder to write; it appears when complete.", "DST")],
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    select: Select = None,
    exclude: Exclude = None,
    rename: Rename = None,
    optimizer_only: OptimizerOnly = False,
    layers: Layers = None,
    average: AverageWith = None,
    weights: Weights = None,
    tp: Tp = None,
    pp: Pp = None,
    vpp: Vpp = None,
    ep: Ep = None,
    etp: Etp = None,
    cp: Cp = None,
    dp: Dp = None,
    first_stage_layers: FirstStageLayers = None,
    last_stage_layers: LastStageLayers = None,
    account_for_embedding: AccountForEmbedding = False,
    account_for_loss: AccountForLoss = False,
    pipeline_layout: PipelineLayout = None,
    to: To = None,
    optimizer: Optimizer = None,
    amax: Amax = "keep",
    te: TeRelease = None,
    amax_history: AmaxHistory = None,
    core_version: CoreVersion = None,
    bridge: Bridge = False,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = None,
    compress: Compress = None,
    digest: Digest = "buffered",
    threads: Threads = None,
    memory: Memory = "128MiB",
    prove_all: ProveAll = False,
    strict: Strict = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    overwrite: Overwrite = False,
    fsync: Fsync = True,
) -> int:
    """Copy a checkpoint into another format, parallel layout or dtype.

    An interrupted run resumes when the same command is given again.

    Example: megtool reshard ./SmolLM2-135M-Instruct ./out --to torch_dist --tp 3 --pp 2
    """
    given, manners = apart(locals())

    def work(progress: Progress) -> Report:
        from megtool.commands.reshard import reshard

        return reshard(**given, progress=progress)

    return run(work, **manners)


@app.command("verify")
def _verify(
    a: Annotated[Path, place("A checkpoint of any format.", "A")],
    b: Annotated[Path | None, place("Another, in any format and layout.", "B")] = None,
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    atol: Annotated[
        float,
        option("Tolerance", "Absolute difference that counts as equal.", "--atol", min=0),
    ] = 0.0,
    rtol: Annotated[
        float,
        option("Tolerance", "Difference relative to B that counts as equal.", "--rtol", min=0),
    ] = 0.0,
    sqnr: Annotated[
        float | None,
        option(
            "Tolerance",
            "Least signal over noise of quantized weights, in dB; default by format: FP8 25, "
            "INT8 24, NVFP4 14, MXFP4 10, INT4 9 (6 dB and more below the worst of sound ones).",
            "--sqnr",
            metavar="DB",
        ),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Check one checkpoint against its digests, or two against each other.

    Where one of two is quantized, weights are compared by signal over noise, and the folder's
    config files with its tensors. Exit status 7 when they differ.

    Example: megtool verify ./SmolLM2-135M-Instruct ./out
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.verify import verify

        return verify(
            a,
            b,
            atol=atol,
            rtol=rtol,
            sqnr=sqnr,
            family=family,
            like=like,
            iteration=iteration,
            threads=threads,
            progress=progress,
        )

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)


@app.command("tokenize")
def _tokenize(
    sources: Annotated[
        list[str],
        place(
            "Files of text, JSON lines or parquet, folders of them, or NAME[:CONFIG][:SPLIT].",
            "SRC",
        ),
    ],
    destination: Annotated[
        Path, place("Writes DST.bin and DST.idx; they appear when complete.", "DST")
    ],
    tokenizer: Annotated[
        Path,
        source_option(
            "A folder with a tokenizer, or a checkpoint that carries one.",
            "--tokenizer",
            metavar="FOLDER",
        ),
    ],
    field: Annotated[
        str | None,
        source_option(
            "The field of a record; default: messages, prompt and completion, or text.",
            "--field",
            metavar="NAME",
        ),
    ] = None,
    split: Split = None,
    append_eos: Annotated[
        bool, output("End each document with the tokenizer's token for it.", "--append-eos")
    ] = False,
    special: Annotated[
        bool,
        output("Add what the tokenizer puts around a text, such as BOS.", "--special/--no-special"),
    ] = True,
    workers: Annotated[
        int | None,
        output("Threads; default: one a core, 8 at most.", "--workers", metavar="N", min=1),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    overwrite: Overwrite = False,
    fsync: Fsync = True,
) -> int:
    """Turn text into tokens for training: Megatron's .bin and .idx, a document a sequence.

    Example: megtool tokenize corpus.jsonl ./corpus --tokenizer ./SmolLM2-135M-Instruct --append-eos
    """
    given, manners = apart(locals())

    def work(progress: Progress) -> Report:
        from megtool.commands.tokenize import tokenize

        return tokenize(**given, progress=progress)

    return run(work, **manners)


@app.command("demo")
def _demo(
    folder: Annotated[
        Path | None, place("Where to work; a temporary folder unless given.", "FOLDER")
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


app.command("generate")(_generate)
app.command("evaluate")(_evaluate)
app.command("quantize")(_quantize)
app.command("export")(_export)
app.command("finetune", cls=Sections)(_finetune)
app.command("lint")(_lint)
app.add_typer(recipe_app)
app.add_typer(amax_app)


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
    except MegtoolError as error:
        say("error", str(error))
        return error.exit_status
    except typer.Abort:
        return 130
    return int(status or 0)


def _unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The hook for what no one foresaw: one line, and the traceback only if asked for."""
    if logging.getLogger("megtool").isEnabledFor(logging.DEBUG):
        traceback.print_exception(kind, error, trace)
    say("error", f"unexpected {kind.__name__}: {error}")
    say("hint", "-v shows where it happened; please report it with that")
