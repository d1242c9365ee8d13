"""The verb `amax`: options and help only; each command calls its function in `commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megtool.cli.options import (
    DryRun,
    Family,
    Fsync,
    Iteration,
    Json,
    Like,
    Memory,
    Overwrite,
    Quiet,
    Source,
    Threads,
    Verbose,
    option,
    output,
    place,
)
from megtool.cli.runner import Report, apart, run
from megtool.console import Progress

amax_app = typer.Typer(
    name="amax",
    help="FP8 scaling in a checkpoint: look it over, put it right, derive static scales from it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Destination = Annotated[Path, place("The new checkpoint, which appears when it is whole.", "DST")]


@amax_app.command("inspect")
def _inspect(
    source: Source,
    weights: Annotated[
        bool,
        option("Input", "Compare with the weights, which are read.", "--weights/--no-weights"),
    ] = True,
    modules: Annotated[bool, output("Every module and finding on its own.", "--modules")] = False,
    iteration: Iteration = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Show every module's FP8 scaling, and what is wrong with it.

    Reads Transformer Engine's extra states of any release, without it and without running their
    pickles, and the amax buffers of ModelOpt's quantizers. Exit status 7 if something is wrong.

    Example: megtool amax inspect ./checkpoints/fp8-run
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.amax import inspect_amax

        return inspect_amax(
            source,
            weights=weights,
            modules=modules,
            iteration=iteration,
            threads=threads,
            progress=progress,
        )

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)


@amax_app.command("fix")
def _fix(
    source: Source,
    destination: Destination,
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    threads: Threads = None,
    memory: Memory = "128MiB",
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    overwrite: Overwrite = False,
    fsync: Fsync = True,
) -> int:
    """Rebuild scaling that the weights contradict, and copy all else.

    Histories and scales of weights that are another weight's, such as the random one that training
    began with, are made anew from the weights; rows that a change of dtype left behind are
    corrected, numbers that are none taken out. `megtool reshard --amax rebuild` does the same on
    the way to another layout.

    Example: megtool amax fix ./checkpoints/fp8-run ./checkpoints/fp8-fixed
    """
    given, manners = apart(locals())

    def work(progress: Progress) -> Report:
        from megtool.commands.amax import fix_amax

        return fix_amax(**given, progress=progress)

    return run(work, resumes=True, **manners)


@amax_app.command("strip")
def _strip(
    source: Source,
    destination: Destination,
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    threads: Threads = None,
    memory: Memory = "128MiB",
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    overwrite: Overwrite = False,
    fsync: Fsync = True,
) -> int:
    """Leave out extra states that hold nothing, where Megatron loads without them.

    Example: megtool amax strip ./checkpoints/fp8-run ./checkpoints/lean
    """
    given, manners = apart(locals())

    def work(progress: Progress) -> Report:
        from megtool.commands.amax import strip_amax

        return strip_amax(**given, progress=progress)

    return run(work, resumes=True, **manners)


@amax_app.command("derive")
def _derive(
    source: Source,
    destination: Annotated[Path, place("The calibration file to write.", "FILE")],
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    overwrite: Overwrite = False,
) -> int:
    """Make a calibration file of what FP8 training already saw: no data, no model run.

    `megtool quantize SRC DST --recipe fp8 --calibration FILE` takes it.

    Example: megtool amax derive ./checkpoints/fp8-run fp8.calibration
    """

    def work(progress: Progress) -> Report:
        from megtool.commands.amax import derive_amax

        return derive_amax(
            source,
            destination,
            iteration=iteration,
            family=family,
            like=like,
            overwrite=overwrite,
            dry_run=dry_run,
        )

    return run(work, as_json=as_json, quiet=quiet, verbose=verbose)
