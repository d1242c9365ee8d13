"""Options of the verbs that read or rewrite checkpoints without running a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megtool.config import LayoutOptions
from megtool.options.effects import requires
from megtool.options.field import (
    REQUIRED,
    OptionCondition,
    Options,
    argument,
    layout_size,
    option,
)
from megtool.options.groups import (
    INPUT,
    OUTPUT,
    CopyOptions,
    DryRunOptions,
    EngineOptions,
    ObjectOptions,
    OutputOptions,
    SourceOptions,
    ThreadOptions,
    WorkerOptions,
    WorkerScanOptions,
)

SOURCE = "A checkpoint: a folder, a save folder, or a single file."
DESTINATION = "The folder to write; it appears when complete."


@dataclass(frozen=True, kw_only=True)
class InspectOptions(SourceOptions, ThreadOptions, WorkerScanOptions):
    """Show what a checkpoint holds, from its headers alone.

    Example: megtool inspect ./SmolLM2-135M-Instruct --tensors
    """

    source: Path = argument(SOURCE, "SRC")
    tensors: bool = option(OUTPUT, "List every tensor instead of folding the layers.", False)
    stats: bool = option(
        OUTPUT, "Read the data: min, max, mean, std, zeros, NaN, Inf of each tensor.", False
    )


@dataclass(frozen=True, kw_only=True)
class ReshardFacts:
    """What `reshard` knows about its target: the format, and how its files are cut."""

    format: str
    is_sharded: bool
    is_array: bool
    is_megatron: bool

    @property
    def is_torch_dist(self) -> bool:
        """The target is Megatron's distributed checkpoint format."""
        return self.format == "torch_dist"


_HAS_SHARDS = OptionCondition(
    holds=lambda options, facts: facts.is_sharded,
    reason="{has} no effect with --to {format}, whose files are not cut by size",
    hint="--to hf writes a folder of shards",
    on_facts=True,
)
_IS_ARRAY = OptionCondition(
    holds=lambda options, facts: facts.is_array,
    reason="{has} no effect with --to {format}",
    hint="--to zarr, tensorstore or ocdbt",
    on_facts=True,
)
_IS_TORCH_DIST = OptionCondition(
    holds=lambda options, facts: facts.is_torch_dist,
    reason="{has} no effect with --to {format}",
    hint="--to torch_dist",
    on_facts=True,
)
_IS_MEGATRON = OptionCondition(
    holds=lambda options, facts: facts.is_megatron,
    reason="{has} no effect with --to {format}",
    hint="--to torch_dist or megatron",
    on_facts=True,
)


_IS_RANK_FILES = OptionCondition(
    holds=lambda options, facts: facts.format == "megatron",
    reason="{has} no effect with --to {format}, which holds each tensor once",
    hint="--to megatron",
    on_facts=True,
)
_WRITES = OptionCondition(
    holds=lambda options, facts: not options.dry_run,
    reason="{has} no effect with --dry-run, which writes nothing",
    hint="leave one of them out",
)


