"""Coverage: experts counted, and what those get that received too little."""

from __future__ import annotations

import numpy as np
import pytest

from megtool.errors import CalibrationError
from megtool.quant.calibration.expert_coverage import fill_missing_statistics, measure_coverage
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.quant.statistics.site_statistics import ActivationStatistics
from tests.support.quant.recording import points_of, record
from tests.support.quant.seen import statistics_of
from tests.support.worlds.moe_layouts import whole_model


def points(num: int, names: tuple[str, ...] = ("fc1", "down")) -> list[ActivationSite]:
    return [
        ActivationSite(
            name=f"layers.2.mlp.experts.{e}.{name}",
            kind="input",
            layer=2,
            modules=(),
            width=4,
            expert=e,
        )
        for e in range(num)
        for name in names
    ]


def statistics(
    tokens: list[int], names: tuple[str, ...] = ("fc1", "down")
) -> dict[str, ActivationStatistics]:
    rng = np.random.default_rng(0)
    found = {}
    for e, n in enumerate(tokens):
        for name in names:
            x = rng.normal(size=(n, 4)).astype(np.float32)
            key = f"layers.2.mlp.experts.{e}.{name}"
            found[key] = (
                statistics_of(x, gram=True) if n else ActivationStatistics.empty(4, gram=True)
            )
    return found


def test_tokens_of_each_expert() -> None:
    (found,) = measure_coverage(points(4), statistics([100, 0, 3, 97]))
    assert found.mixture == "layers.2.mlp"
    assert found.layer == 2
    assert found.tokens == (100, 0, 3, 97)
    assert found.shares == (0.5, 0.0, 0.015, 0.485)
    assert found.unseen == (1,)
    assert found.uncovered == (1, 2)
    assert measure_coverage(points(4)[:0], {}) == []


def test_of_a_real_mixture() -> None:
    decoder = whole_model("shared and gated")
    some = points_of(decoder.config)
    (found,) = measure_coverage(some, record(decoder))
    assert sum(found.tokens) == 74 * decoder.config.moe.num_experts_per_token
    (every,) = measure_coverage(some, record(decoder, calibrate_all_experts=True))
    assert every.tokens == (74,) * 8


def test_siblings_share() -> None:
    had = statistics([100, 0, 3, 97])
    full, notes = fill_missing_statistics(points(4), had)
    assert list(full) == list(had)
    for name in ("fc1", "down"):
        at = "layers.2.mlp.experts.{}." + name
        assert full[at.format(0)] is had[at.format(0)]
        for e in (1, 2):
            got = full[at.format(e)]
            assert got.num_tokens == 200
            want = np.max([had[at.format(i)].amax for i in (0, 2, 3)], axis=0)
            np.testing.assert_array_equal(got.amax, want)
            assert got.gram is not None
            assert not np.isnan(got.gram).any()
            assert got.amax.min() > 0
    assert notes == [
        "layers.2.mlp: experts 1-2 received fewer than 16 tokens; "
        "they use the merged statistics of all 4"
    ]


def test_weights_alone() -> None:
    had = statistics([100, 0, 3, 97])
    full, notes = fill_missing_statistics(points(4), had, "weights")
    assert {n.split(".")[4] for n in full} == {"0", "3"}
    assert "they are quantized by their weights alone" in notes[0]
    full, notes = fill_missing_statistics(points(4), had, "none")
    assert {n.split(".")[4] for n in full} == {"0", "2", "3"}
    assert notes == [
        "layers.2.mlp: expert 1 received no token; they are quantized by their weights alone"
    ]


def test_nobody_to_share_with() -> None:
    full, notes = fill_missing_statistics(points(3), statistics([0, 0, 0]))
    assert full == {}
    assert (
        "experts 0-2 received fewer than 16 tokens; they are quantized by their weights alone"
        in notes[0]
    )


def test_all_have_enough() -> None:
    had = statistics([20, 30])
    dense = {"layers.2.mlp.router": ActivationStatistics.empty(4)}
    assert fill_missing_statistics(points(2), had | dense) == (had | dense, [])
    assert len(fill_missing_statistics(points(2), had, min_tokens=25)[1]) == 1


def test_a_policy_nobody_knows() -> None:
    with pytest.raises(CalibrationError, match="'guess'"):
        fill_missing_statistics([], {}, "guess")
