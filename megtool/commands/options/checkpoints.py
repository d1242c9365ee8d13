"""Options of the verbs that read or rewrite checkpoints without running a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megtool.options.effects import requires
from megtool.options.field import (
    OptionCondition,
    Options,
    argument,
    option,
)
from megtool.options.groups import (
    INPUT,
    OUTPUT,
    RUNNING,
    SOURCE,
    HtmlPage,
    ScanShare,
    SourceOptions,
    ThreadCount,
)


@dataclass(frozen=True, kw_only=True)
class InspectOptions(SourceOptions, ThreadCount, ScanShare, HtmlPage):
    """Show what a checkpoint holds, from its headers alone.

    Example: megtool inspect ./SmolLM2-135M-Instruct --tensors
    """

    source: Path = argument(SOURCE, "SRC")
    tensors: bool = option(OUTPUT, "List every tensor instead of folding the layers.", False)
    stats: bool = option(
        OUTPUT,
        "Read the data: min, max, mean, std, zeros, NaN, Inf and histogram of each tensor.",
        False,
    )


_TWO = requires("b", "megtool verify A B compares two checkpoints")
_EXACT = OptionCondition(
    holds=lambda options, facts: not (options.atol or options.rtol),
    reason="{has} no effect with --atol or --rtol",
    hint="give one kind of tolerance",
)


@dataclass(frozen=True, kw_only=True)
class Tolerance(Options):
    """Largest differences of two numbers that still count as equal."""

    atol: float = option(
        "Tolerance",
        "Absolute difference that counts as equal.",
        0.0,
        metavar="X",
        minimum=0,
        needs=(_TWO,),
    )
    rtol: float = option(
        "Tolerance",
        "Difference relative to B that counts as equal.",
        0.0,
        metavar="X",
        minimum=0,
        needs=(_TWO,),
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(SourceOptions, Tolerance, ThreadCount, ScanShare, HtmlPage):
    """Check one checkpoint against its digests, or two against each other.

    Two are compared in parts, each with a verdict: tensors, configuration, training state, files.
    If one is quantized, weights are compared by signal-to-noise ratio, and the folder's config
    files with its tensors. Of one without digests all data is read. Exit status 7 when they differ.

    Example: megtool verify ./SmolLM2-135M-Instruct ./out
    """

    a: Path = argument("A checkpoint of any format.", "A")
    b: Path | None = argument("Another, in any format and layout.", "B", None)
    parts: str | None = option(
        "Comparison",
        "Parts to compare, comma-separated: tensors, configuration, state, files; default: all.",
        metavar="PART,…",
        needs=(_TWO,),
    )
    logits: int | None = option(
        "Comparison",
        "Also run both models on this many fixed tokens and compare their logits.",
        metavar="N",
        minimum=1,
        needs=(_TWO,),
    )
    sqnr: float | None = option(
        "Tolerance",
        "Least signal-to-quantization-noise ratio of quantized weights, in dB; default by format: "
        "FP8 25, INT8 24, NVFP4 14, MXFP4 10, INT4 9 (at least 6 dB below the worst correct ones).",
        metavar="DB",
        needs=(_TWO, _EXACT),
    )


@dataclass(frozen=True, kw_only=True)
class CleanOptions(Options):
    """List what interrupted runs have left for a destination, or inside a folder or bucket.

    Staging folders; in a store also uploads that are under way, and publications that are not
    complete. What a live run holds is listed and never removed.

    Example: megtool clean ./checkpoints
    """

    location: Path = argument("A destination, or a folder, prefix or bucket.", "LOCATION")
    yes: bool = option(
        "Dangerous",
        "Remove what is listed, but for what a live run holds.",
        False,
        flags=("--yes", "-y"),
    )


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """Show what this machine has, and what of megtool works with it.

    Processors, memory, GPUs, NCCL, optional packages, launchers and engines; and what the file
    system or the store of a location does, by small files that are removed again. The list says
    what to install for what does not work.

    Example: megtool doctor s3://bucket/run
    """

    location: Path = argument(
        "A folder, or a prefix of a store, to try; default: this folder.", "LOCATION", Path()
    )


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    """Take a real model through every format and layout, and back to the same bytes.

    Example: megtool demo
    """

    folder: Path | None = argument(
        "Where to work; default: a temporary folder that is removed.", "FOLDER", None
    )


_WATCHES = requires("watch", "--watch SECONDS looks for new saves")


@dataclass(frozen=True, kw_only=True)
class AuditOptions(ThreadCount, HtmlPage):
    """Find out which save of a run went wrong: every one of them, each byte read once.

    Steps that are identical, weights and moments that do not move or do not belong together, mixed,
    missing, truncated and flipped shards, trackers, NaN, dead rows, exploding norms, schedulers,
    steps and random state that do not follow, FP8 scales, changes midway, averages. Exit status 7
    with findings.

    Example: megtool audit ./checkpoints --report audit.html
    """

    run: Path = argument("The save folder of a run, or of any trainer that saves steps.", "RUN")
    quick: bool = option(
        RUNNING, "Read headers and checksums alone: at most 1 % of the bytes.", False
    )
    watch: float | None = option(
        RUNNING,
        "Look for new saves every so many seconds, until interrupted.",
        metavar="SECONDS",
        minimum=0,
    )
    until: int | None = option(
        RUNNING, "End the watch after this step.", metavar="STEP", minimum=0, needs=(_WATCHES,)
    )
    first: int | None = option(INPUT, "The first step to audit.", metavar="STEP", minimum=0)
    last: int | None = option(INPUT, "The last step to audit.", metavar="STEP", minimum=0)