@dataclass(frozen=True, kw_only=True)
class ReshardOptions(
    SourceOptions, LayoutOptions, CopyOptions, OutputOptions, ObjectOptions, WorkerOptions
):
    """Copy a checkpoint into another format, parallel layout or dtype.

    An interrupted run resumes when the same command is given again.

    Example: megtool reshard ./SmolLM2-135M-Instruct ./out --to torch_dist --tp 3 --pp 2
    """

    source: Path = argument(SOURCE, "SRC")
    destination: Path = argument(DESTINATION, "DST", is_written=True)
    select: tuple[str, ...] = option(
        INPUT, "Only tensors of these names; repeatable.", (), metavar="GLOB"
    )
    exclude: tuple[str, ...] = option(
        INPUT, "No tensors of these names; repeatable.", (), metavar="GLOB"
    )
    rename: tuple[str, ...] = option(
        INPUT, "Write under another name; repeatable.", (), metavar="OLD=NEW"
    )
    optimizer_only: bool = option(INPUT, "Optimizer state without the weights.", False)
    layers: str | None = option(
        INPUT, "Only these transformer layers, renumbered: 0-15, or 0-3,8.", metavar="LIST"
    )
    average: tuple[Path, ...] = option(
        INPUT, "Write the mean of SRC's weights and these; repeatable.", (), metavar="OTHER"
    )
    average_weights: str | None = option(
        INPUT,
        "Weights of the mean, SRC's first: 0.5,0.3,0.2; default: equal ones.",
        metavar="LIST",
        needs=(requires("average", "--average OTHER names other checkpoints"),),
    )
    to: str | None = option(
        OUTPUT,
        "torch_dist, megatron (mp_rank folders), hf, safetensors, dcp, torch_checkpointing, zarr, "
        "tensorstore or ocdbt; default: the source's own (hf for GGUF).",
        metavar="FORMAT",
    )
    optimizer_format: Literal["fully_reshardable", "dp_reshardable", "legacy", "none"] | None = (
        option(
            OUTPUT,
            "Format of optimizer state, none to leave it out; default: one that loads at any "
            "layout.",
        )
    )
    amax: Literal["keep", "rebuild", "strip"] = option(
        OUTPUT,
        "FP8 scaling state: keep it, rebuild what contradicts the weights, or strip empty objects.",
        "keep",
        needs=(_IS_MEGATRON,),
    )
    te_version: str | None = option(
        OUTPUT,
        "Write FP8 scaling state for this release of Transformer Engine, 2.2 for all before 2.3; "
        "default: the source's.",
        metavar="1|2|2.2|2.3",
        needs=(_IS_MEGATRON,),
    )
    amax_history: int | None = option(
        OUTPUT,
        "Steps of FP8's amax histories; default: as in the source.",
        metavar="N",
        minimum=1,
        needs=(_IS_MEGATRON,),
    )
    replicate: tuple[str, ...] = option(
        OUTPUT,
        "Write tensors of these names, which no Megatron module has, whole for every "
        "tensor-parallel rank; repeatable.",
        (),
        metavar="GLOB",
        needs=(_IS_RANK_FILES,),
    )
    model_class: Literal["gpt", "hybrid"] | None = option(
        OUTPUT,
        "Write for Megatron's GPTModel, or for HybridModel, which numbers attention and MLP as "
        "layers of their own; default: the source's, or the one that can hold the model.",
        needs=(_IS_MEGATRON,),
    )
    core_version: str | None = option(
        OUTPUT,
        "Write for one version of megatron-core; default: what old and new ones load.",
        metavar="VERSION",
        needs=(_IS_TORCH_DIST,),
    )
    bridge: bool = option(
        OUTPUT, "Add run_config.yaml for Megatron-Bridge.", False, needs=(_IS_TORCH_DIST,)
    )
    dtype: str | None = option(
        OUTPUT,
        "Cast model weights (bfloat16, float16, float32, ...), never optimizer state.",
        metavar="NAME",
    )
    max_shard_size: str | None = option(
        OUTPUT,
        "Largest file; default: 5GB for hf, 1GiB for zarr and tensorstore.",
        metavar="SIZE",
        needs=(_HAS_SHARDS,),
    )
    compress: Literal["zstd", "blosc"] | None = option(
        OUTPUT,
        "Compress the chunks of zarr, tensorstore or ocdbt; default: uncompressed.",
        needs=(_IS_ARRAY,),
    )
    digest: Literal["all", "buffered", "none"] | None = option(
        OUTPUT,
        "Digest all tensors and files; or those that pass through a buffer, so that the rest can "
        "share blocks with the source where the file system allows it, or be copied by the store "
        "that both are in; or none. Default: all, but buffered within one store.",
    )
    verify: bool = option(
        OUTPUT,
        "Read the result back before it is put in place, and compare it with SRC bit by bit.",
        False,
        needs=(_WRITES,),
    )
    verify_master_weights: bool = option(
        OUTPUT,
        "Compare every master weight with its weight, instead of a sample.",
        False,
    )
    strict: bool = option(OUTPUT, "Fail if a tensor would be dropped.", False)


