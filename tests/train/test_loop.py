"""The loop: the same numbers as torch's own optimizer, and every reason to stop."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool.data.packing import PackedRows
from megtool.errors import LayoutError, TrainingError, UsageError
from megtool.inference.collate import collate_rows
from megtool.options.config_file import build_options
from megtool.options.layout import ParallelConfig
from megtool.train.evaluation import evaluate
from megtool.train.features.registry import TrainingFeatures
from megtool.train.loop import patience_exhausted
from megtool.train.options.config import TrainConfig
from megtool.train.run_plan import RunPlan, plan_run
from tests.support.errors import raises
from tests.support.models import tiny_text
from tests.support.runs.loop_runs import job, load, losses, run
from tests.support.runs.numbered_data import LENGTH, Numbers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save(tmp_path_factory.mktemp("made") / "model")


@pytest.mark.parametrize("clip_grad", [0.0, 0.5])
def test_a_run_is_torchs_own_adamw_bit_for_bit(model: Path, clip_grad: float) -> None:
    mine = job(model, clip_grad=clip_grad, lr_warmup_iters=1, min_lr=1e-4, weight_decay=0.1)
    found = losses(mine)

    (decoder,) = load(model)
    decay = [p for p in decoder.parameters() if p.dim() > 1]
    plain = [p for p in decoder.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decay}, {"params": plain, "weight_decay": 0.0}],
        weight_decay=0.1,
        betas=(0.9, 0.999),
        fused=True,
    )
    expected = []
    for step in range(4):
        batch, labels = collate_rows(Numbers().rows(4 * step, 4), torch.device("cpu"))
        adam.zero_grad()
        total = 0.0
        for row in range(4):
            one = replace(batch, tokens_BS=batch.tokens_BS[row : row + 1])
            loss, _ = decoder.loss(one, labels[row : row + 1])
            loss.backward()
            total = (torch.tensor(total) + loss.detach()).item()
        grads = [p.grad for p in decoder.parameters() if p.grad is not None]
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().item() / 64
        factor = 1 / 64 * (min(1.0, clip_grad / (norm + 1e-6)) if clip_grad else 1.0)
        torch._foreach_mul_(grads, factor)
        lr = 1e-3 * step if step <= 1 else 1e-4 + (1 - (step - 1) / 3) * 9e-4
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        expected.append(total / 64)
    if clip_grad:  # a norm summed in another order is another factor, in its last bits
        assert found == pytest.approx(expected, rel=1e-6)
    else:
        assert found == expected


def test_rows_at_once_change_nothing_but_rounding(model: Path) -> None:
    one, two, four = (losses(job(model, micro_batch_size=n)) for n in (1, 2, 4))
    assert one == pytest.approx(two, abs=1e-6)
    assert one == pytest.approx(four, abs=1e-6)


@pytest.mark.parametrize("options", [{"granularity": "full"}, {"granularity": "selective"}])
def test_recomputing_changes_no_bit(model: Path, options: dict[str, Any]) -> None:
    plain = losses(job(model))
    again = losses_with_recompute(model, **options)
    assert plain == again


def losses_with_recompute(model: Path, **options: Any) -> list[float]:
    from megtool.model.stacks.recompute import recompute

    mine = job(model)
    assert recompute(mine.stages, num_layers=None, **options) == 2
    return losses(mine)


def test_frozen_parameters_stay(model: Path) -> None:
    mine = job(model, freeze=("embedding.*", "*layernorm*"))
    before = {n: p.clone() for n, p in mine.stages[0].named_parameters()}
    losses(mine)
    for name, p in mine.stages[0].named_parameters():
        frozen = name.startswith("embedding.") or "layernorm" in name
        assert torch.equal(p, before[name]) == frozen, name
    with pytest.raises(UsageError, match="--freeze 'nothing'"):
        job(model, freeze=("nothing",))


def test_an_evaluation_is_the_mean_over_all_labels(model: Path) -> None:
    stages = load(model)
    expected = [
        stages[0].loss(*collate_rows(Numbers().rows(n, 1), torch.device("cpu")))[0].item()
        for n in range(5)
    ]
    found = evaluate(stages, Numbers(5), micro_batch_size=2)
    assert found.num_labels == 5 * LENGTH
    assert found.loss == pytest.approx(sum(expected) / (5 * LENGTH), rel=1e-6)
    assert evaluate(stages, Numbers(5), micro_batch_size=2, num_samples=3).num_labels == 3 * LENGTH
    assert stages[0].training


def test_a_loss_that_is_nan_stops_and_names_the_first_tensor(model: Path) -> None:
    mine = job(model)
    weight = mine.stages[0].decoder.layers["1"].mlp.linear_fc1.weight
    with torch.no_grad():
        weight[3, 2] = float("nan")
    with raises(
        TrainingError, tensor="decoder.layers.1.mlp.linear_fc1.weight", hint="no checkpoint yet"
    ) as caught:
        losses(mine)
    assert caught.value.message == "step 1: the loss is nan"


def test_an_activation_that_overflows_is_named(model: Path) -> None:
    mine = job(model)
    fc2 = mine.stages[0].decoder.layers["0"].mlp.linear_fc2
    fc2.register_forward_hook(lambda module, inputs, out: out * 1e38 * 1e10)
    with pytest.raises(TrainingError) as caught:
        losses(mine)
    assert (caught.value.tensor or "").startswith("output of decoder.layers.0.mlp.linear_fc2")


def test_trouble_is_looked_for_in_the_very_passes_of_the_step(model: Path) -> None:
    mine = job(model, hidden_dropout=0.5, micro_batch_size=1, global_batch_size=4)
    mine = replace(mine, features=TrainingFeatures.prepare(mine.settings, mine.stages))
    layers, seen = mine.stages[0].decoder.layers, []
    layers["0"].register_forward_hook(lambda module, inputs, out: seen.append(out.detach().clone()))
    layers["1"].mlp.linear_fc2.register_forward_hook(lambda module, inputs, out: out * math.inf)
    with pytest.raises(TrainingError) as caught:
        losses(mine)
    assert (caught.value.tensor or "").startswith("output of decoder.layers.1.mlp.linear_fc2")
    assert len(seen) == 8
    assert seen[0].shape[0] == LENGTH
    assert not torch.equal(seen[0], seen[1])
    assert all(torch.equal(a, b) for a, b in zip(seen[:4], seen[4:], strict=True))


def test_a_gradient_that_is_nan_stops_with_its_parameter(model: Path) -> None:
    mine = job(model)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    mine.stages[0].get_parameter(name).register_hook(lambda g: g * float("nan"))
    with raises(TrainingError, tensor=f"gradient of {name}"):
        losses(mine)


def test_fp16_skips_overflows_and_goes_on(model: Path) -> None:
    mine = job(model, dtype="float16", fp16=True, train_iters=24, initial_loss_scale=2.0**32)
    outcome = run(mine)
    steps = [x for x in mine.log.lines if "loss" in x]
    skipped = [x for x in steps if x["skipped"]]
    assert outcome.skipped == len(skipped) > 2
    assert not steps[-1]["skipped"]
    assert steps[-1]["loss_scale"] < steps[0]["loss_scale"]
    good = 0
    for x in steps:  # the schedule waits for good steps
        assert x["lr"] == pytest.approx(1e-3 * (1 - good / 24))
        good += not x["skipped"]
    assert steps[-1]["consumed_samples"] == 96


def test_patience_and_time_end_a_run(model: Path) -> None:
    tired = replace(
        job(model, train_iters=8, eval_interval=1, patience=2, lr=0.0, eval_split=0.5),
        eval_dataset=Numbers(2),
    )
    assert run(tired).stop_reason == "patience"
    assert tired.log.lines[-1]["iteration"] == 2
    late = job(model, exit_duration_in_mins=1e-9)
    outcome = run(late)
    assert (outcome.stop_reason, outcome.iteration) == ("time", 1)


def test_sigterm_ends_a_run_after_its_step(model: Path) -> None:
    class Signals(Numbers):
        def rows(self, first: int, count: int) -> PackedRows:
            if first == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().rows(first, count)

    before = signal.getsignal(signal.SIGTERM)
    outcome = run(
        replace(job(model, exit_signal_handler=True, prefetch_steps=0), dataset=Signals())
    )
    assert (outcome.stop_reason, outcome.iteration) == ("signal", 2)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_ends_after_its_step(model: Path, number: signal.Signals) -> None:
    class Signals(Numbers):
        def rows(self, first: int, count: int) -> PackedRows:
            if first == 4:
                os.kill(os.getpid(), number)
            return super().rows(first, count)

    before = signal.getsignal(number)
    outcome = run(replace(job(model, prefetch_steps=0), dataset=Signals()))
    assert (outcome.stop_reason, outcome.iteration) == ("interrupt", 2)
    assert signal.getsignal(number) is before


def test_a_second_signal_stops_at_once(model: Path) -> None:
    class Signals(Numbers):
        def rows(self, first: int, count: int) -> PackedRows:
            if first == 4:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return super().rows(first, count)

    with pytest.raises(KeyboardInterrupt):
        run(replace(job(model, prefetch_steps=0), dataset=Signals()))


def test_patience_counts_evaluations_since_the_best() -> None:
    curve = [(n, x) for n, x in enumerate((3.0, 2.0, 2.5, 2.1))]
    assert not patience_exhausted(curve, 3)
    assert patience_exhausted(curve, 2)
    assert not patience_exhausted(curve[:2], 2)


def test_a_plan_says_what_fits() -> None:
    def plan(replicas: int = 2, samples: int = 100, **options: Any) -> RunPlan:
        settings = build_options(TrainConfig, options)
        return plan_run(
            settings, seq_length=8, num_samples=samples, layout=ParallelConfig(dp=replicas)
        )

    assert plan(global_batch_size=8, micro_batch_size=2).num_microbatches == 2
    assert plan(global_batch_size=8).train_iters == 13  # one pass over 100 rows
    assert plan(global_batch_size=8, epochs=0.5).train_iters == 7
    assert (plan().global_batch_size, plan(micro_batch_size=3).global_batch_size) == (2, 6)
    with pytest.raises(LayoutError) as caught:
        plan(replicas=3, global_batch_size=8, micro_batch_size=2)
    assert caught.value.hint == "the nearest multiple: 6 or 12"
    with pytest.raises(UsageError, match="no sample"):
        plan(samples=0)
