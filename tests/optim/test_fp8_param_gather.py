"""Weights that are FP8 alone, on real processes: what quantizing the whole main parameter gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from megtool.errors import UsageError
from megtool.kernels.fp8.cast import dequantize, quantize_blocks, quantize_tensor
from megtool.optim.config import OptimizerConfig
from megtool.optim.cpu_offload import HybridDeviceOptimizer
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.fp8.config import Fp8Config, Recipe
from megtool.optim.fp8.linear import fp8_product
from megtool.optim.fp8.scaling import make_scaling
from megtool.optim.fp8.weights import (
    cast_part,
    find_fp8_weight,
    mark_for_gather,
    marked_block,
    part_amaxes,
    scale_of_amax,
    weight_values,
)
from megtool.optim.optimizer import Optimizer
from megtool.parallel.process_groups import ProcessGroups
from tests.support.models.small_models import Small, batches, train_step
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.optimizer_layouts import start

HOW = OptimizerConfig(lr=1e-2)
BLOCK = (128, 128)


class Fp8Small(Small):
    """Its linear layers multiply in FP8."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, recipe: Recipe = "tensorwise") -> None:
        super().__init__(dtype)
        self.scaling = make_scaling(Fp8Config(fp8_recipe=recipe))
        for linear in (self.fc1, self.fc2):
            mark_for_gather(linear.weight, BLOCK if recipe == "blockwise" else (0, 0))

    def forward(self, x: Tensor) -> Tensor:
        inner = fp8_product(x, self.fc1.weight, self.scaling) + self.fc1.bias
        inner = torch.tanh(self.norm(inner))
        return fp8_product(inner, self.fc2.weight, self.scaling) + self.fc2.bias


def whole_mains(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
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


def check(model: Small, optimizer: Optimizer) -> None:
    optimizer.wait_for_parameters()
    mains = whole_mains(optimizer, model)
    for name, p in model.named_parameters():
        main, held = mains[name].view(p.shape), find_fp8_weight(p)
        if p.dim() == 1:
            assert held is None
            assert torch.equal(p.detach(), main.to(p.dtype))
            continue
        assert held is not None
        assert p.untyped_storage().nbytes() == p.element_size()  # no copy beside the bytes
        assert p.isnan().all()
        want = quantize_tensor(main, "e4m3")
        if marked_block(p) == BLOCK:
            want = quantize_blocks(main, "e4m3", power_of_two=True)
        assert torch.equal(held.values.data.view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(held.values.scale_inv, want.scale_inv)
        assert float(held.amax.max()) == float(main.abs().max())
        assert torch.equal(weight_values(p), dequantize(want, p.dtype))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: weight_values(p).clone() for n, p in model.named_parameters()}


def on_ranks(
    rank: int, size: int, overlap: bool, bucket_size: int | None, offload: float, recipe: Recipe
) -> None:
    groups = start() if size > 1 else ProcessGroups.alone()
    model = Fp8Small(recipe=recipe)
    first = values_of(model)
    how = OptimizerConfig(
        lr=1e-2,
        overlap_param_gather=overlap,
        overlap_grad_reduce=overlap,
        ddp_bucket_size=bucket_size,
        optimizer_offload_fraction=offload,
    )
    inner = DistributedOptimizer(
        model.named_parameters(), how, groups, chunks=[model], fp8_param_gather=True
    )
    optimizer = HybridDeviceOptimizer(inner) if offload else inner
    check(model, optimizer)
    assert all(torch.equal(v, first[n]) for n, v in values_of(model).items() if v.dim() == 1)
    for i, (x, y) in enumerate(batches(4)):
        train_step(optimizer, model, x.chunk(size)[rank], y.chunk(size)[rank])
        if i != 1:  # once the next forward pass waits for itself
            check(model, optimizer)
    before, mains = values_of(model), whole_mains(optimizer, model)
    states = ("exp_avg", "exp_avg_sq")
    optimizer.load(
        lambda state, name: torch.zeros_like(mains[name]) if state in states else mains[name]
    )
    check(model, optimizer)
    assert all(torch.equal(v, before[n]) for n, v in values_of(model).items())
    with torch.no_grad():  # as a checkpoint is loaded into a model
        for p in model.parameters():
            p.data = torch.full(p.shape, 0.5, dtype=p.dtype)
    optimizer.reload_parameters()
    check(model, optimizer)
    assert all(bool((v == 0.5).all()) for v in values_of(model).values())
    inner.close()
    assert find_fp8_weight(model.fc1.weight) is None
    assert torch.equal(model.fc1.weight, torch.full((12, 7), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("overlap", "bucket_size", "offload", "recipe"),
    [
        (False, None, 0.0, "tensorwise"),
        (True, 70, 0.0, "tensorwise"),
        (False, None, 0.5, "tensorwise"),
        (True, 70, 0.0, "blockwise"),
    ],
)
def test_two_processes_hold_the_quantized_main_parameters(
    overlap: bool, bucket_size: int | None, offload: float, recipe: Recipe
) -> None:
    run_world(on_ranks, 2, overlap, bucket_size, offload, recipe)


def test_three_processes_that_cut_through_parameters() -> None:
    run_world(on_ranks, 3, False, None, 0.0, "blockwise")


@pytest.mark.parametrize("offload", [0.0, 1.0])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_one_process_does_the_same(offload: float, recipe: Recipe) -> None:
    on_ranks(0, 1, False, None, offload, recipe)


def test_a_model_in_fp32_has_main_parameters_of_its_own() -> None:
    model = Fp8Small(torch.float32)
    optimizer = DistributedOptimizer(
        model.named_parameters(),
        HOW,
        ProcessGroups.alone(),
        chunks=[model],
        fp8_param_gather=True,
    )
    x, y = next(batches(1))
    train_step(optimizer, model, x, y)
    check(model, optimizer)


def test_it_trains_as_with_values_beside_the_bytes() -> None:
    """Rounding a weight in every pass, or once when it is gathered, is the same."""
    models = [Fp8Small(torch.float32), Fp8Small(torch.float32)]
    losses: list[list[Tensor]] = [[], []]
    for model, seen, fp8 in zip(models, losses, (True, False), strict=True):
        optimizer = DistributedOptimizer(
            model.named_parameters(),
            HOW,
            ProcessGroups.alone(),
            chunks=[model],
            fp8_param_gather=fp8,
        )
        for x, y in batches(4):
            train_step(optimizer, model, x, y)
            seen.append((model(x) - y).square().sum().detach())
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))


