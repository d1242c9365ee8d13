"""Evaluates a quantized model against its unquantized source, on the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megtool.inference.compare import Comparison, compare
from megtool.inference.forward import Forward
from megtool.inference.windows import TokenDocument
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Metrics of a quantized model, over `num_tokens` predictions.

    Perplexities before and after; KL(before || after) in nats, its mean and maximum; `agreement`,
    the share of tokens for which both have the same most likely token. `comparison` has the rest.
    """

    num_tokens: int
    perplexity_before: float
    perplexity_after: float
    kl_mean: float
    kl_max: float
    agreement: float
    comparison: Comparison

    @property
    def perplexity_ratio(self) -> float:
        """How many times as large perplexity has become."""
        return self.perplexity_after / self.perplexity_before

    @classmethod
    def of(cls, comparison: Comparison) -> Quality:
        """From the comparison of the source, first, with the quantized model."""
        return cls(
            num_tokens=comparison.ours.num_tokens,
            perplexity_before=comparison.ours.perplexity,
            perplexity_after=comparison.reference.perplexity,
            kl_mean=comparison.kl_mean,
            kl_max=comparison.kl_max,
            agreement=comparison.agreement,
            comparison=comparison,
        )


def compare_quantized(
    source: Forward,
    quantized: Forward,
    simulation: FakeQuantModel | None,
    documents: Sequence[TokenDocument],
    *,
    window: int,
    stride: int,
    batch_size: int = 1,
    counted: Callable[[int], None] = lambda n: None,
) -> Quality:
    """Run both models over all documents, the quantized one like its engine.

    `quantized` is loaded from the quantized checkpoint, with a `simulation` of its inputs and
    caches (`weights=False`), or is another decoder of the source with a simulation of its weights
    too (None: inputs stay unrounded). Both may stream their layers. Every rank gets the same
    result.

    Raises:
        UsageError: nothing to predict, or vocabularies differ.
        CheckpointError: logits have NaN.
    """

    def run() -> Comparison:
        return compare(
            source,
            quantized,
            documents,
            window=window,
            stride=stride,
            batch_size=batch_size,
            counted=counted,
        )

    if simulation is None:
        return Quality.of(run())
    with simulation:
        return Quality.of(run())
