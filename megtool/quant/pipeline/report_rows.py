"""Decisions and statistics as rows of the quantize report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megtool.quant.calibration.statistics import BINS_AN_OCTAVE, OCTAVES, Statistics
from megtool.quant.pipeline.report import CoverageRow, FormatRow, InputRow
from megtool.quant.recipes.match import Decision

if TYPE_CHECKING:
    from megtool.quant.calibration.expert_coverage import Coverage


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
    """The format of the KV cache; empty where it is kept."""
    formats = dict.fromkeys(
        d.format.kv_algo for d in decisions if d.module.kind == "kv_cache" and d.format
    )
    return ", ".join(formats)


def coverage_rows(coverages: Iterable[Coverage]) -> tuple[CoverageRow, ...]:
    """One row a mixture."""
    return tuple(
        CoverageRow(mixture=c.mixture, tokens=c.tokens, enough=c.enough) for c in coverages
    )


def input_rows(statistics: Mapping[str, Statistics]) -> tuple[InputRow, ...]:
    """One row a point that saw tokens; quantiles are upper edges of bins."""
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


def quantile(statistics: Statistics, share: float) -> float:
    """The magnitude that `share` of the elements stay below, to a bin (3 %), and at most amax."""
    total = np.cumsum(statistics.histogram)
    if not total[-1]:
        return 0.0
    bin = int(np.searchsorted(total, share * total[-1]))
    if bin == 0:
        return 0.0
    octave, part = divmod(bin - 1, BINS_AN_OCTAVE)
    edge = 2.0 ** (OCTAVES[0] + octave) * (1 + (part + 1) / BINS_AN_OCTAVE)
    return min(edge, float(statistics.amax.max(initial=0.0)))


def histograms(statistics: Mapping[str, Statistics]) -> dict[str, tuple[int, ...]]:
    """Elements by power of two of their size, added up over the points of a role (`attn.qkv`)."""
    counts: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    for name, s in statistics.items():
        role = ".".join(p for p in name.split(".") if not p.isdecimal())
        role = role.removeprefix("layers.")
        bins = s.histogram[1:].reshape(-1, BINS_AN_OCTAVE).sum(1)
        bins[0] += s.histogram[0]
        counts[role] = counts[role] + bins if role in counts else bins
    return {role: tuple(int(n) for n in bins) for role, bins in counts.items()}


def _layer(name: str) -> int | None:
    parts: Sequence[str] = name.split(".")
    return int(parts[1]) if parts[0] == "layers" and parts[1].isdecimal() else None
