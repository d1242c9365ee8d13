"""The rank grid against megatron-core's own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.config import ParallelConfig
from megtool.errors import LayoutError
from megtool.parallel.mesh import Mesh, stage_of_layers


@pytest.mark.parametrize(
    ("dense", "experts"),
    [
        ({"tp": 2, "cp": 2, "dp": 3, "pp": 2}, {"etp": 1, "ep": 3}),
        ({"tp": 4, "cp": 1, "dp": 2, "pp": 2}, {"etp": 2, "ep": 4}),
        ({"tp": 1, "cp": 2, "dp": 4, "pp": 3}, {"etp": 1, "ep": 8}),
    ],
)
def test_groups_equal_megatrons(dense: dict[str, int], experts: dict[str, int]) -> None:
    state = pytest.importorskip("megatron.core.parallel_state")
    p = ParallelConfig(**dense, **experts)
    order = "tp-cp-ep-dp-pp"
    ranks = np.arange(p.world_size)
    where = Mesh(p).position(ranks)
    dense_ranks = state.RankGenerator(**dense, ep=1, order=order)
    expert_ranks = state.RankGenerator(
        tp=p.etp, ep=p.ep, dp=p.expert_dp, pp=p.pp, cp=1, order=order
    )
    own = {"tp": ("tp", dense_ranks, "tp"), "cp": ("cp", dense_ranks, "cp")}
    own |= {"dp": ("dp", dense_ranks, "dp"), "pp": ("pp", dense_ranks, "pp")}
    own |= {"etp": ("tp", expert_ranks, "etp"), "ep": ("ep", expert_ranks, "ep")}
    own |= {"edp": ("dp", expert_ranks, "edp")}
    for axis, (token, generator, _) in own.items():
        for group in generator.get_ranks(token):
            assert where[axis][group].tolist() == list(range(len(group)))


@given(*[st.integers(1, 4)] * 4, st.integers(1, 3))
def test_positions_invert(tp: int, cp: int, pp: int, ep: int, etp: int) -> None:
    p = ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    mesh, ranks = Mesh(p), np.arange(p.world_size)
    at = mesh.position(ranks)
    dense = mesh.rank(tp=at["tp"], cp=at["cp"], dp=at["dp"], pp=at["pp"])
    expert = mesh.expert_rank(etp=at["etp"], ep=at["ep"], edp=at["edp"], pp=at["pp"])
    assert (dense == ranks).all()
    assert (expert == ranks).all()


def test_stages_follow_megatrons_offsets() -> None:
    pp, vpp, layers = 2, 3, 12
    expected = np.empty(layers, int)
    for v in range(vpp):
        for p in range(pp):
            offset = v * (layers // vpp) + p * (layers // vpp // pp)
            expected[offset : offset + layers // vpp // pp] = p
    assert stage_of_layers(layers, pp, vpp).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"pp": -1}, "pp is -1"),
        ({"ep": 2.0}, "ep is 2.0"),
        ({"tp": 1, "ep": 4, "dp": 6}, "does not divide"),
        ({"vpp": 2}, "vpp=2"),
    ],
)
def test_impossible_sizes_are_named(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        ParallelConfig(**sizes)


def test_data_parallel_grows_to_hold_the_experts() -> None:
    assert ParallelConfig(tp=4, ep=32).dp == 32
    assert ParallelConfig(tp=4, ep=32, etp=1).dp == 8
    assert ParallelConfig(tp=4, ep=2, etp=1).dp == 1
