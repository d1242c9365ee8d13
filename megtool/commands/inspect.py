"""Report what a checkpoint holds, from its headers alone, and statistics of its numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megtool.commands.inspection.layer_statistics import (
    LayerStatistics,
    StatisticsOutlier,
    find_outliers,
    find_stacked_layers,
    layer_statistics,
    module_bytes,
)
from megtool.commands.inspection.name_tree import NameFold, draw_tree, fold_tensors
from megtool.commands.inspection.rank_contents import RankContents, list_rank_contents
from megtool.commands.options.checkpoints import InspectOptions
from megtool.commands.worker_scan import ShareReport, run_shared
from megtool.console import Progress, format_bytes, several, silent
from megtool.convert.megatron.names import split_state
from megtool.digests.embedded import find_embedded
from megtool.digests.statistics import TensorStatistics, measure_tensors
from megtool.report.sections import Report, Row, Section, Table, count, fold_names, shown
from megtool.reshard.foreign_objects import ForeignObject, find_foreign_objects
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLine:
    """One stored tensor; `statistics` only where they were asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    num_shards: int
    statistics: TensorStatistics | None = None

    def to_json(self) -> dict[str, Any]:
        """The line as plain data."""
        out = {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "bytes": self.num_bytes,
            "shards": self.num_shards,
        }
        return out | (self.statistics.to_json() if self.statistics else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport(Report):
    """What a checkpoint holds.

    `parameters` counts each weight of the model once: no padding, no copy of a tied embedding, no
    optimizer state. `num_bytes` are those of all tensors, decoded; `file_bytes` those on disk.
    `dtypes` says how many bytes there are of each type. `modules` are the bytes of the model's
    modules by dotted path, `layers` the statistics of a role's tensors in a layer, and `outliers`
    are tensors whose statistics are far from those of the same role in other layers. `ranks` is
    what model-parallel ranks hold, where that is known, `largest_files` the bytes of files.
    `reason` says why no family is known, `left_out` names tensors that are no part of the model,
    with the reason. `foreign_objects` are objects that would run code if they were loaded.
    `digests` counts tensors that have one, None where none has; `digest_files` counts files.
    `tensors` is empty unless asked for.
    """

    path: str
    format: str
    family: str | None
    reason: str | None
    iteration: int | str | None
    layout: Mapping[str, int]
    num_files: int
    num_shards: int
    num_replicas: int
    num_tensors: int
    parameters: int
    num_bytes: int
    file_bytes: int
    dtypes: Mapping[str, int]
    states: tuple[str, ...]
    padding: Mapping[str, int]
    left_out: tuple[tuple[str, str], ...]
    tree: tuple[NameFold, ...]
    tensors: tuple[TensorLine, ...]
    objects: tuple[tuple[str, int], ...]
    object_bytes: int
    foreign_objects: tuple[ForeignObject, ...]
    attachments: tuple[str, ...]
    digests: int | None
    digest_files: int = 0
    modules: Mapping[str, int] = field(default_factory=dict)
    ranks: tuple[RankContents, ...] = ()
    largest_files: tuple[tuple[str, int], ...] = ()
    layers: tuple[LayerStatistics, ...] = ()
    outliers: tuple[StatisticsOutlier, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        out: dict[str, Any] = {n: getattr(self, n) for n in self.__dataclass_fields__}
        out |= {n: dict(getattr(self, n)) for n in ("layout", "dtypes", "padding")}
        out["tree"] = [f.to_json() for f in self.tree]
        out["tensors"] = [t.to_json() for t in self.tensors]
        out["left_out"] = [{"name": name, "reason": reason} for name, reason in self.left_out]
        out["objects"] = [{"name": name, "count": n} for name, n in self.objects]
        out["foreign_objects"] = [f.to_json() for f in self.foreign_objects]
        out["modules"] = dict(self.modules)
        for name in ("ranks", "layers", "outliers"):
            out[name] = [item.to_json() for item in getattr(self, name)]
        return self.add_remarks(out)

    def title(self) -> str:
        """The checkpoint."""
        return f"{self.path} ({self.format})"

    def sections(self) -> Iterator[Section]:
        """Tensors: a tree of their names, or all of them."""
        yield Section(table=self._tensors())

    def rows(self) -> Iterator[Row]:
        """What the checkpoint holds."""
        unknown = "unknown" + (f": {self.reason}" if self.reason else "")
        yield "family", self.family or unknown
        if self.iteration is not None:
            yield "iteration", str(self.iteration)
        same = {"etp"} if self.layout.get("etp") == self.layout.get("tp", 1) else set()
        cut = " ".join(f"{k}={n}" for k, n in self.layout.items() if n != 1 and k not in same)
        copies = f", {self.num_replicas} of them twice" if self.num_replicas else ""
        yield (
            "layout",
            f"{cut}{', ' if cut else ''}{several(self.num_files, 'file')}, "
            f"{several(self.num_shards, 'shard')}{copies}",
        )
        yield "tensors", f"{self.num_tensors}, {count(self.parameters)} parameters"
        kinds = sorted(self.dtypes.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{k} {format_bytes(n)}" if len(kinds) > 1 else k for k, n in kinds)
        packed = any(":" in kind for kind, _ in kinds)
        disk = f"; decoded, {format_bytes(self.file_bytes)} on disk" if packed else ""
        yield "bytes", f"{format_bytes(self.num_bytes)}{' of ' if kinds else ''}{shares}{disk}"
        if self.states:
            yield "optimizer", ", ".join(self.states)
        if self.padding:
            yield "padding", _padding(self.padding)
        for name, reason in self.left_out[:4]:
            yield "left out", f"{name}: {reason}"
        if len(self.left_out) > 4:
            yield "left out", f"and {len(self.left_out) - 4} more (--json lists them)"
        if self.objects:
            yield (
                "objects",
                f"{sum(n for _, n in self.objects)}, {format_bytes(self.object_bytes)}",
            )
        for name, n in self.objects[:8]:
            yield "", f"{name}{f' ({n})' if n > 1 else ''}"
        if len(self.objects) > 8:
            yield "", f"and {len(self.objects) - 8} more kinds (--json lists them)"
        for foreign in self.foreign_objects[:8]:
            yield "foreign", f"{foreign.name} {foreign.text}"
        if len(self.foreign_objects) > 8:
            yield "foreign", f"and {len(self.foreign_objects) - 8} more (--json lists them)"
        if self.attachments:
            more = f", and {len(self.attachments) - 8} more" if len(self.attachments) > 8 else ""
            yield "files", ", ".join(self.attachments[:8]) + more
        for outlier in self.outliers[:8]:
            yield "outlier", f"{outlier.name}: {outlier.text}"
        if len(self.outliers) > 8:
            yield "outlier", f"and {len(self.outliers) - 8} more (--json lists them)"
        missing = "none: a flipped bit would go unnoticed" if self.digests is None else None
        counts = f"of {self.digests} tensors and {several(self.digest_files, 'file')}"
        yield "digests", missing or f"{counts} (`megtool verify` compares them)"

    def _tensors(self) -> Table:
        if not self.tensors:
            return draw_tree(self.tree)
        header = ["tensor", "shape", "dtype", "bytes", "shards"]
        if self.tensors[0].statistics:
            header += ["min", "max", "mean", "std", "zeros", "NaN", "Inf"]
        return Table(header=header, rows=[[*_cells(t)] for t in self.tensors], left=3)


def _cells(t: TensorLine) -> Iterator[str]:
    yield from (t.name, shown(t.shape), t.dtype, format_bytes(t.num_bytes), str(t.num_shards))
    if s := t.statistics:
        for value in (s.min, s.max, s.mean, s.std):
            yield (
                "-" if value is None else f"{value:.4g}" if isinstance(value, float) else f"{value}"
            )
        yield from (str(n) for n in (s.zeros, s.nan, s.inf))


def _padding(rows: Mapping[str, int]) -> str:
    """Padding rows of weights; of their optimizer state where no weight has them."""
    by_weight: dict[str, set[int]] = {}
    weights = {name for name in rows if not split_state(name)[0]}
    with_state = False
    for name, n in rows.items():
        state, _, key = split_state(name)
        with_state |= bool(state)
        by_weight.setdefault(key, set()).add(n)
    shown_rows = [
        f"{'/'.join(map(str, sorted(numbers)))} rows of {name}"
        for name, numbers in by_weight.items()
    ]
    also = " and their optimizer state" if weights else " (optimizer state)"
    return ", ".join(shown_rows) + (also if with_state else "")


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
    source = open_source(options.source, options, lenient=True)
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
