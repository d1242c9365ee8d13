"""The distributed optimizer on real gloo processes, against torch's AdamW in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megtool.parallel.process_groups import ProcessGroups
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.moe_layouts import rank_part
from tests.support.worlds.optimizer_layouts import (
    CLIPPED,
    MODELS,
    Curve,
    start,
    torch_training,
    training,
)

STEPS = 20


def largest_difference(got: Curve, want: Curve, name: str, groups: ProcessGroups) -> float:
    """Between parameters of this rank and their parts of the whole model's."""
    config = MODELS[name]
    return max(
        float((value - rank_part(key, want.parameters[key], config, groups)).abs().max())
        for key, value in got.parameters.items()
    )


@pytest.mark.parametrize("name", ["tied", "biases", "experts"])
def test_one_process_is_torch_bit_for_bit(name: str) -> None:
    want = torch_training(name, steps=STEPS, passes=2, clip=0.0)
    groups = ProcessGroups.alone()
    got, _ = training(name, groups, steps=STEPS, microbatches=2)
    assert got.losses == want.losses
    assert largest_difference(got, want, name, groups) == 0


def replicas(rank: int, size: int, name: str) -> None:
    groups = start()
    assert groups.dp.size == size
    want = torch_training(name, steps=STEPS, passes=size, clip=0.0)
    got, _ = training(name, groups, steps=STEPS)
    assert largest_difference(got, want, name, groups) == 0


@pytest.mark.parametrize("size", [2, 4])
def test_replicas_are_one_process_bit_for_bit(size: int) -> None:
    """With a microbatch for each replica: sums go in the order of ranks, as one process does it."""
    run_world(replicas, size, "tied")


def layouts(rank: int, size: int, cases: list[tuple[str, dict[str, Any], int]]) -> list[float]:
    """20 steps under each layout, with clipping."""
    worst, wanted = [], {}
    for name, how, microbatches in cases:
        sizes = dict(how)
        sequence_parallel = bool(sizes.pop("sequence_parallel", False))
        groups = start(**sizes)
        if name not in wanted:
            wanted[name] = torch_training(name, steps=STEPS, passes=1, clip=CLIPPED.clip_grad)
        got, _ = training(
            name,
            groups,
            steps=STEPS,
            microbatches=microbatches,
            settings=CLIPPED,
            sequence_parallel=sequence_parallel,
        )
        assert got.losses == pytest.approx(wanted[name].losses, rel=1e-5), how
        assert got.norms == pytest.approx(wanted[name].norms, rel=1e-5), how
        assert got.zeros == wanted[name].zeros, how
        assert max(got.norms) > 2 * CLIPPED.clip_grad
        off = largest_difference(got, wanted[name], name, groups)
        assert off < 1e-5, (how, off)
        worst.append(off)
    return worst


TWO: list[tuple[str, dict[str, Any], int]] = [
    ("tied", {"dp": 2}, 2),
    ("tied", {"tp": 2, "sequence_parallel": True}, 1),
    ("tied", {"pp": 2}, 4),
    ("experts", {"ep": 2}, 1),
    ("tied", {"num_instances": 2}, 2),
]
FOUR: list[tuple[str, dict[str, Any], int]] = [
    ("tied", {"pp": 2}, 2),
    ("tied", {"tp": 2, "sequence_parallel": True}, 2),
    ("deep", {"pp": 2, "vpp": 2}, 2),
    ("experts", {"ep": 2}, 2),
    ("experts", {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, 1),
    ("tied", {"num_instances": 2}, 2),
    ("experts", {"num_instances": 2}, 1),
    ("experts", {"num_instances": 2, "ep": 2}, 1),
    ("biases", {"tp": 2, "pp": 2}, 2),
    ("biases", {"tp": 2, "pp": 2, "sequence_parallel": True}, 2),
]


def test_two_ranks_train_as_one_process() -> None:
    run_world(layouts, 2, TWO)


@pytest.mark.slow
def test_four_ranks_train_as_one_process() -> None:
    run_world(layouts, 4, FOUR, timeout_s=300)


def two_levels(rank: int, size: int) -> tuple[list[tuple[tuple[int, ...], int]], int]:
    """What the reductions of a step of two instances sum, over which ranks; and the gradient."""
    import torch.distributed as dist

    from megtool.optim import flat_shards

    groups = start(num_instances=2)
    sent: list[tuple[tuple[int, ...], int]] = []
    scatter, reduce = flat_shards.start_reduce_scatters, dist.all_reduce

    def start_scatters(flats: Any, group: Any, **how: Any) -> Any:
        sent.extend((group.ranks, flat.numel()) for flat in flats)
        return scatter(flats, group, **how)

    def all_reduce(flat: torch.Tensor, group: Any = None, **how: Any) -> Any:
        if how.get("async_op"):
            sent.append((tuple(dist.get_process_group_ranks(group)), flat.numel()))
        return reduce(flat, group=group, **how)

    from megtool.optim import grad_reduce

    grad_reduce.start_reduce_scatters = start_scatters
    dist.all_reduce = all_reduce
    _, optimizer = training("tied", groups, steps=1)
    return sent, sum(b.grads.numel() for b in optimizer.buffers)


def test_instances_sum_no_more_than_their_shards() -> None:
    for rank, (sent, num_elements) in enumerate(run_world(two_levels, 4)):
        first = rank // 2 * 2
        within = [n for ranks, n in sent if ranks == (first, first + 1)]
        between = [n for ranks, n in sent if ranks == (rank % 2, rank % 2 + 2)]
        assert sum(within) == num_elements
        assert sum(between) == num_elements // 2
        assert len(sent) == len(within) + len(between)
        assert [ranks for ranks, _ in sent[: len(within)]] == [(first, first + 1)] * len(within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["tied", "biases", "experts"])
def test_gradient_accumulation_fusion_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    groups = ProcessGroups.alone()
    fused, plain = (
        training(
            name,
            groups,
            steps=5,
            microbatches=2,
            settings=replace(CLIPPED, gradient_accumulation_fusion=fuse),
            dtype=dtype,
        )[0]
        for fuse in (True, False)
    )
    assert fused.losses == plain.losses
    assert fused.norms == plain.norms
    assert largest_difference(fused, plain, name, groups) == 0


def fused_layouts(rank: int, size: int, cases: list[dict[str, Any]]) -> None:
    """Both ways under each layout, with gradients that are sent as soon as they are complete."""
    for how in cases:
        sizes = dict(how)
        sequence_parallel = bool(sizes.pop("sequence_parallel", False))
        name = "experts" if "ep" in sizes else "tied"
        groups = start(**sizes)
        fused, plain = (
            training(
                name,
                groups,
                steps=4,
                microbatches=2,
                settings=replace(
                    CLIPPED, overlap_grad_reduce=True, gradient_accumulation_fusion=fuse
                ),
                sequence_parallel=sequence_parallel,
            )
            for fuse in (True, False)
        )
        assert fused[0].losses == plain[0].losses, how
        assert all(
            torch.equal(value, plain[0].parameters[key])
            for key, value in fused[0].parameters.items()
        ), how
        sent = [len(optimizer.grad_reduce.sent) for _, optimizer in (fused, plain)]
        assert sent[0] == sent[1] > 0, how


def test_fused_sums_are_sent_like_the_others() -> None:
    cases = [{"dp": 2}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"ep": 2}]
    run_world(fused_layouts, 2, cases)
