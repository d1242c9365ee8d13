"""Reports of `evaluate`: a model's score on a text, and how far another one is from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from megtool.console import format_bytes
from megtool.reports import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstPosition:
    """A token that the two models predict most differently, with the text before it."""

    document: int
    place: int
    kl: float
    before: str
    expected: str
    predicted: str
    reference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """How far SRC's predictions are from another model's; see `inference.compare.Comparison`.

    `kl` values are KL(SRC || other) in nats, per token.
    """

    path: str
    format: str
    family: str | None
    perplexity: float
    loss: float
    accuracy: float
    kl_mean: float
    kl_median: float
    kl_90: float
    kl_99: float
    kl_999: float
    kl_max: float
    agreement: float
    logits_mean_difference: float
    logits_max_difference: float
    worst: tuple[WorstPosition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateReport(Report):
    """How well a model predicts a text.

    `tokens` are the predictions that count, `loss` their mean negative log-probability in nats,
    `perplexity` its exponential, `accuracy` the share of them that the model held likeliest. A
    window of `window` tokens begins every `stride` tokens. `tasks` holds what lm-eval measured.
    """

    path: str
    format: str
    family: str | None
    data: str | None
    device: str
    dtype: str
    documents: int = 0
    tokens: int = 0
    loss: float = 0.0
    perplexity: float = 0.0
    accuracy: float = 0.0
    window: int = 0
    stride: int = 0
    load_seconds: float = 0.0
    seconds: float = 0.0
    against: Divergence | None = None
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_shown: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Predictions that count, per second of work."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        values = asdict(self) | {"tokens_per_second": self.tokens_per_second}
        del values["is_shown"]
        return values

    def lines(self) -> Iterator[str]:
        """The human-readable report."""
        if self.is_shown:
            return
        yield f"{self.path} ({self.format})" + (f" on {self.data}" if self.data else "")
        if self.data:
            texts = "1 text" if self.documents == 1 else f"{self.documents:,} texts"
            yield f"  tokens      {self.tokens:,} of {texts}"
            yield f"  windows     of {self.window:,} tokens, every {self.stride:,}"
            yield f"  perplexity  {self.perplexity:.4f}"
            yield f"  loss        {self.loss:.4f} nats per token"
            yield f"  accuracy    {self.accuracy:.2%} of tokens were the likeliest"
            speed = f"{self.tokens_per_second:.1f} tokens/s"
            yield f"  speed       {speed}, {self.dtype} on {self.device}"
        if self.against is not None:
            yield from _against(self.against)
        for task, values in self.tasks.items():
            yield f"  {task}"
            for name, value in values.items():
                shown = f"{value:.4f}" if isinstance(value, float) else str(value)
                yield f"    {name:<24}{shown}"


def _against(d: Divergence) -> Iterator[str]:
    yield f"against {d.path} ({d.format})"
    yield f"  perplexity  {d.perplexity:.4f}"
    yield f"  loss        {d.loss:.4f} nats per token"
    yield f"  accuracy    {d.accuracy:.2%}"
    yield f"  KL          {d.kl_mean:.3e} mean, {d.kl_max:.3e} at most"
    yield (
        f"  KL below    {d.kl_median:.3e} for 50 %, {d.kl_90:.3e} for 90 %, {d.kl_99:.3e} for "
        f"99 % of tokens"
    )
    yield f"  agreement   {d.agreement:.2%} of tokens have the same likeliest one"
    yield (
        f"  logits      differ by {d.logits_mean_difference:.3e} on average, "
        f"{d.logits_max_difference:.3e} at most"
    )
    if d.worst:
        yield "  worst       KL        token       this        other       after"
    for w in d.worst[:5]:
        yield (
            f"              {w.kl:<8.2g}  {_quoted(w.expected)}  {_quoted(w.predicted)}  "
            f"{_quoted(w.reference)}  ...{w.before[-32:]!r}"
        )


def _quoted(text: str) -> str:
    return f"{text[:9]!r:<10}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatePlan(Report):
    """What a run would do, with nothing loaded."""

    path: str
    format: str
    family: str | None
    data: str
    documents: int
    tokens: int
    window: int
    stride: int
    num_windows: int
    batch_size: int
    weight_bytes: int

    def lines(self) -> Iterator[str]:
        """The human-readable plan."""
        yield f"{self.path} ({self.format}) on {self.data}"
        yield f"  family      {self.family or 'not named'}"
        yield f"  tokens      {self.tokens:,} of {self.documents:,} texts"
        yield (
            f"  windows     {self.num_windows:,} of {self.window:,} tokens, every {self.stride:,}, "
            f"{self.batch_size} at once"
        )
        yield f"  weights     {format_bytes(self.weight_bytes)} as stored"
