"""Divergence between the predictions of two models, token by token, over texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megtool.errors import CheckpointError, UsageError
from megtool.inference.evaluation.perplexity import (
    Score,
    check_documents,
    counted_logits,
    hidden_of,
    token_scores,
)
from megtool.inference.forward import Forward
from megtool.inference.windows import TokenDocument, WindowRows, batches

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_NUM_WORST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A predicted token where the two models differ: its document, its place there, and by how
    much. `expected_id` is the token of the text; `our_id` and `reference_id` are each model's
    likeliest tokens.
    """

    document: int
    place: int
    kl: float
    expected_id: int
    our_id: int
    reference_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two models on the same predictions.

    KL(ours || theirs) is in nats: its mean over tokens, its largest value, and `kl_percentiles` of
    tokens that are below (50, 90, 99, 99.9). `agreement` is the share of tokens whose likeliest
    token is the same. Logits are compared after each row's mean is taken off, because adding a
    number to a row changes no probability: mean and largest absolute difference. `worst` are the
    positions of the largest KL.
    """

    ours: Score
    reference: Score
    kl_mean: float
    kl_max: float
    kl_percentiles: tuple[float, ...]
    agreement: float
    logits_mean_difference: float
    logits_max_difference: float
    worst: tuple[Position, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The same of some tokens, one number a token: KL in nats, agreement, logits' difference."""

    kl_T: Tensor
    ours_T: Tensor
    theirs_T: Tensor
    mean_T: Tensor
    max_T: Tensor


def differences(ours_TV: Tensor, theirs_TV: Tensor) -> Differences:
    """KL(ours || theirs), the likeliest tokens, and the absolute difference of centered logits.

    In fp32, KL's sum in fp64: it is a small difference of large numbers where models are close.
    """
    a_TV, b_TV = ours_TV.float(), theirs_TV.float()
    log_p_TV, log_q_TV = a_TV.log_softmax(-1), b_TV.log_softmax(-1)
    gap_TV = torch.where(log_p_TV == -math.inf, 0.0, log_p_TV - log_q_TV)
    kl_T = (log_p_TV.exp() * gap_TV).sum(-1, dtype=torch.float64).clamp_min(0)
    centred_TV = (a_TV - b_TV) - (a_TV - b_TV).mean(-1, keepdim=True)
    return Differences(
        kl_T=kl_T,
        ours_T=a_TV.argmax(-1),
        theirs_T=b_TV.argmax(-1),
        mean_T=centred_TV.abs().mean(-1),
        max_T=centred_TV.abs().amax(-1),
    )


@torch.inference_mode()
def compare(
    model: Forward,
    reference: Forward,
    documents: Sequence[TokenDocument],
    *,
    window: int,
    stride: int,
    batch_size: int = 1,
    graphed: bool = False,
    counted: Callable[[int], None] = lambda n: None,
) -> Comparison:
    """Run both models over all documents, batch by batch, and compare their predictions.

    Both have to be split alike over the ranks; every rank gets the same result. One number a token
    is kept, logits only for some tokens at a time.

    Raises:
        UsageError: nothing to predict.
        CheckpointError: the logits of one contain a NaN, or vocabularies differ in size.
    """
    check_documents(documents, model.config.embedding.vocab_size)
    sizes = model.config.embedding.vocab_size, reference.config.embedding.vocab_size
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"the models have vocabularies of {sizes[0]} and {sizes[1]} tokens",
            hint="predictions are compared token by token: both need the same tokenizer",
        )
    model_score, reference_score = Score(), Score()
    kl_parts: list[Tensor] = []
    num_agreeing, sum_mean, largest = 0, 0.0, 0.0
    worst: list[Position] = []
    hidden = hidden_of(model, graphed=graphed), hidden_of(reference, graphed=graphed)
    for rows in batches(
        documents, window=window, stride=stride, batch_size=batch_size, device=model.device
    ):
        if not rows.num_counted:
            continue
        states = hidden[0](rows.batch), hidden[1](rows.batch)
        facts = _facts(model, reference, states, rows)
        _check(facts, model, reference)
        kl_parts.append(facts[:, _KL])
        model_score += _score(facts, _OUR_LOSS, _OURS)
        reference_score += _score(facts, _THEIR_LOSS, _THEIRS)
        num_agreeing += int((facts[:, _OURS] == facts[:, _THEIRS]).sum())
        sum_mean += float(facts[:, _MEAN].sum())
        largest = max(largest, float(facts[:, _MOST].max()))
        worst = sorted([*worst, *_worst(facts, rows)], key=lambda p: -p.kl)[:_NUM_WORST]
        counted(rows.num_counted)
    kl_N = torch.cat(kl_parts)
    return Comparison(
        ours=model_score,
        reference=reference_score,
        kl_mean=float(kl_N.mean()),
        kl_max=float(kl_N.max()),
        kl_percentiles=percentiles(kl_N),
        agreement=num_agreeing / kl_N.numel(),
        logits_mean_difference=sum_mean / kl_N.numel(),
        logits_max_difference=largest,
        worst=tuple(worst),
    )


