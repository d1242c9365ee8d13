"""Export to the checkpoints of TensorRT-LLM releases up to 1.x, with one file per rank."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from megtool import __version__
from megtool.console import Progress, silent
from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import FormatError, MappingError, UsageError
from megtool.export.engine_commands import describe_build
from megtool.export.hf.read_quantized import read_quantized_modules
from megtool.export.preflight import check_source_scales
from megtool.export.quantized_module import QuantizedModules
from megtool.export.report import ExportReport
from megtool.export.small_tensors import SmallTensorReader
from megtool.export.staged_export import PlannedExport
from megtool.export.trtllm_legacy.config import build_config_json
from megtool.export.trtllm_legacy.layout import check_family
from megtool.export.trtllm_legacy.plan import LegacyModel, TrtllmLegacyPlan, plan_trtllm_legacy
from megtool.export.trtllm_legacy.quantized_weights import QuantizedWeights, find_quantized_weights
from megtool.export.trtllm_legacy.ranks import RankLayout
from megtool.formats.safetensors.quantization_config import quantization_config
from megtool.options.execution import ExecutionOptions
from megtool.options.groups import SourceOptions
from megtool.options.layout import ParallelConfig
from megtool.plan.copies import PlanSource, ReshardPlan
from megtool.plan.planner import build_plan
from megtool.source.checkpoint import CheckpointSource, unknown_model
from megtool.source.open import open_source
from megtool.source.repeated_tensors import refuse_false_copies
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32"}
_ENGINE_MAKES = "W8A16"
"""A format that engines make of plain weights when they load them: what they store is for one kind
of GPU alone."""


def export_trtllm_legacy(
    source: Path,
    destination: Path,
    *,
    layout: ParallelConfig,
    dtype: str | None = None,
    model: SourceOptions,
    execution: ExecutionOptions,
    files: Files | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Write the model of `source`, in any format and layout, for `tp` x `pp` ranks of an engine.

    Llama (and Mistral), GPT-2, Qwen 2 and 3, Mixtral, Gemma, Falcon, StarCoder2, Nemotron (its
    dense models, Minitron among them) and DeepSeek V2 and V3. A quantized Hugging Face folder
    keeps its codes; weights that engines multiply as one get one scale where a format has a single
    one. Scales of an FP8 KV cache below 1 become 1, as ModelOpt writes them. Optimizer state and
    tokenizer are left out; so is multi-token prediction, with a note.

    Args:
        source: A checkpoint of any format.
        destination: The folder.
        layout: How many tensor-parallel ranks and pipeline stages share the model, and among how
            many of these ranks experts are distributed (`ep`, which divides `tp`).
        dtype: The type of what is not quantized: bfloat16, float16, or float32 for a plain model;
            the source's own unless given.
        model: What the user says about the source.
        execution: How the folder is written.
        files: The file system.
        progress: Is called with bytes written and their total.

    Raises:
        MappingError: another family, tensors no legacy model has, a format no legacy engine has
            (which modules, and the nearest recipe), or weights of one tensor in several formats.
        LayoutError: `tp` does not divide heads, blocks or groups, `pp` the layers, or `ep` the
            experts; the hint names the sizes that do.
        FormatError: scales are missing, or numbers are too large for float16.
        StorageError, SourceChangedError, DestinationError: as of a reshard.
    """
    start = time.monotonic()
    opened = open_source(source, model, optimizer=False, as_class=True)
    refuse_false_copies(opened)
    system = files or Files()
    with ExitStack() as stack:
        legacy, plan, catalogue = _plan(opened, layout, dtype, system, stack)
    report = ExportReport(
        source=str(source),
        to="trtllm-legacy",
        engine="TensorRT-LLM up to 1.x",
        algo=legacy.algo,
        kv_algo=legacy.kv_algo,
        source_bytes=catalogue.num_bytes,
        exact=legacy.exact,
        requantized=legacy.requantized,
        decoded=len(catalogue.packed),
        plain=legacy.plain - len(catalogue.packed),
        notes=(*legacy.notes, describe_build(destination, world_size=layout.tp * layout.pp)),
        warnings=tuple(catalogue.warnings),
    )
    export = PlannedExport(
        plan=plan,
        report=report,
        sources=opened.paths,
        dropped_settings=opened.model.dropped_record if opened.model else None,
        overflow_hint="--dtype bfloat16 holds them",
        start=start,
    )
    return export.write(destination, execution, system, progress)


