"""The report of `amax derive`: what is known of a model's inputs, and what knew it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megtool.reports import columns, fold_names

_MOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """The amax of the inputs at one point (the larger of keys' and values' for a cache), and the
    modules of Megatron's that knew it."""

    point: str
    module: str
    amax: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeriveReport:
    """What `derive` found and wrote. `without` are the points of layers that trained without."""

    source: str
    destination: str
    format: str
    origin: str
    derived: tuple[Derived, ...]
    without: tuple[str, ...]
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The report as a person reads it."""
        yield f"{self.source} ({self.format}) -> {self.destination}"
        yield f"  from        {self.origin}"
        yield f"  derived     the amax of {len(self.derived):,} inputs, no data seen"
        if self.without:
            named = ", ".join(n for n, _ in fold_names(self.without)[:_MOST])
            yield f"  without     {len(self.without):,} that trained without FP8: {named}"
        groups: dict[str, list[Derived]] = {}
        for d in self.derived:
            key = "".join(c for c in d.point if not c.isdigit())
            groups.setdefault(key, []).append(d)
        yield ""
        rows = [["input of", "from", "smallest", "largest"]]
        for some in groups.values():
            rows.append(
                [
                    fold_names([d.point for d in some])[0][0],
                    fold_names([d.module for d in some])[0][0],
                    f"{min(d.amax for d in some):.4g}",
                    f"{max(d.amax for d in some):.4g}",
                ]
            )
        yield from columns(rows, left=2)
        yield ""
        if self.dry_run:
            yield "nothing is written (--dry-run)"
        else:
            yield f"megtool quantize {self.source} DST --recipe fp8 --calibration " + (
                self.destination
            )
