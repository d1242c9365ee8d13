"""Sensitivity as KL divergence: how far the output moves when one decision unit alone is quantized.

Every unit in every format it may get is a run of its own, which leaves the model's at its own
layer: what enters that is kept, and all runs go through the layers behind together, each layer
loaded once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from megtool.console import Progress
from megtool.inference.evaluate import MOST_LOGITS
from megtool.parallel.collectives import all_sum
from megtool.quant.calibration.layer_runner import LayerRunner
from megtool.quant.calibration.micro_batches import MicroBatch, num_valid
from megtool.quant.mixed_precision.candidates import CandidateRun, CandidateSurvey, Passes
from megtool.quant.mixed_precision.sensitivity_cache import Key, SensitivityCache

AT_ONCE = 32
"""Runs that end, and are kept, together; the model's own run is made once more for so many."""


def by_divergence(
    survey: CandidateSurvey,
    pieces: Sequence[MicroBatch],
    memory_bytes: int,
    progress: Progress,
    cache: SensitivityCache | None = None,
) -> dict[Key, float]:
    """KL(model || model with one unit rounded), mean over the tokens of all ranks, of all runs.

    Those that `cache` knows are not made again. `pieces` are this rank's.
    """
    decoder, ranks = survey.decoder, survey.ranks
    losses: dict[Key, float] = ranks.all_gather({} if cache is None else cache.losses()[0])[0]
    runs = [r for r in survey.runs() if (r.unit.name, r.key) not in losses]
    if not runs:
        return losses
    tokens = sum(p.num_tokens for p in pieces)
    state = tokens * decoder.config.hidden_size * decoder.dtype.itemsize
    at_once = min(ranks.all_gather(max(1, min(AT_ONCE, memory_bytes // max(state, 1) - 1))))
    waves = [runs[i : i + at_once] for i in range(0, len(runs), at_once)]
    first, *_ = numbers = decoder.stage.layers
    begins: list[int] = [first, *(_behind(w[0]) for w in waves[1:])]
    head = survey.head_passes()
    passes = Passes(progress, tokens)
    for wave, begin in zip(waves, begins, strict=True):
        passes.expect(sum(n >= begin for n in numbers))
        passes.expect(sum(sum(n >= _behind(r) for n in numbers) + head for r in wave))
    survey.solve(passes)
    layers = LayerRunner(decoder, pieces)
    # What enters the layer a wave begins with; behind the last layer for the head's.
    entering = {first: list(layers.embed())}
    for number, (wave, begin) in enumerate(zip(waves, begins, strict=True)):
        later = set(begins[number + 1 :])
        states, streams = _carried(survey, layers, wave, begin, entering, later, passes)
        divergences = _divergences(survey, layers, wave, states, streams, passes, head)
        for run, loss in zip(wave, divergences, strict=True):
            losses[run.unit.name, run.key] = loss
        with ranks.raise_together():
            if cache is not None and decoder.groups.rank == 0:
                cache.record_losses(losses)
        entering = {k: x for k, x in entering.items() if k in later}
    layers.close()
    return losses


END = 1 << 30
"""Behind the last layer."""


def _behind(run: CandidateRun) -> int:
    """The layer that a run begins with."""
    return END if run.unit.layer is None else run.unit.layer


def _carried(
    survey: CandidateSurvey,
    layers: LayerRunner,
    wave: Sequence[CandidateRun],
    begin: int,
    entering: dict[int, list[Tensor]],
    later: Collection[int],
    passes: Passes,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """States behind the last layer of the model and of each run of a wave, which begins before
    layer `begin`. What enters the layers `later` is kept in `entering`."""
    states = entering[begin]
    streams: list[list[Tensor]] = [[] for _ in wave]

    def passed(layer: int, entered: Sequence[Tensor]) -> list[Tensor]:
        out = [layers.run(layer, i, x) for i, x in enumerate(entered)]
        passes(1)
        return out

    for layer in (n for n in survey.decoder.stage.layers if n >= begin):
        if layer in later:
            entering.setdefault(layer, states)
        after = passed(layer, states)
        for number, run in enumerate(wave):
            if streams[number]:
                streams[number] = passed(layer, streams[number])
            elif run.unit.layer == layer:
                with survey.simulated(run):
                    streams[number] = passed(layer, states)
        states = after
    if END in later:
        entering.setdefault(END, states)
    return states, [s or states for s in streams]  # the head's begin here


@torch.inference_mode()
def _divergences(
    survey: CandidateSurvey,
    layers: LayerRunner,
    wave: Sequence[CandidateRun],
    states: Sequence[Tensor],
    streams: Sequence[Sequence[Tensor]],
    passes: Passes,
    head: float,
) -> list[float]:
    """The mean divergence of each run's answers from the model's.

    Raises:
        CalibrationError: an answer is NaN.
    """
    decoder = survey.decoder
    sums, tokens = [0.0] * len(wave), num_valid(layers.micro_batches)
    step = max(1, MOST_LOGITS // decoder.config.vocab_size)
    for i, piece in enumerate(layers.micro_batches):
        valid_T = piece.valid_T
        picked = torch.arange(piece.num_tokens) if valid_T is None else valid_T.nonzero()[:, 0]
        for start in range(0, len(picked), step):
            some = picked[start : start + step].to(layers.device)
            log_p_CV = decoder.logits(layers.finish(states[i][some])).float().log_softmax(-1)
            p_CV = log_p_CV.exp()
            for number, run in enumerate(wave):
                alone = survey.simulated(run) if run.unit.layer is None else nullcontext()
                with alone:
                    logits_CV = decoder.logits(layers.finish(streams[number][i][some]))
                gap_CV = log_p_CV - logits_CV.float().log_softmax(-1)
                gap_CV.masked_fill_(log_p_CV == -torch.inf, 0)
                # p (gap + q / p - 1): its sum is that of p gap, and small gaps cancel term by term.
                kl_CV = torch.expm1(-gap_CV).add_(gap_CV).mul_(p_CV)
                sums[number] += float(kl_CV.sum(dtype=torch.float64))
                passes(head * len(some) / tokens)
    local_sums = torch.tensor([*sums, tokens], dtype=torch.float64, device=layers.device)
    *sums, every = all_sum(local_sums, decoder.groups.dp).tolist()
    return [run.finite(max(s / max(every, 1), 0.0)) for s, run in zip(sums, wave, strict=True)]
