"""The rank grid against megatron-core's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig
from megtool.parallel.mesh import MEGATRON_ORDER, PIPELINE_BEFORE_DATA, Mesh
from tests.support.errors import raises

orders = st.one_of(
    st.sampled_from((MEGATRON_ORDER, PIPELINE_BEFORE_DATA)),
    st.permutations(("tp", "cp", "ep", "dp", "pp")).map("-".join),
)


@pytest.mark.peers
@given(*[st.integers(1, 4)] * 6, orders)
def test_groups_equal_megatrons(
    tp: int, cp: int, pp: int, ep: int, etp: int, times: int, order: str
) -> None:
    state = pytest.importorskip("megatron.core.parallel_state")
    least = ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    p = replace(least, dp=least.dp * times)
    dense = state.RankGenerator(tp=tp, cp=cp, dp=p.dp, pp=pp, ep=1, order=order)
    expert = state.RankGenerator(tp=etp, ep=ep, dp=p.expert_dp, pp=pp, cp=1, order=order)
    try:
        mesh = Mesh(p, order)
    except LayoutError:  # Megatron's own check of the two
        assert dense.get_ranks("pp") != expert.get_ranks("pp")
        return
    assert dense.get_ranks("pp") == expert.get_ranks("pp")
    where = mesh.position(np.arange(p.world_size))
    own = {axis: (axis, dense) for axis in ("tp", "cp", "dp", "pp")}
    own |= {"etp": ("tp", expert), "ep": ("ep", expert), "edp": ("dp", expert)}
    for axis, (token, generator) in own.items():
        for group in generator.get_ranks(token):
            assert where[axis][group].tolist() == list(range(len(group)))
    for group in dense.get_ranks("dp-cp"):  # replicas of a dense shard
        assert len({(int(where["tp"][r]), int(where["pp"][r])) for r in group}) == 1
        if order in (MEGATRON_ORDER, PIPELINE_BEFORE_DATA):  # and their order
            replica = where["dp"][group] * cp + where["cp"][group]
            assert replica.tolist() == list(range(len(group)))


@given(*[st.integers(1, 4)] * 4, st.integers(1, 3), orders)
def test_positions_invert(tp: int, cp: int, pp: int, ep: int, etp: int, order: str) -> None:
    p = ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    try:
        mesh, ranks = Mesh(p, order), np.arange(p.world_size)
    except LayoutError:
        assume(False)
    at = mesh.position(ranks)
    dense = mesh.rank(tp=at["tp"], cp=at["cp"], dp=at["dp"], pp=at["pp"])
    expert = mesh.expert_rank(etp=at["etp"], ep=at["ep"], edp=at["edp"], pp=at["pp"])
    assert (dense == ranks).all()
    assert (expert == ranks).all()


@pytest.mark.parametrize(
    ("sizes", "said", "hint"),
    [
        ({"tp": 0}, "tp is 0", "positive"),
        ({"pp": -1}, "pp is -1", "positive"),
        ({"ep": 2.0}, "ep is 2.0", "positive"),
        ({"cp": True}, "cp is True", "positive"),
        ({"etp": -2}, "etp is -2", "positive"),
        (
            {"tp": 1, "ep": 4, "dp": 6},
            "ep=4 does not divide",
            "multiple of 4: the nearest is 4 or 8",
        ),
        ({"tp": 2, "cp": 2, "etp": 8, "ep": 2, "dp": 3}, "etp=8 x ep=2", "nearest is 4"),
        ({"vpp": 2}, "vpp is 2", "two pipeline stages"),
        ({"pp": 4, "first_stage_layers": 0}, "first_stage_layers is 0", "positive"),
        ({"pp": 4, "last_stage_layers": True}, "last_stage_layers is True", "positive"),
        ({"first_stage_layers": 3}, "first_stage_layers cannot be set with pp=1", "at least 2"),
        (
            {"first_stage_layers": 3, "last_stage_layers": 3},
            "first_stage_layers and last_stage_layers cannot be set with pp=1",
            "at least 2",
        ),
        ({"pp": 4, "account_for_loss": 1}, "account_for_loss is 1", "true or false"),
        (
            {"pp": 4, "first_stage_layers": 3, "account_for_embedding": True},
            "first_stage_layers and account_for_embedding",
            "one of them",
        ),
        (
            {"pp": 2, "pipeline_layout": "Et|tL", "account_for_loss": True},
            "pipeline_layout and account_for_loss",
            "one of them",
        ),
        ({"pp": 2, "pipeline_layout": "Et|t|tL"}, "3 chunks, not pp=2", "parts chunks"),
        ({"pp": 2, "vpp": 1, "pipeline_layout": "Et|t|t|tL"}, "4 chunks, not pp=2 x vpp=1", "'|'"),
        ({"pp": 2, "pipeline_layout": "Et|xL"}, "holds 'x'", "E embedding"),
        ({"pp": 2, "pipeline_layout": "Et*999999999|L"}, "describes", "at most"),
        ({"pp": 2, "pipeline_layout": "E(t*99999)*99999|L"}, "describes", "at most"),
        ({"pp": 2, "pipeline_layout": ["E", "L"]}, "pipeline_layout is", "for example"),
    ],
)
def test_impossible_sizes_are_named(sizes: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(LayoutError) as error:
        ParallelConfig(**sizes)
    assert said in error.value.message
    assert hint in str(error.value.hint)


@pytest.mark.parametrize(
    ("sizes", "order", "said"),
    [
        ({"tp": 2}, "tp-xp", "the order of axes is 'tp-xp'"),
        ({"tp": 2}, "tp-tp-pp", "the order of axes is 'tp-tp-pp'"),
        ({"tp": 2, "cp": 2}, "tp-dp-pp", "leaves out cp=2"),
        ({"tp": 2, "ep": 2}, "tp-cp-dp-pp", "leaves out ep=2"),
        ({"ep": 2, "pp": 2, "dp": 4}, PIPELINE_BEFORE_DATA, "different pipeline stages"),
    ],
)
def test_impossible_orders_are_named(sizes: dict[str, int], order: str, said: str) -> None:
    with raises(LayoutError, match=said, hint=True):
        Mesh(ParallelConfig(**sizes), order)


def test_axes_of_size_one_may_be_left_out_of_the_order() -> None:
    mesh = Mesh(ParallelConfig(tp=2, dp=3), "DP-TP")
    assert mesh.position(np.arange(6))["dp"].tolist() == [0, 1, 2, 0, 1, 2]


def test_an_explicit_layout_says_how_many_virtual_stages() -> None:
    assert ParallelConfig(pp=16, pipeline_layout="Et*3|(tt|)*29,m|L").vpp == 2
    assert ParallelConfig(pp=4, vpp=2, pipeline_layout="E|" + "t|" * 6 + "L").vpp == 2
    assert ParallelConfig(pp=4).vpp == 1


def test_data_parallel_grows_to_hold_the_experts() -> None:
    assert ParallelConfig(tp=4, ep=32).dp == 32
    assert ParallelConfig(tp=4, ep=32, etp=1).dp == 8
    assert ParallelConfig(tp=4, ep=2, etp=1).dp == 1
