"""Calibration on several ranks finds what one process finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool.errors import CalibrationError
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.calibration_file import CalibrationFile
from megtool.quant.calibration.graphed_layer import GraphedLayer
from megtool.quant.statistics.site_statistics import ActivationStatistics
from tests.support.emulated.graph_rules import check_graphs
from tests.support.models import family_models
from tests.support.quant.calibrated import case, on_rank, random_moe, tokens
from tests.support.worlds.gloo_world import run_world


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_moe(tmp_path_factory.mktemp("parallel") / "moe")


def same(
    found: dict[str, ActivationStatistics],
    wanted: dict[str, ActivationStatistics],
    *,
    exact: bool,
    close: float = 1e-5,
) -> None:
    assert list(found) == list(wanted)
    for name, s in wanted.items():
        tolerance = 0 if exact else close
        assert found[name].num_tokens == s.num_tokens, name
        for key in ("amax", "abs_sum", "square_sum"):
            np.testing.assert_allclose(
                getattr(found[name], key), getattr(s, key), rtol=tolerance, atol=1e-9, err_msg=name
            )


@pytest.mark.parametrize(
    ("layout", "size", "exact"),
    [
        ({"dp": 2}, 2, False),
        ({"tp": 2}, 2, False),
        ({"pp": 2}, 2, True),
        ({"cp": 2}, 2, False),
        pytest.param(
            {"cp": 2, "tp": 2, "cp_comm_type": ("p2p",)}, 4, False, marks=pytest.mark.slow
        ),
        pytest.param({"tp": 2, "pp": 2, "dp": 2}, 8, False, marks=pytest.mark.slow),
    ],
)
def test_a_dense_model(
    llama: Path, layout: dict[str, int], size: int, exact: bool, tmp_path: Path
) -> None:
    wanted = case(llama).run()
    results = run_world(on_rank, size, llama, "fp8", layout, {})
    for statistics, data in results:
        same(statistics, wanted.statistics, exact=exact)
        assert data == results[0][1], "every rank has the same artefact"
    (tmp_path / "a").write_bytes(results[0][1])
    treatments = CalibrationFile.load(tmp_path / "a").qparams.weights
    for name, t in wanted.qparams.weights.items():
        assert treatments[name].input_amax == pytest.approx(t.input_amax, rel=1e-5)


def on_rank_with_graphs(
    rank: int, size: int, folder: Path, layout: dict[str, int]
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Statistics without and with graphs, and how many layers were replayed. For `run_world`."""
    groups = ProcessGroups.start(ParallelConfig(**layout))
    replays, call = 0, GraphedLayer.__call__

    def count(self: GraphedLayer, *args: Any) -> Any:
        nonlocal replays
        before = self._use.num_replays
        out = call(self, *args)
        replays += self._use.num_replays - before
        return out

    GraphedLayer.__call__ = count  # type: ignore[method-assign]
    try:
        made = case(folder, batches=tokens(128, rows=1, count=9, width=8))
        plain = made.run(groups=groups, stream_layers=False).statistics
        with check_graphs():
            graphed = made.run(groups=groups, stream_layers=False).statistics
        return plain, graphed, replays
    finally:
        GraphedLayer.__call__ = call  # type: ignore[method-assign]
        groups.stop()


@pytest.mark.parametrize("layout", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.slow)])
def test_layers_are_graphs_on_every_rank(llama: Path, layout: dict[str, int]) -> None:
    """By the checker, which adds rows as a GPU does (squares in float32); sums over tp ranks
    included."""
    for plain, graphed, replays in run_world(on_rank_with_graphs, 2, llama, layout):
        same(graphed, plain, exact=False)
        assert replays >= 9


@pytest.mark.parametrize(
    ("layout", "size"),
    [({"ep": 2, "dp": 2}, 2), ({"tp": 2, "ep": 2, "etp": 1}, 2), ({"cp": 2, "ep": 2}, 2)],
)
def test_experts_on_several_ranks(mixture: Path, layout: dict[str, int], size: int) -> None:
    wanted = case(mixture).run()
    for statistics, _ in run_world(on_rank, size, mixture, "fp8", layout, {}):
        same(statistics, wanted.statistics, exact=False)


@pytest.mark.parametrize("recipe", ["int4_awq", "int8_sq"])
def test_parts_of_rows_that_are_filled_up(llama: Path, recipe: str) -> None:
    """Of 23 tokens, which four chunks do not divide, and for algorithms that go on with what is
    quantized, where rounding counts for more."""
    wanted = case(llama, recipe, width=23).run()
    more = {"width": 23}
    for statistics, _ in run_world(on_rank, 2, llama, recipe, {"cp": 2}, more):
        same(statistics, wanted.statistics, exact=False, close=1e-3)


@pytest.mark.slow
def test_stages_send_residuals_side_by_side(tmp_path: Path) -> None:
    """DeepSeek-V4's, of which each token has several."""
    folder = family_models.save("deepseek_v4", tmp_path / "model", **family_models.SHORT_V4)
    wanted = case(folder).run()
    for statistics, _ in run_world(on_rank, 2, folder, "fp8", {"pp": 2}, {}):
        same(statistics, wanted.statistics, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"offload_activations": True}])
def test_work_is_shared_and_resumed(llama: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    layout, work = {"tp": 2, "pp": 2}, tmp_path / "work"
    (whole, *_) = run_world(on_rank, 4, llama, "int8_sq", layout, {})
    first = run_world(on_rank, 4, llama, "int8_sq", layout, {"resume_folder": work, **more})
    assert [data for _, data in first] == [whole[1]] * 4
    (work / "unit-00003.safetensors").unlink()
    again = run_world(on_rank, 4, llama, "int8_sq", layout, {"resume_folder": work, **more})
    assert [data for _, data in again] == [whole[1]] * 4
    with pytest.raises(CalibrationError, match="layout"):
        case(llama, "int8_sq").run(resume_folder=work)
