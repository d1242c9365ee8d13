"""Scores of labels for whole texts, and what they lose: classes, numbers, and preferred answers.

L labels of a model (`ModelConfig.num_labels`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.errors import UsageError
from megtool.model.layers.param_attributes import mark
from megtool.options.layout import LabelKind
from megtool.parallel.collectives import gather_columns
from megtool.parallel.context_parallel import own_tokens, whole_tokens
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig

IGNORED = -100
"""The label of tokens that are not scored."""


class LabelHead(nn.Module):
    """The layers that score labels; a base of the module that has them.

    Every tensor rank has the layers whole; with sequence parallelism it has rows of its own, and a
    part of the gradients.
    """

    groups: ProcessGroups
    sequence_parallel: bool
    label_kind: LabelKind
    score: nn.Linear | None
    score_dense: nn.Linear | None

    def init_scores(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Make the layer of scores, and the dense one before it if the model has one."""
        head = config.head
        size, num_labels = config.hidden_size, head.num_labels
        self.score = nn.Linear(size, num_labels, bias=head.score_bias, dtype=dtype, device=device)
        if head.score_dense:
            self.score_dense = nn.Linear(size, size, dtype=dtype, device=device)
        for layer in (self.score, self.score_dense):
            for parameter in () if layer is None else layer.parameters():
                mark(parameter, partial=self.sequence_parallel)

    def score_rows(self, x_TH: Tensor) -> Tensor:
        """Return the scores behind rows of `hidden`, `[T, L]`.

        Raises:
            UsageError: this stage has no head, or nothing is loaded.
        """
        if self.score is None:
            raise UsageError("this stage has no layer that scores labels")
        if self.score.weight.is_meta and not x_TH.is_meta:
            raise UsageError("the layer that scores labels is not loaded yet")
        if self.score_dense is not None:
            x_TH = torch.tanh(self.score_dense(x_TH))
        scores_TL: Tensor = self.score(x_TH)
        return scores_TL

    def label_scores(self, x_TH: Tensor, num_rows: int) -> Tensor:
        """Return the scores behind every token, `[B, S, L]`, on every rank, from the states of
        `hidden`; the gradient of each rank is that of its own tokens."""
        scores_TL = self.score_rows(x_TH)
        if self.sequence_parallel:
            scores_TL = gather_columns(scores_TL.t().contiguous(), self.groups.tp).t()
        scores_BSL = scores_TL.reshape(num_rows, -1, scores_TL.shape[-1])
        return whole_tokens(scores_BSL, self.groups.cp)

    def label_loss(self, x_TH: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of all labels' losses (float32), and how many there are (int64), from the
        states of `hidden`; a label is where the token is that is scored, and `IGNORED` elsewhere.

        - classes: cross-entropy;
        - numbers: the squared difference (transformers' regression);
        - preferences: `-log(sigmoid(r_chosen - r_rejected))` (Bradley and Terry, 1952).

        With context parallelism every rank has an equal share of the sum, and counts its own
        labels.
        """
        scores_BSL = self.label_scores(x_TH, labels_BS.shape[0]).float()
        total, cp = label_losses(self.label_kind, scores_BSL, labels_BS).sum(), self.groups.cp
        if cp.size > 1:
            total = total - total.detach() * (1 - 1 / cp.size)
        return total, (own_tokens(labels_BS, cp) != IGNORED).sum()


def label_losses(kind: LabelKind, scores_BSL: Tensor, labels_BS: Tensor) -> Tensor:
    """The loss of each label, [N], in the order of rows and places."""
    is_labeled_BS = labels_BS != IGNORED
    scores_NL, labels_N = scores_BSL[is_labeled_BS], labels_BS[is_labeled_BS]
    if kind == "preferences":
        rows_N = is_labeled_BS.nonzero()[:, 0]
        return -F.logsigmoid(scores_NL[:, 0] - scores_BSL[rows_N, labels_N, 0])
    if kind == "numbers":
        return (scores_NL[:, 0] - numbers_of(labels_N)).square()
    return F.cross_entropy(scores_NL, labels_N, reduction="none")


def numbers_of(labels_N: Tensor) -> Tensor:
    """Labels that are numbers, fp32, from their bits."""
    return labels_N.to(torch.int32).view(torch.float32)
