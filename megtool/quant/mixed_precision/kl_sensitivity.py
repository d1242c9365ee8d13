"""Sensitivity as KL divergence: how far the output moves when one decision unit alone is quantized.

Every unit in every candidate format is a run, which equals the unquantized model up to its layer.
The input of that layer is kept, and all runs pass the following layers together, so that each layer
is loaded once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from megtool.console import Progress
from megtool.errors import UsageError
from megtool.inference.evaluation.perplexity import MOST_LOGITS
from megtool.parallel.collectives import all_sum
from megtool.quant.calibration.layer_runner import LayerRunner
from megtool.quant.calibration.micro_batches import MicroBatch, num_valid
from megtool.quant.mixed_precision.candidates import CandidateRun, CandidateSurvey, Passes
from megtool.quant.mixed_precision.sensitivity_cache import Key, SensitivityCache
from megtool.spec import layer_sets

MOST_CONCURRENT_RUNS = 32
"""Runs per wave. Each wave runs the unquantized model once more and stores its losses together."""


def measure_kl_sensitivity(
    survey: CandidateSurvey,
    micro_batches: Sequence[MicroBatch],
    memory_bytes: int,
    progress: Progress,
    cache: SensitivityCache | None = None,
) -> dict[Key, float]:
    """Measure KL(model || model with one unit quantized) of all runs, the mean over the tokens of
    all ranks.

    Runs whose loss `cache` has are skipped. `micro_batches` are those of this rank.
    """
    decoder, ranks = survey.decoder, survey.ranks
    if layer_sets.has_side_inputs(decoder.config):
        raise UsageError(
            "layers of this model read more than the output of the layer before (keys and values "
            "of another, an embedding of their own), and KL is measured layer by layer",
            hint="the algorithm `gradient` measures all layers at once",
        )
    losses: dict[Key, float] = ranks.all_gather({} if cache is None else cache.losses()[0])[0]
    runs = [r for r in survey.runs() if (r.unit.name, r.key) not in losses]
    if not runs:
        return losses
    tokens = sum(p.num_tokens for p in micro_batches)
    state = tokens * decoder.config.residual_size * decoder.dtype.itemsize
    num_concurrent = min(
        ranks.all_gather(max(1, min(MOST_CONCURRENT_RUNS, memory_bytes // max(state, 1) - 1)))
    )
    waves = [runs[i : i + num_concurrent] for i in range(0, len(runs), num_concurrent)]
    first, *_ = numbers = decoder.stage.layers
    begins: list[int] = [first, *(_first_layer(w[0]) for w in waves[1:])]
    head = survey.head_passes()
    passes = Passes(progress, tokens)
    for wave, begin in zip(waves, begins, strict=True):
        passes.expect(sum(n >= begin for n in numbers))
        passes.expect(sum(sum(n >= _first_layer(r) for n in numbers) + head for r in wave))
    survey.solve(passes)
    layers = LayerRunner(decoder, micro_batches)
    # The inputs of the first layer of each wave, or of the head.
    layer_inputs = {first: list(layers.embed())}
    for number, (wave, begin) in enumerate(zip(waves, begins, strict=True)):
        later = set(begins[number + 1 :])
        states, streams = _run_wave(survey, layers, wave, begin, layer_inputs, later, passes)
        divergences = _divergences(survey, layers, wave, states, streams, passes, head)
        for run, loss in zip(wave, divergences, strict=True):
            losses[run.unit.name, run.key] = loss
        with ranks.raise_together():
            if cache is not None and decoder.groups.rank == 0:
                cache.record_losses(losses)
        layer_inputs = {k: x for k, x in layer_inputs.items() if k in later}
    layers.close()
    return losses


HEAD = 1 << 30
"""The number of the head among layers: it is after the last one."""


def _first_layer(run: CandidateRun) -> int:
    """The first layer in which a run differs from the model."""
    return HEAD if run.unit.layer is None else run.unit.layer


def _run_wave(
    survey: CandidateSurvey,
    layers: LayerRunner,
    wave: Sequence[CandidateRun],
    begin: int,
    layer_inputs: dict[int, list[Tensor]],
    later: Collection[int],
    passes: Passes,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The outputs of the last layer of the model and of each run of a wave, which starts at layer
    `begin`. Stores the inputs of the layers `later` in `layer_inputs`."""
    states = layer_inputs[begin]
    streams: list[list[Tensor]] = [[] for _ in wave]

    def run_layer(layer: int, entered: Sequence[Tensor]) -> list[Tensor]:
        out = [layers.run(layer, i, x) for i, x in enumerate(entered)]
        passes(1)
        return out

    for layer in (n for n in survey.decoder.stage.layers if n >= begin):
        if layer in later:
            layer_inputs.setdefault(layer, states)
        outputs = run_layer(layer, states)
        for number, run in enumerate(wave):
            if streams[number]:
                streams[number] = run_layer(layer, streams[number])
            elif run.unit.layer == layer:
                with survey.fake_quantized(run):
                    streams[number] = run_layer(layer, states)
        states = outputs
    if HEAD in later:
        layer_inputs.setdefault(HEAD, states)
    return states, [s or states for s in streams]  # runs of the head begin here


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
    """The mean divergence of each run's logits from the model's.

    Raises:
        CalibrationError: an answer is NaN.
    """
    decoder = survey.decoder
    sums, tokens = [0.0] * len(wave), num_valid(layers.micro_batches)
    num_local = 0
    step = max(1, MOST_LOGITS // decoder.config.embedding.vocab_size)
    for i, micro_batch in enumerate(layers.micro_batches):
        valid_T = micro_batch.valid_T
        counted_T = (
            torch.arange(micro_batch.num_tokens) if valid_T is None else valid_T.nonzero()[:, 0]
        )
        num_local += len(counted_T)
        for start in range(0, len(counted_T), step):
            tokens_C = counted_T[start : start + step].to(layers.device)
            log_p_CV = decoder.logits(layers.finish(states[i][tokens_C])).float().log_softmax(-1)
            p_CV = log_p_CV.exp()
            for number, run in enumerate(wave):
                quantized_head = (
                    survey.fake_quantized(run) if run.unit.layer is None else nullcontext()
                )
                with quantized_head:
                    logits_CV = decoder.logits(layers.finish(streams[number][i][tokens_C]))
                gap_CV = log_p_CV - logits_CV.float().log_softmax(-1)
                gap_CV.masked_fill_(log_p_CV == -torch.inf, 0)
                # p (gap + q / p - 1): its sum is that of p gap, and small gaps cancel term by term.
                kl_CV = torch.expm1(-gap_CV).add_(gap_CV).mul_(p_CV)
                sums[number] += float(kl_CV.sum(dtype=torch.float64))
                passes(head * len(tokens_C) / tokens)
    local_sums = torch.tensor([*sums, num_local], dtype=torch.float64, device=layers.device)
    *sums, total = all_sum(local_sums, decoder.groups.replicas).tolist()
    return [run.finite(max(s / max(total, 1), 0.0)) for s, run in zip(sums, wave, strict=True)]
