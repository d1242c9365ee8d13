"""Divergence: how far a model's answers move when one unit of it alone is rounded.

Every unit in every format it may get is a run of its own, which leaves the model's at its own
layer: what enters that is kept, and all runs go through the layers behind together, each layer
loaded once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megtool.inference.evaluate import MOST_LOGITS
from megtool.log import Progress
from megtool.quant.calibration.layers import Layers
from megtool.quant.calibration.pieces import Piece
from megtool.quant.choosing.survey import Run, Survey


def by_divergence(
    survey: Survey, pieces: Sequence[Piece], memory_bytes: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """KL(model || model with one unit rounded), mean over tokens, of all runs."""
    survey.settle()
    decoder, runs = survey.decoder, survey.runs()
    state = sum(p.num_tokens for p in pieces) * decoder.config.hidden_size * decoder.dtype.itemsize
    at_once = max(1, memory_bytes // max(state, 1) - 1)
    waves = [runs[i : i + at_once] for i in range(0, len(runs), at_once)]
    layers = Layers(decoder, pieces)
    # What enters the layer a wave begins with; behind the last layer for the head's.
    entering = {decoder.stage.layers[0]: list(layers.embed())}
    starts = [w[0].unit.layer for w in waves]
    begins: list[int | None] = [decoder.stage.layers[0], *starts[1:]]
    losses: dict[str, dict[str, float]] = {u.name: {} for u in survey.units}
    for number, (wave, begin) in enumerate(zip(waves, begins, strict=True)):
        later = {END if b is None else b for b in begins[number + 1 :]}
        at = END if begin is None else begin
        states, streams = _carried(survey, layers, wave, at, entering, later)
        for run, loss in zip(
            wave, _divergences(survey, layers, wave, states, streams), strict=True
        ):
            losses[run.unit.name][run.key] = loss
        entering = {k: x for k, x in entering.items() if k in later}
        progress("sensitivity", len(wave), len(runs))
    layers.close()
    return losses


END = -1
"""Behind the last layer."""


def _carried(
    survey: Survey,
    layers: Layers,
    wave: Sequence[Run],
    begin: int,
    entering: dict[int, list[Tensor]],
    later: Collection[int],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """States behind the last layer of the model and of each run of a wave, which begins before
    layer `begin`. What enters the layers `later` is kept in `entering`."""
    states = entering[begin]
    streams: list[list[Tensor]] = [[] for _ in wave]
    for layer in survey.decoder.stage.layers:
        if begin == END or layer < begin:
            continue
        if layer in later:
            entering.setdefault(layer, states)
        after = [layers.run(layer, i, x) for i, x in enumerate(states)]
        for number, run in enumerate(wave):
            if streams[number]:
                streams[number] = [layers.run(layer, i, x) for i, x in enumerate(streams[number])]
            elif run.unit.layer == layer:
                with survey.simulated(run):
                    streams[number] = [layers.run(layer, i, x) for i, x in enumerate(states)]
        states = after
    if END in later:
        entering.setdefault(END, states)
    return states, [s or states for s in streams]  # the head's begin here


@torch.inference_mode()
def _divergences(
    survey: Survey,
    layers: Layers,
    wave: Sequence[Run],
    states: Sequence[Tensor],
    streams: Sequence[Sequence[Tensor]],
) -> list[float]:
    """The mean divergence of each run's answers from the model's.

    Raises:
        CalibrationError: an answer is NaN.
    """
    decoder = survey.decoder
    sums, tokens = [0.0] * len(wave), 0
    step = max(1, MOST_LOGITS // decoder.config.vocab_size)
    for i, piece in enumerate(layers.pieces):
        base_TH = layers.finish(states[i])
        ours = [layers.finish(xs[i]) for xs in streams]
        valid_T = piece.valid_T
        count = piece.num_tokens
        picked = torch.arange(count) if valid_T is None else valid_T.nonzero()[:, 0]
        tokens += len(picked)
        for at in range(0, len(picked), step):
            some = picked[at : at + step].to(base_TH.device)
            log_p_CV = decoder.logits(base_TH[some]).float().log_softmax(-1)
            p_CV = log_p_CV.exp()
            for number, run in enumerate(wave):
                if run.unit.layer is None:
                    with survey.simulated(run):
                        logits_CV = decoder.logits(ours[number][some])
                else:
                    logits_CV = decoder.logits(ours[number][some])
                gap_CV = log_p_CV - logits_CV.float().log_softmax(-1)
                gap_CV.masked_fill_(log_p_CV == -torch.inf, 0)
                # p (gap + q / p - 1): its sum is that of p gap, and small gaps cancel term by term.
                kl_CV = torch.expm1(-gap_CV).add_(gap_CV).mul_(p_CV)
                sums[number] += float(kl_CV.sum(dtype=torch.float64))
    return [run.finite(max(s / max(tokens, 1), 0.0)) for s, run in zip(sums, wave, strict=True)]
