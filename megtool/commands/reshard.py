"""Reshard a checkpoint: any format and parallel layout to any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megtool.commands.options.reshard import PRUNED_SIZES, ReshardFacts, ReshardOptions
from megtool.console import Progress, silent
from megtool.convert.pruning_scores import PrunedSizes
from megtool.digests.crc32c import DigestMode
from megtool.dtypes import DTYPES, DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import FormatError, UsageError
from megtool.formats import ARRAY_FORMATS
from megtool.fp8_state.transfer import parse_amax_options
from megtool.options.effects import check_effects
from megtool.options.groups import CopyOptions, OutputOptions
from megtool.options.layout import LayoutOptions
from megtool.options.sizes import parse_size
from megtool.plan.copies import ReshardPlan
from megtool.process.worker_identity import WorkerIdentity, parse_worker
from megtool.reshard.execute import ExecutionOptions, choose_num_threads
from megtool.reshard.report import ReshardReport
from megtool.reshard.run import reshard_checkpoint
from megtool.reshard.source_options import SelectionOptions
from megtool.reshard.target import MEGATRON, choose_format
from megtool.reshard.writers.target_spec import TargetOptions
from megtool.source.checkpoint import CheckpointSource
from megtool.source.subset.widths import PruningOptions
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath


def reshard(
    options: ReshardOptions,
    *,
    check: Callable[[ReshardPlan], object] | None = None,
    progress: Progress = silent,
    files: Files | None = None,
) -> ReshardReport:
    """Write the checkpoint `source` to `destination` in another format, layout or dtype.

    Optimizer state in buckets is decoded, and checked against its master weights. Several
    checkpoints are averaged in float32 and rounded once, without optimizer state. Adapters are
    added to the weights in float64 and rounded to float32 and the dtype to write, without optimizer
    state. FP8's delayed
    scaling state is merged over ranks. Sizes, such as `hidden_size`, leave out the parts of the
    model with the lowest of the `pruning_scores`. `check` is called with the plan before anything
    is staged; what it raises is raised. An interrupted run resumes when it is called again with the
    same options.

    Raises:
        UsageError: an option has no effect here, or no such value.
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    check_effects(options)
    return reshard_checkpoint(
        options.source,
        SelectionOptions(
            iteration=options.iteration,
            family=options.family,
            like=options.like,
            select=options.select,
            exclude=options.exclude,
            optimizer_only=options.optimizer_only,
            pruning=PruningOptions(
                sizes=PrunedSizes(**{n: getattr(options, n) for n in PRUNED_SIZES}),
                file=options.pruning_scores,
                layers=options.layers,
            ),
            average=options.average,
            weights=options.average_weights,
            adapters=options.adapter,
        ),
        _target_options(options),
        replace(
            make_execution_options(
                options,
                options,
                parse_worker(options.worker),
                locations=(options.source, options.destination, *options.average),
            ),
            digest=_choose_digest(options),
            strict=options.strict,
            verify=options.verify,
        ),
        check_source=lambda source: check_effects(options, _learn_facts(options, source)),
        check=check,
        progress=progress,
        files=files,
    )


def _choose_digest(options: ReshardOptions) -> DigestMode:
    """All digests, but for a copy within one store, which would have to read everything."""
    if options.digest is not None:
        return DigestMode(options.digest)
    source, destination = options.source, options.destination
    is_within = (
        isinstance(source, StorePath)
        and isinstance(destination, StorePath)
        and source.bucket_url == destination.bucket_url
        and destination.store.can_copy
    )
    return DigestMode.BUFFERED if is_within else DigestMode.ALL


def _target_options(options: ReshardOptions) -> TargetOptions:
    return TargetOptions(
        to=options.to,
        layout=LayoutOptions(**options.explicit()),
        optimizer=options.optimizer_format,
        prove_all=options.verify_master_weights,
        drop_objects=options.drop_objects,
        core_version=options.core_version,
        bridge=options.bridge,
        dtype=None if options.dtype is None else _parse_dtype(options.dtype),
        max_shard_bytes=(
            parse_size(options.max_shard_size, "max shard size") if options.max_shard_size else None
        ),
        compress=options.compress,
        renames=options.rename,
        replicate=options.replicate,
        model_class=options.model_class,
        destination=options.destination,
        amax=parse_amax_options(options.amax, options.te_version, options.amax_history),
    )


def _learn_facts(options: ReshardOptions, source: CheckpointSource) -> ReshardFacts:
    format_name = choose_format(source.catalogue, options.to)
    return ReshardFacts(
        format=format_name,
        is_sharded=format_name in ("hf", *ARRAY_FORMATS),
        is_array=format_name in ARRAY_FORMATS,
        is_megatron=format_name in MEGATRON,
    )


def make_execution_options(
    options: CopyOptions,
    output: OutputOptions,
    worker: WorkerIdentity | None = None,
    *,
    locations: Sequence[Path] = (),
) -> ExecutionOptions:
    """How to copy, from a verb's options, which are usually both arguments.

    `locations` are what is read and written.

    Raises:
        UsageError: there is too little memory.
    """
    memory_bytes = parse_size(options.memory, "memory")
    return ExecutionOptions(
        threads=choose_num_threads(options.threads, memory_bytes, *locations),
        memory_bytes=memory_bytes,
        overwrite=output.overwrite,
        dry_run=output.dry_run,
        fsync=output.fsync,
        unsafe_store=options.unsafe_store,
        worker=worker,
    )


def _parse_dtype(text: str) -> DType:
    try:
        dtype = named_dtype(text)
    except FormatError as e:
        known = ", ".join(d.name for d in DTYPES if d.is_float and d.itemsize > 1)
        raise UsageError(f"--dtype is {text!r}, which is no dtype", hint=f"one of {known}") from e
    if not dtype.is_float:
        raise UsageError(f"dtype {text!r} is not floating point", hint="for example bfloat16")
    if dtype.itemsize == 1:
        raise UsageError(
            f"dtype {text!r} has 8 bits: it needs scales, and a cast has none",
            hint="for example --dtype bfloat16; megtool quantize makes FP8 with scales",
        )
    return dtype
