"""The next token of every sequence from its logits: greedy, or sampled.

A draw spends one uniform number per token, taken from a generator of the sequence's own on the
CPU. So a sequence gets the same text from the same seed alone or in a batch, whatever its
neighbors, and on any device (as far as the logits are the same there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megtool.options.sampling import Sampling

NO_NUMBER = -1
"""What `choose` gives for a sequence whose logits contain a NaN."""


def choose(
    logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator] = ()
) -> Tensor:
    """The next token of each sequence, int64 [B] on the device of the logits.

    `generators` has one for each sequence unless `sampling` is greedy. A sequence with a NaN among
    its logits gets `NO_NUMBER`; nothing here waits for the device.
    """
    if sampling.is_greedy:
        tokens_B = logits_BV.argmax(-1)
    else:
        uniform_B1 = torch.stack([torch.rand(1, generator=g) for g in generators])
        probs_BV, ids_BV = filter_logits(logits_BV, sampling)
        sums_BV = probs_BV.cumsum(-1)
        target_B1 = uniform_B1.to(logits_BV.device) * sums_BV[:, -1:]
        place_B1 = torch.searchsorted(sums_BV, target_B1, right=True)
        last_B1 = (probs_BV > 0).sum(-1, keepdim=True) - 1  # rounding never draws what is cut off
        tokens_B = ids_BV.gather(-1, torch.minimum(place_B1, last_B1.clamp_min(0)))[:, 0]
    return torch.where(logits_BV.isnan().any(-1), NO_NUMBER, tokens_B)


def choose_each(
    logits_BV: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]
) -> Tensor:
    """As `choose`, where every sequence has its own settings; each of these is one call."""
    groups: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        groups.setdefault(replace(sampling, seed=0), []).append(row)
    if len(groups) == 1:
        return choose(logits_BV, samplings[0], generators)
    tokens_B = torch.empty(len(samplings), dtype=torch.int64, device=logits_BV.device)
    for sampling, rows in groups.items():
        tokens_B[rows] = choose(logits_BV[rows], sampling, [generators[n] for n in rows])
    return tokens_B


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities that tokens are drawn with, fp32 [B, V], by their ids."""
    probs_BK, ids_BK = filter_logits(logits_BV, sampling)
    probs_BK = probs_BK / probs_BK.sum(-1, keepdim=True)
    out_BV = torch.zeros(logits_BV.shape, dtype=probs_BK.dtype, device=logits_BV.device)
    return out_BV.scatter_(-1, ids_BK, probs_BK)


def draw(weights_V: Tensor, generator: torch.Generator) -> int:
    """A token, with probabilities in proportion to `weights_V` [V]; one number is drawn."""
    sums_V = weights_V.cumsum(-1)
    target = torch.rand(1, generator=generator).to(sums_V.device) * sums_V[-1]
    place = int(torch.searchsorted(sums_V, target, right=True))
    last = int(weights_V.nonzero()[-1])  # rounding never draws what has no weight
    return min(place, last)


def filter_logits(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities from which a token is drawn, largest first, and the token ids in that order.

    What `top_k` and `top_p` cut off has probability 0. With `top_k` only that many columns come
    back. Probabilities are fp32 and, before `top_p`, add up to 1.
    """
    scaled_BV = logits_BV.float() / sampling.temperature
    num_columns = min(sampling.top_k or scaled_BV.shape[-1], scaled_BV.shape[-1])
    values_BK, ids_BK = scaled_BV.topk(num_columns, dim=-1, sorted=True)
    probs_BK = values_BK.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        before_BK = probs_BK.cumsum(-1) - probs_BK
        probs_BK = torch.where(before_BK < sampling.top_p, probs_BK, 0)
    return probs_BK, ids_BK
