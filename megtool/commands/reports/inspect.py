"""The report of `inspect`: tensors, files, ranks and statistics, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megtool.commands.inspection.layer_statistics import (
    LayerStatistics,
    StatisticsOutlier,
)
from megtool.commands.inspection.name_tree import NameFold, draw_tree
from megtool.commands.inspection.rank_contents import RankContents
from megtool.console import format_bytes, several
from megtool.convert.megatron.names import split_state
from megtool.digests.statistics import TensorStatistics
from megtool.report.sections import Report, Row, Section, Table, count, shown
from megtool.reshard.foreign_objects import ForeignObject


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
        return f"{self.path} ({self.format})"

    def sections(self) -> Iterator[Section]:
        yield Section(table=self._tensors())

    def rows(self) -> Iterator[Row]:
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
