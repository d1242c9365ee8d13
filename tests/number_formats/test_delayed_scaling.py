"""Delayed scaling as arithmetic: merged over ranks, split and joined over products, looked over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megtool.number_formats import delayed_scaling, grouped_delayed_scaling
from megtool.number_formats.delayed_scaling import KINDS, WEIGHT, Array, Columns, ScalingRule

RULE = ScalingRule()
NUMBERS = st.floats(0, 1e4, width=32)


@st.composite
def states(draw: st.DrawFn, gemms: int = 1, count: int = 1) -> list[dict[str, Array]]:
    """States of one module on `count` ranks; scales come of histories, as in a run."""
    length = draw(st.integers(1, 5))
    out = []
    for _ in range(count):
        state: dict[str, Array] = {}
        for d, kinds in KINDS.items():
            history = draw(hnp.arrays(np.float32, (length, kinds * gemms), elements=NUMBERS))
            ones = np.ones(kinds * gemms, np.float32)
            state[f"scale_{d}"] = delayed_scaling.scale(history.max(0), ones, RULE.fp8_max(d))
            state[f"amax_history_{d}"] = history
        out.append(state)
    return out


def same(a: delayed_scaling.State, b: delayed_scaling.State) -> bool:
    return a.keys() == b.keys() and all(
        np.array_equal(t, b[n], equal_nan=True) for n, t in a.items()
    )


@settings(max_examples=20, deadline=None)
@given(states(count=4))
def test_merging_is_the_maximum_in_any_order_and_settles(ranks: list[dict[str, Array]]) -> None:
    merged = delayed_scaling.merge(ranks, RULE)
    for d in KINDS:
        want = np.max([r[f"amax_history_{d}"] for r in ranks], 0)
        assert np.array_equal(merged[f"amax_history_{d}"], want)
        top = want.max(0)
        seen = top > 0
        scales = merged[f"scale_{d}"]
        assert (
            np.allclose(scales[seen] * top[seen], RULE.fp8_max(d), rtol=1e-6) or top.min() < 1e-30
        )
    assert same(delayed_scaling.merge(ranks[::-1], RULE), merged)
    assert same(delayed_scaling.merge([merged] * 3, RULE), merged)
    halves = [delayed_scaling.merge(ranks[:2], RULE), delayed_scaling.merge(ranks[2:], RULE)]
    assert same(delayed_scaling.merge(halves, RULE), merged)
    assert same(delayed_scaling.merge(ranks, RULE, reduction="first"), ranks[0])


@settings(max_examples=15, deadline=None)
@given(states(gemms=4))
def test_what_is_split_is_joined_again(found: list[dict[str, Array]]) -> None:
    (whole,) = found
    for columns, at in (("blocked", WEIGHT * 4 + 2), ("interleaved", 2 * 3 + WEIGHT)):
        parts = grouped_delayed_scaling.split(whole, 4, columns)
        assert parts is not None
        joined = grouped_delayed_scaling.join(parts, columns)
        assert joined is not None
        assert same(joined, whole)
        assert grouped_delayed_scaling.split(whole, 3, columns) is None
        assert parts[2]["scale_fwd"][WEIGHT] == whole["scale_fwd"][at]


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(2, 9), st.sampled_from(grouped_delayed_scaling.LAYOUTS))
def test_how_columns_lie_shows_in_those_that_are_never_used(
    data: st.DataObject, gemms: int, columns: Columns
) -> None:
    """One weight that was seen is enough, whatever else was."""
    parts = []
    for (one,) in (data.draw(states()) for _ in range(gemms)):
        for d, idle in (("fwd", 2), ("bwd", 1)):
            one[f"amax_history_{d}"][:, idle], one[f"scale_{d}"][idle] = 0, 1
        parts.append(one)
    whole = grouped_delayed_scaling.join(parts, columns)
    assert whole is not None
    assert grouped_delayed_scaling.columns_of(whole) in (columns, None)
    for one in parts:  # weights are quantized in the first step of all
        one["amax_history_fwd"][-1, WEIGHT] = 3
        one["scale_fwd"][WEIGHT] = 448 / 3
    whole = grouped_delayed_scaling.join(parts, columns)
    assert whole is not None
    assert grouped_delayed_scaling.columns_of(whole) == columns
    assert delayed_scaling.faults(whole, linear=False, columns=columns) == []
    assert not grouped_delayed_scaling.is_same_in_both(whole)
    assert grouped_delayed_scaling.is_same_in_both(delayed_scaling.unseen(whole))
    assert grouped_delayed_scaling.columns_of(delayed_scaling.unseen(whole)) is None
    for array in whole.values():
        array[..., -1] = 2  # the last column is idle in both: it tells nothing any more
    assert grouped_delayed_scaling.columns_of(whole) is None


def test_what_ranks_agree_on_does_not_change_by_a_bit() -> None:
    odd = np.array([3.25, 7.0, 1.0], np.float32)  # not what the history says
    history = np.array([[0, 0, 0], [1, 2, 0]], np.float32)
    a = {"scale_fwd": odd, "amax_history_fwd": history}
    b = {"scale_fwd": odd.copy(), "amax_history_fwd": history.copy()}
    b["amax_history_fwd"][1, 1] = 4
    merged = delayed_scaling.merge([a, b], RULE)
    assert merged["scale_fwd"].tolist() == [3.25, 112.0, 1.0]


def test_scales_of_what_nothing_can_be_computed_from_stay() -> None:
    magnitude = np.array([0, np.nan, np.inf, 1e-38, 2], np.float32)
    previous = np.arange(5, dtype=np.float32) + 1
    out = delayed_scaling.scale(magnitude, previous, 448, margin=1)
    assert out.tolist() == [1, 2, 3, float(np.finfo(np.float32).max), 112]


def test_not_a_number_and_infinity_in_some_ranks() -> None:
    ok = np.array([[0.0], [2.0]], np.float32)
    bad = np.array([[0.0], [np.nan]], np.float32)
    over = np.array([[0.0], [np.inf]], np.float32)
    two, three = np.array([2.0], np.float32), np.array([3.0], np.float32)
    a = {"scale_fwd": three, "amax_history_fwd": ok}
    b = {"scale_fwd": two, "amax_history_fwd": bad}
    c = {"scale_fwd": two, "amax_history_fwd": over}
    assert delayed_scaling.merge([a, b], RULE)["scale_fwd"].tolist() == [224]
    assert delayed_scaling.merge([a, c], RULE)["scale_fwd"].tolist() == [2]  # as training keeps it


def test_a_history_of_another_length_keeps_the_newest_steps() -> None:
    history = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert delayed_scaling.lengthened(history, 3).ravel().tolist() == [0, 6, 7]
    assert delayed_scaling.lengthened(history, 10).ravel().tolist() == [
        0,
        0,
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
    ]
    assert delayed_scaling.lengthened(history, 1).ravel().tolist() == [0]
    state = {"scale_fwd": np.array([5.0], np.float32), "amax_history_fwd": history[::-1].copy()}
    short = delayed_scaling.with_length(state, 3, RULE)  # 7 is of the step under way
    assert short["scale_fwd"].tolist() == [5.0]
    state["amax_history_fwd"][0] = 0
    assert delayed_scaling.with_length(state, 3, RULE)["scale_fwd"].tolist() == [448]
    assert delayed_scaling.with_length(state, 1, RULE)["scale_fwd"].tolist() == [5.0]


@pytest.mark.parametrize(
    ("algorithm", "want"), [("max", 64.0), ("most_recent", 224.0), (None, 9.0)]
)
def test_scales_by_each_algorithm(algorithm: str | None, want: float) -> None:
    history = np.array([[0.0], [7.0], [2.0]], np.float32)
    state = {"scale_fwd": np.array([9.0], np.float32), "amax_history_fwd": history}
    out = delayed_scaling.rescaled(state, ScalingRule(algorithm=algorithm))
    assert out["scale_fwd"].tolist() == [want]


def test_inverses_follow_their_scales() -> None:
    two, four = np.array([2.0], np.float32), np.array([4.0], np.float32)
    history = np.array([[0.0], [448.0]], np.float32)
    a = {"scale_fwd": two, "scale_inv_fwd": 1 / two, "amax_history_fwd": history}
    b = {"scale_fwd": four, "scale_inv_fwd": 1 / four, "amax_history_fwd": history / 2}
    merged = delayed_scaling.merge([a, b], RULE)
    assert merged["scale_fwd"].tolist() == merged["scale_inv_fwd"].tolist() == [1]
    assert "scale_inv_fwd" not in delayed_scaling.without_inverses(merged)
    assert delayed_scaling.inverses(delayed_scaling.without_inverses(b))[
        "scale_inv_fwd"
    ].tolist() == [0.25]


def test_faults_and_what_is_none() -> None:
    history = np.ones((3, 6), np.float32)  # two products: inputs, weights, outputs
    history[0] = 0
    history[:, 4:] = 0  # outputs are not quantized
    state = {"scale_fwd": np.ones(6, np.float32), "amax_history_fwd": history}
    assert delayed_scaling.faults(state) == []
    history[1, 0], history[2, 1], history[:, 3] = np.nan, np.inf, 0
    state["scale_fwd"][2] = 0
    found = {(f.kind, f.array): f.columns for f in delayed_scaling.faults(state)}
    assert found == {
        ("nan", "amax_history_fwd"): (0,),
        ("inf", "amax_history_fwd"): (1,),
        ("zeros", "amax_history_fwd"): (3,),
        ("zeros", "scale_fwd"): (2,),
    }
    assert ("zeros", "amax_history_fwd") not in {
        (f.kind, f.array) for f in delayed_scaling.faults(state, linear=False)
    }
    history[:] = 1
    history[:, [2, 5]] = 0  # the outputs of the two, in releases since 2.3
    assert [f.columns for f in delayed_scaling.faults(state) if f.kind == "zeros"][:1] == [(2,)]
    found = delayed_scaling.faults(state, columns="interleaved")
    assert [(f.array, f.columns) for f in found] == [("scale_fwd", (2,))]


def test_states_of_other_shapes_are_not_merged() -> None:
    a = {"scale_fwd": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match="shape"):
        delayed_scaling.merge([a, {"scale_fwd": np.ones(6, np.float32)}], RULE)
