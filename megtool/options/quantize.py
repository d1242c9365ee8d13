"""A recipe, what it is calibrated on, and what is written by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megtool.errors import UsageError
from megtool.options.field import REQUIRED, Options, group, option
from megtool.options.groups import (
    INPUT,
    OUTPUT,
    RequiredEngine,
    RuntimeOptions,
    TextRecords,
    TokenizerChoice,
)
from megtool.options.layout import LayoutOptions
from megtool.options.sizes import parse_size

RECIPE, CALIBRATION, CHECK = "Recipe", "Calibration", "Check"
DEFAULT_SAMPLES, DEFAULT_LENGTH = 128, 512
MIN_LENGTH = 16
"""The least tokens of a sample: shorter ones hardly use attention."""


@dataclass(frozen=True, kw_only=True)
class RecipeChoice(RequiredEngine):
    """A recipe, and what it is applied for."""

    recipe: str = option(
        RECIPE,
        "A shipped recipe (megtool recipe list), or a file of megtool, Megatron, ModelOpt or "
        "compressed-tensors.",
        REQUIRED,
        metavar="R",
    )
    group_size: int | None = option(
        RECIPE, "Group size instead of the recipe's.", metavar="N", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class CalibrationData(Options):
    """The data to calibrate on.

    `data` is what `data.documents.documents` reads, or a Megatron data set; None is the text that
    comes with megtool. The first samples are taken, or with a `seed` random ones.
    """

    data: str | None = option(
        INPUT,
        "Calibration data: text, JSON lines, parquet, Megatron's .bin, or a data set "
        "NAME[:CONFIG][:SPLIT]; default: a text that comes with megtool.",
        metavar="FILE",
    )
    records: TextRecords = group(TextRecords)
    samples: int | None = option(
        CALIBRATION,
        "Samples; default: 128, or as many as the data has.",
        metavar="N",
        minimum=1,
    )
    seq_length: int | None = option(
        CALIBRATION,
        "Tokens of a sample; default: 512.",
        metavar="N",
        minimum=1,
    )
    seed: int | None = option(
        CALIBRATION,
        "Sample at random from all of the data; default: its first texts.",
        metavar="N",
    )
    synthetic: bool = option(CALIBRATION, "Calibrate on random tokens.", False)

    def sizes(self, max_positions: int) -> tuple[int, int]:
        """Return the number of samples and their length.

        Raises:
            UsageError: they do not fit a model with so many positions.
        """
        samples = DEFAULT_SAMPLES if self.samples is None else self.samples
        length = min(DEFAULT_LENGTH, max_positions) if self.seq_length is None else self.seq_length
        if length > max_positions:
            raise UsageError(
                f"samples have {length} tokens, but the model has {max_positions} positions",
                hint=f"use --seq-length {max_positions} or less",
            )
        if samples < 1 or length < min(MIN_LENGTH, max_positions):
            raise UsageError(
                f"{samples} samples of {length} tokens are too few",
                hint=f"at least 1 of {MIN_LENGTH}: --samples {DEFAULT_SAMPLES} --seq-length "
                f"{DEFAULT_LENGTH}",
            )
        return samples, length


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(TokenizerChoice):
    """What calibrates, on what, and what becomes of its result."""

    data: CalibrationData = group(CalibrationData)
    uncalibrated_experts: Literal["share", "weights", "none"] | None = option(
        CALIBRATION,
        "Experts that too few tokens reached: share uses the statistics of the other experts "
        "(default, or as in --calibration), weights those of the weights alone, none what there "
        "is.",
    )
    calibrate_all_experts: bool = option(
        CALIBRATION,
        "Send every token to every expert.",
        False,
    )
    offload_activations: bool = option(
        CALIBRATION,
        "Keep activations on disk between layers.",
        False,
    )
    backend: Literal["megtool", "modelopt"] = option(
        CALIBRATION,
        "What calibrates; modelopt: NVIDIA ModelOpt.",
        "megtool",
    )
    calibration: tuple[Path, ...] = option(
        INPUT,
        "A calibration file to use instead of data, for any --bits too; repeatable, merged.",
        (),
        metavar="FILE",
    )
    save_calibration: Path | None = option(
        OUTPUT,
        "Also save the calibration.",
        metavar="FILE",
        is_written=True,
    )
    calibrate_only: bool = option(
        CALIBRATION,
        "Write only the calibration file, to DST.",
        False,
    )
    work_dir: Path | None = option(
        CALIBRATION,
        "Where finished layers are stored until the end; default: next to DST.",
        metavar="FOLDER",
    )


@dataclass(frozen=True, kw_only=True)
class StreamedRuntime(RuntimeOptions):
    """How a model is calibrated: layer by layer, unless the whole of it fits."""

    stream_layers: bool = option(
        CALIBRATION,
        "Keep one layer in memory at a time; --no-stream-layers is faster if the model fits.",
        True,
    )


@dataclass(frozen=True, kw_only=True)
class QuantizedOutput(Options):
    """What is written, and whether both models are measured on a text."""

    eval_data: str | None = option(
        CHECK,
        "Measure perplexity and divergence before and after on this text.",
        metavar="FILE",
    )
    eval_tokens: int | None = option(
        CHECK,
        "Tokens of it; default: 8192.",
        metavar="N",
        minimum=2,
    )
    to: Literal["hf", "torch_dist"] = option(
        OUTPUT,
        "hf: codes and scales for engines; torch_dist: a Megatron checkpoint with ModelOpt's "
        "quantizers, for its training, and for `megtool export`.",
        "hf",
    )
    dst_tp: int | None = option(
        OUTPUT,
        "Tensor-parallel size of the Megatron checkpoint; default: 1.",
        metavar="N",
        minimum=1,
    )
    dst_pp: int | None = option(
        OUTPUT,
        "Its pipeline-parallel size.",
        metavar="N",
        minimum=1,
    )
    dst_ep: int | None = option(
        OUTPUT,
        "Its expert-parallel size.",
        metavar="N",
        minimum=1,
    )
    max_shard_size: str | None = option(
        OUTPUT,
        "Largest file; default: 5GB.",
        metavar="SIZE",
    )

    @property
    def layout(self) -> LayoutOptions:
        """The parallel layout of the checkpoint that is written, with `to` torch_dist."""
        return LayoutOptions(tp=self.dst_tp, pp=self.dst_pp, ep=self.dst_ep)

    @property
    def max_shard_bytes(self) -> int | None:
        """The most bytes of a file, None for the usual number."""
        return parse_size(self.max_shard_size, "max shard size") if self.max_shard_size else None
