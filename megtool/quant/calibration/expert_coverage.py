"""Expert coverage: how many calibration tokens each expert received, and how gaps are filled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

from megtool.errors import CalibrationError
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.quant.statistics.site_statistics import ActivationStatistics

UnseenExpertPolicy = Literal["share", "weights", "none"]
POLICIES: tuple[UnseenExpertPolicy, ...] = get_args(UnseenExpertPolicy)
MIN_EXPERT_TOKENS = 16
"""An expert with at least this many tokens uses its own statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCoverage:
    """Tokens per expert of one MoE layer (`mixture` is `layers.3.mlp`)."""

    mixture: str
    layer: int
    tokens: tuple[int, ...]
    min_tokens: int = MIN_EXPERT_TOKENS

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the layer's tokens per expert; the sum is 1."""
        total = max(sum(self.tokens), 1)
        return tuple(n / total for n in self.tokens)

    @property
    def unseen(self) -> tuple[int, ...]:
        """Experts without tokens."""
        return tuple(e for e, n in enumerate(self.tokens) if not n)

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Experts with fewer than `min_tokens` tokens."""
        return tuple(e for e, n in enumerate(self.tokens) if n < self.min_tokens)


def measure_coverage(
    sites: Iterable[ActivationSite],
    statistics: Mapping[str, ActivationStatistics],
    *,
    min_tokens: int = MIN_EXPERT_TOKENS,
) -> list[ExpertCoverage]:
    """Measure the coverage of every MoE layer among `sites`, in their order.

    The count of an expert is the maximum over its sites.
    """
    tokens_of: dict[str, dict[int, int]] = defaultdict(dict)
    layers: dict[str, int] = {}
    for p in sites:
        if p.expert is None or p.layer is None:
            continue
        mixture = p.name.partition(".experts.")[0]
        layers[mixture] = p.layer
        tokens = statistics[p.name].num_tokens if p.name in statistics else 0
        tokens_of[mixture][p.expert] = max(tokens, tokens_of[mixture].get(p.expert, 0))
    return [
        ExpertCoverage(
            mixture=mixture,
            layer=layers[mixture],
            tokens=tuple(n for _, n in sorted(by_expert.items())),
            min_tokens=min_tokens,
        )
        for mixture, by_expert in tokens_of.items()
    ]


def fill_missing_statistics(
    sites: Iterable[ActivationSite],
    statistics: Mapping[str, ActivationStatistics],
    uncalibrated_experts: str = "share",
    *,
    min_tokens: int = MIN_EXPERT_TOKENS,
) -> tuple[dict[str, ActivationStatistics], list[str]]:
    """Replace the statistics of experts with too few tokens; returns them with notes.

    - `share`: such an expert gets the merged statistics of all experts of its layer.
    - `weights`: it gets none, so it is quantized by its weights alone.
    - `none`: it keeps what it has; without any tokens it gets none, as above.

    If no expert of a layer has tokens, all get none. Other sites are unchanged.

    Raises:
        CalibrationError: there is no such handling of experts.
    """
    if uncalibrated_experts not in POLICIES:
        raise CalibrationError(
            f"the policy {uncalibrated_experts!r} for experts without data is unknown",
            hint=f"known: {', '.join(POLICIES)}",
        )
    out = dict(statistics)
    sibling_groups: dict[tuple[str, str], list[ActivationSite]] = defaultdict(list)
    for p in sites:
        if p.expert is not None and p.name in statistics:
            before, _, suffix = p.name.partition(".experts.")
            sibling_groups[before, suffix.partition(".")[2]].append(p)
    notes: dict[str, None] = {}
    for (mixture, _), siblings in sibling_groups.items():
        uncovered = [p for p in siblings if statistics[p.name].num_tokens < min_tokens]
        if uncalibrated_experts == "none":
            uncovered = [p for p in uncovered if not statistics[p.name].num_tokens]
        if not uncovered:
            continue
        numbers = _format_experts([p.expert for p in uncovered if p.expert is not None])
        measured = [s for p in siblings if (s := statistics[p.name]).num_tokens]
        shared = (
            reduce(ActivationStatistics.merge, measured)
            if uncalibrated_experts == "share" and measured
            else None
        )
        for p in uncovered:
            if shared is None:
                del out[p.name]
            else:
                out[p.name] = shared
        action = "they are quantized by their weights alone"
        if shared is not None:
            action = f"they use the merged statistics of all {len(siblings)}"
        shortage = (
            "no token" if uncalibrated_experts == "none" else f"fewer than {min_tokens} tokens"
        )
        notes[f"{mixture}: {numbers} received {shortage}; {action}"] = None
    return out, list(notes)


def _format_experts(numbers: list[int]) -> str:
    """`expert 3`, or `experts 0-2, 7`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    words = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    return ("expert " if len(numbers) == 1 else "experts ") + ", ".join(words)
