"""Coverage: how many tokens each expert saw, and what becomes of those that saw few."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

from megtool.errors import CalibrationError
from megtool.quant.calibration.activation_sites import ActivationSite
from megtool.quant.calibration.statistics import ActivationStatistics

UnseenExpertPolicy = Literal["share", "weights", "none"]
POLICIES: tuple[UnseenExpertPolicy, ...] = get_args(UnseenExpertPolicy)
MIN_EXPERT_TOKENS = 16
"""Tokens from which on an expert's own statistics are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCoverage:
    """The experts of one layer (`mixture` is `layers.3.mlp`) and the tokens that each saw."""

    mixture: str
    layer: int
    tokens: tuple[int, ...]
    min_tokens: int = MIN_EXPERT_TOKENS

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the mixture's tokens that went to each expert; all of them add up to 1."""
        total = max(sum(self.tokens), 1)
        return tuple(n / total for n in self.tokens)

    @property
    def unseen(self) -> tuple[int, ...]:
        """Experts without a token."""
        return tuple(e for e, n in enumerate(self.tokens) if not n)

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Experts with fewer tokens than are enough, or none."""
        return tuple(e for e, n in enumerate(self.tokens) if n < self.min_tokens)


def measure_coverage(
    sites: Iterable[ActivationSite],
    statistics: Mapping[str, ActivationStatistics],
    *,
    min_tokens: int = MIN_EXPERT_TOKENS,
) -> list[ExpertCoverage]:
    """The coverage of every mixture with points among these, in their order.

    An expert's number is the most that any of its points saw.
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
    policy: str = "share",
    *,
    min_tokens: int = MIN_EXPERT_TOKENS,
) -> tuple[dict[str, ActivationStatistics], list[str]]:
    """Statistics with which no expert is left with too few tokens, and notes on what was done.

    - `share`: such an expert gets what all experts of its layer saw at the same place, together.
    - `weights`: it gets none, so that its weights alone decide.
    - `none`: it keeps the few it has; one without any gets none, as above.

    So do all where none saw a token. Other points stay as they are.

    Raises:
        CalibrationError: no policy is called so.
    """
    if policy not in POLICIES:
        raise CalibrationError(
            f"no policy for experts without data is called {policy!r}",
            hint=f"known: {', '.join(POLICIES)}",
        )
    out = dict(statistics)
    sibling_groups: dict[tuple[str, str], list[ActivationSite]] = defaultdict(list)
    for p in sites:
        if p.expert is not None and p.name in statistics:
            before, _, behind = p.name.partition(".experts.")
            sibling_groups[before, behind.partition(".")[2]].append(p)
    notes: dict[str, None] = {}
    for (mixture, _), siblings in sibling_groups.items():
        uncovered = [p for p in siblings if statistics[p.name].num_tokens < min_tokens]
        if policy == "none":
            uncovered = [p for p in uncovered if not statistics[p.name].num_tokens]
        if not uncovered:
            continue
        numbers = _format_experts([p.expert for p in uncovered if p.expert is not None])
        measured = [s for p in siblings if (s := statistics[p.name]).num_tokens]
        shared = (
            reduce(ActivationStatistics.merge, measured) if policy == "share" and measured else None
        )
        for p in uncovered:
            if shared is None:
                del out[p.name]
            else:
                out[p.name] = shared
        action = "their weights alone decide"
        if shared is not None:
            action = f"they share what all {len(siblings)} saw"
        shortage = "no token" if policy == "none" else f"fewer than {min_tokens} tokens"
        notes[f"{mixture}: {numbers} saw {shortage}; {action}"] = None
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
