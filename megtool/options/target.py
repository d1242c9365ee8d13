"""What a checkpoint is written as: format, layout, dtype and names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megtool.options.field import OptionCondition, argument, group, option
from megtool.options.groups import DESTINATION, INPUT, OUTPUT, ForeignObjects
from megtool.options.layout import LayoutOptions
from megtool.options.sizes import parse_size


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What is known of a target before it is planned: the format, and how its files are cut."""

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


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ForeignObjects):
    """What to write and where.

    Raises:
        UsageError: a size is none.
    """

    destination: Path = argument(DESTINATION, "DST", is_written=True)
    rename: tuple[str, ...] = option(
        INPUT, "Write under another name; repeatable.", (), metavar="OLD=NEW"
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
    verify_master_weights: bool = option(
        OUTPUT,
        "Compare every master weight with its weight, instead of a sample.",
        False,
    )
    layout: LayoutOptions = group(LayoutOptions)

    @property
    def max_shard_bytes(self) -> int | None:
        """The most bytes of a file, None for the format's own."""
        return parse_size(self.max_shard_size, "max shard size") if self.max_shard_size else None
