"""Report what a checkpoint holds, from its headers alone, and statistics of its numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from megtool.commands.inspection.layer_statistics import (
    find_outliers,
    find_stacked_layers,
    layer_statistics,
    module_bytes,
)
from megtool.commands.inspection.name_tree import fold_tensors
from megtool.commands.inspection.rank_contents import list_rank_contents
from megtool.commands.options.checkpoints import InspectOptions
from megtool.commands.reports.inspect import InspectReport, TensorLine
from megtool.commands.worker_scan import ShareReport, run_shared
from megtool.console import Progress, silent
from megtool.digests.embedded import find_embedded
from megtool.digests.statistics import TensorStatistics, measure_tensors
from megtool.report.sections import fold_names
from megtool.reshard.foreign_objects import find_foreign_objects
from megtool.run_state.common_state import read_source_layout
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.reading.parallel_scan import default_threads
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.reading.shared_scan import SharedScan

MAX_FILES = 200
"""Files whose bytes a report has."""

_OPTIMIZER = ("optimizer.", "optim.", "optimizer_states.")


def inspect(options: InspectOptions, *, progress: Progress = silent) -> InspectReport | ShareReport:
    """Report what the checkpoint `source` holds.

    Reads only headers and small files; with `stats` it reads all tensors, in bounded memory.
    `tensors` lists every tensor, as `stats` does. Tensors that fit no known model are no error.

    Raises:
        MegtoolError: there is no checkpoint, or it is broken; a `family` or `like` that is given
            cannot be used.
    """
    if not options.stats:
        return _inspect(options, progress, None)
    return run_shared(
        options, "inspect", [options.source], lambda scan: _inspect(options, progress, scan)
    )


def _inspect(options: InspectOptions, progress: Progress, scan: SharedScan | None) -> InspectReport:
    source = open_source(options.source, options, lenient=True, compare_copies=False)
    catalogue = source.catalogue
    threads = default_threads(options.threads, options.source)
    stacked = find_stacked_layers(catalogue.tensors)
    statistics = _measure(source, threads, progress, scan, stacked) if options.stats else {}
    by_layer = layer_statistics(statistics, stacked)
    lines: tuple[TensorLine, ...] = ()
    if options.tensors or options.stats:
        lines = tuple(
            _line(t, _num_shards(source, number), statistics.get(t.name))
            for number, t in enumerate(catalogue.tensors)
        )
    side, model = source.view, source.model
    family = model.family if model and source.is_canonical else None
    num_digests, num_files = _count_digests(source)
    return InspectReport(
        path=str(options.source),
        format=catalogue.format,
        family=family.name if family else None,
        reason=_reason(source) if family is None else None,
        iteration=_iteration(catalogue.metadata.get("iteration")),
        layout=read_source_layout(catalogue),
        num_files=len(set(catalogue.extents.file.tolist())),
        num_shards=len(catalogue.shards),
        num_replicas=len(catalogue.replicas),
        num_tensors=len(catalogue.tensors),
        parameters=_parameters(source),
        num_bytes=catalogue.num_bytes,
        file_bytes=sum(f.size for f in catalogue.files),
        dtypes=_dtypes(catalogue.tensors),
        states=tuple(side.states),
        padding=dict(side.padding),
        left_out=tuple(side.dropped),
        tree=tuple(fold_tensors(catalogue.tensors)),
        tensors=lines,
        objects=tuple(fold_names(catalogue.objects)),
        object_bytes=sum(o.extent[2] for o in catalogue.objects.values() if o.extent),
        foreign_objects=tuple(find_foreign_objects(catalogue)),
        attachments=tuple(sorted(catalogue.auxiliary_files)),
        digests=num_digests,
        digest_files=num_files,
        modules=module_bytes(source),
        ranks=list_rank_contents(source),
        largest_files=_largest_files(catalogue),
        layers=by_layer,
        outliers=find_outliers(by_layer),
        warnings=tuple(catalogue.warnings),
    )


def _count_digests(source: CheckpointSource) -> tuple[int | None, int]:
    """The numbers of tensors (None without any digests) and of files that have a digest."""
    sidecar, embedded = source.sidecar, find_embedded(source.catalogue, source.path)
    if embedded is not None:
        empty = sum(t.num_bytes == 0 for t in source.catalogue.tensors)
        return len(embedded.tensors) + empty, 1
    return (sidecar.num_tensors, len(sidecar.files)) if sidecar is not None else (None, 0)


def _line(t: GlobalTensor, num_shards: int, statistics: TensorStatistics | None) -> TensorLine:
    return TensorLine(
        name=t.name,
        shape=t.shape,
        dtype=t.packing or t.dtype.name,
        num_bytes=t.num_bytes,
        num_shards=num_shards,
        statistics=statistics,
    )


def _num_shards(source: CheckpointSource, number: int) -> int:
    rows = source.catalogue.shards.of(number)
    return int(rows.stop - rows.start)


def _iteration(value: Any) -> int | str | None:
    return value if isinstance(value, int | str) else None


def _reason(source: CheckpointSource) -> str:
    if source.reason is not None:
        return source.reason.message
    if source.model is not None:
        return "Megatron's args do not name it (--family does)"
    return "no config.json, and no args of Megatron's"


def _parameters(source: CheckpointSource) -> int:
    """Elements of the model's weights, each counted once."""
    canonical = source.view.canonical.items()
    if source.is_canonical:
        return sum(t.numel for name, t in canonical if ":" not in name)
    return sum(t.numel for name, t in canonical if not name.startswith(_OPTIMIZER))


def _largest_files(catalogue: Catalogue) -> tuple[tuple[str, int], ...]:
    """The names and bytes of the files with most of them."""
    files = sorted(catalogue.files, key=lambda f: (-f.size, f.path))[:MAX_FILES]
    return tuple((f.path or catalogue.root.name, f.size) for f in files)


def _dtypes(tensors: Sequence[GlobalTensor]) -> dict[str, int]:
    out: dict[str, int] = defaultdict(int)
    for t in tensors:
        out[t.packing or t.dtype.name] += t.num_bytes
    return dict(out)


def _measure(
    source: CheckpointSource,
    threads: int,
    progress: Progress,
    scan: SharedScan | None,
    stacked: Collection[str],
) -> dict[str, TensorStatistics]:
    catalogue = source.catalogue
    total = catalogue.num_bytes
    progress("statistics", 0, total)
    with CheckpointReader(catalogue, Files(), is_strict=False) as reader:
        statistics = measure_tensors(
            reader,
            [t.name for t in catalogue.tensors],
            threads=threads,
            by_row=stacked,
            progress=lambda n: progress("statistics", n, total),
            scan=scan.part("statistics") if scan else None,
        )
    catalogue.check_unchanged()
    return statistics
