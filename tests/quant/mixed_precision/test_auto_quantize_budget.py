"""Formats chosen anew within another budget, by what a calibration file knows of their costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megtool import quantize
from megtool.errors import CalibrationError, UsageError
from megtool.quant.calibration.calibration_file import CalibrationFile
from megtool.quantize.plan import QuantizePlan
from megtool.quantize.report import QuantizeReport
from tests.support.errors import raises
from tests.support.folders import contents
from tests.support.models import tiny_text

RECIPE = "auto_nvfp4_fp8"
TEXTS = ("The rain fell in torrents. ", "Nine cats sat on a wall, and a tenth looked on. ")


class Reads:
    """A progress that knows whether the model was shown data."""

    def __init__(self) -> None:
        self.stages: set[str] = set()

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.stages.add(stage)


def done(source: Path, at: Path, **options: Any) -> QuantizeReport:
    report = quantize(source, at, fsync="calibrate_only" in options, **options)
    assert isinstance(report, QuantizeReport)
    return report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_text.save_wide(tmp_path_factory.mktemp("again") / "hf", num_layers=3)


@pytest.fixture(scope="module")
def kept(folder: Path) -> list[Path]:
    """Calibration files of two machines with their own data."""
    out = []
    for number, text in enumerate(TEXTS):
        (folder.parent / f"{number}.txt").write_text(text * 40)
        out.append(folder.parent / f"{number}.safetensors")
        data = {"data": folder.parent / f"{number}.txt", "samples": 2 + number, "seq_length": 24}
        done(folder, out[-1], recipe=RECIPE, bits=7, calibrate_only=True, **data)
    return out


@pytest.mark.parametrize("bits", [5.0, 12])
def test_another_budget_is_met_as_with_data(
    folder: Path, kept: list[Path], tmp_path: Path, bits: float
) -> None:
    told: dict[str, Any] = {"recipe": RECIPE, "bits": bits}
    data = {"data": folder.parent / "0.txt", "samples": 2, "seq_length": 24}
    whole = done(folder, tmp_path / "whole", **told, **data)
    reads = Reads()
    again = done(
        *(folder, tmp_path / "again"),
        **{**told, "calibration": kept[:1], "report": tmp_path / "page.html", "progress": reads},
    )
    assert not reads.stages & {"calibrate", "sensitivity"}, "no data is run"
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    assert again.auto == whole.auto
    assert again.auto is not None
    assert len(again.auto.curve) > 5
    assert again.auto.chosen.bits <= bits
    assert "Choice of formats" in (tmp_path / "page.html").read_text()


def test_a_dry_run_shows_the_choice(folder: Path, kept: list[Path], tmp_path: Path) -> None:
    plans = [
        quantize(
            *(folder, tmp_path / "out"),
            **{"recipe": RECIPE, "bits": bits, "calibration": kept[:1], "dry_run": True},
        )
        for bits in (5, 12)
    ]
    sizes = [p.explained.num_bytes for p in plans if isinstance(p, QuantizePlan)]
    assert sizes[0] < sizes[1]
    assert "chosen: " in str(plans[0].to_json())


def test_files_of_two_machines_add_up_by_tokens(
    folder: Path, kept: list[Path], tmp_path: Path
) -> None:
    both = tmp_path / "both"
    done(
        *(folder, tmp_path / "out"),
        **{"recipe": RECIPE, "bits": 6, "calibration": kept, "save_calibration": both},
    )
    first, second = (CalibrationFile.load(path).sensitivities for path in kept)
    found = CalibrationFile.load(both).sensitivities
    assert first is not None
    assert second is not None
    assert found is not None
    assert (first.num_tokens, second.num_tokens, found.num_tokens) == (48, 72, 120)
    for unit, some in found.losses.items():
        for key, loss in some.items():
            mean = (48 * first.losses[unit][key] + 72 * second.losses[unit][key]) / 120
            assert math.isclose(loss, mean, rel_tol=1e-12)
    done(folder, tmp_path / "again", recipe=RECIPE, bits=6, calibration=[both])
    assert contents(tmp_path / "again") == contents(tmp_path / "out"), "added up once is enough"
    with pytest.raises(CalibrationError, match="used the same data"):
        done(folder, tmp_path / "no", recipe=RECIPE, calibration=[both, kept[0]])


def test_a_budget_below_all_is_refused(folder: Path, kept: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="smallest choice"):
        done(folder, tmp_path / "out", recipe=RECIPE, bits=3, calibration=kept[:1])
    assert not list(tmp_path.iterdir())


def test_a_calibration_that_knows_no_costs(folder: Path, kept: list[Path], tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    data = {"data": folder.parent / "0.txt", "samples": 2, "seq_length": 24}
    done(folder, plain, recipe="fp8", calibrate_only=True, **data)
    with raises(
        CalibrationError, match="has no sensitivities by kl_div", hint="--save-calibration"
    ):
        done(folder, tmp_path / "out", recipe=RECIPE, calibration=[plain])
    done(folder, tmp_path / "fp8", recipe="fp8", calibration=kept[:1])
    done(folder, tmp_path / "same", recipe="fp8", calibration=[plain])
    assert contents(tmp_path / "fp8") == contents(tmp_path / "same"), "it serves plain recipes too"


def test_formats_that_were_not_measured(folder: Path, kept: list[Path], tmp_path: Path) -> None:
    from megtool import show_recipe

    recipe = tmp_path / "mine.yaml"
    text = "\n".join(show_recipe(RECIPE).lines())
    recipe.write_text(text.replace("algo: FP8 ", "algo: FP8_PER_CHANNEL_PER_TOKEN "))
    with pytest.raises(CalibrationError, match="there is no sensitivity of"):
        done(folder, tmp_path / "out", recipe=recipe, calibration=kept[:1])


def test_costs_are_kept_where_no_input_is_looked_at(folder: Path, tmp_path: Path) -> None:
    from megtool import show_recipe

    recipe = tmp_path / "mine.yaml"
    text = "\n".join(show_recipe(RECIPE).lines())
    recipe.write_text(
        text.replace("algo: NVFP4 ", "algo: MXFP4 ")
        .replace("group_size: 16", "")
        .replace("algo: FP8 ", "algo: MXFP8 ")
    )
    data = {"data": folder.parent / "0.txt", "samples": 2, "seq_length": 24}
    (folder.parent / "0.txt").write_text(TEXTS[0] * 40)
    file = tmp_path / "file"
    done(folder, tmp_path / "one", recipe=recipe, bits=9, save_calibration=file, **data)
    report = done(folder, tmp_path / "two", recipe=recipe, bits=9, calibration=[file])
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert report.auto is not None
