"""The calibration file: its file, its sums, and what it is refused for."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool.errors import CalibrationError
from megtool.quant.calibration import calibration_file_io
from megtool.quant.calibration.calibration_file import (
    CalibrationFile,
    check_fits,
    merge_calibrations,
)
from megtool.quant.calibration.fingerprint import Fingerprint, compute_fingerprint
from megtool.quant.calibration.sensitivities import Sensitivities
from megtool.quant.qparams import KVCacheQParams, QParams, WeightQParams
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quant.statistics.site_statistics import BINS, ActivationStatistics
from tests.support.errors import raises
from tests.support.quant.calibrated import Case, case, random_moe, tokens

FP8 = RecipeFormat(name="fp8", algo="FP8", input_amax=7.5)
SEEN = Fingerprint(model="m" * 64, recipe="r" * 64, data="d" * 64, seed=3)


def made(seed: int = 0, data: str = "d") -> CalibrationFile:
    draw = np.random.default_rng(seed)
    histogram = np.zeros(BINS, np.int64)
    histogram[[0, 900, 1400]] = 5, 6, 7
    seen = ActivationStatistics(
        num_tokens=9,
        amax=draw.random(4, np.float32),
        abs_sum=draw.random(4),
        square_sum=draw.random(4),
        histogram=histogram,
        gram=np.ones((4, 4), np.float32),
    )
    treatment = WeightQParams(
        module="layers.0.attn.q",
        format=FP8,
        smoothing_scale=np.full(4, 0.5, np.float32),
        amax=np.array(0.1, np.float32),
        global_amax=0.1,
        codes=np.array([[1, -8]], np.int8),
        input_amax=1 / 3,
    )
    cache = KVCacheQParams(
        module="layers.0.attn.kv",
        format=RecipeFormat(name="kv", kv_algo="FP8"),
        key_amax=0.7,
        value_amax=1e-30,
    )
    return CalibrationFile(
        fingerprint=replace(SEEN, data=data * 64),
        num_samples=3,
        num_tokens=9,
        statistics={"layers.0.attn.qkv": seen, "empty": ActivationStatistics.empty(2)},
        qparams=QParams(
            weights={treatment.module: treatment},
            kv_caches={cache.module: cache},
            norm_scales={"layers.0.attn_norm": np.full(4, 2, np.float32)},
            notes=["a note"],
        ),
        sensitivities=Sensitivities(
            method="kl_div", num_tokens=9 + seed, losses={"u": {"FP8:0:max": 1 / (3 + seed)}}
        ),
        solved_recipe="chosen",
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    wanted = made()
    wanted.save(tmp_path / "a")
    found = CalibrationFile.load(tmp_path / "a")
    assert found.fingerprint == wanted.fingerprint
    assert (found.num_samples, found.num_tokens) == (3, 9)
    for name, s in wanted.statistics.items():
        for key in ("amax", "abs_sum", "square_sum", "histogram"):
            np.testing.assert_array_equal(getattr(found.statistics[name], key), getattr(s, key))
        assert found.statistics[name].gram is None
    one, other = (a.qparams.weights["layers.0.attn.q"] for a in (found, wanted))
    for key in ("smoothing_scale", "amax", "codes"):
        np.testing.assert_array_equal(getattr(one, key), getattr(other, key))
    assert (one.format, one.input_amax, one.global_amax) == (FP8, 1 / 3, 0.1)
    assert found.qparams.kv_caches == wanted.qparams.kv_caches
    assert found.qparams.notes == ["a note"]
    assert found.sensitivities == wanted.sensitivities
    assert found.solved_recipe == "chosen"
    found.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def as_said(calibration: CalibrationFile, path: Path, **facts: object) -> Path:
    """A calibration file's file that says something else; None: nothing."""
    calibration.save(path)
    said, arrays = calibration_file_io.read(path)
    changed = {k: v for k, v in (said | facts).items() if v is not None}
    calibration_file_io.write(path, {n: np.array(a) for n, a in arrays.items()}, changed)
    return path


