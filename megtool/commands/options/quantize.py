"""Options of `quantize` and `recipe`, and what each of them needs to have an effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megtool.options.effects import requires
from megtool.options.execution import (
    WITHOUT_CHECKS,
    ExecutionOptions,
    LargeExecution,
)
from megtool.options.field import OptionCondition, Options, argument, group, option
from megtool.options.groups import (
    SOURCE,
    AdaptedSource,
    HtmlPage,
    RuntimeOptions,
    SourceOptions,
)
from megtool.options.quantize import (
    RECIPE,
    CalibrationOptions,
    QuantizedOutput,
    RecipeChoice,
    StreamedRuntime,
)
from megtool.storage.location.path import location


@dataclass(frozen=True, kw_only=True)
class QuantizeFacts:
    """What `quantize` knows before any work: of the recipe, and of the model."""

    recipe: str
    chooses_formats: bool
    needs_data: bool
    has_experts: bool


def _unless_measured(holds: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """The condition for an option that also serves the measurement on --eval-data."""
    return lambda options, facts: options.eval_data is not None or holds(options, facts)


def _is_not_plain(options: Any) -> bool:
    """The data is not one file of plain text."""
    from megtool.data.documents import has_fields

    data = options.data
    return data is None or not location(data).is_file() or has_fields(str(data))


_CHOOSES = OptionCondition(
    holds=lambda options, facts: facts.chooses_formats,
    reason="{has} no effect: recipe {recipe} chooses no format",
    hint="a recipe with `choose` does, such as auto_nvfp4_fp8",
    on_facts=True,
)
_MAKES_CALIBRATION = OptionCondition(
    holds=lambda options, facts: facts.needs_data,
    reason="{has} no effect: recipe {recipe} needs no data",
    hint="leave {it} out: scales come from the weights alone, and there is no calibration to save",
    on_facts=True,
)


def _is_megtool(options: Any, facts: Any) -> bool:
    return bool(options.backend == "megtool")


_MEGTOOL = OptionCondition(
    holds=_is_megtool,
    reason="{has} no effect with --backend modelopt, which does not use {it}",
    hint="--backend megtool has {names}; with modelopt leave {it} out",
)
_QUANTIZES = OptionCondition(
    holds=lambda options, facts: not options.calibrate_only,
    reason="{has} no effect with --calibrate-only, which quantizes nothing",
    hint="leave out --calibrate-only, or give {names} to the run that uses the calibration",
)


_IS_MEGATRON = OptionCondition(
    holds=lambda options, facts: options.to == "torch_dist",
    reason="{has} no effect with --to hf, which has no ranks",
    hint="--to torch_dist writes a Megatron checkpoint; --tp, --pp and --ep are those in which "
    "calibration runs",
)
_IS_FOLDER = OptionCondition(
    holds=lambda options, facts: options.to == "hf",
    reason="{has} no effect with --to torch_dist",
    hint="leave {it} out; `megtool export` of the result makes the folder, which has it",
)


def _has_no_file(options: Any, facts: Any) -> bool:
    return not options.calibration


_NO_FILE = OptionCondition(
    holds=_has_no_file,
    reason="{has} no effect with --calibration, which replaces data",
    hint="a calibration file stands for the data it was made of: leave out one or the other; "
    "--save-calibration merges several files",
)
_NO_FILE_OR_MEASURED = OptionCondition(
    holds=_unless_measured(_has_no_file), reason=_NO_FILE.reason, hint=_NO_FILE.hint
)
_NOT_SYNTHETIC = OptionCondition(
    holds=lambda options, facts: not options.synthetic,
    reason="{has} no effect with --synthetic, which generates random tokens",
    hint="leave out one or the other",
)
_NOT_SYNTHETIC_OR_MEASURED = OptionCondition(
    holds=_unless_measured(_NOT_SYNTHETIC.holds),
    reason=_NOT_SYNTHETIC.reason,
    hint=_NOT_SYNTHETIC.hint,
)
_HAS_DATA = requires(
    "data", "the text that comes with megtool has no fields and no splits: --data FILE"
)
_NOT_INDEXED = OptionCondition(
    holds=lambda options, facts: (
        options.data is None or location(options.data).suffix not in (".bin", ".idx")
    ),
    reason="{has} no effect with a Megatron data set, which holds only tokens",
    hint="leave {it} out",
)
_NOT_ONE_FILE = OptionCondition(
    holds=lambda options, facts: options.data is None or not location(options.data).is_file(),
    reason="{has} no effect with one file of --data, which has no splits",
    hint="leave it out, or name a folder or a data set",
)
_NOT_PLAIN = OptionCondition(
    holds=lambda options, facts: _is_not_plain(options),
    reason="{has} no effect with a text in --data, which has no fields",
    hint="leave it out, or give JSON lines or parquet",
)
_EVALUATES = requires("eval_data", "--eval-data FILE is the text that is measured on")


def _needs_data(options: Any, facts: Any) -> bool:
    return bool(facts.needs_data)


_USES_DATA = OptionCondition(
    holds=_needs_data,
    reason="recipe {recipe} needs no data; {names} {is} not used",
    on_facts=True,
)
_USES_DATA_OR_MEASURED = OptionCondition(
    holds=_unless_measured(_needs_data), reason=_USES_DATA.reason, on_facts=True
)
_RUNS_BACKEND = OptionCondition(
    holds=_needs_data,
    reason="recipe {recipe} needs no data; ModelOpt is not run",
    on_facts=True,
)
_HAS_EXPERTS = OptionCondition(
    holds=lambda options, facts: facts.has_experts or not facts.needs_data,
    reason="the model has no experts; {names} {is} not used",
    on_facts=True,
)

CONDITIONS = (
    _CHOOSES,
    _MAKES_CALIBRATION,
    _MEGTOOL,
    _QUANTIZES,
    _IS_MEGATRON,
    _IS_FOLDER,
    _NO_FILE,
    _NO_FILE_OR_MEASURED,
    _NOT_SYNTHETIC,
    _NOT_SYNTHETIC_OR_MEASURED,
    _HAS_DATA,
    _NOT_INDEXED,
    _NOT_ONE_FILE,
    _NOT_PLAIN,
    _EVALUATES,
    _USES_DATA,
    _USES_DATA_OR_MEASURED,
    _RUNS_BACKEND,
    _HAS_EXPERTS,
)
"""In the order in which they are checked."""

_SAMPLES = (
    *("data", "field", "split", "samples", "seq_length", "seed", "synthetic"),
    *("offload_activations", "work_dir"),
)
"""The options that choose calibration data."""

_EXPERTS = ("uncalibrated_experts", "calibrate_all_experts")
_RUN = ("stream_layers", "device", "dtype", "kernels")
"""The options of running the model."""

_MEASURED = ("eval_data", "eval_tokens")
_WRITTEN = ("to", "dst_tp", "dst_pp", "dst_ep", "max_shard_size")


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(HtmlPage):
    """Quantize a checkpoint in any format for an engine, and check the result.

    Writes a Hugging Face folder that vLLM, SGLang and TensorRT-LLM load, or with --to torch_dist a
    Megatron checkpoint that ModelOpt restores. Runs layer by layer, in the memory of one; an
    interrupted run resumes when the same command is given again.

    Example: megtool quantize ./SmolLM2-135M-Instruct ./SmolLM2-fp8 --recipe fp8
    """

    extra_needs: ClassVar = {
        _CHOOSES: ("bits",),
        _MAKES_CALIBRATION: ("save_calibration", "calibrate_only"),
        _MEGTOOL: ("uncalibrated_experts", "calibration", "save_calibration", "calibrate_only"),
        _QUANTIZES: (*_WRITTEN, *_MEASURED, "memory", "fsync", "report"),
        _IS_MEGATRON: ("dst_tp", "dst_pp", "dst_ep"),
        _IS_FOLDER: ("eval_data", "max_shard_size"),
        _NO_FILE: (*_SAMPLES, "calibrate_only", "tp", "pp", "ep", "etp", "cp"),
        _NO_FILE_OR_MEASURED: ("tokenizer", *_RUN),
        _NOT_SYNTHETIC: ("data", "field", "split"),
        _NOT_SYNTHETIC_OR_MEASURED: ("tokenizer",),
        _HAS_DATA: ("field", "split"),
        _NOT_INDEXED: ("field", "split"),
        _NOT_ONE_FILE: ("split",),
        _NOT_PLAIN: ("field",),
        _EVALUATES: ("eval_tokens",),
        _USES_DATA: (*_SAMPLES, *_EXPERTS, "calibration"),
        _USES_DATA_OR_MEASURED: ("tokenizer", *_RUN),
        _RUNS_BACKEND: ("backend",),
        _HAS_EXPERTS: (*_EXPERTS, "ep", "etp"),
    }
    not_offered: ClassVar = WITHOUT_CHECKS | {"unsafe_store"}
    shared: ClassVar = frozenset({"threads"})
    shown_after: ClassVar = {
        "tokenizer": "like",
        "stream_layers": "calibrate_all_experts",
        "target": "memory",
    }

    source: Path = argument(SOURCE, "SRC")
    destination: Path = argument(
        "The folder to write; with --calibrate-only the calibration file.", "DST", is_written=True
    )
    bits: float | None = option(
        RECIPE,
        "Budget of a recipe that chooses formats, in bits per weight.",
        metavar="X",
        minimum=1,
    )
    calibration: CalibrationOptions = group(CalibrationOptions)
    output: QuantizedOutput = group(QuantizedOutput)
    recipe: RecipeChoice = group(RecipeChoice)
    reading: AdaptedSource = group(AdaptedSource)
    runtime: RuntimeOptions = group(StreamedRuntime)
    execution: ExecutionOptions = group(LargeExecution)


@dataclass(frozen=True, kw_only=True)
class ListRecipesOptions(Options):
    """List the shipped recipes.

    Example: megtool recipe list
    """


@dataclass(frozen=True, kw_only=True)
class ShowRecipeOptions(Options):
    """Print a recipe with every line explained: a start for your own.

    Example: megtool recipe show int4_awq > mine.yaml
    """

    recipe: str = argument("A shipped recipe's name, or a file in any dialect.", "NAME")


@dataclass(frozen=True, kw_only=True)
class ExplainRecipeOptions(Options):
    """Show which rule applies to each module of a checkpoint, and how large the result will be.

    Reads only headers.

    Example: megtool recipe explain ./SmolLM2-135M-Instruct --recipe fp8 --target vllm
    """

    source: Path = argument(SOURCE, "SRC")
    recipe: RecipeChoice = group(RecipeChoice)
    reading: SourceOptions = group(SourceOptions)
