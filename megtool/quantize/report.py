"""The report of `quantize`: what was written, its error against the source, and the findings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megtool.console import format_bytes
from megtool.plan.worker_status import WorkerStatus
from megtool.quant.explain import FormatLine, describe_target
from megtool.quant.recipes.match import Decision
from megtool.quant.statistics.site_statistics import BINS_PER_OCTAVE, OCTAVES, ActivationStatistics
from megtool.report.sections import Report, Row, Section, Table, count
from megtool.reshard.written_digests import describe_digests

if TYPE_CHECKING:
    from megtool.quant.calibration.expert_coverage import ExpertCoverage
    from megtool.quantize.verification.verify_folder import FolderVerification

_WORST = 5
_MOST_FINDINGS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRow(FormatLine):
    """All modules of one format, with the bytes that they had before."""

    source_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRow:
    """The inputs at one activation site: the amax, and the magnitudes below which half, 99 % and
    99.99 % of all elements are."""

    name: str
    layer: int | None
    num_tokens: int
    amax: float
    median: float
    percent_99: float
    percent_9999: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageRow:
    """The tokens that each expert of one MoE layer received; `enough` is the minimum for each."""

    mixture: str
    tokens: tuple[int, ...]
    enough: int

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Experts with too few tokens."""
        return tuple(e for e, n in enumerate(self.tokens) if n < self.enough)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFacts:
    """The calibration data. `histograms` count input elements by module role and power of two of
    their magnitude (the first is 2^-40 and includes smaller ones)."""

    data: str
    num_samples: int
    num_tokens: int
    seconds: float = 0.0
    inputs: tuple[InputRow, ...] = ()
    histograms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    coverage: tuple[CoverageRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeEvaluation:
    """Metrics of both models on one text. `kl_mean` is the KL divergence of the quantized model
    from the source, in nats per token; `agreement` is the share of tokens for which both have the
    same most likely token."""

    data: str
    tokens: int
    perplexity_before: float
    perplexity_after: float
    kl_mean: float
    kl_99: float
    kl_max: float
    agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """The least loss that a number of bits per weight allows."""

    bits: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSensitivity:
    """Modules that share a format: the one chosen, and the predicted loss with each of the formats
    alone, in nats per token."""

    name: str
    format: str
    losses: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoChoice:
    """The choice of formats by an automatic recipe: within `budget` bits per weight, `chosen` on
    the curve. `units` are the modules that share a format, the most sensitive first."""

    method: str
    budget: float
    chosen: ParetoPoint
    curve: tuple[ParetoPoint, ...] = ()
    units: tuple[UnitSensitivity, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport(Report):
    """The report of `quantize`.

    `source_bytes` and `num_bytes` are those of all weights, before and after (of the files, if
    there is a `proof`). `doubt` says why the target may not run the model. `seconds` are by stage.
    Of the `tensors` written, `digested` have a digest, and so have `digested_files`.
    `reproduction` has versions, seed, fingerprints and the command. `calibration_file` is the saved
    calibration. With several processes that run the model, the reports of all but the first count
    as shown; of workers that write together, each has one, and the `worker` in it.
    """

    source: str
    destination: str
    source_format: str = ""
    family: str | None = None
    recipe: str = ""
    method: str = "none"
    rotation: str = ""
    target: str | None = None
    doubt: str = ""
    formats: tuple[FormatRow, ...] = ()
    source_bytes: int = 0
    num_bytes: int = 0
    kv_format: str = ""
    calibration: CalibrationFacts | None = None
    calibration_file: str | None = None
    proof: FolderVerification | None = None
    evaluation: QuantizeEvaluation | None = None
    auto: AutoChoice | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    resumed_units: int = 0
    tensors: int = 0
    digested: int = 0
    digested_files: int = 0
    reproduction: Mapping[str, str] = field(default_factory=dict)
    worker: WorkerStatus | None = None

    @classmethod
    def elsewhere(cls, source: str, destination: str) -> QuantizeReport:
        """The report of a process whose result another process writes."""
        return cls(source=source, destination=destination, is_shown=True)

    @property
    def bits(self) -> float:
        """Bits per weight over all modules."""
        weights = sum(f.weights for f in self.formats)
        return 8 * sum(f.num_bytes for f in self.formats) / max(weights, 1)

    @property
    def exit_status(self) -> int:
        """0, or 7 if verification found errors."""
        return self.proof.exit_status if self.proof is not None else 0

    def to_json(self) -> dict[str, Any]:
        out = asdict(self) | {"bits": self.bits}
        if self.proof is not None:
            out["proof"] = self.proof.to_json()
        return self.add_remarks(out)

    def title(self) -> str:
        kind = f" ({self.source_format})" if self.source_format else ""
        return f"{self.source}{kind} -> {self.destination} by recipe {self.recipe}"

    def sections(self) -> Iterator[Section]:
        if self.formats:
            yield Section(table=self._formats())
        if self.proof is not None:
            yield from _proof_sections(self.proof)

    def rows(self) -> Iterator[Row]:
        yield "family", self.family or "unknown"
        yield "algorithm", self.method
        if self.rotation:
            yield "rotation", self.rotation
        if self.worker is not None:
            yield "worker", self.worker.describe()
        if self.target:
            yield "target", describe_target(self.target, self.doubt)
        if self.num_bytes:
            share = f" ({100 * self.num_bytes / self.source_bytes:.1f} %)"
            yield (
                "size",
                f"{format_bytes(self.source_bytes)} -> {format_bytes(self.num_bytes)}"
                f"{share if self.source_bytes else ''}, {self.bits:.2f} bits per weight",
            )
        if self.kv_format:
            yield "KV cache", self.kv_format
        if self.calibration is not None:
            yield from _calibrated(self.calibration)
        if self.calibration_file:
            yield "saved", f"the calibration to {self.calibration_file}"
        if self.auto is not None:
            yield (
                "chosen",
                f"{self.auto.chosen.bits:.2f} bits per weight within {self.auto.budget:g}, "
                f"by {self.auto.method}",
            )
        if self.proof is not None and self.proof.rows:
            yield "proof", _summary(self.proof)
        if (e := self.evaluation) is not None:
            change = 100 * (e.perplexity_after / e.perplexity_before - 1)
            yield (
                "perplexity",
                f"{e.perplexity_before:.4f} -> {e.perplexity_after:.4f} ({change:+.2f} %) on "
                f"{e.tokens:,} tokens of {e.data}",
            )
            yield "KL", f"{e.kl_mean:.3e} mean, {e.kl_99:.3e} for 99 % of tokens"
            yield "agreement", f"{e.agreement:.2%} of tokens have the same most likely token"
        if self.tensors:
            text = describe_digests(self.digested, self.tensors, self.digested_files)
            yield "digests", text
        if self.resumed_units:
            yield "resumed", f"{self.resumed_units} finished pieces verified"
        if self.seconds:
            stages = ", ".join(f"{name} {s:.1f}" for name, s in self.seconds.items())
            yield "seconds", f"{sum(self.seconds.values()):.1f} ({stages})"
        if self.peak_rss_bytes:
            yield "memory", f"{format_bytes(self.peak_rss_bytes)} peak resident"

    def _formats(self) -> Table:
        rows = []
        for f in self.formats:
            bits = f"{8 * f.num_bytes / max(f.weights, 1):.2f}"
            size, before = format_bytes(f.num_bytes), format_bytes(f.source_bytes)
            rows.append((f.format, str(f.modules), count(f.weights), bits, size, before))
        return Table(header=("format", "modules", "weights", "bits", "bytes", "before"), rows=rows)


def _calibrated(c: CalibrationFacts) -> Iterator[Row]:
    data = f"{c.num_tokens:,} tokens of {c.num_samples:,} samples" if c.num_samples else "no data"
    yield "calibrated", f"on {data}: {c.data}"
    if c.coverage:
        experts = sum(len(row.tokens) for row in c.coverage)
        short = sum(len(row.uncovered) for row in c.coverage)
        least = min(min(row.tokens, default=0) for row in c.coverage)
        text = f"{experts - short:,} of {experts:,} experts received enough tokens"
        yield "experts", text + (f", the fewest {least:,}" if short else "")


def _summary(p: FolderVerification) -> str:
    finite = sorted(r.sqnr_db for r in p.rows)
    middle = finite[len(finite) // 2]
    unquantized = f", {p.num_unquantized} unquantized are equal" if p.num_unquantized else ""
    norms = f", {p.num_norms} norms have smoothing scales" if p.num_norms else ""
    return (
        f"{len(p.rows)} weights compared: SQNR at least {decibels(finite[0])}, "
        f"median {decibels(middle)}{unquantized}{norms}"
    )


def _proof_sections(p: FolderVerification) -> Iterator[Section]:
    if p.rows:
        rows = []
        for r in p.worst(_WORST):
            clipped = "-" if r.num_clipped is None else f"{r.num_clipped:,}"
            error, most = f"{r.relative_error:.3%}", f"{r.max_error:.3g}"
            rows.append(
                (r.name, r.label, decibels(r.sqnr_db), f"{r.cosine:.6f}", error, most, clipped)
            )
        header = ("worst", "format", "SQNR", "cosine", "error", "max", "clipped")
        yield Section(table=Table(header=header, rows=rows, left=2))
    findings: list[Row] = [
        (str(f.severity), f"{f.id}: {f.module}: {f.message}; {f.effect}")
        for f in p.findings[:_MOST_FINDINGS]
    ]
    if len(p.findings) > _MOST_FINDINGS:
        errors = p.num_errors
        warnings = len(p.findings) - errors
        findings.append(
            ("in all", f"{errors:,} errors and {warnings:,} warnings (--json lists them)")
        )
    if findings:
        yield Section(rows=findings)


def decibels(value: float) -> str:
    """A value like `31.4 dB`, or `exact` without noise."""
    if math.isinf(value):
        return "exact" if value > 0 else "nothing left"
    return f"{value:.1f} dB"


def format_rows(decisions: Iterable[Decision]) -> tuple[FormatRow, ...]:
    """Weights by format, in order of first appearance; KV caches are left out."""
    groups: dict[str, list[Decision]] = defaultdict(list)
    for d in decisions:
        if d.module.kind != "kv_cache":
            groups[d.label].append(d)
    return tuple(
        FormatRow(
            format=label,
            modules=len(some),
            weights=sum(d.module.numel for d in some),
            num_bytes=sum(d.num_bytes for d in some),
            source_bytes=sum(d.module.num_bytes for d in some),
        )
        for label, some in groups.items()
    )


def kv_format(decisions: Iterable[Decision]) -> str:
    """The format of the KV cache; empty if it is not quantized."""
    formats = dict.fromkeys(
        d.format.kv_algo for d in decisions if d.module.kind == "kv_cache" and d.format
    )
    return ", ".join(formats)


def coverage_rows(coverages: Iterable[ExpertCoverage]) -> tuple[CoverageRow, ...]:
    """One row per MoE layer."""
    return tuple(
        CoverageRow(mixture=c.mixture, tokens=c.tokens, enough=c.min_tokens) for c in coverages
    )


def input_rows(statistics: Mapping[str, ActivationStatistics]) -> tuple[InputRow, ...]:
    """One row per activation site with tokens; quantiles are upper edges of bins."""
    return tuple(
        InputRow(
            name=name,
            layer=_layer(name),
            num_tokens=s.num_tokens,
            amax=float(s.amax.max(initial=0.0)),
            median=quantile(s, 0.5),
            percent_99=quantile(s, 0.99),
            percent_9999=quantile(s, 0.9999),
        )
        for name, s in statistics.items()
        if s.num_tokens
    )


def quantile(statistics: ActivationStatistics, share: float) -> float:
    """The magnitude below which a share of the elements is, to a bin (3 %), at most the amax."""
    total = np.cumsum(statistics.histogram)
    if not total[-1]:
        return 0.0
    bin = int(np.searchsorted(total, share * total[-1]))
    if bin == 0:
        return 0.0
    octave, part = divmod(bin - 1, BINS_PER_OCTAVE)
    edge = 2.0 ** (OCTAVES[0] + octave) * (1 + (part + 1) / BINS_PER_OCTAVE)
    return min(edge, float(statistics.amax.max(initial=0.0)))


def histograms(statistics: Mapping[str, ActivationStatistics]) -> dict[str, tuple[int, ...]]:
    """Elements by power of two of their magnitude, summed over the sites of a role (`attn.qkv`)."""
    counts: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    for name, s in statistics.items():
        role = ".".join(p for p in name.split(".") if not p.isdecimal())
        role = role.removeprefix("layers.")
        bins = s.histogram[1:].reshape(-1, BINS_PER_OCTAVE).sum(1)
        bins[0] += s.histogram[0]
        counts[role] = counts[role] + bins if role in counts else bins
    return {role: tuple(int(n) for n in bins) for role, bins in counts.items()}


def _layer(name: str) -> int | None:
    parts: Sequence[str] = name.split(".")
    return int(parts[1]) if parts[0] == "layers" and parts[1].isdecimal() else None
