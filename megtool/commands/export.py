"""Export a checkpoint as the files that an engine, or another tool, loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megtool.commands.options.export import ExportFacts, ExportOptions
from megtool.commands.options.reshard import ReshardOptions
from megtool.commands.reshard import reshard
from megtool.console import Progress, several, silent
from megtool.errors import UsageError
from megtool.export.engine_commands import describe_serving
from megtool.export.report import ExportReport
from megtool.formats import detect_format, open_checkpoint
from megtool.formats.safetensors.quantization_config import quantization_config
from megtool.fp8_state.modelopt_amax import has_quantizers
from megtool.lint.engines import ENGINES
from megtool.options.effects import check_effects, without_effect
from megtool.options.layout import ParallelConfig
from megtool.options.selection import SourceSelection
from megtool.options.target import TargetOptions
from megtool.plan.copies import ReshardPlan
from megtool.quant.recipes.engine_support import parse_engine
from megtool.reshard.execute import fill_in
from megtool.source.open import Headers
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue


def export(
    options: ExportOptions, *, files: Files | None = None, progress: Progress = silent
) -> ExportReport:
    """Write the checkpoint `source`, quantized or not, in any format and layout, as `to`.

    What the engine `target` cannot load is refused before a byte is staged. Codes and scales of
    quantized weights are copied as they are if the format has a place for them; they are repacked
    if it packs otherwise, and rescaled if it has one scale for several weights. Only headers are in
    memory at once, and an interrupted run resumes when it is called again with the same options.

    Raises:
        UsageError: an option has no effect here.
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    check_effects(options)
    _check_adapters(options)
    to, source, destination = options.to, options.source, options.destination
    _check_engines(options)
    engine = options.target or (to if to in ENGINES else "")
    execution = fill_in(options.execution, options.source, options.destination)
    if to == "trtllm-legacy":
        from megtool.export.trtllm_legacy.write_checkpoint import export_trtllm_legacy

        return export_trtllm_legacy(
            source,
            destination,
            layout=ParallelConfig(tp=options.tp or 1, pp=options.pp or 1, ep=options.ep or 1),
            dtype=options.dtype,
            model=options.reading,
            execution=execution,
            files=files,
            progress=progress,
        )
    if to == "gguf":
        from megtool.export.gguf.write_file import export_gguf

        return export_gguf(
            source,
            destination,
            options.gguf,
            model=options.reading,
            execution=execution,
            files=files,
            progress=progress,
        )
    if to != "hf" and _is_quantized_megatron(options):
        from megtool.export.hf.quantized_folder import EngineFolder
        from megtool.export.hf.quantized_megatron import export_quantized_megatron

        check_effects(options, ExportFacts(to=to, is_repacked=False))
        _check_no_cast(options)
        megatron = export_quantized_megatron(
            source,
            destination,
            options.reading,
            EngineFolder(to=to, target=engine or None, max_shard_size=options.max_shard_size),
            execution=execution,
            files=files,
            progress=progress,
        )
        return _add_engine_note(megatron, engine, destination)
    catalogue = _open_quantized(source)
    is_repacked = catalogue is not None and to != "hf"
    check_effects(options, ExportFacts(to=to, is_repacked=is_repacked))
    if not is_repacked:
        plain = _export_plain(options, engine, catalogue, files, progress)
        return _add_engine_note(plain, engine, destination)
    from megtool.export.hf.quantized_folder import EngineFolder, export_folder

    report = export_folder(
        source,
        destination,
        EngineFolder(to=to, target=engine or None, max_shard_size=options.max_shard_size),
        family=options.reading.family,
        execution=execution,
        files=files,
        progress=progress,
    )
    return _add_engine_note(report, engine, destination)


def _add_engine_note(report: ExportReport, engine: str, folder: Path) -> ExportReport:
    """The report, with the command that serves a folder for TensorRT-LLM."""
    if not engine or parse_engine(engine).engine != "trtllm":
        return report
    return replace(report, notes=(*report.notes, describe_serving(folder)))


def _check_engines(options: ExportOptions) -> None:
    """Refuse two different engines.

    Raises:
        UsageError: `to` and `target` differ, or there is no such engine.
    """
    to, target = options.to, options.target
    if target is None:
        return
    engine = parse_engine(target).engine
    if to in ENGINES and engine != to:
        raise UsageError(
            f"--to {to} and --target {target} are two engines", hint="leave one of them out"
        )


