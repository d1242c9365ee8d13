"""A measurement that was killed goes on: what it had finished is not measured again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import quantize
from megtool.errors import CalibrationError
from megtool.model.batch import Batch
from megtool.quant.calibration.fingerprint import Fingerprint
from megtool.quant.mixed_precision import kl_sensitivity
from megtool.quant.mixed_precision.candidates import CandidateSurvey
from megtool.quant.resolve import ResolvedRecipe, resolve_recipe
from tests.support.folders import contents
from tests.support.models import tiny_models, tiny_text
from tests.support.quant.loaded import measure_sensitivities

PRINT = Fingerprint(model="m", recipe="r", data="d")


class Killed(Exception):
    """Where a kill would be."""


class Ends:
    """Progress that ends the run when so many calls were made."""

    def __init__(self, most: int) -> None:
        self.left = most

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == "sensitivity":
            self.left -= 1
            if self.left < 0:
                raise Killed


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each unit was settled and run in each format."""
    found: Counter[str] = Counter()
    settle, carried = CandidateSurvey._solve_unit, kl_sensitivity._divergences

    def settled(self: CandidateSurvey, unit: Any, fmt: Any, statistics: Any) -> Any:
        out = settle(self, unit, fmt, statistics)
        found[f"settled {unit.name} {fmt.algo}"] += 1
        return out

    def ended(survey: CandidateSurvey, layers: Any, wave: Any, *more: Any) -> Any:
        out = carried(survey, layers, wave, *more)
        found.update(f"run {r.unit.name} {r.key}" for r in wave)
        return out

    monkeypatch.setattr(CandidateSurvey, "_solve_unit", settled)
    monkeypatch.setattr(kl_sensitivity, "_divergences", ended)
    monkeypatch.setattr(kl_sensitivity, "MOST_CONCURRENT_RUNS", 5)
    return found


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> ResolvedRecipe:
    folder = tiny_models.llama(tmp_path_factory.mktemp("kept") / "llama", num_hidden_layers=3)
    return resolve_recipe(folder, "auto_nvfp4_fp8")


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [Batch(tokens_BS=torch.randint(0, 128, (3, 32), generator=generator)) for _ in range(2)]


@pytest.mark.parametrize("method", ["kl_div", pytest.param("gradient", marks=pytest.mark.slow)])
def test_what_is_finished_is_not_measured_again(
    decided: ResolvedRecipe,
    batches: list[Batch],
    tmp_path: Path,
    counted: Counter[str],
    method: str,
) -> None:
    recipe = replace(decided.recipe, algorithm={"method": method})
    decided = replace(decided, recipe=recipe)
    if method == "gradient":
        batches = batches * 6  # 1152 tokens, there and back in several parts
    whole = measure_sensitivities(decided, batches)
    expected = Counter(counted)
    assert set(expected.values()) == {1}
    counted.clear()
    kept = {"resume_folder": tmp_path / "work", "fingerprint": PRINT}
    kills, most = 0, 1
    while True:
        try:
            found = measure_sensitivities(decided, batches, **kept, progress=Ends(most))
            break
        except Killed:
            kills += 1
            before = counted.total()
            with pytest.raises(Killed):  # at once: nothing more of it is finished
                measure_sensitivities(decided, batches, **kept, progress=Ends(0))
            assert counted.total() == before
            most += 3
    assert kills > 4
    assert found == whole, "to the last bit"
    assert counted == expected, "each was settled once, and run once"
    counted.clear()
    assert measure_sensitivities(decided, batches, **kept, progress=Ends(0)) == whole
    assert not counted
    assert not list((tmp_path / "work").glob("qparams-*")), "of no more use"
    with pytest.raises(CalibrationError, match="another calibration: different data"):
        measure_sensitivities(
            decided,
            batches,
            resume_folder=kept["resume_folder"],
            fingerprint=replace(PRINT, data="e"),
        )
    with pytest.raises(CalibrationError, match="another calibration: different dtype"):
        measure_sensitivities(decided, batches, **kept, dtype="bfloat16")


def test_what_is_damaged_is_measured_again(
    decided: ResolvedRecipe, batches: list[Batch], tmp_path: Path, counted: Counter[str]
) -> None:
    whole = measure_sensitivities(decided, batches)
    counted.clear()
    kept = {"resume_folder": tmp_path / "work", "fingerprint": PRINT}
    with pytest.raises(Killed):
        measure_sensitivities(decided, batches, **kept, progress=Ends(60))
    assert any(name.startswith("run") for name in counted)
    files = sorted((tmp_path / "work").glob("*.safetensors"))
    assert {"losses.safetensors", "qparams-00000.safetensors"} <= {f.name for f in files}
    for file in files:
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    assert measure_sensitivities(decided, batches, **kept) == whole


def test_a_killed_run_of_an_automatic_recipe_goes_on(tmp_path: Path, counted: Counter[str]) -> None:
    pytest.importorskip("transformers")
    folder = tiny_text.save_wide(tmp_path / "hf", num_layers=2)
    told: dict[str, Any] = {"recipe": "auto_nvfp4_fp8", "bits": 6, "synthetic": True}
    quantize(folder, tmp_path / "whole", **told, samples=8, seq_length=32, fsync=False)
    expected = Counter(counted)
    counted.clear()
    for most in (2, 9, 20):
        with pytest.raises(Killed):
            quantize(
                *(folder, tmp_path / "out"),
                **told,
                **{"samples": 8, "seq_length": 32, "fsync": False, "progress": Ends(most)},
            )
    assert (tmp_path / ".out.calibration" / "sensitivity" / "calibration.json").is_file()
    quantize(folder, tmp_path / "out", **told, samples=8, seq_length=32, fsync=False)
    assert counted == expected
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".out*")), "nothing of the work is left"
