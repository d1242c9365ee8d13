"""Export a Megatron checkpoint with ModelOpt's quantizers as the folder that engines load."""

from __future__ import annotations

import time
from pathlib import Path

from megtool.console import Progress, several, silent
from megtool.errors import MappingError, UsageError
from megtool.export.hf.quantized_folder import EngineFolder
from megtool.export.preflight import check_engine_rules
from megtool.export.report import ExportReport
from megtool.lint.folder_view import open_folder
from megtool.options.execution import DigestMode, ExecutionOptions
from megtool.options.groups import SourceOptions
from megtool.options.target import TargetOptions
from megtool.quant.recipes.engine_support import EngineVersion, check_engine, parse_engine
from megtool.quant.recipes.recipe import Recipe
from megtool.quant.recipes.rules import RecipeProblems
from megtool.quant.resolve import find_model_class
from megtool.quantize.layout.megatron_source import (
    QuantizedMegatronSource,
    read_quantized_megatron,
)
from megtool.quantize.layout.write import VerificationError, check_storable, write
from megtool.quantize.verification.verify_folder import verify_folder
from megtool.reshard.execute import peak_rss_bytes
from megtool.reshard.target import make_target
from megtool.storage.files import Files

UNIFIED = ("unified", "vllm", "sglang", "trtllm")
"""What `--to` may be: the forms of ModelOpt's unified export."""


def export_quantized_megatron(
    source: Path,
    destination: Path,
    reading: SourceOptions,
    folder: EngineFolder,
    *,
    execution: ExecutionOptions,
    files: Files | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Write codes and scales by the quantizers of a `torch_dist` checkpoint.

    The bytes are those that `megtool quantize` writes for the same quantization parameters. The
    result is read again and compared with the weights, and checked against the rules of the engine
    `target`, before it appears.

    Raises:
        UsageError: another form is asked for.
        FormatError: a quantizer is damaged, or of a format that no engine has.
        MappingError: the engine cannot load the result, or the family cannot be stored quantized.
        StorageError, SourceChangedError, DestinationError: as of a reshard.
    """
    start = time.monotonic()
    to, target = folder.to, folder.target
    if to not in UNIFIED:
        raise UsageError(
            f"--to {to} cannot be made of a quantized Megatron checkpoint in one step",
            hint="--to unified, then megtool export of that folder",
        )
    engine = parse_engine(target) if target else None
    read = read_quantized_megatron(
        source, reading, threads=execution.num_threads, progress=progress
    )
    check_storable(read.source, read.decisions)
    if engine is not None:
        _check_engine(read, engine)
    quantized = [d for d in read.decisions if d.format is not None and d.format.algo]
    caches = {d.format.kv_algo for d in read.decisions if d.format is not None and d.format.kv_algo}

    def check(tree: Path) -> None:
        if not read.smoothed:
            proof = verify_folder(
                read.source,
                tree,
                read.decisions,
                read.qparams,
                auxiliary_files=make_target(
                    read.source, TargetOptions(destination=destination, to="hf")
                ).destination.small_files,
                threads=execution.num_threads,
                progress=progress,
            )
            wrong = [f for f in proof.findings if f.severity == "error"]
            if wrong:
                raise VerificationError(
                    f"the written files do not hold what they should: {wrong[0].module}: "
                    f"{wrong[0].message}",
                    hint="nothing was written; this is a bug: report it with the command",
                )
        with open_folder(tree) as view:
            notes.extend(check_engine_rules(view, target))

    notes: list[str] = []
    written = write(
        read.source,
        read.decisions,
        read.qparams,
        TargetOptions(to="hf", max_shard_size=folder.max_shard_size, destination=destination),
        execution,
        files=files,
        before_commit=check,
        progress=progress,
    )
    algos = sorted({d.format.algo for d in quantized if d.format is not None})
    if read.smoothed:
        count = several(len(read.smoothed), "weight")
        notes.append(f"{count} keep their smoothing scales, as pre_quant_scale")
    return ExportReport(
        source=str(source),
        destination=str(destination),
        to=to if to == "unified" else f"unified ({to})",
        engine=engine.name if engine else "",
        algo=" and ".join(algos),
        kv_algo=next(iter(caches), None),
        tensors=written.tensors,
        num_bytes=written.num_bytes,
        source_bytes=read.source.catalogue.num_bytes,
        exact=len(quantized),
        plain=sum(d.format is None and d.module.kind == "linear" for d in read.decisions),
        files=written.files,
        notes=tuple(notes),
        warnings=(*written.warnings, *read.source.catalogue.warnings),
        is_dry=execution.dry_run,
        seconds=time.monotonic() - start,
        peak_rss_bytes=peak_rss_bytes() if written.copied else 0,
        digested=written.digests.tensors if execution.digest_mode is not DigestMode.NONE else 0,
        digested_files=written.digests.files,
        worker=written.copied.worker if written.copied else None,
    )


def _check_engine(read: QuantizedMegatronSource, engine: EngineVersion) -> None:
    """Refuse formats that the engine does not load, before any work.

    Raises:
        MappingError: lists them.
    """
    problems = RecipeProblems(str(read.source.path))
    recipe = Recipe(name="modelopt", description="")
    architecture = find_model_class(read.source)
    check_engine(engine, recipe, read.decisions, problems, architecture=architecture)
    if problems.problems:
        texts = dict.fromkeys(text for _, text, _ in problems.problems)
        raise MappingError(
            f"{engine.name} cannot load what would be made: {'; '.join(texts)}",
            file=read.source.path,
            hint=problems.problems[0][2] or "another format, or another engine",
            error_id="unsupported-by-engine",
        )