def test_a_file_without_sensitivities_is_read(tmp_path: Path) -> None:
    absent = {"sensitivities": None, "solved_recipe": None}
    found = CalibrationFile.load(as_said(made(), tmp_path / "a", **absent))
    assert found.sensitivities is None
    assert found.solved_recipe == SEEN.recipe
    with pytest.raises(CalibrationError, match="version 5"):
        CalibrationFile.load(as_said(made(), tmp_path / "b", version=5))


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"method": "guess", "num_tokens": 1, "losses": {}},
        {"method": "kl_div", "num_tokens": 0, "losses": {}},
        {"method": "kl_div", "num_tokens": 1, "losses": {"u": {"f": "nan"}}},
        {"method": "kl_div", "num_tokens": 1, "losses": {"u": 3}},
    ],
    ids=str,
)
def test_sensitivities_that_are_none(tmp_path: Path, wrong: object) -> None:
    path = as_said(made(), tmp_path / "a", sensitivities=wrong)
    with pytest.raises(CalibrationError, match="calibration file is damaged"):
        CalibrationFile.load(path)


def test_sensitivities_add_up_by_tokens_where_all_have_them() -> None:
    one, two = made(), made(2, "e")
    found = merge_calibrations([one, two]).sensitivities
    assert found is not None
    assert found.num_tokens == 9 + 11
    assert found.losses == {"u": {"FP8:0:max": pytest.approx((9 / 3 + 11 / 5) / 20)}}
    assert merge_calibrations([one, replace(two, sensitivities=None)]).sensitivities is None
    own = two.sensitivities
    assert own is not None
    other = replace(own, losses={"u": {"FP8:0:mse": 1.0}, "v": {"FP8:0:max": 1.0}})
    found = merge_calibrations([one, replace(two, sensitivities=other)]).sensitivities
    assert found is not None
    assert found.losses == {}, "what one knows nothing about is not known"
    by_gradient = replace(own, method="gradient")
    assert merge_calibrations([one, replace(two, sensitivities=by_gradient)]).sensitivities is None