def test_it_is_refused_where_nothing_is_gained_or_main_parameters_would_be_lost() -> None:
    for model, settings, message in (
        (Small(torch.bfloat16), {}, "no parameter is used in FP8"),
        (Fp8Small(), {"store_param_remainders": True}, "low bits"),
    ):
        how = replace(HOW, **settings)
        with pytest.raises(UsageError, match=message):
            DistributedOptimizer(
                model.named_parameters(),
                how,
                ProcessGroups.alone(),
                chunks=[model],
                fp8_param_gather=True,
            )


@pytest.mark.parametrize("block", [(0, 0), (4, 8), (128, 128)])
@pytest.mark.parametrize("shape", [(10, 20), (3, 10, 20)])
def test_parts_of_a_weight_give_the_whole(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    """Wherever ranks cut through it, experts' stacks included."""
    main = torch.randn(shape) * torch.rand(shape[:-1]).unsqueeze(-1).exp()
    flat, size = main.flatten(), main.numel()
    matrices = main if main.dim() == 3 else main.unsqueeze(0)
    for cuts in ([0, size], [0, 7, 133, 200, size], [0, 1, size - 1, size]):
        spans = [(a, b) for a, b in pairwise(cuts) if a < b]
        parts = [part_amaxes(flat[a:b], a, main.shape, block) for a, b in spans]
        scale = scale_of_amax(torch.stack(parts).amax(0), block)
        codes = torch.cat(
            [cast_part(flat[a:b], a, main.shape, block, scale) for a, b in spans]
        ).view(matrices.shape)
        for e, matrix in enumerate(matrices):
            if block == (0, 0):
                want = quantize_tensor(matrix, "e4m3")
            else:
                want = quantize_blocks(matrix, "e4m3", block=block, power_of_two=True)
            assert torch.equal(codes[e], want.data.view(torch.uint8))
            assert torch.equal(1 / scale[e].view(want.scale_inv.shape), want.scale_inv)
