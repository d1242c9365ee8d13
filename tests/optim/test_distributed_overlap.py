"""Overlap: the same bits, and communication under way when it is said to be."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from megtool.errors import UsageError
from megtool.model.stacks.decoder import Decoder
from megtool.optim.distributed import DistributedOptimizer
from megtool.parallel.process_groups import ProcessGroups
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.optimizer_layouts import PLAIN, start, training
from tests.support.worlds.overlap_settings import OVERLAPPED, SMALL


def same_bits(rank: int, size: int, name: str, sizes: dict[str, int]) -> None:
    groups = start(**sizes)
    want, _ = training(name, groups, steps=5, microbatches=2, settings=SMALL)

    def slow(stages: list[Decoder]) -> None:
        """Ranks are late by turns."""
        for layer in stages[0].decoder.layers.values():
            layer.register_forward_pre_hook(lambda *_: time.sleep(0.01 * (rank == 0)))
            layer.register_full_backward_hook(lambda *_: time.sleep(0.01 * (rank == size - 1)))

    for how in (
        replace(SMALL, overlap_grad_reduce=True),
        replace(SMALL, overlap_param_gather=True),
        OVERLAPPED,
    ):
        got, optimizer = training(
            name, groups, steps=5, microbatches=2, settings=how, prepared=slow
        )
        assert got.losses == want.losses
        for key, value in want.parameters.items():
            assert torch.equal(got.parameters[key], value), key
        several = how.overlap_grad_reduce and groups.pp.is_first
        assert (len(optimizer.buffers[0].buckets) > 2) == several


@pytest.mark.parametrize("name", ["tied", "experts"])
def test_overlap_changes_no_bit(name: str) -> None:
    run_world(same_bits, 2, name, {})


@pytest.mark.slow
def test_overlap_changes_no_bit_of_a_pipeline() -> None:
    run_world(same_bits, 4, "deep", {"pp": 2, "vpp": 2})
    run_world(same_bits, 4, "biases", {"pp": 2})


def order_of_sums(rank: int, size: int) -> list[int]:
    """How many buckets were sent when the embedding's gradient came, backward pass by pass."""
    counts: list[int] = []
    optimizers: list[DistributedOptimizer] = []

    def watch(stages: list[Decoder]) -> None:
        assert stages[0].embedding is not None
        words = stages[0].embedding.word_embeddings.weight
        words.register_post_accumulate_grad_hook(
            lambda _: counts.append(len(optimizers[0].grad_reduce.sent))
        )

    _, optimizer = training(
        "biases",
        start(),
        steps=2,
        microbatches=2,
        settings=OVERLAPPED,
        prepared=watch,
        made=lambda _, made: optimizers.append(made),
    )
    buckets = optimizer.buffers[0].buckets
    assert optimizer.grad_reduce.sent == list(buckets)
    last = [m.param_info.name for m in buckets[-1].members]
    assert last[-1] == "embedding.word_embeddings.weight"
    return [*counts, len(buckets)]


def test_buckets_are_sent_while_the_last_backward_pass_runs() -> None:
    for one, two, three, four, num_buckets in run_world(order_of_sums, 2):
        # The first step counts how often gradients come, and its buckets are sent at its end.
        assert (one, two, three) == (0, 0, 0)
        assert four == num_buckets - 1 > 2