def test_a_calibration_file_is_read_without_torch(tmp_path: Path) -> None:
    made().save(tmp_path / "a")
    code = (
        "import sys; from pathlib import Path;"
        "from megtool.quant.calibration.calibration_file_io import read;"
        f"read(Path({str(tmp_path / 'a')!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    made().save(tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    facts, arrays = calibration_file_io.read(tmp_path / "a")
    draw = random.Random(0)
    header = int.from_bytes(data[:8], "little") + 8
    text = data[8:header].rstrip()
    places = [draw.randrange(len(text)) + 8 for _ in range(400)]
    places += [draw.randrange(header, len(data)) for _ in range(50)]
    for place in places:
        hurt = bytearray(data)
        hurt[place] ^= 1 << draw.randrange(8)
        (tmp_path / "b").write_bytes(hurt)
        try:
            CalibrationFile.load(tmp_path / "b")
        except CalibrationError:
            continue
        assert place < header, "the name of the digest may change unnoticed, and nothing else"
        found, others = calibration_file_io.read(tmp_path / "b")
        assert found == facts
        assert all(np.array_equal(others.pop(name), array) for name, array in arrays.items())
        assert not others
    for size in (0, 7, 100, header, len(data) - 1):
        (tmp_path / "b").write_bytes(data[:size])
        with pytest.raises(CalibrationError):
            CalibrationFile.load(tmp_path / "b")
    with pytest.raises(CalibrationError):
        CalibrationFile.load(tmp_path / "nothing")
    (tmp_path / "b").write_text(json.dumps({"a": 1}))
    with pytest.raises(CalibrationError):
        CalibrationFile.load(tmp_path / "b")


def test_statistics_add_up_and_wait_to_be_settled() -> None:
    one, other = made(0, "d"), made(1, "e")
    both = merge_calibrations([one, other])
    name = "layers.0.attn.qkv"
    assert both.num_tokens == 18
    assert both.needs_solving
    assert not both.qparams.weights
    a, b, c = (x.statistics[name] for x in (one, other, both))
    np.testing.assert_array_equal(c.amax, np.maximum(a.amax, b.amax))
    np.testing.assert_array_equal(c.histogram, a.histogram + b.histogram)
    assert merge_calibrations([other, one]).fingerprint == both.fingerprint


def test_what_does_not_add_up_is_refused() -> None:
    with pytest.raises(CalibrationError, match="different models"):
        merge_calibrations(
            [made(), replace(made(1, "e"), fingerprint=replace(SEEN, model="x", data="e"))]
        )
    with pytest.raises(CalibrationError, match="same data"):
        merge_calibrations([made(), made()])
    less = replace(made(1, "e"), statistics={"layers.0.attn.qkv": ActivationStatistics.empty(4)})
    with pytest.raises(CalibrationError, match="empty"):
        merge_calibrations([made(), less])
    with pytest.raises(CalibrationError, match="no calibration files"):
        merge_calibrations([])


@pytest.mark.parametrize("alone", ["d", "e"])
def test_a_part_is_not_added_to_what_it_is_in(alone: str, tmp_path: Path) -> None:
    merge_calibrations([made(0, "d"), made(1, "e")]).save(tmp_path / "both")
    both = CalibrationFile.load(tmp_path / "both")
    with pytest.raises(CalibrationError, match="same data"):
        merge_calibrations([both, made(0, alone)])
    with pytest.raises(CalibrationError, match="same data"):
        merge_calibrations([made(2, "f"), merge_calibrations([made(3, "g"), both]), both])
    three, same = (
        merge_calibrations([both, made(2, "f")]),
        merge_calibrations([made(2, "f"), made(1, "e")]),
    )
    assert three.data_hashes == ("d" * 64, "e" * 64, "f" * 64)
    assert three.fingerprint == merge_calibrations([made(0, "d"), same]).fingerprint


def fits(calibration: CalibrationFile, of: Case, **more: Any) -> bool:
    d = of.decided
    seen = compute_fingerprint(d.source.catalogue, d.source.view, d.recipe, d.matched.decisions)
    return check_fits(calibration, seen, d.recipe, d.matched.decisions, of.points, **more)


def test_a_calibration_file_fits_its_model_and_recipes_that_need_no_more(
    llama: Path, moe: Path
) -> None:
    mine = case(llama, batches=tokens(128, count=1))
    calibration = mine.run()
    assert fits(calibration, mine)
    assert not fits(calibration, case(llama, "nvfp4")), "solved again"
    assert not fits(replace(calibration, needs_solving=True), mine)
    with pytest.raises(CalibrationError, match="gptq needs the inputs"):
        fits(calibration, case(llama, "int4_gptq"))
    with raises(CalibrationError, id="foreign-calibration"):
        fits(calibration, case(moe))


def test_what_layers_saw_behind_gptq_is_for_its_recipe_alone(llama: Path, tmp_path: Path) -> None:
    mine = case(llama, "int4_gptq", batches=tokens(128, count=1))
    mine.run().save(tmp_path / "a")
    calibration = CalibrationFile.load(tmp_path / "a")
    assert calibration.sequential
    assert fits(calibration, mine)
    with pytest.raises(CalibrationError, match="its statistics cannot be used"):
        fits(calibration, case(llama, "fp8"))


def test_how_unseen_experts_were_settled_counts(tmp_path: Path) -> None:
    source = random_moe(tmp_path / "moe")
    mine = case(source, batches=tokens(128, count=1))
    mine.run(uncalibrated_experts="weights").save(tmp_path / "a")
    calibration = CalibrationFile.load(tmp_path / "a")
    assert calibration.uncalibrated_experts == "weights"
    assert fits(calibration, mine)
    assert fits(calibration, mine, uncalibrated_experts="weights")
    assert not fits(calibration, mine, uncalibrated_experts="share"), "solved again"
    with pytest.raises(CalibrationError, match="--calibrate-all-experts"):
        fits(calibration, mine, calibrate_all_experts=True)
    everyone = replace(calibration, calibrate_all_experts=True)
    assert fits(everyone, mine, calibrate_all_experts=True)
    assert fits(everyone, mine)
    with pytest.raises(CalibrationError, match="--calibrate-all-experts"):
        merge_calibrations([calibration, replace(everyone, data_hashes=("x",))])
    other = case(source, "int4_awq")
    d = other.decided
    seen = compute_fingerprint(d.source.catalogue, d.source.view, d.recipe, d.matched.decisions)
    searched = replace(calibration, fingerprint=seen, solved_recipe=seen.recipe)
    assert fits(searched, other)
    with pytest.raises(CalibrationError, match="experts weights, and awq needs the inputs"):
        fits(searched, other, uncalibrated_experts="share")
