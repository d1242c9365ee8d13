"""Per-token statistics for evaluation: log-probability, argmax, divergence of two models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.errors import LayoutError
from megtool.kernels.vocabulary.lm_head import NOWHERE, Softmax, Vocabulary, bend, fold, logits

CHUNK_ELEMENTS = 1 << 25


@torch.no_grad()
def token_log_probs(
    x_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    vocab_size: int,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
    scale: float = 1.0,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Each label's log-probability (fp32, 0 where ignored) and whether it is the argmax (bool).

    The argmax is the first of equal logits, as `torch.argmax` takes it, over all ranks of `group`.
    Arguments as `linear_cross_entropy`'s; no gradients. An ignored label is no hit.
    """
    vocabulary = Vocabulary(
        size=vocab_size, local=weight_VH.shape[0], softcap=softcap, scale=scale, group=group
    )
    column_T, kept_T, invalid_T = vocabulary.place(labels_T, ignore_index)
    softmax = Softmax.start(x_TH.shape[0], x_TH, best=True)
    for block in vocabulary.blocks(x_TH.shape[0], x_TH.device, chunk):
        fold(logits(x_TH, weight_VH, bias, block), block.start, column_T, vocabulary, softmax)
    softmax.reduce(vocabulary)
    log_probs_T = softmax.target_T - softmax.log_total_T.masked_fill_(invalid_T, torch.nan)
    return torch.where(kept_T, log_probs_T, 0.0), kept_T & (softmax.best_T == labels_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """A model's output layer: this rank's rows of its weight, and the transformation of raw
    logits.
    """

    weight_VH: Tensor
    vocab_size: int
    bias: Tensor | None = None
    softcap: float = 0.0
    scale: float = 1.0
    group: dist.ProcessGroup | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """The columns of this rank."""
        return Vocabulary(
            size=self.vocab_size,
            local=self.weight_VH.shape[0],
            softcap=self.softcap,
            scale=self.scale,
            group=self.group,
        )


@torch.no_grad()
def log_softmax_block(x_CH: Tensor, head: OutputHead) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a chunk of tokens for this rank's (unpadded) columns, and the argmax.

    Returns log_probs_CV in fp32 (fp64 for fp64) and best_C, the vocabulary's number of the first
    of the largest logits over all ranks.
    """
    vocabulary = head.vocabulary
    raw_CV = logits(x_CH, head.weight_VH, head.bias, slice(0, vocabulary.num_rows))
    softmax = Softmax.start(x_CH.shape[0], x_CH, best=True)
    if vocabulary.num_rows:
        nowhere_C = torch.full_like(softmax.best_T, NOWHERE)
        fold(raw_CV, 0, nowhere_C, vocabulary, softmax)
    softmax.reduce(vocabulary)
    log_probs_CV = bend(raw_CV, head.softcap, head.scale)
    return log_probs_CV.sub_(softmax.log_total_T.unsqueeze(1)), softmax.best_T


@torch.no_grad()
def divergence(
    x_TH: Tensor,
    head: OutputHead,
    other_x_TG: Tensor,
    other: OutputHead,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Per token, KL(first || other) in nats (fp32) and whether both models' argmax agree (bool).

    The models may differ in hidden size, padding aside both cut the same vocabulary over the same
    group. Works on `chunk` tokens at a time (None: by the size of the vocabulary), which hold two
    [chunk, V] blocks in fp32.

    Raises LayoutError where the two heads hold different columns on this rank.
    """
    a, b = head.vocabulary, other.vocabulary
    if (a.size, a.first, a.num_rows) != (b.size, b.first, b.num_rows):
        raise LayoutError(
            f"columns {a.first}+{a.num_rows} of {a.size} cannot be compared with "
            f"{b.first}+{b.num_rows} of "
            f"{b.size}",
            hint="pad both vocabularies to the same size and use one tensor-parallel size",
        )
    rows = chunk or max(1, CHUNK_ELEMENTS // max(a.local, 1))
    row_pairs = torch.split(x_TH, rows), torch.split(other_x_TG, rows)
    kl, agrees = [], []
    for x_CH, other_x_CG in zip(row_pairs[0], row_pairs[1], strict=True):
        log_p_CV, best_C = log_softmax_block(x_CH, head)
        log_q_CV, other_best_C = log_softmax_block(other_x_CG, other)
        terms_CV = log_q_CV.sub_(log_p_CV).neg_()
        p_CV = log_p_CV.exp_()
        # Where p is 0 in floating point its term is 0, also where both logarithms are infinite.
        kl.append(terms_CV.mul_(p_CV).masked_fill_(p_CV == 0, 0.0).sum(1))
        agrees.append(best_C == other_best_C)
    kl_T = torch.cat(kl)
    if head.group is not None:
        dist.all_reduce(kl_T, dist.ReduceOp.SUM, head.group)
    return kl_T, torch.cat(agrees)
