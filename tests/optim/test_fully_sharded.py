"""Parameters sharded by torch's `fully_shard`, on real gloo processes, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megtool.errors import UsageError
from megtool.optim.config import OptimizerConfig
from megtool.parallel.process_groups import ProcessGroups
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.moe_layouts import rank_part
from tests.support.worlds.optimizer_layouts import (
    CLIPPED,
    MODELS,
    PLAIN,
    start,
    take_steps,
    torch_training,
    training,
)
from tests.support.worlds.sharded_training import (
    ZERO_2,
    ZERO_3,
    held_bytes,
    make_sharded,
    train_sharded,
)

Case = tuple[str, dict[str, Any], str, int, dict[str, Any]]


def layouts(rank: int, size: int, steps: int, cases: list[Case]) -> None:
    """Every case draws the curve of one process, and leaves its parameters."""
    wanted = {}
    for name, sizes, strategy, microbatches, how in cases:
        groups = start(**sizes)
        if name not in wanted:
            wanted[name] = torch_training(name, steps=steps, passes=1, clip=CLIPPED.clip_grad)
        want = wanted[name]
        got = train_sharded(
            name,
            groups,
            strategy,
            steps=steps,
            microbatches=microbatches,
            settings=CLIPPED,
            **how,
        )
        case = (name, sizes, strategy)
        assert got.losses == pytest.approx(want.losses, rel=1e-5), case
        assert got.norms == pytest.approx(want.norms, rel=1e-5), case
        assert got.zeros == want.zeros, case
        for key, value in got.parameters.items():
            part = rank_part(key, want.parameters[key], MODELS[name], groups)
            assert float((value - part).abs().max()) < 1e-5, (case, key)


TWO: list[Case] = [
    ("tied", {}, ZERO_3, 2, {}),
    ("tied", {}, ZERO_2, 1, {}),
    ("experts", {}, ZERO_3, 2, {"granularity": "full"}),
    ("experts", {"ep": 2}, ZERO_3, 1, {}),
    ("tied", {"num_instances": 2}, ZERO_3, 2, {}),
]
SLOW_TWO: list[Case] = [
    ("biases", {}, ZERO_3, 2, {"granularity": "selective"}),
    ("biases", {"tp": 2}, ZERO_2, 2, {}),
    ("deep", {"pp": 2}, ZERO_3, 4, {}),
]
FOUR: list[Case] = [
    ("experts", {"ep": 2}, ZERO_3, 2, {}),
    ("experts", {"ep": 2}, ZERO_2, 1, {"granularity": "full"}),
    ("experts", {"tp": 2, "ep": 2, "etp": 1}, ZERO_3, 1, {"sequence_parallel": True}),
    ("tied", {"tp": 2}, ZERO_3, 2, {"sequence_parallel": True}),
    ("tied", {"num_instances": 2}, ZERO_3, 1, {}),
    ("experts", {"num_instances": 2}, ZERO_2, 1, {}),
    ("experts", {"num_instances": 2, "ep": 2}, ZERO_3, 1, {}),
    ("deep", {"pp": 2}, ZERO_3, 2, {}),
    ("deep", {"pp": 2, "vpp": 2}, ZERO_3, 2, {}),
    ("deep", {"pp": 2, "vpp": 2}, ZERO_2, 2, {}),
]


def test_two_ranks_train_as_one_process() -> None:
    run_world(layouts, 2, 4, TWO)


@pytest.mark.slow
def test_further_layouts_train_as_one_process() -> None:
    run_world(layouts, 2, 20, TWO + SLOW_TWO)


@pytest.mark.slow
def test_four_ranks_train_as_one_process() -> None:
    run_world(layouts, 4, 20, FOUR)


SETTINGS = {
    "adam": CLIPPED,
    "sgd": OptimizerConfig(optimizer="sgd", lr=1e-3, clip_grad=0.5),
    "muon": OptimizerConfig(optimizer="muon", lr=1e-3, clip_grad=0.5),
    "bfloat16 moments": OptimizerConfig(exp_avg_dtype="bf16", lr=1e-3, clip_grad=0.5),
}


def other_settings(rank: int, size: int, kinds: list[str], dtype: torch.dtype) -> None:
    """Update rules in a dtype: the same curve and main parameters as of a DistributedOptimizer."""
    groups = start()
    for kind in kinds:
        settings = SETTINGS[kind]
        want, _ = training("experts", groups, steps=6, settings=settings, dtype=dtype)
        got = train_sharded(
            "experts", groups, ZERO_3, steps=6, microbatches=1, settings=settings, dtype=dtype
        )
        rel = 1e-5 if dtype == torch.float32 else 2e-3
        assert got.losses == pytest.approx(want.losses, rel=rel), kind
        assert got.norms == pytest.approx(want.norms, rel=10 * rel), kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.slow
def test_every_update_rule_is_that_of_the_distributed_optimizer(dtype: torch.dtype) -> None:
    run_world(other_settings, 2, list(SETTINGS), dtype)


def count_bytes(rank: int, size: int, strategy: str) -> dict[str, int]:
    groups = start()
    stages, optimizer = make_sharded("experts", groups, strategy, settings=PLAIN)
    take_steps(stages, optimizer, groups, range(1), 1)
    return held_bytes(stages, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ZERO_2, ZERO_3])
def test_what_a_rank_holds_falls_with_their_number(strategy: str) -> None:
    (whole,) = run_world(count_bytes, 1, strategy)
    assert whole["parameters"] == whole["gradients"] == whole["state"] // 2
    for size in (2, 4):
        ranks = run_world(count_bytes, size, strategy)
        for kind, num_bytes in whole.items():
            assert sum(r[kind] for r in ranks) == num_bytes
            assert max(r[kind] for r in ranks) <= 1.05 * num_bytes / size, (size, kind)


def gathered(rank: int, size: int, strategy: str) -> tuple[list[int], list[int]]:
    """Layers whose parameters are whole behind the forward pass, and behind the backward pass."""
    from tests.support.worlds.optimizer_layouts import Batch, data

    groups = start()
    (stage,), optimizer = make_sharded("deep", groups, strategy, settings=PLAIN)
    tokens_BS, labels_BS = data(0)
    batch = Batch(tokens_BS=tokens_BS)

    def whole_layers() -> list[int]:
        return [
            n
            for n in stage.stage.layers
            if all(not hasattr(p, "full_tensor") for p in stage.decoder.layers[str(n)].parameters())
        ]

    optimizer.zero_grad()
    (x_TH,) = stage.advance(batch, stage.frame(batch))
    behind_forward = whole_layers()
    loss, _ = stage.loss_of(x_TH, labels_BS)
    loss.backward()
    return behind_forward, whole_layers()


def test_zero_2_keeps_parameters_for_the_backward_pass_and_zero_3_does_not() -> None:
    for strategy, kept in ((ZERO_2, [0, 1, 2, 3]), (ZERO_3, [])):
        for behind_forward, behind_backward in run_world(gathered, 2, strategy):
            assert behind_forward == kept
            assert behind_backward == []


def sums_of_instances(rank: int, size: int) -> tuple[int, int, int]:
    """Elements that instances sum in a step of two passes; those of a shard; and how often."""
    import torch.distributed as dist

    groups = start(num_instances=2)
    instances, reduce, sent = groups.instances.handle, dist.all_reduce, []

    def all_reduce(flat: torch.Tensor, *args: Any, group: Any = None, **how: Any) -> Any:
        if group is instances:
            sent.append(flat.numel())
        return reduce(flat, *args, group=group, **how)

    dist.all_reduce = all_reduce
    stages, optimizer = make_sharded("tied", groups, ZERO_3, settings=PLAIN)
    take_steps(stages, optimizer, groups, range(1), 2)
    return sum(sent), sum(s.numel for s in optimizer.segments), len(sent)


def test_instances_sum_their_shards_once_per_step() -> None:
    for elements, shard, times in run_world(sums_of_instances, 4):
        assert elements == shard
        assert times == 3  # two layers, and what is outside of them


def test_one_process_has_nothing_to_share_out() -> None:
    want = torch_training("tied", steps=3, passes=1, clip=0.0)
    got = train_sharded(
        "tied", ProcessGroups.alone(), ZERO_3, steps=3, microbatches=1, settings=PLAIN
    )
    assert got.losses == want.losses


def test_remainders_are_refused() -> None:
    settings = OptimizerConfig(store_param_remainders=True)
    with pytest.raises(UsageError, match="have no remainders"):
        make_sharded("tied", ProcessGroups.alone(), ZERO_3, settings=settings)
