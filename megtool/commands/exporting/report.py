"""Report of `export`: what was written, how exact it is, and what an engine will find in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megtool.commands.tree import count
from megtool.log import format_bytes

_MOST_NOTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was written, or would be.

    `to` is the form asked for, `engine` what it is for. Of quantised modules, `exact` keep their
    codes and scales (packed anew or not), and `requantised` were decoded and encoded again by other
    scales; `decoded` were made plain, `plain` had been it before. `files` are relative paths.
    `algo` and `kv_algo` are what the result says of itself, "" and None where it is not quantised.
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
    requantised: int = 0
    decoded: int = 0
    plain: int = 0
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    is_dry: bool = False
    seconds: float = 0.0
    peak_rss_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def __str__(self) -> str:
        verb = "would write" if self.is_dry else "wrote"
        lines = [
            f"{verb} {count(len(self.files), 'file')}, {count(self.tensors, 'tensor')}, "
            f"{format_bytes(self.num_bytes)} to {self.destination}",
        ]
        what = self.algo or "plain weights"
        cache = f", KV cache {self.kv_algo}" if self.kv_algo else ""
        lines.append(f"{self.to}: {what}{cache}{f', for {self.engine}' if self.engine else ''}")
        told = (
            (self.exact, "keep their codes and scales"),
            (self.requantised, "were brought to other scales"),
            (self.decoded, "were made plain"),
        )
        lines += [f"{count(n, 'quantised module')} {words}" for n, words in told if n]
        lines += [f"note: {n}" for n in self.notes[:_MOST_NOTES]]
        if len(self.notes) > _MOST_NOTES:
            lines.append(f"note: {len(self.notes) - _MOST_NOTES} more, with --json")
        if not self.is_dry:
            lines.append(
                f"{self.seconds:.1f} s, {format_bytes(self.peak_rss_bytes)} of memory at most"
            )
        return "\n".join(lines)
