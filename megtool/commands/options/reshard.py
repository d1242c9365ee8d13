"""Options of `megtool reshard`, and which of them have an effect together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megtool.options.effects import is_set, requires
from megtool.options.field import (
    OptionCondition,
    argument,
    option,
)
from megtool.options.groups import (
    DESTINATION,
    INPUT,
    OUTPUT,
    SOURCE,
    AdaptedSourceOptions,
    CopyOptions,
    ObjectOptions,
    OutputOptions,
    PageOptions,
    WorkerOptions,
)
from megtool.options.layout import LayoutOptions


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
PRUNING = "Pruning"
PRUNED_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size"),
    *("num_attention_heads", "num_query_groups", "num_experts"),
)
"""The options that say how small a pruned model is."""

PARTS_AND_MEANS = ("select", "exclude", "optimizer_only", "layers", "average")
"""The options that make another model than the source's."""

_NEEDS_SCORES = requires(
    "pruning_scores", "--pruning-scores FILE says what matters least; `evaluate` writes it"
)
_HAS_SIZE = OptionCondition(
    holds=lambda options, facts: any(getattr(options, n) is not None for n in PRUNED_SIZES),
    reason="{has} no effect without a smaller size",
    hint="--ffn-hidden-size N, for example",
)
_IS_WHOLE_MODEL = OptionCondition(
    holds=lambda options, facts: (
        not any(is_set(options, name) for name in (*PARTS_AND_MEANS, *PRUNED_SIZES))
    ),
    reason="{is} merged into a whole model, not into a part of one or a mean",
    hint="merge first, and then reshard what was written with the other options",
)
_WRITES = OptionCondition(
    holds=lambda options, facts: not options.dry_run,
    reason="{has} no effect with --dry-run, which writes nothing",
    hint="leave one of them out",
)


@dataclass(frozen=True, kw_only=True)
class ReshardOptions(
    AdaptedSourceOptions,
    LayoutOptions,
    CopyOptions,
    OutputOptions,
    ObjectOptions,
    WorkerOptions,
    PageOptions,
):
    """Copy a checkpoint into another format, parallel layout or dtype.

    An interrupted run resumes when the same command is given again.

    Example: megtool reshard ./SmolLM2-135M-Instruct ./out --to torch_dist --tp 3 --pp 2
    """

    extra_needs: ClassVar = {_IS_WHOLE_MODEL: ("adapter",)}

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
    pruning_scores: Path | None = option(
        PRUNING,
        "Scores of the model's parts, which `evaluate --pruning-scores` wrote; those with the "
        "lowest are left out.",
        metavar="FILE",
        needs=(_HAS_SIZE,),
    )
    num_layers: int | None = option(
        PRUNING, "Layers that stay.", metavar="N", minimum=1, needs=(_NEEDS_SCORES,)
    )
    hidden_size: int | None = option(
        PRUNING,
        "Channels of hidden states that stay, the same in all layers.",
        metavar="N",
        minimum=1,
        needs=(_NEEDS_SCORES,),
    )
    ffn_hidden_size: int | None = option(
        PRUNING,
        "Neurons of each MLP that stay; each layer has its own.",
        metavar="N",
        minimum=1,
        needs=(_NEEDS_SCORES,),
    )
    num_attention_heads: int | None = option(
        PRUNING,
        "Query heads of each layer that stay, as many in each group.",
        metavar="N",
        minimum=1,
        needs=(_NEEDS_SCORES,),
    )
    num_query_groups: int | None = option(
        PRUNING,
        "Groups of each layer (heads of keys and values, with their query heads) that stay.",
        metavar="N",
        minimum=1,
        needs=(_NEEDS_SCORES,),
    )
    num_experts: int | None = option(
        PRUNING, "Experts of each layer that stay.", metavar="N", minimum=1, needs=(_NEEDS_SCORES,)
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