def _plan(
    opened: CheckpointSource,
    layout: ParallelConfig,
    dtype: str | None,
    files: Files,
    stack: ExitStack,
) -> tuple[TrtllmLegacyPlan, ReshardPlan, Catalogue]:
    """The plan, and the catalogue it reads."""
    _check_model(opened)
    folder = _read_quantized(opened)
    model = _read_model(opened, folder)
    catalogue, weights = opened.catalogue, None
    if folder is not None:
        catalogue = catalogue if model.algo else folder.catalogue
        values = stack.enter_context(SmallTensorReader(folder.catalogue, files))
        weights = find_quantized_weights(
            folder, model.placements, model.shapes, values, are_decoded=bool(model.algo)
        )
    kind, note = _choose_dtype(opened, dtype, None if model.algo else weights)
    opened.check_config()
    _check_settings(opened, model)
    legacy = plan_trtllm_legacy(
        model,
        catalogue,
        weights,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        dtype=kind,
        reasons=dict(opened.view.dropped) | {s.name: s.reason for s in catalogue.ignored},
    )
    legacy.notes[:0] = [note] if note else []
    if opened.model is not None and opened.model.dropped:
        legacy.notes.insert(0, opened.model.describe_dropped())
    plan = build_plan(
        [PlanSource(catalogue=catalogue, placements=legacy.pieces.source)],
        legacy.destination,
        legacy.pieces.target,
        fills=legacy.pieces.fills,
        dropped=legacy.dropped,
        copies=legacy.pieces.copies,
        feeds=legacy.feeds,
        options=repr((__version__, "trtllm-legacy")),
    )
    return legacy, plan, catalogue


def _check_settings(opened: CheckpointSource, model: LegacyModel) -> None:
    """Refuse a model of which config.json says no more than of another.

    Raises:
        MappingError: it does not hold a setting.
    """
    if opened.model is None or opened.model.family is None or model.family is None:
        return
    name = model.family

    def describe(config: ModelConfig) -> bytes:
        check_family(name, config)
        words = config.embedding.vocab_size
        cut = RankLayout(config=config, tp=1, pp=1, ep=1, vocab_size=words, vocab_rows=words)
        return build_config_json(
            name,
            cut,
            dtype="float32",
            architecture=model.architecture,
            shares_table=False,
            quantization={},
        )

    opened.check_said(opened.model.family, describe, "a legacy TensorRT-LLM checkpoint")


def _read_quantized(opened: CheckpointSource) -> QuantizedModules | None:
    """The source's quantized modules, if it is a folder that has any."""
    if opened.catalogue.format != "hf" or quantization_config(opened.catalogue.metadata) is None:
        return None
    check_source_scales(opened.path)
    return read_quantized_modules(opened.path)


def _check_model(opened: CheckpointSource) -> None:
    """It is known what is exported, and legacy engines have a model for it.

    Raises:
        MappingError: not so.
    """
    model = opened.model
    if model is None or not opened.is_canonical:
        raise unknown_model(
            opened, "a legacy checkpoint needs the model's family and configuration"
        )
    check_family(model.family.name if model.family else None, model.config)


def _read_model(opened: CheckpointSource, folder: QuantizedModules | None) -> LegacyModel:
    model, config = opened.model, opened.view.config
    if model is None or model.family is None or config is None:
        raise MappingError(
            "nothing says which model it is", file=opened.path, error_id="no-model-config"
        )
    for name, p in opened.view.placements.items():
        stored = opened.catalogue[p.stored]
        if name in opened.view.canonical and not stored.dtype.is_float:
            raise FormatError(
                f"a weight of {stored.dtype} has no scale to be decoded with",
                file=opened.path,
                tensor=p.stored,
                hint="the checkpoint is damaged, or quantized in a form that is not known",
            )
    architectures = (model.hf_config or {}).get("architectures")
    algos = {m.algo for m in folder.modules} if folder else set()
    return LegacyModel(
        family=model.family.name,
        config=config,
        placements={n: opened.placement_of(n) for n in opened.view.canonical},
        shapes={n: t.shape for n, t in opened.view.canonical.items()},
        architecture=architectures[0]
        if isinstance(architectures, list) and architectures
        else None,
        algo=_ENGINE_MAKES if algos == {_ENGINE_MAKES} else "",
    )


def _choose_dtype(
    opened: CheckpointSource, requested: str | None, weights: QuantizedWeights | None
) -> tuple[DType, str]:
    """The type of what is not quantized, and a note about it (empty: none)."""
    supported = ("bfloat16", "float16") if weights else ("bfloat16", "float16", "float32")
    if requested is not None:
        name = _DTYPES.get(requested, requested)
        if name not in supported:
            raise UsageError(
                f"the dtype {requested!r} is not supported", hint=f"known: {', '.join(supported)}"
            )
        return named_dtype(name), ""
    stored = opened.catalogue[opened.view.placements["embed.weight"].stored].dtype
    if stored.name in ("bfloat16", "float16"):
        return stored, ""
    return named_dtype("bfloat16"), f"weights of {stored} become bfloat16; --dtype chooses another"
