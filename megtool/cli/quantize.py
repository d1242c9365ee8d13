"""The verb `quantize`: options and help only; it calls its function in `commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from megtool.cli.model import (
    Device,
    Field,
    Kernels,
    RunDtype,
    RunEp,
    RunEtp,
    RunPp,
    RunTp,
    Tokenizer,
    of_rank,
)
from megtool.cli.options import (
    DryRun,
    Family,
    Fsync,
    GroupSize,
    Iteration,
    Json,
    Like,
    MaxShardSize,
    Memory,
    Overwrite,
    Quiet,
    Source,
    Split,
    Threads,
    Verbose,
    engine_option,
    option,
    output,
    place,
    source_option,
)
from megtool.cli.runner import Report, apart, run
from megtool.console import Progress

_RECIPE, _CALIBRATION, _PROOF = "Recipe", "Calibration", "Proof"


Destination = Annotated[
    Path, place("The folder to write; with --calibrate-only the calibration file.", "DST")
]
RecipeName = Annotated[
    str,
    option(
        _RECIPE,
        "A shipped recipe (megtool recipe list), or a file in any dialect.",
        "--recipe",
        metavar="R",
    ),
]
Engine = Annotated[str | None, engine_option(_RECIPE)]
Bits = Annotated[
    float | None,
    option(_RECIPE, "Budget of a recipe that chooses formats, in bits a weight.", "--bits", min=1),
]
Data = Annotated[
    str | None,
    source_option(
        "Calibration data: text, JSON lines, parquet, Megatron's .bin, or a data set "
        "NAME[:CONFIG][:SPLIT]; default: a text that comes with megtool.",
        "--data",
        metavar="FILE",
    ),
]
NumSamples = Annotated[
    int | None,
    option(
        _CALIBRATION,
        "Samples; default: 128, or as many as the data has.",
        "--samples",
        metavar="N",
        min=1,
    ),
]
Length = Annotated[
    int | None,
    option(_CALIBRATION, "Tokens of a sample; default: 512.", "--length", metavar="N", min=1),
]
Seed = Annotated[
    int | None,
    option(
        _CALIBRATION,
        "Draw samples from all of the data; default: its first ones.",
        "--seed",
        metavar="N",
    ),
]
Synthetic = Annotated[bool, option(_CALIBRATION, "Calibrate on random tokens.", "--synthetic")]
Unseen = Annotated[
    Literal["share", "weights", "none"] | None,
    option(
        _CALIBRATION,
        "Experts that saw too little: take their siblings' statistics (default: as in "
        "--calibration, else this), or those of weights alone, or (none) what little there is.",
        "--unseen-experts",
    ),
]
RouteAll = Annotated[bool, option(_CALIBRATION, "Show every expert every token.", "--route-all")]
Resident = Annotated[
    bool,
    option(
        _CALIBRATION, "Hold the whole model, not one layer: faster where it fits.", "--resident"
    ),
]
Spill = Annotated[bool, option(_CALIBRATION, "Keep activations on disk between layers.", "--spill")]
Backend = Annotated[
    Literal["megtool", "modelopt"],
    option(_CALIBRATION, "Who calibrates; modelopt: NVIDIA ModelOpt.", "--backend"),
]
Calibration = Annotated[
    list[Path] | None,
    source_option(
        "A calibration file to use instead of data, for any --bits too; repeatable, they add up.",
        "--calibration",
        metavar="FILE",
    ),
]
SaveCalibration = Annotated[
    Path | None,
    output("Also keep the calibration.", "--save-calibration", metavar="FILE"),
]
CalibrateOnly = Annotated[
    bool, option(_CALIBRATION, "Write the calibration file alone, to DST.", "--calibrate-only")
]
Work = Annotated[
    Path | None,
    option(
        _CALIBRATION,
        "Where finished layers are kept until the end; default: beside DST.",
        "--work",
        metavar="FOLDER",
    ),
]
Evaluate = Annotated[
    str | None,
    option(
        _PROOF,
        "Measure perplexity and divergence before and after on this text.",
        "--evaluate",
        metavar="FILE",
    ),
]
EvaluateTokens = Annotated[
    int | None,
    option(_PROOF, "Tokens of it; default: 8192.", "--evaluate-tokens", metavar="N", min=2),
]
Page = Annotated[
    Path | None,
    option(_PROOF, "Also write the report as a page with plots.", "--report", metavar="HTML"),
]


def _quantize(
    source: Source,
    destination: Destination,
    recipe: RecipeName,
    target: Engine = None,
    group_size: GroupSize = None,
    bits: Bits = None,
    data: Data = None,
    field: Field = None,
    split: Split = None,
    tokenizer: Tokenizer = None,
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    samples: NumSamples = None,
    length: Length = None,
    seed: Seed = None,
    synthetic: Synthetic = False,
    unseen: Unseen = None,
    route_all: RouteAll = False,
    resident: Resident = False,
    spill: Spill = False,
    backend: Backend = "megtool",
    calibration: Calibration = None,
    save_calibration: SaveCalibration = None,
    calibrate_only: CalibrateOnly = False,
    work: Work = None,
    evaluate: Evaluate = None,
    evaluate_tokens: EvaluateTokens = None,
    page: Page = None,
    max_shard_size: MaxShardSize = None,
    memory: Memory = "256MiB",
    dtype: RunDtype = None,
    device: Device = None,
    kernels: Kernels = "auto",
    threads: Threads = None,
    tp: RunTp = None,
    pp: RunPp = None,
    ep: RunEp = None,
    etp: RunEtp = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    fsync: Fsync = True,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Quantize a checkpoint in any format for an engine, and prove that the result is right.

    Writes a Hugging Face folder that vLLM, SGLang and TensorRT-LLM load. Runs layer by layer, in
    the memory of one; killed, the same command goes on.

    Example: megtool quantize ./SmolLM2-135M-Instruct ./SmolLM2-fp8 --recipe fp8
    """
    given, manners = apart(locals())

    def work_on(progress: Progress) -> Report:
        from megtool.commands.quantize import quantize

        return quantize(**given, progress=progress)

    return run(work_on, resumes=True, **of_rank(manners))
