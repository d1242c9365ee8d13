"""The report of `export`: what was written, and which modules kept their codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megtool.console import format_bytes, several
from megtool.plan.worker_status import WorkerStatus
from megtool.report.sections import Report, Row
from megtool.reshard.written_digests import describe_digests


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport(Report):
    """What was written, or would be.

    `to` is the form asked for, `engine` what it is for. Of quantized modules, `exact` keep their
    codes and scales (packed anew or not), and `requantized` were decoded and encoded again by other
    scales; `decoded` were made plain, `plain` had been it before. `files` are relative paths.
    `overflowed` counts, by the source's tensors, numbers too large for float16, infinite now.
    `algo` and `kv_algo` are what the result says of itself, "" and None where it is not quantized.
    `worker` is set in a run of several workers.
    """

    source: str
    destination: str = ""
    to: str
    engine: str = ""
    algo: str = ""
    kv_algo: str | None = None
    tensors: int = 0
    num_bytes: int = 0
    source_bytes: int
    exact: int = 0
    requantized: int = 0
    decoded: int = 0
    plain: int = 0
    files: tuple[str, ...] = ()
    overflowed: dict[str, int] = field(default_factory=dict)
    is_dry: bool = False
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    digested: int = 0
    digested_files: int = 0
    worker: WorkerStatus | None = None

    def title(self) -> str:
        return f"{self.source} -> {self.destination}"

    def rows(self) -> Iterator[Row]:
        if self.worker is None or self.worker.is_committed:
            yield (
                "would write" if self.is_dry else "written",
                f"{several(len(self.files), 'file')}, {several(self.tensors, 'tensor')}, "
                f"{format_bytes(self.num_bytes)} (of {format_bytes(self.source_bytes)})",
            )
        cache = f", KV cache {self.kv_algo}" if self.kv_algo else ""
        engine = f", for {self.engine}" if self.engine else ""
        yield "form", f"{self.to}: {self.algo or 'plain weights'}{cache}{engine}"
        counts = (
            (self.exact, "with codes and scales as they were"),
            (self.requantized, "brought to other scales"),
            (self.decoded, "made plain"),
        )
        for number, words in counts:
            if number:
                yield "modules", f"{several(number, 'quantized module')} {words}"
        if self.worker is not None:
            yield "worker", self.worker.describe()
            if not self.worker.is_committed and self.worker.num_bytes:
                yield "share", format_bytes(self.worker.num_bytes)
        if not self.is_dry and (self.worker is None or self.worker.state == "published"):
            text = describe_digests(self.digested, self.tensors, self.digested_files)
            yield "digests", text
            yield "time", f"{self.seconds:.1f} s"
            yield "memory", f"{format_bytes(self.peak_rss_bytes)} peak resident"