_KL, _OURS, _THEIRS, _MEAN, _MOST, _LABEL, _OUR_LOSS, _THEIR_LOSS = range(8)
"""Columns of what is known of each prediction; token ids are exact in fp64."""


def _facts(
    model: Forward,
    reference: Forward,
    states: tuple[Tensor | None, Tensor | None],
    rows: WindowRows,
) -> Tensor:
    """Statistics of each prediction of a batch, fp64 [N, 8] on the CPU of every rank."""
    x_TH, y_TH = states
    facts_N8 = torch.zeros(rows.num_counted, 8, dtype=torch.float64, device=model.device)
    if x_TH is not None and y_TH is not None:
        pairs = zip(
            counted_logits(model, x_TH, rows.labels_BS),
            counted_logits(reference, y_TH, rows.labels_BS),
            strict=True,
        )
        parts = []
        for (ours_CV, labels_C), (theirs_CV, _) in pairs:
            d = differences(ours_CV, theirs_CV)
            losses = token_scores(ours_CV, labels_C)[0], token_scores(theirs_CV, labels_C)[0]
            columns = (d.kl_T, d.ours_T, d.theirs_T, d.mean_T, d.max_T, labels_C, *losses)
            parts.append(torch.stack([c.double() for c in columns], 1))
        facts_N8 = torch.cat(parts)
    return model.share(facts_N8).cpu()


def _check(facts: Tensor, model: Forward, reference: Forward) -> None:
    for column, forward, label in ((_OUR_LOSS, model, "first"), (_THEIR_LOSS, reference, "other")):
        if bool(facts[:, column].isnan().any()):
            raise CheckpointError(
                f"the logits of the {label} model contain a NaN", **forward.where_is_nan()
            )


def _score(facts: Tensor, loss: int, top: int) -> Score:
    return Score(
        num_tokens=len(facts),
        loss_sum=float(facts[:, loss].sum()),
        num_hits=int((facts[:, top] == facts[:, _LABEL]).sum()),
    )


def _worst(facts: Tensor, rows: WindowRows) -> Iterator[Position]:
    """The positions of a batch where the models differ most; none where they do not."""
    for row in facts[:, _KL].topk(min(_NUM_WORST, len(facts))).indices.tolist():
        document, place = rows.places[row]
        kl = float(facts[row, _KL])
        if kl > 0:
            expected, ours, reference = (int(facts[row, c]) for c in (_LABEL, _OURS, _THEIRS))
            yield Position(
                document=document,
                place=place,
                kl=kl,
                expected_id=expected,
                our_id=ours,
                reference_id=reference,
            )


def percentiles(values_N: Tensor) -> tuple[float, ...]:
    """The value below which so many percent of `values_N` are; the nearest that is there."""
    sorted_N = values_N.sort().values
    last = len(sorted_N) - 1
    return tuple(float(sorted_N[round(last * p / 100)]) for p in PERCENTILES)
