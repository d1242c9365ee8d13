"""Sensitivity of each decision unit, estimated from one backward pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megtool.console import Progress
from megtool.inference.windows import IGNORED
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import places
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.micro_batches import (
    MicroBatch,
    move_to_device,
    next_tokens,
    num_valid,
    shard_micro_batches,
    split_rows,
)
from megtool.quant.calibration.rank_sync import RankSync
from megtool.quant.mixed_precision.candidates import CandidateRun, CandidateSurvey, Passes
from megtool.quant.mixed_precision.sensitivity_cache import Key, SensitivityCache
from megtool.quant.recipes.decision_units import DecisionUnit

BACKWARD_TOKENS = 1024
"""Tokens per backward pass; all of their activations are in memory."""


_Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], None]


@dataclass(frozen=True, slots=True)
class _RecordedInput:
    """A call of a module of a decision unit: its inputs, its output, and the gradient of the
    output.
    """

    unit: DecisionUnit
    module: nn.Module
    inputs: tuple[Any, ...]
    options: dict[str, Any]
    output: Tensor
    gradient: list[Tensor]


def measure_gradient_sensitivity(
    survey: CandidateSurvey,
    micro_batches: Sequence[MicroBatch],
    progress: Progress,
    cache: SensitivityCache | None = None,
) -> dict[Key, float]:
    """Measure the sensitivity of all runs by gradient.

    The estimate is half the sum over outputs y of (dL/dy)^2 (quantized y - y)^2, the mean over
    tokens. With L the loss of the tokens, this is the KL divergence to second order if outputs were
    independent of each other (the diagonal of the empirical Fisher information). Resumes after the
    last micro-batch whose sums `cache` has. Data-parallel ranks split `micro_batches`.
    """
    ranks, groups = survey.ranks, survey.decoder.groups
    runs: dict[str, list[CandidateRun]] = {}
    for run in survey.runs():
        runs.setdefault(run.unit.name, []).append(run)
    sums = {(r.unit.name, r.key): 0.0 for some in runs.values() for r in some}
    parts = [p for micro_batch in micro_batches for p in split_rows(micro_batch, BACKWARD_TOKENS)]
    local_parts, tokens, done = shard_micro_batches(parts, groups), num_valid(parts), 0
    losses, count = ranks.all_gather(({}, 0) if cache is None else cache.losses())[0]
    if losses.keys() == sums.keys() and count <= len(local_parts):
        done = count
        sums = losses if groups.rank == 0 else sums
    passes, num_layers = Passes(progress, BACKWARD_TOKENS), len(survey.decoder.stage.layers)
    # Forward, backward at twice the cost, and one run of a unit's modules per format.
    most = max((len(some) for some in runs.values()), default=0)
    cost = 3 * (num_layers + survey.head_passes()) + most * num_layers
    passes.expect(cost * sum(passes.of(p.num_tokens) for p in local_parts[done:]))
    if done < len(local_parts):
        survey.solve(passes)
        simulations = {
            id(run): survey.fake_quantized(run) for some in runs.values() for run in some
        }
    for number, micro_batch in enumerate(local_parts[done:], start=done):
        with ranks.raise_together():
            calls = _backward(survey, micro_batch) if micro_batch.is_counted else []
            part = cost * passes.of(micro_batch.num_tokens) / max(len(calls), 1)
            while calls:
                call = calls.pop()
                for run in runs.get(call.unit.name, ()):
                    with simulations[id(run)]:
                        sums[run.unit.name, run.key] += _estimate_loss(call)
                passes(part)
            for run in (r for some in runs.values() for r in some):
                run.finite(sums[run.unit.name, run.key])
        if cache is not None:
            _record(cache, _sum_over_ranks(sums, groups), number + 1, ranks)
    return {key: x / tokens for key, x in _sum_over_ranks(sums, groups).items()}


def _sum_over_ranks(sums: Mapping[Key, float], groups: ProcessGroups) -> dict[Key, float]:
    """Add up the sums of all data-parallel ranks."""
    local_sums = torch.tensor(list(sums.values()), dtype=torch.float64, device=groups.device)
    return dict(zip(sums, all_sum(local_sums, groups.dp).tolist(), strict=True))


def _record(
    cache: SensitivityCache, sums: Mapping[Key, float], num_pieces: int, ranks: RankSync
) -> None:
    with ranks.raise_together():
        if ranks.groups.rank == 0:
            cache.record_losses(sums, num_pieces)


def _backward(survey: CandidateSurvey, micro_batch: MicroBatch) -> list[_RecordedInput]:
    """Run a micro-batch forward and backward; returns all calls of the units' modules."""
    decoder = survey.decoder
    calls: list[_RecordedInput] = []

    def make_hook(unit: DecisionUnit) -> _Hook:
        def hook(
            module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Tensor
        ) -> None:
            tensors: list[Tensor] = []
            output.register_hook(tensors.append)  # type: ignore[no-untyped-call]
            detached = tuple(i.detach() if isinstance(i, Tensor) else i for i in inputs)
            calls.append(_RecordedInput(unit, module, detached, options, output.detach(), tensors))

        return hook

    handles = []
    try:
        for unit in survey.units:
            if unit.layer is None:
                continue
            modules = {
                id(p.module): p.module
                for site in survey.sites_of(unit)
                for p in places(decoder, site.name)
            }
            hook = make_hook(unit)
            handles += [m.register_forward_hook(hook, with_kwargs=True) for m in modules.values()]
        with torch.enable_grad():
            batch = move_to_device(micro_batch, decoder.groups.device).batch
            frame = decoder.frame(batch)
            x_TH = decoder.embed(batch, frame).detach().requires_grad_()
            states_TH = decoder.finish(decoder.run(x_TH, frame))
            logits_TV = decoder.logits(states_TH)
            for unit in (u for u in survey.units if u.layer is None):
                make_hook(unit)(_Head(decoder), (states_TH,), {}, logits_TV)
            loss = F.cross_entropy(
                logits_TV.float(),
                next_tokens(batch).flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
            torch.autograd.backward(loss)
    finally:
        for handle in handles:
            handle.remove()
        decoder.rotary.forget()
    return calls


class _Head(nn.Module):
    """The head as a module; its weight may be shared."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.__dict__["decoder"] = decoder

    def forward(self, x_TH: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.__dict__["decoder"].logits(x_TH)
        return out


@torch.no_grad()
def _estimate_loss(call: _RecordedInput) -> float:
    """The estimated loss of a call with the module's current parameters."""
    if not call.gradient:  # an output that no counted token depends on
        return 0.0
    output = call.module(*call.inputs, **call.options)
    change = (output.float() - call.output.float()) * call.gradient[0].float()
    return 0.5 * float(change.square_().sum(dtype=torch.float64))
