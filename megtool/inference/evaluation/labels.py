"""Scores of labels for texts, and how often the best one is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.data.labeled_texts import LabeledDataset, LabeledText
from megtool.errors import CheckpointError
from megtool.inference.collate import collate_rows
from megtool.inference.forward import Forward
from megtool.model.stacks.label_scores import numbers_of
from megtool.options.layout import LabelKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelScore:
    """How well labels are predicted: the mean loss in nats (of numbers, the mean squared error).

    `accuracy` is the share of texts whose label has the highest score, or of pairs whose preferred
    answer has the higher one; None for numbers, of which `mean_error` is the mean absolute one.
    `class_counts` are, by label, the number of texts that have it, and of those among them, and of
    all texts, that it is predicted for.
    """

    loss: float
    accuracy: float | None = None
    mean_error: float | None = None
    class_counts: tuple[tuple[int, int, int], ...] = ()


@torch.inference_mode()
def score_texts(
    forward: Forward,
    dataset: LabeledDataset,
    *,
    batch_size: int,
    counted: Callable[[int], None] = lambda n: None,
) -> Tensor:
    """The scores of all texts, fp64 `[N, sides, L]`, on the CPU of every rank.

    Raises:
        CheckpointError: one is a NaN.
    """
    texts, num_labels = dataset.labeled.texts, forward.config.head.num_labels
    num_sides = max(len(t.sides) for t in texts)
    parts = []
    for first in range(0, len(texts), batch_size):
        numbers = range(first, min(first + batch_size, len(texts)))
        batch, _ = collate_rows(dataset.rows_of(numbers), forward.device)
        x_TH = forward.hidden(batch)
        shape = len(numbers), num_sides, num_labels
        scores = torch.zeros(shape, dtype=torch.float64, device=forward.device)
        if x_TH is not None:
            scores_BSL = forward.decoder.score_rows(x_TH).view(*batch.shape, num_labels)
            places = torch.tensor([dataset.places_of(n) for n in numbers], device=x_TH.device)
            rows = torch.arange(len(numbers), device=x_TH.device)[:, None]
            scores = scores_BSL[rows, places].double()
        parts.append(forward.share(scores).cpu())
        counted(len(numbers))
    out = torch.cat(parts)
    if len(bad := out.isnan().any(-1).any(-1).nonzero()):
        raise CheckpointError(
            f"the scores of text {int(bad[0])} contain a NaN", **forward.where_is_nan()
        )
    return out


def rate_scores(kind: LabelKind, scores: Tensor, texts: Sequence[LabeledText]) -> LabelScore:
    """How well scores `[N, sides, L]` fit the labels of their texts."""
    if kind == "preferences":
        margins = scores[:, 0, 0] - scores[:, 1, 0]
        return LabelScore(
            loss=float(-F.logsigmoid(margins).mean()),
            accuracy=float((margins > 0).double().mean()),
        )
    labels = torch.tensor([t.label or 0 for t in texts])
    if kind == "numbers":
        errors = scores[:, 0, 0] - numbers_of(labels).double()
        return LabelScore(
            loss=float(errors.square().mean()),
            mean_error=float(errors.abs().mean()),
        )
    best = scores[:, 0].argmax(-1)
    classes = [
        (labels == n, (labels == n) & (best == n), best == n) for n in range(scores.shape[-1])
    ]
    return LabelScore(
        loss=float(F.cross_entropy(scores[:, 0], labels)),
        accuracy=float((best == labels).double().mean()),
        class_counts=tuple((int(a.sum()), int(b.sum()), int(c.sum())) for a, b, c in classes),
    )
