"""bf16 and fp16 parameters with fp32 main parameters: accumulation, loss scales, overflows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from megtool.errors import MappingError, UsageError
from megtool.optim.config import OptimizerConfig
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.optim.scaler import DynamicGradScaler
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from tests.support.models.small_models import Small, batches, sum_loss, train_step
from tests.support.worlds.gloo_world import run_world


def plain(
    model: nn.Module, groups: ProcessGroups | None = None, **settings: Any
) -> ReplicatedOptimizer:
    made = OptimizerConfig(**{"lr": 1e-2, **settings})
    return ReplicatedOptimizer(model.named_parameters(), made, groups or ProcessGroups.alone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_main_parameters_are_those_of_adamw_on_the_same_gradients(dtype: torch.dtype) -> None:
    model = Small(dtype)
    optimizer = plain(model, loss_scale=1024.0, clip_grad=1.0)
    mains = [p.detach().float().requires_grad_() for p in model.parameters()]
    real = torch.optim.AdamW(
        [
            {"params": [p for p in mains if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in mains if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        fused=True,
    )
    for x, y in batches(20):
        copy = Small(dtype)
        with torch.no_grad():
            for p, q in zip(copy.parameters(), mains, strict=True):
                p.copy_(q)
        sums = [torch.zeros_like(q) for q in mains]
        for rows, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            copy.zero_grad()
            (sum_loss(copy, rows, wanted) * 1024.0).backward()
            for total, p in zip(sums, copy.parameters(), strict=True):
                total += p.grad.float()  # type: ignore[union-attr]
        for q, total in zip(mains, sums, strict=True):
            q.grad = total / 1024.0
        # The factor of the clip and that of the loss scale are one number here: both powers of 2.
        nn.utils.clip_grad_norm_(mains, 1.0)
        real.step()
        assert train_step(optimizer, model, x, y, microbatches=2).ok
        for s, p, q in zip(optimizer.segments, model.parameters(), mains, strict=True):
            assert s.main is not None
            assert torch.equal(s.main.view_as(q), q)
            assert torch.equal(p, q.to(dtype))
            assert p.grad is None


def test_remainders_train_as_float32_main_parameters_do() -> None:
    one, two = Small(torch.bfloat16), Small(torch.bfloat16)
    first = plain(one)
    second = plain(two, store_param_remainders=True)
    for x, y in batches(20):
        train_step(first, one, x, y)
        train_step(second, two, x, y)
    for a, b in zip(first.segments, second.segments, strict=True):
        assert b.main is None
        assert torch.equal(a.read_main(0, a.numel), b.read_main(0, b.numel))


def test_long_parameters_pass_in_parts_with_the_same_bits() -> None:
    g = torch.Generator().manual_seed(0)
    start = torch.randn(1_000_001, generator=g).bfloat16()
    grads = [torch.randn(len(start), generator=g).bfloat16() for _ in range(2)]
    ends = []
    for remainders in (False, True):
        p = nn.Parameter(start.clone())
        made = OptimizerConfig(store_param_remainders=remainders)
        optimizer = ReplicatedOptimizer([("w", p)], made, ProcessGroups.alone())
        for grad in grads:
            optimizer.zero_grad()
            (p * grad).sum().backward()
            optimizer.finish(torch.tensor(1))
            assert optimizer.step(1e-2, 0.1).ok
        ends.append(optimizer.segments[0].read_main(0, len(start)))
    assert torch.equal(*ends)


def test_bf16_moments_follow_fp32_ones() -> None:
    one, two = Small(), Small()
    first, second = plain(one), plain(two, exp_avg_dtype="bf16")
    losses = []
    for x, y in list(batches(1)) * 60:
        train_step(first, one, x, y)
        train_step(second, two, x, y)
        losses.append((sum_loss(one, x, y).item(), sum_loss(two, x, y).item()))
    assert second.segments[0].states["exp_avg_sq"].dtype == torch.bfloat16
    assert losses[-1][0] < 0.5 * losses[0][0]
    assert math.isclose(*losses[-1], rel_tol=0.02)


def test_an_fp16_overflow_skips_lowers_the_scale_and_training_goes_on() -> None:
    model = Small(torch.float16)
    optimizer = plain(model, initial_loss_scale=2.0**24, hysteresis=2, loss_scale_window=4)
    x, y = next(batches(1))
    scales, oks = [], []
    for _ in range(40):
        before = [p.detach().clone() for p in model.parameters()]
        result = train_step(optimizer, model, x, y)
        scales.append(result.loss_scale)
        oks.append(result.ok)
        moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert moved == result.ok
        if not result.ok:
            assert result.first_nonfinite is not None
    assert oks[:2] == [False, False]
    assert scales[:3] == [2.0**24, 2.0**24, 2.0**23]  # the first is let pass
    assert any(oks)
    assert optimizer.num_steps == sum(oks)
    assert "grad_scaler" in optimizer.small_state()


def overflow(rank: int, size: int, bad: int, kind: str) -> tuple[Any, ...]:
    parallel = ParallelConfig(dp=size) if kind == "dp" else ParallelConfig(tp=size)
    groups = ProcessGroups.start(parallel)
    model = Small(torch.float16)
    for p in model.parameters():
        p.tensor_model_parallel = kind == "tp"  # type: ignore[attr-defined]
    optimizer = plain(model, groups, initial_loss_scale=4.0, hysteresis=1, clip_grad=0.0)
    x, y = next(batches(1))
    optimizer.zero_grad()
    optimizer.scale_loss(sum_loss(model, x, y)).backward()
    if rank == bad:
        optimizer._sums[id(model.fc2.weight)][0] = math.inf
    optimizer.finish(torch.tensor(1.0))
    first = optimizer.step(1e-2, 0.1)
    second = train_step(optimizer, model, x, y)
    out = first.ok, first.first_nonfinite, optimizer.loss_scale, second.ok, second.grad_norm
    groups.stop()
    return out


@pytest.mark.parametrize("kind", ["dp", "tp"])
def test_an_overflow_on_one_rank_skips_on_all(kind: str) -> None:
    results = run_world(overflow, 2, 1, kind)
    assert results[0] == results[1]
    ok, name, scale, ok_again, _ = results[0]
    # Replicas have summed by then, so that all of them have it.
    assert (ok, name) == (False, f"fc2.weight (rank {0 if kind == 'dp' else 1})")
    assert (scale, ok_again) == (2.0, True)


def replicas(rank: int, size: int, steps: int) -> list[Any]:
    groups = ProcessGroups.start(ParallelConfig(dp=size))
    model = Small()
    optimizer = plain(model, groups)
    norms = []
    for x, y in batches(steps):
        norms.append(
            train_step(optimizer, model, x.chunk(size)[rank], y.chunk(size)[rank], labels=8)
        )
    groups.stop()
    return [[n.grad_norm for n in norms], [p.tolist() for p in model.parameters()]]


@pytest.mark.parametrize("size", [2, 4])
def test_replicas_train_as_one_process_does(size: int) -> None:
    model = Small()
    optimizer = plain(model)
    norms = [train_step(optimizer, model, x, y, labels=8).grad_norm for x, y in batches(10)]
    results = run_world(replicas, size, 10)
    assert all(r == results[0] for r in results)
    torch.testing.assert_close(results[0][0], norms, rtol=1e-5, atol=0)
    for p, q in zip(results[0][1], model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(p), q.detach(), rtol=0, atol=2e-5)


def test_remainders_of_fp16_are_refused() -> None:
    with pytest.raises(UsageError, match="remainders need bfloat16"):
        plain(Small(torch.float16), store_param_remainders=True)


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(MappingError, match="float64"):
        plain(Small(torch.float64))


def test_an_optimizer_that_is_gone_leaves_gradients_to_the_next() -> None:
    model = Small(torch.bfloat16)
    optimizer = plain(model)
    del optimizer
    sum_loss(model, *next(batches(1))).backward()
    assert model.fc1.weight.grad is not None


def test_one_parameter_in_fp16_is_enough_for_a_loss_scale() -> None:
    model = nn.ModuleList([nn.Linear(2, 2).half(), nn.Linear(2, 2)])
    assert isinstance(plain(model).scaler, DynamicGradScaler)
    assert not isinstance(plain(model[1]).scaler, DynamicGradScaler)
