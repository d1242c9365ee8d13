"""Loss, perplexity and accuracy of a model over windows of texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megtool.errors import CheckpointError, UsageError
from megtool.inference.cuda_graph import GraphedHidden
from megtool.inference.forward import Forward
from megtool.inference.windows import IGNORED, TokenDocument, WindowRows, batches, num_counted
from megtool.model.batch import Batch, check_ids

MOST_LOGITS = 1 << 23
"""Logits held at a time: 8 M of fp32 are 32 MiB, and a comparison takes a few times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Sums over predicted tokens: `loss_sum` in nats, and how often the likeliest was right."""

    num_tokens: int = 0
    loss_sum: float = 0.0
    num_hits: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            num_tokens=self.num_tokens + other.num_tokens,
            loss_sum=self.loss_sum + other.loss_sum,
            num_hits=self.num_hits + other.num_hits,
        )

    @property
    def loss(self) -> float:
        """Mean negative log-probability of a token, in nats."""
        return self.loss_sum / self.num_tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def accuracy(self) -> float:
        """Share of tokens that were the likeliest."""
        return self.num_hits / self.num_tokens


def check_documents(documents: Sequence[TokenDocument], vocab_size: int) -> int:
    """How many predictions count.

    Raises:
        UsageError: none does, or a text holds a token beyond the vocabulary.
    """
    for number, document in enumerate(documents):
        check_ids(document.tokens, vocab_size, f"text {number}")
    total = num_counted(documents)
    if not total:
        raise UsageError(
            "the data contains no token to predict",
            hint="a text needs at least two tokens; --field names the field of a record with text",
        )
    return total


@torch.inference_mode()
def evaluate(
    forward: Forward,
    documents: Sequence[TokenDocument],
    *,
    window: int,
    stride: int,
    batch_size: int = 1,
    graphed: bool = False,
    counted: Callable[[int], None] = lambda n: None,
) -> Score:
    """Score all documents; see `windows` for how they are cut, and `check_documents`.

    Every rank of the model gets the same result. `counted` is called with the predictions of each
    batch; `graphed` replays a CUDA graph for batches of the same shape. Logits are made for some
    tokens at a time, never for a whole batch.

    Raises:
        UsageError: nothing to predict, or sizes that make no sense.
        CheckpointError: the logits contain a NaN.
    """
    check_documents(documents, forward.config.embedding.vocab_size)
    hidden = hidden_of(forward, graphed=graphed)
    total = Score()
    for rows in batches(
        documents, window=window, stride=stride, batch_size=batch_size, device=forward.device
    ):
        if rows.num_counted:
            total += score(forward, hidden(rows.batch), rows)
            counted(rows.num_counted)
    return total


Hidden = Callable[[Batch], Tensor | None]


def hidden_of(forward: Forward, *, graphed: bool) -> Hidden:
    """A model's states of a batch, through CUDA graphs if `graphed` and no stage waits for another.

    What comes back holds until the next call.
    """
    return GraphedHidden(forward) if graphed and forward.is_graphable else forward.hidden


def score(forward: Forward, x_TH: Tensor | None, rows: WindowRows) -> Score:
    """The score of one batch by its states, on every rank."""
    log_probs_N, hits_N = predictions(forward, x_TH, rows).unbind(1)
    return Score(
        num_tokens=rows.num_counted,
        loss_sum=-float(log_probs_N.sum()),
        num_hits=int(hits_N.sum()),
    )


def predictions(forward: Forward, x_TH: Tensor | None, rows: WindowRows) -> Tensor:
    """Of each prediction that counts, in the order of `rows.places`: the log-probability of the
    label (nats), and 1 where it is the likeliest token. fp64 [N, 2] on the CPU of every rank.

    Raises:
        CheckpointError: the logits contain a NaN.
    """
    facts_N2 = torch.zeros(rows.num_counted, 2, dtype=torch.float64, device=forward.device)
    if x_TH is not None:
        labels_T = rows.labels_BS.flatten()
        picked = (labels_T != IGNORED).nonzero()[:, 0]
        log_probs_N, hits_N = forward.token_log_probs(x_TH[picked], labels_T[picked])
        facts_N2 = torch.stack([log_probs_N.double(), hits_N.double()], 1)
    facts_N2 = forward.share(facts_N2).cpu()
    bad = facts_N2[:, 0].isnan().nonzero()
    if len(bad):
        document, place = rows.places[int(bad[0])]
        raise CheckpointError(
            f"the logits before token {place} of text {document} contain a NaN",
            **forward.where_is_nan(),
        )
    return facts_N2


def counted_logits(
    forward: Forward, x_TH: Tensor, labels_BS: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [C, V] and labels [C] of the predictions that count, so many at a time that no more
    than `MOST_LOGITS` logits are held."""
    labels_T = labels_BS.flatten()
    picked = (labels_T != IGNORED).nonzero()[:, 0]
    size = max(1, MOST_LOGITS // forward.config.embedding.vocab_size)
    for start in range(0, len(picked), size):
        some = picked[start : start + size]
        yield forward.logits(x_TH[some]), labels_T[some]


def token_scores(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-probability of each label (fp32, nats), and whether it is the likeliest."""
    fp32_TV = logits_TV.float()
    losses_T = fp32_TV.logsumexp(-1) - fp32_TV.gather(-1, labels_T[:, None])[:, 0]
    return losses_T, fp32_TV.argmax(-1) == labels_T
