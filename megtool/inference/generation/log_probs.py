"""Log-probabilities of tokens and of the likeliest ones, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megtool.inference.forward import Forward
from megtool.inference.generation.batching import Running, TokenLogProb

_ROWS = 64
"""Rows of logits of a prompt at a time: [64, V] in fp32 are 32 MiB of 128k tokens."""


def rank_tokens(logits_TV: Tensor, tokens_T: Tensor, num_top: int) -> Tensor:
    """The log-probability of each row's token, then the ids of the likeliest tokens, then their
    log-probabilities: fp64 [T, 1 + 2 * num_top], in which ids are exact."""
    log_probs_TV = logits_TV.float().log_softmax(-1)
    own_T1 = log_probs_TV.gather(-1, tokens_T.clamp_min(0)[:, None])
    values_TK, ids_TK = log_probs_TV.topk(min(num_top, log_probs_TV.shape[-1]), dim=-1)
    missing = num_top - values_TK.shape[-1]  # of a vocabulary that is smaller
    ids_TK = torch.nn.functional.pad(ids_TK, (0, missing), value=-1)
    values_TK = torch.nn.functional.pad(values_TK, (0, missing))
    return torch.cat([own_T1.double(), ids_TK.double(), values_TK.double()], dim=-1)


def read_ranking(tokens: Sequence[int], ranking_TC: Tensor, num_top: int) -> list[TokenLogProb]:
    """Rows of `rank_tokens`; of the likeliest tokens as many as were asked for."""
    columns = (ranking_TC.shape[1] - 1) // 2
    out = []
    for token, (own, *rest) in zip(tokens, ranking_TC.tolist(), strict=True):
        pairs = zip(map(int, rest[:columns]), rest[columns:], strict=True)
        top = tuple((t, p) for t, p in pairs if t >= 0)[:num_top]
        out.append(TokenLogProb(token, own, top))
    return out


def rank_next_tokens(
    forward: Forward, logits_BV: Tensor | None, rows: Sequence[Running], tokens: Sequence[int]
) -> list[TokenLogProb | None]:
    """Log-probabilities of the tokens that rows have got, of those rows that ask for them.

    Every rank calls this; logits are None on those that have none.
    """
    counts = [r.request.text.num_log_probs for r in rows]
    places = [n for n, count in enumerate(counts) if count is not None]
    if not places:
        return [None] * len(rows)
    most = max(count for count in counts if count is not None)
    ranking_RC = torch.zeros(len(places), 1 + 2 * most, dtype=torch.float64, device=forward.device)
    chosen = [tokens[n] for n in places]
    if logits_BV is not None:
        ids_R = torch.tensor(chosen, device=logits_BV.device)
        ranking_RC = rank_tokens(logits_BV[places], ids_R, most)
    ranking_RC = forward.share(ranking_RC).cpu()
    out: list[TokenLogProb | None] = [None] * len(rows)
    for n, token, ranking_C in zip(places, chosen, ranking_RC, strict=True):
        out[n] = read_ranking([token], ranking_C[None], counts[n] or 0)[0]
    return out


def rank_prompt(
    forward: Forward, x_BSH: Tensor | None, rows: Sequence[Running], counts: Sequence[int]
) -> None:
    """Add log-probabilities of prompts' tokens, of those rows that ask for them.

    `x_BSH` are the states of the `counts` tokens that each row is about to have read.
    """
    for n, (running, count) in enumerate(zip(rows, counts, strict=True)):
        request = running.request
        if not request.text.prompt_log_probs:
            continue
        first = len(running.prompt_log_probs)  # the first token has none: nothing is before it
        last = min(running.num_read + count, len(request.prompt) - 1)
        num_top = request.text.num_log_probs or 0
        for start in range(max(first, running.num_read), last, _ROWS):
            stop = min(start + _ROWS, last)
            tokens = request.prompt[start + 1 : stop + 1]
            ranking_TC = torch.zeros(
                stop - start, 1 + 2 * num_top, dtype=torch.float64, device=forward.device
            )
            if x_BSH is not None:
                x_TH = x_BSH[n, start - running.num_read : stop - running.num_read]
                ids_T = torch.tensor(tokens, device=x_TH.device)
                ranking_TC = rank_tokens(forward.logits(x_TH), ids_T, num_top)
            ranking_TC = forward.share(ranking_TC).cpu()
            running.prompt_log_probs += read_ranking(tokens, ranking_TC, num_top)
