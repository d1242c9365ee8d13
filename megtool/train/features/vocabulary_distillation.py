"""Distillation between vocabularies: losses of spans of text that two tokenizers share.

The distribution of a span is that of its last token, times the probabilities of the tokens before
it (the chain rule, as TRL's GOLD merges tokens with its `bayesian` strategy). Two losses compare a
span's distributions p of the student and q of the teacher, summed over spans:

- `uld`: the Wasserstein-1 distance of Universal Logit Distillation (Boizard et al., 2024, arXiv
  2402.12030): the sum of |p_i - q_i| of both sorted from the largest, the shorter with zeros.
- `gold`: of the tokens that both vocabularies have, the sum of q * log(q / p), and of the others
  the distance of `uld`. The former is weighted by the tokens' share in the teacher's vocabulary,
  the latter by the rest (TRL's hybrid loss with `beta` 0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megtool.data.token_alignment import TokenAligner, TokenBytes
from megtool.errors import LayoutError
from megtool.model.batch import Batch, run_starts
from megtool.options.layout import ParallelConfig

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Logits of each model that are in memory as float32 at a time."""

LEAST = 1e-8
"""The least probability of a token within a span, and of a token that both vocabularies have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTokens:
    """Tokens that both vocabularies have: `own_M` and `taught_M` (int64), in the same order."""

    own_M: Tensor
    taught_M: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPair:
    """The student's tokens, the teacher's, and whether `uld` or `gold` compares them."""

    own: TokenBytes
    taught: TokenBytes
    loss: str = "uld"

    def shared_tokens(self, device: torch.device) -> SharedTokens:
        """The tokens that both have, on a device."""
        pairs_M2 = torch.tensor(self.own.shared(self.taught), device=device).view(-1, 2)
        return SharedTokens(own_M=pairs_M2[:, 0], taught_M=pairs_M2[:, 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRows:
    """Spans of one side over its flattened tokens T.

    `rows_N` are the rows whose logits predict the spans' tokens, `tokens_N` these tokens, and
    `ends_G` where each span's rows end among them (int64).
    """

    rows_N: Tensor
    tokens_N: Tensor
    ends_G: Tensor

    @classmethod
    def build(cls, spans: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> SpanRows:
        """Of spans as lists of rows with the tokens that they predict."""
        pairs = [pair for span in spans for pair in span]
        flat_N2 = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        ends_G = torch.tensor([len(span) for span in spans], dtype=torch.int64).cumsum(0)
        rows_N, tokens_N = (column.to(device) for column in flat_N2.unbind(1))
        return cls(rows_N=rows_N, tokens_N=tokens_N, ends_G=ends_G)

    def slice(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, tokens and ends of the spans `begin` to `end`."""
        first = int(self.ends_G[begin - 1]) if begin else 0
        last = int(self.ends_G[end - 1])
        return (
            self.rows_N[first:last],
            self.tokens_N[first:last],
            self.ends_G[begin:end] - first,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedBatch:
    """The teacher's rows of a batch's text, and spans of both sides that have labels."""

    teacher: Batch
    own: SpanRows
    taught: SpanRows

    @property
    def num_spans(self) -> int:
        """How many spans are compared."""
        return len(self.own.ends_G)


def align_batch(aligner: TokenAligner, batch: Batch, labels_BS: Tensor) -> AlignedBatch:
    """A batch's text as the teacher's tokens, a row for each row, and the spans to compare.

    A span is compared if every token of it has a label, and if something before it in its document
    predicts its first token on both sides.
    """
    width = batch.shape[1]
    device = batch.tokens_BS.device
    labels, token_rows = labels_BS.tolist(), batch.tokens_BS.tolist()
    taught_rows: list[list[int]] = []
    documents: list[list[int]] = []
    spans: list[tuple[int, list[int], list[int]]] = []
    for row, (tokens, runs) in enumerate(zip(token_rows, _runs(batch), strict=True)):
        taught: list[int] = []
        numbers: list[int] = []
        for number, (begin, end) in enumerate(runs):
            aligned = aligner.align(tokens[begin:end], is_start=True)
            place = len(taught)
            taught += aligned.tokens
            numbers += [number] * len(aligned.tokens)
            for span in aligned.spans:
                own = list(range(begin + span.own[0], begin + span.own[1]))
                others = list(range(place + span.other[0], place + span.other[1]))
                is_predicted = own[0] > begin and others[0] > place
                if is_predicted and all(labels[row][t - 1] == tokens[t] for t in own):
                    spans.append((row, own, others))
        taught_rows.append(taught)
        documents.append(numbers)
    taught_width = max(1, *map(len, taught_rows))
    own_spans = [[(row * width + t - 1, token_rows[row][t]) for t in own] for row, own, _ in spans]
    taught_spans = [
        [(row * taught_width + t - 1, taught_rows[row][t]) for t in others]
        for row, _, others in spans
    ]
    return AlignedBatch(
        teacher=_teacher_batch(taught_rows, documents, taught_width, device),
        own=SpanRows.build(own_spans, device),
        taught=SpanRows.build(taught_spans, device),
    )


def _runs(batch: Batch) -> Iterator[list[tuple[int, int]]]:
    """The documents of each row, as ranges without padding."""
    valid_BS = batch.valid_BS
    for row in range(batch.shape[0]):
        valid_S = torch.ones(batch.shape[1], dtype=torch.bool)
        if valid_BS is not None:
            valid_S = valid_BS[row].cpu()
        places = valid_S.nonzero()[:, 0].tolist()
        numbers = None if batch.documents_BS is None else batch.documents_BS[row].tolist()
        runs: list[tuple[int, int]] = []
        for place in places:
            is_same = runs and runs[-1][1] == place
            if is_same and (numbers is None or numbers[place] == numbers[place - 1]):
                runs[-1] = (runs[-1][0], place + 1)
            else:
                runs.append((place, place + 1))
        yield runs


def _teacher_batch(
    rows: Sequence[Sequence[int]],
    documents: Sequence[Sequence[int]],
    width: int,
    device: torch.device,
) -> Batch:
    shape = (len(rows), width)
    tokens_BS = torch.zeros(shape, dtype=torch.int64)
    documents_BS, positions_BS = torch.zeros_like(tokens_BS), torch.zeros_like(tokens_BS)
    valid_BS = torch.zeros(shape, dtype=torch.bool)
    for row, (tokens, numbers) in enumerate(zip(rows, documents, strict=True)):
        n = len(tokens)
        tokens_BS[row, :n] = torch.tensor(tokens, dtype=torch.int64)
        numbers_S = torch.tensor(numbers, dtype=torch.int64)
        documents_BS[row, :n], documents_BS[row, n:] = numbers_S, -1
        for number in range(int(numbers_S.max()) + 1 if n else 0):
            places = (numbers_S == number).nonzero()[:, 0]
            positions_BS[row, places] = torch.arange(len(places))
        valid_BS[row, : max(n, 1)] = True
    padded_BS = None if bool(valid_BS.all()) else valid_BS
    starts_BM = run_starts(documents_BS, padded_BS)
    return Batch(
        tokens_BS=tokens_BS.to(device),
        positions_BS=positions_BS.to(device),
        valid_BS=None if padded_BS is None else padded_BS.to(device),
        documents_BS=documents_BS.to(device),
        run_starts_BM=None if starts_BM is None else starts_BM.to(device),
    )


def merge_spans(logits_NV: Tensor, tokens_N: Tensor, ends_G: Tensor, temperature: float) -> Tensor:
    """The distribution of each span, float32 or wider [G, V]; see the module."""
    probs_NV = (logits_NV / temperature).softmax(-1)
    last_G = ends_G.to(probs_NV.device) - 1
    factor_N = probs_NV.gather(1, tokens_N[:, None])[:, 0].clamp_min(LEAST).log()
    factor_N = factor_N.index_fill(0, last_G, 0.0)
    sums_N = torch.cat((factor_N.new_zeros(1), factor_N.cumsum(0)))
    begin_G = torch.cat((last_G.new_zeros(1), last_G[:-1] + 1))
    scale_G = (sums_N[last_G + 1] - sums_N[begin_G]).exp()
    return probs_NV[last_G] * scale_G[:, None]


def span_loss(own_GV: Tensor, taught_GV: Tensor, shared: SharedTokens | None = None) -> Tensor:
    """The sum over spans of `uld`, or with `shared` tokens of `gold`."""
    if shared is None:
        return _sorted_distance(own_GV, taught_GV)
    p_GM = own_GV[:, shared.own_M].clamp_min(LEAST).log()
    q_GM = taught_GV[:, shared.taught_M].clamp_min(LEAST).log()
    matched = (q_GM.exp() * (q_GM - p_GM)).sum()
    weight = len(shared.own_M) / taught_GV.shape[1]
    rest = own_GV.new_zeros(())
    own_mask, taught_mask = (
        torch.ones(x.shape[1], dtype=torch.bool, device=x.device).index_fill(0, of, False)
        for x, of in ((own_GV, shared.own_M), (taught_GV, shared.taught_M))
    )
    if bool(own_mask.any()) and bool(taught_mask.any()):
        rest = _sorted_distance(own_GV[:, own_mask], taught_GV[:, taught_mask])
    return weight * matched + (1 - weight) * rest


def _sorted_distance(own_GV: Tensor, taught_GV: Tensor) -> Tensor:
    """The sum of |p_i - q_i| of both sorted from the largest."""
    width = max(own_GV.shape[1], taught_GV.shape[1])
    p_GV, q_GV = (
        F.pad(x.sort(dim=1, descending=True).values, (0, width - x.shape[1]))
        for x in (own_GV, taught_GV)
    )
    return (p_GV - q_GV).abs().sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanComparison:
    """What is compared with the student's states: those of the teacher, over the same spans.

    `logits` makes the student's of states and the weight of its head, `taught_logits` the
    teacher's of states; both are float32 or wider. Without `shared` the loss is `uld`.
    """

    spans: AlignedBatch
    taught_x_TH: Tensor
    logits: Callable[[Tensor, Tensor], Tensor]
    taught_logits: Callable[[Tensor], Tensor]
    shared: SharedTokens | None = None
    temperature: float = 1.0


class SpanDivergence(torch.autograd.Function):
    """The loss of all spans, of the student's states and the weight of its head; logits exist for
    some spans at a time."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_VH: Tensor, compared: SpanComparison) -> Tensor:
        """The loss, and its gradients with it."""
        spans, temperature = compared.spans, compared.temperature
        has_grad = ctx.needs_input_grad[:2]
        g_x_TH = torch.zeros_like(x_TH) if has_grad[0] else None
        g_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if has_grad[1] else None
        total = torch.zeros((), dtype=torch.float32, device=x_TH.device)
        for begin, end in _chunks(spans, max(weight_VH.shape[0], 1), x_TH.device.type):
            rows_N, tokens_N, ends_G = spans.own.slice(begin, end)
            taught_rows_N, taught_tokens_N, taught_ends_G = spans.taught.slice(begin, end)
            with torch.no_grad():
                taught_NV = compared.taught_logits(compared.taught_x_TH[taught_rows_N])
                q_GV = merge_spans(taught_NV, taught_tokens_N, taught_ends_G, temperature)
            with torch.enable_grad():
                x_NH = x_TH[rows_N].detach().requires_grad_(has_grad[0])
                weight = weight_VH.detach().requires_grad_(has_grad[1])
                p_GV = merge_spans(compared.logits(x_NH, weight), tokens_N, ends_G, temperature)
                loss = span_loss(p_GV, q_GV, compared.shared)
            total += loss.detach().float()
            inputs = [t for t in (x_NH, weight) if t.requires_grad]
            if not inputs:
                continue
            gradients = list(torch.autograd.grad(loss, inputs))
            if g_x_TH is not None:
                g_x_TH.index_add_(0, rows_N, gradients.pop(0))
            if g_weight_VH is not None:
                g_weight_VH += gradients.pop(0)
        ctx.save_for_backward(g_x_TH, g_weight_VH)
        ctx.dtype = weight_VH.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the states and the weight."""
        g_x_TH, g_weight_VH = ctx.saved_tensors
        by_x = None if g_x_TH is None else g_x_TH * g.to(g_x_TH.dtype)
        by_weight = None if g_weight_VH is None else (g_weight_VH * g).to(ctx.dtype)
        return by_x, by_weight, None


def _chunks(spans: AlignedBatch, vocab_size: int, device: str) -> Iterator[tuple[int, int]]:
    """Ranges of spans whose logits are few enough to be in memory together."""
    most = max(1, CHUNK.get(device, CHUNK["cuda"]) // vocab_size)
    ends = torch.maximum(spans.own.ends_G, spans.taught.ends_G).tolist()
    begin = first = 0
    for number, end in enumerate(ends):
        if number > begin and end - first > most:
            yield begin, number
            begin, first = number, ends[number - 1]
    if begin < len(ends):
        yield begin, len(ends)


def check_ranks(layout: ParallelConfig) -> None:
    """Refuse ranks that have parts of a row or of the vocabulary.

    Raises:
        LayoutError: there are some.
    """
    for axis in ("tp", "pp", "cp"):
        if (size := getattr(layout, axis)) > 1:
            raise LayoutError(
                f"{axis}={size}, and distillation between vocabularies needs whole rows and "
                "distributions",
                hint=f"--{axis} 1; --dp splits the batch",
            )
