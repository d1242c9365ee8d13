"""Parameters gathered as FP8 on real processes: what quantizing the whole main parameter gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megtool.errors import UsageError
from megtool.kernels.fp8 import dequantize, quantize_tensor
from megtool.optim.config import OptimizerConfig
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.fp8.fp8_param_gather import forget, gathered_fp8_weight, mark_for_gather
from megtool.parallel.process_groups import ProcessGroups
from tests.support.models.small_models import Small, batches, train_step
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.optimizer_layouts import start

SETTINGS: dict[str, Any] = {"lr": 1e-2, "fp8_param_gather": True}


def marked(dtype: torch.dtype = torch.bfloat16) -> Small:
    model = Small(dtype)
    for linear in (model.fc1, model.fc2):
        mark_for_gather(linear.weight)
    return model


def whole_mains(optimizer: DistributedOptimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The main parameters, put together from all ranks, as fp32."""
    whole = {n: torch.zeros(p.numel()) for n, p in model.named_parameters()}
    for piece in optimizer.pieces():
        if piece.state == "main":
            whole[piece.parameter][piece.start : piece.stop] = piece.tensor
    group = optimizer.groups.replicas
    for held in whole.values():
        if group.handle is not None:
            torch.distributed.all_reduce(held, group=group.handle)
    return whole


def check(model: Small, optimizer: DistributedOptimizer) -> None:
    optimizer.wait_for_parameters()
    mains = whole_mains(optimizer, model)
    for name, p in model.named_parameters():
        main, held = mains[name].view(p.shape), gathered_fp8_weight(p)
        if p.dim() == 1:
            assert held is None
            assert torch.equal(p.detach(), main.bfloat16())
            continue
        assert held is not None
        want = quantize_tensor(main, "e4m3")
        assert torch.equal(held.values.data.view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(held.values.scale_inv, want.scale_inv)
        assert torch.equal(held.amax, main.abs().max())
        assert torch.equal(p.detach(), dequantize(want, torch.bfloat16))


def on_ranks(rank: int, size: int, overlap: bool, bucket_size: int | None) -> None:
    groups = start() if size > 1 else ProcessGroups.alone()
    model = marked()
    how = OptimizerConfig(
        **SETTINGS,
        overlap_param_gather=overlap,
        overlap_grad_reduce=overlap,
        bucket_size=bucket_size,
    )
    optimizer = DistributedOptimizer(model.named_parameters(), how, groups, chunks=[model])
    for i, (x, y) in enumerate(batches(4)):
        train_step(optimizer, model, x.chunk(size)[rank], y.chunk(size)[rank])
        if i != 1:  # once the next forward pass waits for itself
            check(model, optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    mains = whole_mains(optimizer, model)
    states = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0.0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer.load(
        lambda state, name: torch.zeros_like(mains[name]) if state in states else mains[name]
    )
    check(model, optimizer)
    assert all(torch.equal(p.detach(), before[n]) for n, p in model.named_parameters())
    optimizer.reload_parameters()
    assert gathered_fp8_weight(model.fc1.weight) is None
    optimizer.close()


@pytest.mark.parametrize(("overlap", "bucket_size"), [(False, None), (True, 70)])
def test_two_processes_hold_the_quantized_main_parameters(
    overlap: bool, bucket_size: int | None
) -> None:
    run_world(on_ranks, 2, overlap, bucket_size)


def test_three_processes_that_cut_through_parameters() -> None:
    run_world(on_ranks, 3, False, None)


def test_one_process_does_the_same() -> None:
    on_ranks(0, 1, False, None)


def test_it_is_refused_where_main_parameters_would_be_lost_or_nothing_gained() -> None:
    for model, settings, message in (
        (Small(torch.bfloat16), {}, "no parameter is used in FP8"),
        (marked(torch.float32), {}, "own main"),
        (marked(), {"main_params": "remainder"}, "own main"),
        (marked(), {"offload_fraction": 0.5}, "on the host"),
    ):
        how = OptimizerConfig(**SETTINGS, **settings)
        with pytest.raises(UsageError, match=message):
            DistributedOptimizer(
                model.named_parameters(), how, ProcessGroups.alone(), chunks=[model]
            )


def test_what_was_gathered_can_be_forgotten() -> None:
    model = marked()
    how = OptimizerConfig(**SETTINGS)
    optimizer = DistributedOptimizer(
        model.named_parameters(), how, ProcessGroups.alone(), chunks=[model]
    )
    x, y = next(batches(1))
    train_step(optimizer, model, x, y)
    assert gathered_fp8_weight(model.fc1.weight) is not None
    forget(model.fc1.weight)
    forget(model.fc1.weight)
    assert gathered_fp8_weight(model.fc1.weight) is None
