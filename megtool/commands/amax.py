"""Inspect, fix, strip and use the FP8 delayed scaling in a checkpoint."""

from __future__ import annotations

from megtool.commands.options.amax import (
    DeriveAmaxOptions,
    InspectAmaxOptions,
    RewriteAmaxOptions,
)
from megtool.commands.worker_scan import ShareReport, run_shared
from megtool.console import Progress, silent
from megtool.fp8_state import inspect
from megtool.fp8_state.inspect_report import AmaxInspection
from megtool.megatron_state.extra_states.amax_report import AmaxMode
from megtool.quant import derive_calibration
from megtool.quant.derive_calibration import DeriveReport
from megtool.reshard.execute import fill_in
from megtool.reshard.fp8_rewrite import rewrite_fp8_state
from megtool.reshard.report import ReshardReport


def inspect_amax(
    options: InspectAmaxOptions, *, progress: Progress = silent
) -> AmaxInspection | ShareReport:
    """Report the FP8 scaling of the checkpoint `source`, and what is wrong with it.

    With `weights` those of the modules that have scaling state are read, in bounded memory.
    A checkpoint without any is no error.

    Raises:
        MegtoolError: there is no checkpoint, it is broken, or a state is damaged or hostile.
    """
    return run_shared(
        options,
        "amax",
        [options.source],
        lambda scan: inspect.inspect_amax(
            options.source,
            weights=options.weights,
            modules=options.modules,
            iteration=options.iteration,
            threads=options.threads,
            progress=progress,
            scan=scan,
        ),
    )


def fix_amax(options: RewriteAmaxOptions, *, progress: Progress = silent) -> ReshardReport:
    """Write `source` to `destination` with FP8 scaling that agrees with its weights.

    The weights of all modules with a state are read once. If a weight's scale does not reach it,
    or belongs to another weight (the random one that training started from), history and scale
    are computed from the weight; so are rows that a change of dtype left in histories of
    Transformer Engine 1.x. NaN and Inf are removed from histories, and scales that contradict
    their history are recomputed. Everything else is copied.

    Raises:
        UsageError: there is no FP8 state in it.
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    return _rewrite(options, "rebuild", progress)


def strip_amax(options: RewriteAmaxOptions, *, progress: Progress = silent) -> ReshardReport:
    """Write `source` to `destination` without the extra states that hold nothing.

    Those that Megatron needs under its default strictness stay, as small as possible.

    Raises:
        UsageError: there are no extra states in it.
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    return _rewrite(options, "strip", progress)


def derive_amax(options: DeriveAmaxOptions) -> DeriveReport:
    """Write the calibration file `destination` from the FP8 scaling of the checkpoint `source`.

    `megtool quantize --calibration` takes it for recipes whose inputs have one static scale. Sites
    of modules that trained without FP8 are left out of it: a recipe that needs them is refused.

    Raises:
        UsageError: the checkpoint holds no such state.
        CalibrationError: a history is empty or broken, or belongs to several experts that cannot
            be told apart; says of which modules.
        MappingError: the model is not known.
        DestinationError: there is a file already.
    """
    return derive_calibration.derive_amax(
        options.source,
        options.destination,
        options.reading,
        overwrite=options.overwrite,
        dry_run=options.dry_run,
    )


def _rewrite(options: RewriteAmaxOptions, mode: AmaxMode, progress: Progress) -> ReshardReport:
    return rewrite_fp8_state(
        options.source,
        options.destination,
        mode,
        options.reading,
        fill_in(options.execution, options.source, options.destination),
        drop_objects=options.drop_objects,
        progress=progress,
    )
