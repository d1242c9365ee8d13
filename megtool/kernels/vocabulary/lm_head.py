"""A linear head over a vocabulary, block by block: logits, softmax statistics, gradients.

Nothing here needs the logits of all tokens and the whole vocabulary at once. A block is some
columns of the vocabulary for all tokens; `fold` takes it into the running maximum and sum of
exponentials of every token (the online softmax of Milakov and Gimelshein, 2018), `slope` turns it
into the loss's gradient in place. Over a tensor-parallel group every rank holds
V / size rows of the weight, in order, and the padding of the vocabulary lies in the last rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megtool.errors import LayoutError
from megtool.kernels.dispatch import Kernel
from megtool.kernels.vocabulary import lm_head_triton

# Elements of a block where the caller does not say: what keeps a GPU's matrix units busy, and what
# stays near a CPU's caches.
BLOCK_ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 20}
SMALLEST_BLOCK = 1024
NOWHERE = -1  # the column of a label that this rank does not hold; lies in no block


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The columns of the vocabulary on this rank, and the transformation of raw logits.

    Logits x become `softcap * tanh(scale * x / softcap)` (`scale * x` where softcap is 0).

    Raises LayoutError where all ranks together hold fewer columns than `size`.
    """

    size: int
    local: int
    softcap: float = 0.0
    scale: float = 1.0
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        if not 0 < self.size <= ranks * self.local:
            raise LayoutError(
                f"{ranks} x {self.local} rows do not hold a vocabulary of {self.size}",
                hint=f"give at least {-(-self.size // ranks)} rows a rank",
            )

    @property
    def first(self) -> int:
        """The vocabulary's number of this rank's first column."""
        return 0 if self.group is None else dist.get_rank(self.group) * self.local

    @property
    def num_rows(self) -> int:
        """The number of this rank's columns that are not padding; they come first."""
        return min(max(self.size - self.first, 0), self.local)

    def place(self, labels_T: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Each label's column here (NOWHERE: on another rank), which count, which are invalid."""
        kept_T = labels_T != ignore_index
        invalid_T = kept_T & ((labels_T < 0) | (labels_T >= self.size))
        column_T = labels_T - self.first
        here_T = kept_T & (column_T >= 0) & (column_T < self.num_rows)
        return torch.where(here_T, column_T, NOWHERE), kept_T, invalid_T

    def blocks(self, num_tokens: int, device: torch.device, chunk: int | None) -> Iterator[slice]:
        """Cut the columns held into blocks of `chunk` (None: by the number of tokens)."""
        if chunk is None:
            room = BLOCK_ELEMENTS.get(device.type, BLOCK_ELEMENTS["cuda"]) // max(num_tokens, 1)
            chunk = max(SMALLEST_BLOCK, room // 128 * 128)
        for start in range(0, self.num_rows, chunk):
            yield slice(start, min(start + chunk, self.num_rows))


@dataclass(slots=True, kw_only=True)
class Softmax:
    """Running statistics of each token's logits: fp32 (fp64 for fp64 inputs), updated in place.

    `best` is the vocabulary's number of the first of the largest logits (int64), where asked for.
    """

    maximum_T: Tensor
    total_T: Tensor  # sum of exp(logit - maximum)
    target_T: Tensor  # the label's logit; 0 where another rank holds it
    best_T: Tensor
    finds_best: bool

    @classmethod
    def start(cls, num_tokens: int, like: Tensor, *, best: bool = False) -> Softmax:
        """Statistics of no column yet, for tokens of `like`'s dtype and device."""
        wide = torch.promote_types(like.dtype, torch.float32)
        zeros = torch.zeros(num_tokens, dtype=wide, device=like.device)
        return cls(
            maximum_T=torch.full_like(zeros, -torch.inf),
            total_T=zeros,
            target_T=zeros.clone(),
            best_T=torch.zeros_like(zeros, dtype=torch.int64),
            finds_best=best,
        )

    def reduce(self, vocabulary: Vocabulary) -> None:
        """Join the ranks of the group: one MAX and one SUM all-reduce (and a MIN for `best`)."""
        self.best_T += vocabulary.first
        if vocabulary.group is None:
            return
        maximum_T = self.maximum_T.clone()
        dist.all_reduce(maximum_T, dist.ReduceOp.MAX, vocabulary.group)
        stacked = torch.stack((self.total_T * (self.maximum_T - maximum_T).exp(), self.target_T))
        dist.all_reduce(stacked, dist.ReduceOp.SUM, vocabulary.group)
        if self.finds_best:
            # Of ranks with the same maximum, the one with the lowest column wins.
            nowhere = torch.full_like(self.best_T, vocabulary.size)
            self.best_T = torch.where(self.maximum_T == maximum_T, self.best_T, nowhere)
            dist.all_reduce(self.best_T, dist.ReduceOp.MIN, vocabulary.group)
        self.maximum_T, self.total_T, self.target_T = maximum_T, stacked[0], stacked[1]

    @property
    def log_total_T(self) -> Tensor:
        """The logarithm of the sum of exponentials of the logits."""
        return self.maximum_T + self.total_T.log()


def logits(x_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, block: slice) -> Tensor:
    """Raw logits of one block of columns, in x's dtype."""
    return F.linear(x_TH, weight_VH[block], None if bias_V is None else bias_V[block])


def fold(
    raw_TB: Tensor, start: int, column_T: Tensor, vocabulary: Vocabulary, into: Softmax
) -> None:
    """Take the raw logits of columns `start`... of this rank into the statistics `into`."""
    _FOLD.on(raw_TB.device)(
        raw_TB,
        start,
        column_T,
        vocabulary.softcap,
        vocabulary.scale,
        into.maximum_T,
        into.total_T,
        into.target_T,
        into.best_T if into.finds_best else None,
    )


def slope(
    raw_TB: Tensor,
    start: int,
    column_T: Tensor,
    log_total_T: Tensor,
    g_T: Tensor,
    vocabulary: Vocabulary,
    *,
    out: Tensor,
) -> None:
    """The gradient of the losses, weighted by g, by the raw logits; rounded to out's dtype once.

    `out` may be `raw_TB` itself.
    """
    run = _SLOPE.on(raw_TB.device)
    cap, scale = vocabulary.softcap, vocabulary.scale
    run(raw_TB, start, column_T, log_total_T, g_T, cap, scale, out)


def _fold(
    raw_TB: Tensor,
    start: int,
    column_T: Tensor,
    softcap: float,
    scale: float,
    maximum_T: Tensor,
    total_T: Tensor,
    target_T: Tensor,
    best_T: Tensor | None,
) -> None:
    """The reference of `fold`."""
    bent_TB = bend(raw_TB, softcap, scale)
    block_T = bent_TB.amax(1)
    if best_T is not None:
        better_T = block_T > maximum_T
        best_T.copy_(torch.where(better_T, bent_TB.argmax(1) + start, best_T))
    above_T = torch.maximum(maximum_T, block_T)
    here_T, at_T = _within(column_T, start, raw_TB.shape[1])
    found_T = bent_TB.gather(1, at_T.unsqueeze(1)).squeeze(1)
    target_T.add_(torch.where(here_T, found_T, 0.0))
    total_T.mul_((maximum_T - above_T).exp_())
    total_T.add_(bent_TB.sub_(above_T.unsqueeze(1)).exp_().sum(1))
    maximum_T.copy_(above_T)


def _slope(
    raw_TB: Tensor,
    start: int,
    column_T: Tensor,
    log_total_T: Tensor,
    g_T: Tensor,
    softcap: float,
    scale: float,
    out_TB: Tensor,
) -> None:
    """The reference of `slope`."""
    bent_TB = bend(raw_TB, softcap, scale)
    bending_TB = 1.0 - (bent_TB / softcap).square_() if softcap else None
    bent_TB.sub_(log_total_T.unsqueeze(1)).exp_()
    here_T, at_T = _within(column_T, start, raw_TB.shape[1])
    bent_TB.scatter_add_(1, at_T.unsqueeze(1), -here_T.to(bent_TB.dtype).unsqueeze(1))
    bent_TB.mul_((g_T * scale).unsqueeze(1))
    if bending_TB is not None:
        bent_TB.mul_(bending_TB)
    out_TB.copy_(bent_TB)


def bend(raw: Tensor, softcap: float, scale: float) -> Tensor:
    """Scaled and capped logits, in at least fp32; never the memory of `raw`."""
    bent = raw.to(torch.promote_types(raw.dtype, torch.float32), copy=True)
    if scale != 1.0:
        bent.mul_(scale)
    if softcap:
        bent.div_(softcap).tanh_().mul_(softcap)
    return bent


def _within(column_T: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Which labels are in a block, and at which of its columns (0 for the others)."""
    at_T = column_T - start
    here_T = (at_T >= 0) & (at_T < width)
    return here_T, torch.where(here_T, at_T, 0)


_FOLD = Kernel("online softmax", _fold, triton=lm_head_triton.fold)
_SLOPE = Kernel("gradient of cross entropy", _slope, triton=lm_head_triton.slope)