def order_of_gathers(rank: int, size: int) -> None:
    """Before a module runs, its buckets are under way; then they are there, and later ones not."""
    before: dict[str, set[str]] = {}
    within: dict[str, set[str]] = {}
    optimizers: list[DistributedOptimizer] = []

    def names() -> set[str]:
        under_way = optimizers[0].param_gather.under_way
        return {m.param_info.name for bucket in under_way for m in bucket.members}

    def note(where: dict[str, set[str]], name: str) -> None:
        if optimizers[0].num_steps == 1:  # the pass behind the first step
            where.setdefault(name, names())

    def watch(where: dict[str, set[str]], decoder: Decoder) -> None:
        for name, module in decoder.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: note(where, name))

    def made(stages: list[Decoder], optimizer: DistributedOptimizer) -> None:
        optimizers.append(optimizer)
        watch(within, stages[0])

    _, optimizer = training(
        "biases",
        start(),
        steps=2,
        settings=OVERLAPPED,
        prepared=lambda stages: watch(before, stages[0]),
        made=made,
    )
    words, fc2 = "embedding.word_embeddings", "decoder.layers.1.mlp.linear_fc2"
    assert f"{words}.weight" in before[words]
    assert f"{words}.weight" not in within[words]
    assert f"{fc2}.weight" in within[words]
    assert f"{fc2}.weight" in before[fc2]
    assert f"{fc2}.weight" not in within[fc2]
    # No module is called for the output matrix: it is there from the start.
    assert "output_layer.weight" not in before[words]
    assert not optimizer.param_gather.under_way


def test_parameters_are_waited_for_before_they_are_used() -> None:
    run_world(order_of_gathers, 2)


class Branches(nn.Module):
    """Two ways through, a matrix that is used twice, and one that is read by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.ways = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.named = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.first(x))))
        return self.ways[way](x) @ self.named.weight


def branches(groups: ProcessGroups, ways: list[list[int]], *, overlap: bool) -> list[torch.Tensor]:
    """Parameters after steps of microbatches, each of which goes one way on each replica."""
    module = Branches()
    module.first.bias.requires_grad_(False)
    settings = replace(OVERLAPPED if overlap else PLAIN, ddp_bucket_size=100 if overlap else None)
    optimizer = DistributedOptimizer(module.named_parameters(), settings, groups, chunks=[module])
    assert all(f.name != "first.bias" for f in optimizer.param_infos)
    for step, taken in enumerate(ways):
        optimizer.zero_grad()
        optimizer.begin(len(taken) // groups.dp.size)
        for n, way in enumerate(taken):
            if n % groups.dp.size == groups.dp.rank:
                torch.manual_seed(10 * step + n)
                module(torch.randn(4, 8), way).square().sum().backward()
        optimizer.finish(torch.tensor(4 * len(taken)))
        assert optimizer.step(1e-2, 0.1).ok
    optimizer.wait_for_parameters()
    return [p.detach().clone() for p in module.parameters()]


# Which way each microbatch of a step goes: not all ways are gone in each step, or on each replica.
WAYS = [[0, 0], [0, 1], [1, 1], [1, 0, 0, 0], [0, 1, 0, 1], [0, 0]]


def uneven(rank: int, size: int) -> None:
    want = branches(ProcessGroups.alone(), WAYS, overlap=False)
    groups = start()
    for overlap in (False, True):
        for got, wanted in zip(branches(groups, WAYS, overlap=overlap), want, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-6, rtol=0)


def test_what_a_step_does_not_use_is_zero_and_holds_nobody_up() -> None:
    run_world(uneven, 2)


def test_a_parameter_that_nothing_uses_stays_but_for_its_decay() -> None:
    module = Branches()
    before = module.ways[1].weight.detach().clone()
    optimizer = DistributedOptimizer(module.named_parameters(), OVERLAPPED, ProcessGroups.alone())
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.begin(1)
        module(torch.randn(4, 8), 0).sum().backward()
        optimizer.finish(torch.tensor(1))
        optimizer.step(1e-2, 0.5)
    assert module.ways[1].weight.grad is None
    torch.testing.assert_close(module.ways[1].weight.detach(), before * (1 - 1e-2 * 0.5) ** 3)


def late(rank: int, size: int) -> str:
    module = Branches()
    optimizer = DistributedOptimizer(module.named_parameters(), OVERLAPPED, start())
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.begin(1)
        module(torch.ones(4, 8), 0).sum().backward()
        optimizer.finish(torch.tensor(1))
    with pytest.raises(UsageError) as found:
        module(torch.ones(4, 8), 0).sum().backward()
    optimizer.close()
    return str(found.value)


def test_a_gradient_that_comes_too_late_is_named() -> None:
    for message in run_world(late, 2):
        assert "a gradient of named.weight arrived after its bucket was sent" in message
