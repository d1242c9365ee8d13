"""Options: what the verbs take in common, and the panels into which --help sorts them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def option(panel: str, what: str, *flags: str, metavar: str | None = None, **extra: Any) -> Any:
    """An option in one of the panels into which --help sorts them."""
    return typer.Option(*flags, help=what, metavar=metavar, rich_help_panel=panel, **extra)


def source_option(what: str, *flags: str, metavar: str) -> Any:
    """An option that says what to read."""
    return option("Input", what, *flags, metavar=metavar)


def layout(what: str, *flags: str) -> Any:
    """The size of a parallel axis."""
    return option("Parallel layout", what, *flags, metavar="N", min=1)


def output(what: str, *flags: str, metavar: str | None = None, **extra: Any) -> Any:
    """An option that says what to write, print or use for it."""
    return option("Output", what, *flags, metavar=metavar, **extra)


def dangerous(what: str, *flags: str) -> Any:
    """An option that can lose something."""
    return option("Dangerous", what, *flags)


def engine_option(panel: str) -> Any:
    """The engine that has to load what is written."""
    return option(
        panel,
        "Fail if this engine cannot load the result: vllm, trtllm, sglang, or vllm@0.16.0.",
        "--target",
        metavar="ENGINE",
    )


def place(what: str, metavar: str) -> Any:
    """An argument that names a file or a folder."""
    return typer.Argument(help=what, metavar=metavar, show_default=False)


Source = Annotated[Path, place("A checkpoint: a folder, a save folder, or a single file.", "SRC")]
Family = Annotated[
    str | None,
    source_option("The model family, if the checkpoint names none.", "--family", metavar="NAME"),
]
Like = Annotated[
    Path | None,
    source_option(
        "A Hugging Face folder to take config and tokenizer from.", "--like", metavar="FOLDER"
    ),
]
Iteration = Annotated[
    str | None,
    source_option("Iteration of a save folder; default: the latest.", "--iteration", metavar="N"),
]
Json = Annotated[bool, output("Print the report as JSON.", "--json")]
Quiet = Annotated[bool, output("No progress and no warnings.", "--quiet", "-q")]
Verbose = Annotated[bool, output("More messages, and tracebacks.", "--verbose", "-v")]
Threads = Annotated[
    int | None,
    output("Threads; default: one a core, 8 at most.", "--threads", metavar="N", min=1),
]

Split = Annotated[str | None, source_option("The split of a data set.", "--split", metavar="NAME")]
GroupSize = Annotated[
    int | None,
    option("Recipe", "Group size instead of the recipe's.", "--group-size", metavar="N", min=1),
]

Select = Annotated[
    list[str] | None,
    source_option("Only tensors of these names; repeatable.", "--select", metavar="GLOB"),
]
Exclude = Annotated[
    list[str] | None,
    source_option("No tensors of these names; repeatable.", "--exclude", metavar="GLOB"),
]
Rename = Annotated[
    list[str] | None,
    source_option("Write under another name; repeatable.", "--rename", metavar="OLD=NEW"),
]
OptimizerOnly = Annotated[
    bool, option("Input", "Optimizer state without the weights.", "--optimizer-only")
]
AverageWith = Annotated[
    list[Path] | None,
    source_option(
        "Write the mean of SRC's weights and these; repeatable.", "--average", metavar="OTHER"
    ),
]
Weights = Annotated[
    str | None,
    source_option(
        "Shares in the mean, SRC's first: 0.5,0.3,0.2; default: equal ones.",
        "--weights",
        metavar="LIST",
    ),
]
Layers = Annotated[
    str | None,
    source_option(
        "Only these transformer layers, numbered anew: 0-15, or 0-3,8.", "--layers", metavar="LIST"
    ),
]
Tp = Annotated[
    int | None,
    layout("Tensor-parallel ranks; like the other axes, the source's unless given.", "--tp"),
]
Pp = Annotated[int | None, layout("Pipeline-parallel ranks.", "--pp")]
Vpp = Annotated[int | None, layout("Virtual pipeline stages per rank.", "--vpp")]
Ep = Annotated[int | None, layout("Expert-parallel ranks.", "--ep")]
Etp = Annotated[int | None, layout("Tensor-parallel ranks of experts; default: --tp.", "--etp")]
Cp = Annotated[int | None, layout("Context-parallel ranks.", "--cp")]
Dp = Annotated[int | None, layout("Data-parallel ranks.", "--dp")]
FirstStageLayers = Annotated[
    int | None, layout("Layers of the first pipeline stage.", "--first-stage-layers")
]
LastStageLayers = Annotated[
    int | None, layout("Layers of the last pipeline stage.", "--last-stage-layers")
]
AccountForEmbedding = Annotated[
    bool,
    option("Parallel layout", "Count the embedding as a layer.", "--account-for-embedding"),
]
AccountForLoss = Annotated[
    bool, option("Parallel layout", "Count the loss as a layer.", "--account-for-loss")
]
PipelineLayout = Annotated[
    str | None,
    option(
        "Parallel layout",
        "Layers of every stage in Megatron's words, such as Et*3|(tt|)*29m|L.",
        "--pipeline-layout",
        metavar="TEXT",
    ),
]

To = Annotated[
    str | None,
    output(
        "torch_dist, megatron (mp_rank folders), hf, safetensors, dcp, zarr, tensorstore or ocdbt; "
        "default: the source's own (hf for GGUF).",
        "--to",
        metavar="FORMAT",
    ),
]
Optimizer = Annotated[
    Literal["fully_reshardable", "dp_reshardable", "legacy", "none"] | None,
    output(
        "Format of optimizer state, none to leave it out; default: one that loads at any layout.",
        "--optimizer",
    ),
]
Amax = Annotated[
    Literal["keep", "rebuild", "strip"],
    output(
        "FP8 scaling state: keep it, rebuild what the weights contradict, or strip empty objects.",
        "--amax",
    ),
]
AmaxHistory = Annotated[
    int | None,
    output(
        "Steps of FP8's histories; default: as many as there are.",
        "--amax-history",
        metavar="N",
        min=1,
    ),
]
TeRelease = Annotated[
    str | None,
    output(
        "Write FP8 scaling state for a release of Transformer Engine, 2.2 for up to that; "
        "default: its own.",
        "--te",
        metavar="1|2|2.2|2.3",
    ),
]
CoreVersion = Annotated[
    str | None,
    output(
        "Write for one version of megatron-core; default: what old and new ones load.",
        "--core-version",
        metavar="VERSION",
    ),
]
Bridge = Annotated[bool, output("Add run_config.yaml for Megatron-Bridge.", "--bridge")]
Dtype = Annotated[
    str | None,
    output(
        "Cast model weights (bfloat16, float16, float32, ...), never optimizer state.",
        "--dtype",
        metavar="NAME",
    ),
]
MaxShardSize = Annotated[
    str | None,
    output(
        "Largest file; default: 5GB for hf, 1GiB for zarr and tensorstore.",
        "--max-shard-size",
        metavar="SIZE",
    ),
]
Compress = Annotated[
    Literal["zstd", "blosc"] | None,
    output("Compress the chunks of zarr, tensorstore or ocdbt; default: raw ones.", "--compress"),
]
Digest = Annotated[
    Literal["all", "buffered", "none"],
    output("Digest all bytes, or those that pass a buffer, or none.", "--digest"),
]
Memory = Annotated[
    str,
    output("Most memory for buffers (384 KiB a thread is least).", "--memory", metavar="SIZE"),
]
ProveAll = Annotated[
    bool, output("Compare every master weight with its weight, not some of each.", "--verify")
]
Strict = Annotated[bool, output("Fail if a tensor would be dropped.", "--strict")]
DryRun = Annotated[bool, output("Print the plan and write nothing.", "--dry-run", "-n")]
Overwrite = Annotated[
    bool, dangerous("Replace DST, which stays valid until the new one is.", "--overwrite")
]
Fsync = Annotated[bool, dangerous("Make the result survive a power cut.", "--fsync/--no-fsync")]
