"""Groups on real gloo processes against the ranks that megatron-core's own generator names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megtool.errors import LayoutError, MissingPackageError
from megtool.options.layout import ParallelConfig
from megtool.parallel.collectives import all_sum
from megtool.parallel.mesh import MEGATRON_ORDER, PIPELINE_BEFORE_DATA
from megtool.parallel.process_groups import (
    Group,
    ProcessGroups,
    check_instances,
    fit,
    order_kernels,
)
from tests.support.errors import raises
from tests.support.worlds.gloo_world import run_world

AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "expert_dp", "replicas", "ends", "world")
LAYOUTS: tuple[tuple[dict[str, int], str], ...] = (
    ({"tp": 2, "pp": 2}, MEGATRON_ORDER),
    ({"tp": 2, "ep": 2}, MEGATRON_ORDER),
    ({"tp": 2, "ep": 2, "etp": 1}, MEGATRON_ORDER),
    ({"pp": 2, "dp": 2}, PIPELINE_BEFORE_DATA),
    ({"cp": 2}, "cp-tp-ep-dp-pp"),
    ({"pp": 4}, MEGATRON_ORDER),
)


def join(rank: int, size: int) -> list[dict[str, Any]]:
    out = []
    world = ProcessGroups.start(ParallelConfig())  # the following do not own it
    for sizes, order in LAYOUTS:
        groups = ProcessGroups.start(ParallelConfig(**sizes), order=order)
        seen: dict[str, Any] = {"grown": groups.parallel.dp, "owns": groups.owns_world}
        for axis in AXES:
            group: Group = getattr(groups, axis)
            total = torch.tensor(float(rank))
            if group.handle is not None:
                dist.all_reduce(total, group=group.handle)
            seen[axis] = (group.ranks, group.rank, total.item())
        groups.stop()  # it is not theirs to stop
        assert dist.is_initialized()
        out.append(seen)
    assert world.owns_world
    world.stop()
    with pytest.raises(LayoutError, match="no connection to ranks"):
        all_sum(torch.ones(1), world.world)
    assert not dist.is_initialized()
    return out


def again(rank: int, size: int) -> list[float]:
    """Worlds one after the other; ranks reach the next one at different times."""
    out = []
    for turn in range(5):
        groups = ProcessGroups.start(ParallelConfig(tp=size if turn % 2 else 1), timeout_s=30)
        total = all_sum(torch.tensor(float(rank + turn)), groups.world)
        out.append(total.item())
        if turn % 2 == rank:
            time.sleep(0.05)
        groups.stop()
    return out


def test_a_world_may_follow_another() -> None:
    expected = [1.0 + 2 * turn for turn in range(5)]
    assert run_world(again, 2, timeout_s=60) == [expected, expected]


@pytest.fixture(scope="module")
def joined() -> list[list[dict[str, Any]]]:
    return run_world(join, 4)


def test_every_group_sums_over_exactly_its_ranks(joined: list[list[dict[str, Any]]]) -> None:
    for rank, layouts in enumerate(joined):
        for seen in layouts:
            assert not seen["owns"]
            for axis in AXES:
                ranks, place, total = seen[axis]
                assert ranks[place] == rank
                assert total == sum(ranks)


def test_data_parallelism_fills_the_world(joined: list[list[dict[str, Any]]]) -> None:
    assert [seen["grown"] for seen in joined[0]] == [1, 2, 2, 2, 2, 1]
    assert fit(ParallelConfig(tp=2, ep=4), 16).dp == 8


def test_tied_embeddings_are_shared_by_the_outer_stages(
    joined: list[list[dict[str, Any]]],
) -> None:
    four_stages = LAYOUTS.index(({"pp": 4}, MEGATRON_ORDER))
    assert [layouts[four_stages]["ends"][0] for layouts in joined] == [(0, 3), (1,), (2,), (0, 3)]


@pytest.mark.peers
def test_groups_equal_megatrons(joined: list[list[dict[str, Any]]]) -> None:
    state = pytest.importorskip("megatron.core.parallel_state")
    for (sizes, order), *seen in zip(LAYOUTS, *joined, strict=True):
        p = fit(ParallelConfig(**sizes), 4)
        dense = state.RankGenerator(tp=p.tp, cp=p.cp, dp=p.dp, pp=p.pp, ep=1, order=order)
        expert = state.RankGenerator(tp=p.etp, ep=p.ep, dp=p.expert_dp, pp=p.pp, cp=1, order=order)
        own = {axis: (dense, axis) for axis in ("tp", "cp", "pp", "dp")}
        own |= {"replicas": (dense, "dp-cp"), "etp": (expert, "tp"), "ep": (expert, "ep")}
        own |= {"expert_dp": (expert, "dp")}
        for axis, (generator, token) in own.items():
            for ranks in generator.get_ranks(token):
                for rank in ranks:
                    assert seen[rank][axis][0] == tuple(ranks), (sizes, axis)


INSTANCES = ({}, {"tp": 2}, {"cp": 2}, {"ep": 2}, {"tp": 2, "ep": 2, "etp": 1})


def instances(rank: int, size: int) -> list[tuple[tuple[int, ...], ...]]:
    out = []
    for sizes in INSTANCES:
        groups = ProcessGroups.start(ParallelConfig(**sizes), num_instances=2)
        names = ("shards", "instances", "expert_shards", "expert_instances")
        out.append(tuple(getattr(groups, name).ranks for name in names))
        groups.stop()
    return out


def megatron_instances(rank: int, size: int) -> list[tuple[tuple[int, ...], ...]]:
    from megatron.core import parallel_state as state

    dist.init_process_group("gloo")
    out = []
    for sizes in INSTANCES:
        state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.get("tp", 1),
            context_parallel_size=sizes.get("cp", 1),
            expert_model_parallel_size=sizes.get("ep", 1),
            expert_tensor_parallel_size=sizes.get("etp"),
            num_distributed_optimizer_instances=2,
        )
        groups = (
            state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
            state._INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP,
            state.get_expert_data_parallel_group(partial_expert_data_parallel=True),
            state._INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP,
        )
        out.append(tuple(tuple(dist.get_process_group_ranks(g)) for g in groups))
        state.destroy_model_parallel()
    return out


def test_instances_divide_replicas() -> None:
    found = run_world(instances, 4)
    assert [r[0][:2] for r in found] == [
        ((0, 1), (0, 2)),
        ((0, 1), (1, 3)),
        ((2, 3), (0, 2)),
        ((2, 3), (1, 3)),
    ]
    with pytest.raises(LayoutError, match="3 instances of the distributed optimizer do not divide"):
        check_instances(ParallelConfig(dp=4), 3)


@pytest.mark.slow
def test_instances_equal_megatrons() -> None:
    pytest.importorskip("megatron.core.parallel_state")
    pytest.importorskip("einops", reason="megatron-core makes these groups with it")
    assert run_world(instances, 4) == run_world(megatron_instances, 4)


def stages(rank: int, size: int) -> list[tuple[tuple[int, ...], float]]:
    """The ranks of a stage, and their sum over its group."""
    out = []
    world = ProcessGroups.start(ParallelConfig())
    for sizes in ({"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "pp": 2}, {"pp": 4}, {"tp": 2}, {"pp": 8}):
        stage = ProcessGroups.start(ParallelConfig(**sizes)).stage()
        out.append((stage.ranks, all_sum(torch.tensor(float(rank)), stage).item()))
    world.stop()
    return out


@pytest.mark.slow
def test_a_stage_has_all_ranks_of_its_layers() -> None:
    for rank, seen in enumerate(run_world(stages, 8, timeout_s=120)):
        half = tuple(range(4)) if rank < 4 else tuple(range(4, 8))
        pair = (rank - rank % 2, rank - rank % 2 + 1)
        assert [ranks for ranks, _ in seen[:4]] == [half, half, pair, tuple(range(8))]
        assert all(total == sum(ranks) for ranks, total in seen[:4])
        assert seen[4] == ((rank,), float(rank))
    assert ProcessGroups.alone().stage().size == 1


def test_one_process_initialises_nothing() -> None:
    for groups in (ProcessGroups.alone(), ProcessGroups.start(ParallelConfig(), environment={})):
        assert not dist.is_initialized()
        assert {getattr(groups, axis).size for axis in AXES} == {1}
        assert groups.tp.is_first
        assert groups.pp.is_last
        groups.stop()


@pytest.mark.parametrize(
    ("sizes", "world", "said", "hint"),
    [
        ({"tp": 4}, 2, "tp=4 needs 4 processes, and there are 2", "tp that do: 1, 2"),
        ({"tp": 2, "pp": 3}, 4, "tp=2 x pp=3 needs 6 processes", "fits 6, 12, 18, ... processes"),
        ({"tp": 3, "pp": 2}, 4, "tp=3 x pp=2 needs 6", "with 4, sizes of tp that do: 1, 2"),
        ({"tp": 2, "ep": 8}, 4, "tp=2 x dp=8 needs 16", "fits 16, 32, 48"),
    ],
)
def test_a_world_that_does_not_fit_is_told_what_would(
    sizes: dict[str, int], world: int, said: str, hint: str
) -> None:
    with pytest.raises(LayoutError) as error:
        ProcessGroups.start(
            ParallelConfig(**sizes), environment={"RANK": "0", "WORLD_SIZE": str(world)}
        )
    assert said in error.value.message
    assert hint in str(error.value.hint)
    assert not dist.is_initialized()


def test_a_layout_of_several_ranks_needs_torchrun() -> None:
    with raises(LayoutError, "2 processes", "1"):
        ProcessGroups.start(ParallelConfig(tp=2), environment={})
    with pytest.raises(LayoutError, match="torchrun"):
        ProcessGroups.start(ParallelConfig(), environment={"WORLD_SIZE": "two"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("size", ["1", "2"])
def test_a_gpu_that_is_not_there_is_an_error(size: str) -> None:
    with raises(MissingPackageError, hint="--device cpu") as error:
        ProcessGroups.start(
            ParallelConfig(), device="cuda", environment={"RANK": "0", "WORLD_SIZE": size}
        )
    assert "CUDA device 0, and there are 0" in error.value.message


def test_kernels_start_in_the_order_of_their_calls() -> None:
    for layout, want in (({"tp": 2}, "1"), ({"cp": 2}, "1"), ({"pp": 2}, None), ({"dp": 4}, None)):
        environment: dict[str, str] = {}
        order_kernels(ParallelConfig(**layout), environment)
        assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == want
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    order_kernels(ParallelConfig(tp=2), environment)
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def test_a_part_that_does_not_divide_is_told_what_would() -> None:
    with raises(LayoutError, "4", "heads=6", "1, 2, 3, 6"):
        Group(ranks=(0, 1, 2, 3)).part(6, "heads")


SCRIPT = """
import os
import torch
from megtool.options.layout import ParallelConfig
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import ProcessGroups

groups = ProcessGroups.start(ParallelConfig(tp=2))
total = int(all_sum(torch.tensor(groups.rank + 1), groups.tp))
os.write(1, f"sum {total}\\n".encode())  # in one piece, whatever the other rank writes
groups.stop()
"""


@pytest.mark.slow
def test_torchrun_gives_what_is_needed(tmp_path: Path, checkout: Path) -> None:
    script = tmp_path / "sums.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3") == 2
