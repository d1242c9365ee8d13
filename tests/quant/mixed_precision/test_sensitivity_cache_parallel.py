"""What formats cost, measured on several ranks: what one process finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.calibration.sensitivities import Sensitivities
from megtool.quant.resolve import resolve_recipe
from tests.support.errors import raises
from tests.support.models import tiny_models
from tests.support.quant.calibrated import random_moe
from tests.support.quant.loaded import measure_sensitivities
from tests.support.worlds.gloo_world import WorldError, run_world

PRINT = Fingerprint(model="m", recipe="r", data="d")


def data() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [Batch(tokens_BS=torch.randint(0, 128, (3, 32), generator=generator)) for _ in range(3)]


def measured(folder: Path, method: str, **more: Any) -> Sensitivities:
    decided = resolve_recipe(folder, "auto_nvfp4_fp8")
    recipe = replace(decided.recipe, algorithm={"method": method})
    return measure_sensitivities(replace(decided, recipe=recipe), data(), most_tokens=192, **more)


def on_rank(
    rank: int, size: int, folder: Path, method: str, layout: dict[str, int], more: dict[str, Any]
) -> Sensitivities:
    """What a rank finds. For `run_world`."""
    groups = ProcessGroups.start(ParallelConfig(**layout))
    try:
        return measured(folder, method, groups=groups, **more)
    finally:
        groups.stop()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("dense") / "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_moe(tmp_path_factory.mktemp("mixture") / "moe")


def same(found: Sensitivities, wanted: Sensitivities, tolerance: float) -> None:
    assert (found.method, found.num_tokens) == (wanted.method, wanted.num_tokens)
    assert {u: list(f) for u, f in found.losses.items()} == {
        u: list(f) for u, f in wanted.losses.items()
    }
    for unit, some in wanted.losses.items():
        assert found.losses[unit] == pytest.approx(some, rel=tolerance, abs=1e-9), unit


@pytest.mark.parametrize(
    ("model", "method", "layout", "size"),
    [
        ("dense", "kl_div", {}, 2),
        ("dense", "kl_div", {"tp": 2}, 2),
        ("dense", "gradient", {}, 2),
        pytest.param("dense", "kl_div", {"tp": 2}, 4, marks=pytest.mark.slow),
        pytest.param("dense", "gradient", {}, 3, marks=pytest.mark.slow),
        pytest.param("mixture", "kl_div", {"ep": 2, "dp": 2}, 2, marks=pytest.mark.slow),
        pytest.param("mixture", "kl_div", {"tp": 2, "etp": 1, "ep": 2}, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_find_what_one_process_finds(
    request: pytest.FixtureRequest, model: str, method: str, layout: dict[str, int], size: int
) -> None:
    folder = request.getfixturevalue(model)
    wanted = measured(folder, method)
    results = run_world(on_rank, size, folder, method, layout, {})
    assert all(found == results[0] for found in results), "to the last bit on every rank"
    same(results[0], wanted, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kl_div", "gradient"])
def test_work_is_shared_and_not_done_again(dense: Path, tmp_path: Path, method: str) -> None:
    kept = {"resume_folder": tmp_path / "work", "fingerprint": PRINT}
    (whole, *_) = run_world(on_rank, 2, dense, method, {}, {})
    assert run_world(on_rank, 2, dense, method, {}, kept) == [whole] * 2
    assert not list((tmp_path / "work").glob("qparams-*"))
    assert not list((tmp_path / "work").glob("into-*"))
    assert run_world(on_rank, 2, dense, method, {}, kept) == [whole] * 2
    with pytest.raises(WorldError, match="different layout"):
        run_world(on_rank, 3, dense, method, {}, kept)


@pytest.mark.parametrize(
    ("method", "layout", "told"),
    [("kl_div", {"pp": 2}, "--pp 2"), ("gradient", {"tp": 2, "pp": 2}, "--tp 2 --pp 2")],
)
def test_layouts_that_do_not_serve(
    dense: Path, method: str, layout: dict[str, int], told: str
) -> None:
    groups = replace(ProcessGroups.alone(), parallel=ParallelConfig(**layout))
    with raises(UsageError, match=told, hint="split the data"):
        measured(dense, method, groups=groups)
