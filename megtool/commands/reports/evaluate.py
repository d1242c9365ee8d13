"""Reports of `evaluate`: a model's score on a text, and how far another one is from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megtool.console import format_bytes, several
from megtool.report.sections import Report, Row, Section, Table


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
class _ModelOnData(Report):
    """A report on a model (its path, format and family) and the data that it is evaluated on."""

    path: str
    format: str
    family: str | None
    data: str | None

    def title(self) -> str:
        return f"{self.path} ({self.format})" + (f" on {self.data}" if self.data else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateReport(_ModelOnData):
    """How well a model predicts a text.

    `tokens` are the predictions that count, `loss` their mean negative log-probability in nats,
    `perplexity` its exponential, `accuracy` the share of them that the model held likeliest. A
    window of `window` tokens begins every `stride` tokens. `tasks` holds what lm-eval measured.
    `quantization` is what is rounded as an engine does; empty if that is nothing. `layer_scores`
    are, by layer, the means of 1 - cos between the states before and behind it.
    """

    device: str
    dtype: str
    quantization: str = ""
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
    layer_scores: tuple[float, ...] = ()
    pruning_scores: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Predictions that count, per second of work."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return self.add_remarks(asdict(self) | {"tokens_per_second": self.tokens_per_second})

    def rows(self) -> Iterator[Row]:
        if self.quantization:
            yield "quantized", self.quantization
        if self.data:
            yield "tokens", f"{self.tokens:,} of {several(self.documents, 'text')}"
            yield "windows", f"of {self.window:,} tokens, every {self.stride:,}"
            yield "perplexity", f"{self.perplexity:.4f}"
            yield "loss", f"{self.loss:.4f} nats per token"
            yield "accuracy", f"{self.accuracy:.2%} of tokens were the likeliest"
            speed = f"{self.tokens_per_second:.1f} tokens/s"
            yield "speed", f"{speed}, {self.dtype} on {self.device}"
        if self.pruning_scores is not None:
            yield "scores", self.pruning_scores

    def sections(self) -> Iterator[Section]:
        if self.against is not None:
            d = self.against
            yield Section(title=f"against {d.path} ({d.format})", rows=[*_divergence_rows(d)])
            if d.worst:
                yield Section(table=_worst_table(d.worst[:5]))
        if self.layer_scores:
            yield Section(table=_layer_table(self.layer_scores))
        for task, values in self.tasks.items():
            rows = [
                (name, f"{value:.4f}" if isinstance(value, float) else str(value))
                for name, value in values.items()
            ]
            yield Section(title=task, rows=rows)


_LABELS = {
    "classes": "labeled texts",
    "numbers": "texts with a number",
    "preferences": "pairs of answers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelReport(_ModelOnData):
    """How well a model scores labels.

    `labeled` of the `texts` (or pairs) are compared with their labels. `loss` is in nats, for
    numbers the mean squared error. `accuracy` is the share of texts whose label has the highest
    score, or of pairs whose chosen answer has the higher one. `classes` are, by label, the texts
    that have it (`texts`), those of them that get it (`right`), and all that do (`predicted`).
    """

    device: str
    dtype: str
    kind: str
    texts: int
    labeled: int
    tokens: int
    loss: float | None
    accuracy: float | None
    mean_error: float | None
    classes: dict[str, dict[str, int]]
    predictions: str | None
    load_seconds: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return self.add_remarks(asdict(self))

    def rows(self) -> Iterator[Row]:
        yield _LABELS[self.kind], f"{self.labeled:,} of {self.texts:,}"
        if self.loss is not None:
            is_number = self.kind == "numbers"
            yield "loss", f"{self.loss:.4f}" + (" (squared error)" if is_number else " nats")
        if self.accuracy is not None:
            yield "accuracy", f"{self.accuracy:.2%}"
        if self.mean_error is not None:
            yield "mean error", f"{self.mean_error:.4f}"
        speed = self.texts / self.seconds if self.seconds else 0.0
        yield "speed", f"{speed:.1f} texts/s, {self.dtype} on {self.device}"
        if self.predictions is not None:
            yield "predictions", self.predictions

    def sections(self) -> Iterator[Section]:
        if self.classes:
            rows = [
                (name, f"{c['texts']:,}", f"{c['right']:,}", f"{c['predicted']:,}")
                for name, c in self.classes.items()
            ]
            yield Section(table=Table(header=("label", "texts", "right", "predicted"), rows=rows))


def _divergence_rows(d: Divergence) -> Iterator[Row]:
    yield "perplexity", f"{d.perplexity:.4f}"
    yield "loss", f"{d.loss:.4f} nats per token"
    yield "accuracy", f"{d.accuracy:.2%}"
    yield "KL", f"{d.kl_mean:.3e} mean, {d.kl_max:.3e} at most"
    yield (
        "KL below",
        f"{d.kl_median:.3e} for 50 %, {d.kl_90:.3e} for 90 %, {d.kl_99:.3e} for 99 % of tokens",
    )
    yield "agreement", f"{d.agreement:.2%} of tokens have the same likeliest one"
    yield (
        "logits",
        f"differ by {d.logits_mean_difference:.3e} on average, "
        f"{d.logits_max_difference:.3e} at most",
    )


def _layer_table(scores: Sequence[float]) -> Table:
    """Layers from the one that changes states least on."""
    order = sorted(range(len(scores)), key=lambda number: scores[number])
    rows = [(str(number), f"{scores[number]:.4f}") for number in order]
    return Table(header=("layer", "1 - cos"), rows=rows)


def _worst_table(worst: Sequence[WorstPosition]) -> Table:
    rows = [
        (
            f"{w.kl:.2g}",
            repr(w.expected[:9]),
            repr(w.predicted[:9]),
            repr(w.reference[:9]),
            f"...{w.before[-32:]!r}",
        )
        for w in worst
    ]
    return Table(header=("worst KL", "token", "this", "other", "after"), rows=rows, left=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatePlan(_ModelOnData):
    """What a run would do, with nothing loaded."""

    documents: int
    tokens: int
    window: int
    stride: int
    num_windows: int
    batch_size: int
    weight_bytes: int

    def rows(self) -> Iterator[Row]:
        yield "family", f"{self.family or 'not named'}"
        yield "tokens", f"{self.tokens:,} of {self.documents:,} texts"
        yield (
            "windows",
            f"{self.num_windows:,} of {self.window:,} tokens, every {self.stride:,}, "
            f"{self.batch_size} at once",
        )
        yield "weights", f"{format_bytes(self.weight_bytes)} as stored"
