"""Export to TensorRT-LLM's own checkpoints, of releases up to 1.x: a file a rank."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megtool import __version__
from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.digest import DigestMode
from megtool.checkpoint.formats.quantized import quantization
from megtool.checkpoint.parallel_scan import usual_threads
from megtool.checkpoint.plan import Plan, Source
from megtool.checkpoint.planner import build
from megtool.checkpoint.storage.files import Files
from megtool.console import Progress, silent
from megtool.dtypes import DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import MappingError, UsageError
from megtool.export.quantized_module import CodedFolder
from megtool.export.read_quantized import read_coded
from megtool.export.report import ExportReport
from megtool.export.small_tensors import Values
from megtool.export.trtllm_legacy.layout import check_family
from megtool.export.trtllm_legacy.plan import LegacyPlan, Model, plan_legacy
from megtool.export.trtllm_legacy.quantized_weights import CodedWeights, coded_weights
from megtool.reshard.execute import peak_rss_bytes, places_of
from megtool.reshard.open_source import CheckpointSource, open_model, unknown_model
from megtool.reshard.parse_size import parse_size
from megtool.reshard.staged_write import write_staged, written_files
from megtool.reshard.target import no_copies

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32"}
_ENGINE_MAKES = "W8A16"
"""A format that engines make of plain weights when they load them: what they store is for one kind
of GPU alone."""


def export_legacy(
    source: str | Path,
    destination: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dtype: str | None = None,
    keep_cache_scales: bool = False,
    iteration: str | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    threads: int | None = None,
    memory: str = "256MiB",
    overwrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    files: Files | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Write the model of `source`, in any format and layout, for `tp` x `pp` ranks of an engine.

    Llama (and Mistral), GPT-2, Qwen 2 and 3, Mixtral and Gemma. A quantized Hugging Face folder
    keeps its codes; weights that engines multiply as one are brought to one scale where a format
    has a single one. `dtype` is that of everything else: bfloat16, float16, or float32 for a plain
    model; the source's own unless given. Scales of an FP8 KV cache below 1 become 1, as ModelOpt
    writes them, unless `keep_cache_scales`. Optimizer state and tokenizer are left out.

    Raises:
        MappingError: another family, tensors no legacy model has, a format no legacy engine has
            (which modules, and the nearest recipe), or weights of one tensor in several formats.
        LayoutError: `tp` does not divide heads, blocks or groups, or `pp` the layers; the hint
            names the sizes that do.
        FormatError: scales are missing, or numbers are too large for float16.
        StorageError, SourceChangedError, DestinationError: as of a reshard.
    """
    began = time.monotonic()
    memory_bytes, place = parse_size(memory, "memory"), Path(destination)
    opened = open_model(
        Path(source),
        iteration=iteration,
        family_name=family,
        like=None if like is None else Path(like),
        optimizer=False,
    )
    system = files or Files()
    with ExitStack() as stack:
        legacy, plan, catalogue = _planned(opened, tp, pp, dtype, keep_cache_scales, system, stack)
    stage = Stage(
        place,
        files=system,
        fingerprint=plan.fingerprint,
        overwrite=overwrite,
        sources=places_of(opened),
    )
    target = plan.target
    report = ExportReport(
        source=str(source),
        destination=str(destination),
        to="trtllm-legacy",
        engine="TensorRT-LLM up to 1.x",
        algo=legacy.algo,
        kv_algo=legacy.kv_algo,
        tensors=len(target.catalogue.tensors),
        num_bytes=target.catalogue.num_bytes,
        source_bytes=catalogue.num_bytes,
        exact=legacy.exact,
        requantized=legacy.requantized,
        decoded=len(catalogue.packed),
        plain=legacy.plain - len(catalogue.packed),
        files=written_files(plan),
        notes=tuple(legacy.notes),
        is_dry=dry_run,
    )
    if dry_run:
        stage.check()
        return report
    write_staged(
        plan,
        stage,
        what="export",
        threads=usual_threads(threads),
        memory_bytes=memory_bytes,
        digest=DigestMode.NONE,
        fsync=fsync,
        progress=progress,
        wider="--dtype bfloat16 holds them",
    )
    return replace(
        report,
        warnings=(*catalogue.warnings, *stage.messages),
        seconds=time.monotonic() - began,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _planned(
    opened: CheckpointSource,
    tp: int,
    pp: int,
    dtype: str | None,
    keep_cache_scales: bool,
    files: Files,
    stack: ExitStack,
) -> tuple[LegacyPlan, Plan, Catalogue]:
    """The plan, and the catalogue it reads."""
    _check_model(opened)
    folder = _coded(opened)
    model = _model_of(opened, folder)
    catalogue, weights = opened.catalogue, None
    if folder is not None:
        catalogue = catalogue if model.algo else folder.catalogue
        values = stack.enter_context(Values(folder.catalogue, files))
        weights = coded_weights(
            folder, model.held, model.shapes, values, are_decoded=bool(model.algo)
        )
    kind, note = _dtype_of(opened, dtype, None if model.algo else weights)
    legacy = plan_legacy(
        model,
        catalogue,
        weights,
        tp=tp,
        pp=pp,
        dtype=kind,
        reasons=dict(opened.side.dropped) | {s.name: s.reason for s in catalogue.set_aside},
        keeps_cache_scales=keep_cache_scales,
    )
    legacy.notes[:0] = [note] if note else []
    legacy.notes += no_copies(opened).values()
    plan = build(
        [Source(catalogue=catalogue, placements=legacy.pieces.source)],
        legacy.destination,
        legacy.pieces.target,
        fills=legacy.pieces.fills,
        dropped=legacy.dropped,
        copies=legacy.pieces.copies,
        feeds=legacy.feeds,
        options=repr((__version__, "trtllm-legacy")),
    )
    return legacy, plan, catalogue


def _coded(opened: CheckpointSource) -> CodedFolder | None:
    """The source's quantized modules, if it is a folder that has any."""
    if opened.catalogue.format != "hf" or quantization(opened.catalogue.metadata) is None:
        return None
    return read_coded(opened.path)


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


def _model_of(opened: CheckpointSource, folder: CodedFolder | None) -> Model:
    """What is exported."""
    model, config = opened.model, opened.side.config
    if model is None or model.family is None or config is None:
        raise MappingError("nothing says which model it is", file=opened.path)
    said = (model.hf_config or {}).get("architectures")
    algos = {m.algo for m in folder.modules} if folder else set()
    return Model(
        family=model.family.name,
        config=config,
        held={n: opened.placement_of(n) for n in opened.side.canonical},
        shapes={n: t.shape for n, t in opened.side.canonical.items()},
        architecture=said[0] if isinstance(said, list) and said else None,
        algo=_ENGINE_MAKES if algos == {_ENGINE_MAKES} else "",
    )


def _dtype_of(
    opened: CheckpointSource, asked: str | None, weights: CodedWeights | None
) -> tuple[DType, str]:
    """The type of what is not quantized, and what is to be said about it."""
    known = ("bfloat16", "float16") if weights else ("bfloat16", "float16", "float32")
    if asked is not None:
        name = _DTYPES.get(asked, asked)
        if name not in known:
            raise UsageError(f"dtype {asked!r}", hint=f"known: {', '.join(known)}")
        return named_dtype(name), ""
    own = opened.catalogue[opened.side.placements["embed.weight"].stored].dtype
    if own.name in ("bfloat16", "float16"):
        return own, ""
    return named_dtype("bfloat16"), f"weights of {own} become bfloat16; --dtype chooses another"
