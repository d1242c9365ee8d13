"""The report of a reshard: what was written and how, what was dropped and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megtool.console import format_bytes
from megtool.errors import listed
from megtool.formats import RANK_SHARDED_FORMATS
from megtool.plan.copies import DroppedItem
from megtool.plan.flows import FileFlows
from megtool.plan.summary import PlanSummary
from megtool.report.sections import Report, Row, Section
from megtool.reshard.inventory import OBJECTS, Inventory
from megtool.reshard.written_digests import describe_digests

if TYPE_CHECKING:
    from megtool.megatron_state.extra_states.amax_report import AmaxReport
    from megtool.plan.worker_status import WorkerStatus
    from megtool.source.merge import AdapterMerge

_NESTED = ("plan", "inventory", "merges", "amax", "worker", "flows")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport(Report):
    """The result of a reshard, or with `dry_run` its plan.

    `left_out` counts source tensors that were not selected (--select, --exclude, --layers,
    --optimizer-format none, --optimizer-only). `shares` are the checkpoints averaged, `merges`
    are the adapters that were added to weights, `pruned` says which parts of a larger model stay,
    `replicated` the tensors that are whole in every rank's files because --replicate says so.
    `digested` tensors have a digest of the bytes written, `inherited` ones the source's own,
    `unverified` ones none; `digested_files` are the files that have one. `peak_rss_bytes` is the
    peak resident set of this process, with libraries and mapped files. `overflowed` counts, by the
    source's tensors, numbers that are too large for float16 and became infinite. `verified` tensors
    were read back and equal the source's, cast, averaged or merged; None without `verify`. `amax`
    reports FP8's delayed scaling state. `worker` is set in a run of several workers; only the one
    that published has counted what all have written. `flows` are the bytes from source files to
    target files, and `stages` the seconds of each part of the work.
    """

    source: str
    destination: str
    source_format: str
    target_format: str
    family: str | None
    layout: dict[str, int]
    tensors: int
    num_bytes: int
    plan: PlanSummary
    inventory: Inventory
    left_out: int
    shares: tuple[tuple[str, float], ...]
    dry_run: bool
    merges: tuple[AdapterMerge, ...] = ()
    pruned: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    amax: AmaxReport | None = None
    seconds: float = 0.0
    kernel_bytes: int = 0
    resumed_units: int = 0
    repaired_units: int = 0
    digested: int = 0
    inherited: int = 0
    unverified: int = 0
    digested_files: int = 0
    peak_buffer_bytes: int = 0
    peak_rss_bytes: int = 0
    verified: int | None = None
    overflowed: dict[str, int] = field(default_factory=dict)
    worker: WorkerStatus | None = None
    flows: FileFlows | None = None
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether this process has the result: of several workers, the one that published."""
        return self.worker is None or self.worker.state == "published"

    @property
    def moved(self) -> dict[str, tuple[str, ...]]:
        """What the target has unchanged: source names of `tensors`, `objects` and `files`."""
        return self.inventory.moved

    @property
    def derived(self) -> dict[str, tuple[str, ...]]:
        """What is cast, decoded, averaged, merged or rewritten, by kind."""
        return self.inventory.derived

    @property
    def dropped(self) -> tuple[DroppedItem, ...]:
        """What the target lacks, of every kind, and why."""
        return self.inventory.all_dropped

    def to_json(self) -> dict[str, Any]:
        names = [n for n in self.__dataclass_fields__ if n not in _NESTED]
        out: dict[str, Any] = {n: getattr(self, n) for n in names}
        out["plan"] = self.plan.to_json()
        out["merges"] = [merge.to_json() for merge in self.merges]
        out["amax"] = self.amax.to_json() if self.amax else None
        out["worker"] = self.worker.to_json() if self.worker else None
        out["flows"] = self.flows.to_json() if self.flows else None
        return self.add_remarks(out | self.inventory.to_json())

    def title(self) -> str:
        source = f"{self.source} ({self.source_format})"
        return f"{source} -> {self.destination} ({self.target_format})"

    def rows(self) -> Iterator[Row]:
        yield "family", self.family or "unknown: tensors keep their names"
        for path, share in self.shares:
            yield "average", f"{share:.6g} of {path}"
        yield from (("merged", merge.describe()) for merge in self.merges)
        yield from (("kept", text) for text in self.pruned)
        if self.target_format in RANK_SHARDED_FORMATS:
            yield "layout", self._format_layout()
        if not self.dry_run:
            yield from self._result_rows()
        if (counts := self.inventory.counts(OBJECTS)) is not None:
            yield "objects", str(counts)
        if self.amax is not None:
            yield from (("amax", text) for text in self.amax.describe())
        if self.replicated:
            yield "replicated", f"{listed(self.replicated)}: whole for every tensor-parallel rank"
        if self.left_out:
            yield "left out", f"{self.left_out} tensors that were not selected"
        reasons: dict[str, list[str]] = {}
        for drop in self.dropped:
            reasons.setdefault(drop.reason, []).append(drop.name)
        for reason, names in reasons.items():
            yield "dropped", f"{listed(names, 1)}: {reason}"

    def sections(self) -> Iterator[Section]:
        if self.dry_run:
            yield Section(rows=self.plan.rows())

    def _format_layout(self) -> str:
        etp = self.layout.get("tp") if self.layout.get("ep", 1) == 1 else None
        return " ".join(
            f"{k}={v}"
            for k, v in self.layout.items()
            if (v != 1 and not (k == "etp" and v == etp)) or k in ("tp", "pp")
        )

    def _result_rows(self) -> Iterator[Row]:
        if self.worker is not None:
            yield "worker", self.worker.describe()
            if self.worker.state != "published":
                if not self.worker.is_committed and self.worker.num_bytes:
                    yield "share", format_bytes(self.worker.num_bytes)
                return
        rate = format_bytes(self.num_bytes / self.seconds) if self.seconds else "-"
        yield (
            "written",
            f"{self.tensors} tensors, {format_bytes(self.num_bytes)} "
            f"in {self.seconds:.2f} s ({rate}/s)",
        )
        yield "kernel", f"{format_bytes(self.kernel_bytes)} copied without entering the process"
        total = self.digested + self.inherited + self.unverified
        text = describe_digests(self.digested, total, self.digested_files, inherited=self.inherited)
        yield "digests", text
        if self.verified is not None:
            yield "verified", f"{self.verified} tensors read back, equal to the source"
        if self.resumed_units:
            yield (
                "resumed",
                f"{self.resumed_units} finished units verified, "
                f"{self.repaired_units} written again",
            )
        yield "memory", f"{format_bytes(self.peak_rss_bytes)} peak resident"
