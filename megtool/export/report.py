"""The report of `export`: what was written, and which modules kept their codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from megtool.console import format_bytes, several

_MOST_NOTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written, or would be.

    `to` is the form asked for, `engine` what it is for. Of quantized modules, `exact` keep their
    codes and scales (packed anew or not), and `requantized` were decoded and encoded again by other
    scales; `decoded` were made plain, `plain` had been it before. `files` are relative paths.
    `overflowed` counts, by the source's tensors, numbers too large for float16, infinite now.
    `algo` and `kv_algo` are what the result says of itself, "" and None where it is not quantized.
    """

    source: str
    destination: str
    to: str
    engine: str = ""
    algo: str = ""
    kv_algo: str | None = None
    tensors: int
    num_bytes: int
    source_bytes: int
    exact: int = 0
    requantized: int = 0
    decoded: int = 0
    plain: int = 0
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    overflowed: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    is_dry: bool = False
    seconds: float = 0.0
    peak_rss_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The human-readable report."""
        verb = "would write" if self.is_dry else "wrote"
        yield (
            f"{verb} {self.destination}: {several(len(self.files), 'file')}, "
            f"{several(self.tensors, 'tensor')}, {format_bytes(self.num_bytes)} "
            f"(of {format_bytes(self.source_bytes)})"
        )
        cache = f", KV cache {self.kv_algo}" if self.kv_algo else ""
        engine = f", for {self.engine}" if self.engine else ""
        yield f"{self.to}: {self.algo or 'plain weights'}{cache}{engine}"
        counts = (
            (self.exact, "with codes and scales as they were"),
            (self.requantized, "brought to other scales"),
            (self.decoded, "made plain"),
        )
        for number, words in counts:
            if number:
                yield f"{several(number, 'quantized module')} {words}"
        for note in self.notes[:_MOST_NOTES]:
            yield f"note: {note}"
        if len(self.notes) > _MOST_NOTES:
            yield f"note: {len(self.notes) - _MOST_NOTES} more, with --json"
        if not self.is_dry:
            memory = format_bytes(self.peak_rss_bytes)
            yield f"{self.seconds:.1f} s, {memory} resident at most"