def _check_adapters(options: ExportOptions) -> None:
    """Refuse adapters of weights whose codes would be copied.

    Raises:
        UsageError: codes would be.
    """
    if not options.reading.adapter or options.to in ("hf", "gguf", "trtllm-legacy"):
        return
    if _is_quantized_megatron(options) or _open_quantized(options.source) is not None:
        raise UsageError(
            f"{options.source} is quantized, and --to {options.to} copies codes: an adapter "
            "changes the weights",
            hint="megtool reshard --adapter writes plain weights, quantize --adapter makes new "
            "codes",
        )


def _is_quantized_megatron(options: ExportOptions) -> bool:
    """Whether SRC is a Megatron checkpoint with ModelOpt's quantizers."""
    if "torch_dist" not in detect_format(options.source).names:
        return False
    return has_quantizers(Headers.read(options.source, options.reading).catalogue)


def _check_no_cast(options: ExportOptions) -> None:
    """Refuse a dtype for a checkpoint whose weights become codes.

    Raises:
        UsageError: one is given.
    """
    if options.dtype is not None:
        raise without_effect(
            f"--dtype {options.dtype} has no effect with a quantized Megatron checkpoint",
            "what is not quantized keeps its dtype; --to hf casts plain weights",
        )


def _open_quantized(source: Path) -> Catalogue | None:
    """A Hugging Face folder that declares quantization, if only of the KV cache; None for others:
    files of other formats hold plain weights."""
    if "hf" not in detect_format(source).names:
        return None
    catalogue = open_checkpoint(source)
    return None if quantization_config(catalogue.metadata) is None else catalogue


def _export_plain(
    options: ExportOptions,
    engine: str,
    quantized: Catalogue | None,
    files: Files | None,
    progress: Progress,
) -> ExportReport:
    """Write a plain Hugging Face folder, whatever the source is."""
    from megtool.export.preflight import check_plan, find_wrong_scales

    source, destination = options.source, options.destination
    if options.to in ("compressed-tensors", "fp8-blocks"):
        raise UsageError(
            f"{source} is not quantized: {options.to} would hold only plain weights",
            hint="megtool quantize does that first; --to hf writes it plain",
        )
    notes: list[str] = []
    warnings: list[str] = []
    if quantized is not None:
        warnings += find_wrong_scales(quantized.root)
        if quantized.ignored:
            count = several(len(quantized.ignored), "scale")
            notes.append(f"{count} of inputs and of the KV cache are left out: the copy is plain")

    def check(plan: ReshardPlan) -> None:
        notes.extend(check_plan(plan, destination, engine))

    report = reshard(
        ReshardOptions(
            source=source,
            selection=SourceSelection(reading=options.reading),
            target=TargetOptions(
                destination=destination,
                to="hf",
                optimizer_format="none",
                dtype=options.dtype,
                max_shard_size=options.max_shard_size,
            ),
            execution=options.execution,
        ),
        check=check if engine else None,
        files=files,
        progress=progress,
    )
    if options.to != "hf":
        notes.append("its weights are plain: megtool quantize --recipe makes them smaller")
    if report.left_out:
        notes.append(f"optimizer state is left out: {report.left_out:,} tensors")
    is_there = not report.dry_run and (report.worker is None or report.worker.is_committed)
    written = [] if not is_there else sorted(f for f in destination.rglob("*") if f.is_file())
    return ExportReport(
        source=str(source),
        destination=str(destination),
        to=options.to,
        engine=engine,
        tensors=report.tensors,
        num_bytes=report.num_bytes,
        source_bytes=report.plan.read_bytes,
        decoded=len(quantized.packed) if quantized is not None else 0,
        files=tuple(str(f.relative_to(destination)) for f in written),
        notes=tuple(notes),
        overflowed=report.overflowed,
        digested=report.digested if report.unverified else report.tensors,
        digested_files=report.digested_files,
        warnings=(*warnings, *report.warnings),
        is_dry=report.dry_run,
        seconds=report.seconds,
        peak_rss_bytes=report.peak_rss_bytes,
        worker=report.worker,
    )