_TWO = requires("b", "megtool verify A B compares two checkpoints")
_EXACT = OptionCondition(
    holds=lambda options, facts: not (options.atol or options.rtol),
    reason="{has} no effect with --atol or --rtol",
    hint="give one kind of tolerance",
)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(SourceOptions, ThreadOptions, WorkerScanOptions):
    """Check one checkpoint against its digests, or two against each other.

    If one of two is quantized, weights are compared by signal-to-noise ratio, and the folder's
    config files with its tensors. Exit status 7 when they differ.

    Example: megtool verify ./SmolLM2-135M-Instruct ./out
    """

    a: Path = argument("A checkpoint of any format.", "A")
    b: Path | None = argument("Another, in any format and layout.", "B", None)
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
    sqnr: float | None = option(
        "Tolerance",
        "Least signal-to-quantization-noise ratio of quantized weights, in dB; default by format: "
        "FP8 25, INT8 24, NVFP4 14, MXFP4 10, INT4 9 (at least 6 dB below the worst correct ones).",
        metavar="DB",
        needs=(_TWO, _EXACT),
    )


EXPORT_FORMATS = {
    "hf": "plain Hugging Face folder; quantized weights are decoded",
    "unified": "Hugging Face folder with ModelOpt's codes and scales",
    "vllm": "unified, as vLLM loads it",
    "sglang": "unified, as SGLang loads it",
    "trtllm": "unified, as TensorRT-LLM loads it",
    "compressed-tensors": "Hugging Face folder as llm-compressor writes it",
    "fp8-blocks": "Hugging Face folder in FP8 blocks of 128 x 128, as DeepSeek publishes it",
    "trtllm-legacy": "config.json and rankN.safetensors of TensorRT-LLM up to 1.x",
    "gguf": "one file for llama.cpp",
}
"""What `export` writes."""


def _formats(*names: str) -> OptionCondition:
    return OptionCondition(
        holds=lambda options, facts: options.to in names,
        reason="{has} no effect with this --to",
        hint=f"only with --to {', '.join(names)}",
    )


_FOLDERS = _formats(*(f for f in EXPORT_FORMATS if f not in ("gguf", "trtllm-legacy")))
_LEGACY = _formats("trtllm-legacy")
_GGUF = _formats("gguf")
_PLAIN = _formats("hf", "unified", "vllm", "trtllm", "sglang", "trtllm-legacy")
_NOT_CODED = OptionCondition(
    holds=lambda options, facts: not facts.is_repacked,
    reason="{has} no effect with --to {to} of a quantized folder",
    hint="its tensors keep their types, and its config.json stays; --to hf decodes it",
    on_facts=True,
)


@dataclass(frozen=True, kw_only=True)
class ExportFacts:
    """What `export` knows about its source: `is_repacked` if it is quantized and stays so."""

    to: str
    is_repacked: bool


@dataclass(frozen=True, kw_only=True)
class ExportOptions(SourceOptions, EngineOptions, CopyOptions, OutputOptions, WorkerOptions):
    """Write a checkpoint as the files that an engine loads, quantized or not.

    Codes and scales are copied as they are, packed as the format packs them. Needs no GPU, no
    framework and little memory; an interrupted run resumes when the same command is given again.

    Example: megtool export ./SmolLM2-fp8 ./out --to compressed-tensors --target vllm
    """

    extra_needs: ClassVar = {
        _FOLDERS: ("target", "max_shard_size"),
        _NOT_CODED: ("iteration", "like"),
    }

    source: Path = argument(SOURCE, "SRC")
    destination: Path = argument(
        "The folder (or GGUF file) to write; it appears when complete.", "DST", is_written=True
    )
    to: Literal[
        "hf",
        "unified",
        "vllm",
        "sglang",
        "trtllm",
        "compressed-tensors",
        "fp8-blocks",
        "trtllm-legacy",
        "gguf",
    ] = option(
        OUTPUT,
        "hf: plain weights; unified, vllm, sglang, trtllm: ModelOpt's codes and scales; "
        "compressed-tensors: llm-compressor's; fp8-blocks: DeepSeek's; trtllm-legacy: "
        "TensorRT-LLM up to 1.x; gguf: llama.cpp.",
        REQUIRED,
        metavar="FORMAT",
    )
    tp: int | None = layout_size("tp", note=", for trtllm-legacy", needs=(_LEGACY,))
    pp: int | None = layout_size("pp", note=", for trtllm-legacy", needs=(_LEGACY,))
    outtype: str | None = option(
        OUTPUT,
        "Number format of a GGUF file: bf16, f16, f32, q8_0, q4_0 or another that the gguf package "
        "encodes; default: bf16.",
        metavar="TYPE",
        needs=(_GGUF,),
    )
    pre_tokenizer: str | None = option(
        OUTPUT,
        "llama.cpp's name for how the tokenizer splits text (its LLAMA_VOCAB_PRE); default: found "
        "in tokenizer.json.",
        metavar="NAME",
        needs=(_GGUF,),
    )
    dtype: str | None = option(
        OUTPUT,
        "Cast weights that are not quantized (bfloat16, float16, float32, ...).",
        metavar="NAME",
        needs=(_PLAIN, _NOT_CODED),
    )
    max_shard_size: str | None = option(OUTPUT, "Largest file; default: 5GB.", metavar="SIZE")
    memory: str = option(
        OUTPUT,
        "Most memory for buffers (at least 384 KiB per thread).",
        "256MiB",
        metavar="SIZE",
    )


