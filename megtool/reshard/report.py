"""The report of a reshard: what was written and how, what was dropped and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megtool.checkpoint.formats import CUT_BY_RANKS
from megtool.checkpoint.plan import Dropped
from megtool.checkpoint.plan_summary import PlanSummary
from megtool.console import format_bytes
from megtool.errors import listed
from megtool.reshard.inventory import OBJECTS, Account
from megtool.reshard.megatron.amax_report import AmaxReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """What was done, or with `dry_run` what would be.

    `left_out` counts source tensors that were not asked for (--select, --exclude, --layers,
    --optimizer none, --optimizer-only). `shares` are the checkpoints averaged.
    `digested` tensors have a digest of the bytes written, `inherited` ones the source's own,
    `unverified` ones none. `peak_rss_bytes` is this process's largest resident set so far,
    libraries and mapped files included. `overflowed` counts, by the source's tensors, numbers too
    large for float16, which are infinite now. `amax` is what became of FP8's delayed scaling state.
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
    account: Account
    left_out: int
    shares: tuple[tuple[str, float], ...]
    dry_run: bool
    amax: AmaxReport | None = None
    seconds: float = 0.0
    kernel_bytes: int = 0
    resumed_units: int = 0
    repaired_units: int = 0
    digested: int = 0
    inherited: int = 0
    unverified: int = 0
    peak_buffer_bytes: int = 0
    peak_rss_bytes: int = 0
    overflowed: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = field(default_factory=tuple)

    @property
    def moved(self) -> dict[str, tuple[str, ...]]:
        """What the target has unchanged: the source's names of `tensors`, `objects` and `files`."""
        return self.account.moved

    @property
    def derived(self) -> dict[str, tuple[str, ...]]:
        """What is cast, decoded, averaged or written anew, by kind."""
        return self.account.derived

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """What the target has not got, of every kind, and why."""
        return self.account.all_dropped

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        names = [n for n in self.__dataclass_fields__ if n not in ("plan", "account", "amax")]
        out: dict[str, Any] = {n: getattr(self, n) for n in names}
        out["plan"] = self.plan.to_json()
        out["amax"] = self.amax.to_json() if self.amax else None
        return out | self.account.to_json()

    def lines(self) -> Iterator[str]:
        """The report as a person reads it."""
        etp = self.layout.get("tp") if self.layout.get("ep", 1) == 1 else None
        layout = " ".join(
            f"{k}={v}"
            for k, v in self.layout.items()
            if (v != 1 and not (k == "etp" and v == etp)) or k in ("tp", "pp")
        )
        yield f"{self.source} ({self.source_format}) -> {self.destination} ({self.target_format})"
        yield f"  {'family':<12}{self.family or 'unknown: tensors keep their names'}"
        for path, share in self.shares:
            yield f"  {'average':<12}{share:.6g} of {path}"
        if self.target_format in CUT_BY_RANKS:
            yield f"  {'layout':<12}{layout}"
        if self.dry_run:
            yield from (f"  {line}" for line in self.plan.lines())
        else:
            yield from self._done()
        if (counts := self.account.counts(OBJECTS)) is not None:
            yield f"  {'objects':<12}{counts}"
        if self.amax is not None:
            yield from (f"  {'amax':<12}{line}" for line in self.amax.lines())
        if self.left_out:
            yield f"  {'left out':<12}{self.left_out} tensors that were not asked for"
        reasons: dict[str, list[str]] = {}
        for drop in self.dropped:
            reasons.setdefault(drop.reason, []).append(drop.name)
        for reason, names in reasons.items():
            yield f"  {'dropped':<12}{listed(names, 1)}: {reason}"

    def _done(self) -> Iterator[str]:
        rate = format_bytes(self.num_bytes / self.seconds) if self.seconds else "-"
        yield (
            f"  {'written':<12}{self.tensors} tensors, {format_bytes(self.num_bytes)} "
            f"in {self.seconds:.2f} s ({rate}/s)"
        )
        moved = format_bytes(self.kernel_bytes)
        yield f"  {'kernel':<12}{moved} copied without entering the process"
        yield (
            f"  {'digests':<12}{self.digested} computed, {self.inherited} carried over, "
            f"{self.unverified} unverified"
        )
        if self.resumed_units:
            yield (
                f"  {'resumed':<12}{self.resumed_units} finished pieces verified, "
                f"{self.repaired_units} written again"
            )
        yield f"  {'memory':<12}{format_bytes(self.peak_rss_bytes)} peak resident"