@dataclass(frozen=True, kw_only=True)
class LintOptions(Options):
    """Check an exported folder against the rules of engines' loaders.

    Reads headers, config files and small scales. Exit status 7 if an engine would stop, or give
    wrong output.

    Example: megtool lint ./exported --target vllm --target trtllm@1.0.0 --tp 2
    """

    path: Path = argument("An exported Hugging Face folder.", "EXPORTED")
    target: tuple[str, ...] = option(
        INPUT,
        "vllm, trtllm or sglang, or ENGINE@VERSION; repeatable; default: all three.",
        (),
        metavar="ENGINE",
    )
    tp: int | None = layout_size("tp", note=" that it will run on")


@dataclass(frozen=True, kw_only=True)
class InspectAmaxOptions(ThreadOptions, WorkerScanOptions):
    """Show every module's FP8 scaling, and what is wrong with it.

    Reads Transformer Engine's extra states of any release, without it and without running their
    pickles, and the amax buffers of ModelOpt's quantizers. Exit status 7 if something is wrong.

    Example: megtool amax inspect ./checkpoints/fp8-run
    """

    source: Path = argument(SOURCE, "SRC")
    weights: bool = option(INPUT, "Compare with the weights, which are read.", True)
    modules: bool = option(OUTPUT, "List every module and finding.", False)
    iteration: str | None = option(
        INPUT, "Iteration of a save folder; default: the latest.", metavar="N"
    )


@dataclass(frozen=True, kw_only=True)
class RewriteAmaxOptions(SourceOptions, CopyOptions, OutputOptions, ObjectOptions, WorkerOptions):
    """What `amax fix` and `amax strip` take."""

    source: Path = argument(SOURCE, "SRC")
    destination: Path = argument(
        "The new checkpoint; it appears when complete.", "DST", is_written=True
    )


@dataclass(frozen=True, kw_only=True)
class FixAmaxOptions(RewriteAmaxOptions):
    """Rebuild FP8 scaling that contradicts the weights, and copy everything else.

    Histories and scales that belong to another weight, such as the random one that training started
    from, are computed from the weights; rows that a change of dtype left behind are corrected, NaN
    and Inf removed. `megtool reshard --amax rebuild` does the same on the way to another layout.

    Example: megtool amax fix ./checkpoints/fp8-run ./checkpoints/fp8-fixed
    """


@dataclass(frozen=True, kw_only=True)
class StripAmaxOptions(RewriteAmaxOptions):
    """Leave out extra states that hold nothing, if Megatron loads without them.

    Example: megtool amax strip ./checkpoints/fp8-run ./checkpoints/lean
    """


@dataclass(frozen=True, kw_only=True)
class DeriveAmaxOptions(SourceOptions, DryRunOptions):
    """Make a calibration file from FP8 training's amax histories: no data, no model run.

    `megtool quantize SRC DST --recipe fp8 --calibration FILE` takes it.

    Example: megtool amax derive ./checkpoints/fp8-run fp8.calibration
    """

    source: Path = argument(SOURCE, "SRC")
    destination: Path = argument("The calibration file to write.", "FILE", is_written=True)
    overwrite: bool = option("Dangerous", "Replace FILE.", False, flags=("--overwrite",))


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
