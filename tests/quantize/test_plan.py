"""What a run of `megtool quantize` would refuse in the end is refused before any work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megtool import quantize, reshard
from megtool.errors import (
    CalibrationError,
    DestinationError,
    MegtoolError,
    MissingPackageError,
    RecipeError,
    UsageError,
)
from megtool.quantize.plan import QuantizePlan
from tests.support.models import tiny_text

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2}
SMALL: dict[str, Any] = {"samples": 2, "seq_length": 32, "device": "cpu", "threads": 1}
KEPT: dict[str, Any] = {"threads": 1}
"""What goes with a calibration."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_text.save(tmp_path_factory.mktemp("before") / "hf", dtype="bfloat16", **SIZES)


@pytest.fixture(scope="module")
def kept(folder: Path) -> Path:
    """What the folder was calibrated by."""
    out = folder.parent / "kept.safetensors"
    quantize(folder, out, recipe="fp8", calibrate_only=True, **SMALL)
    return out


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Path:
    """A model that it was not."""
    return tiny_text.save(folder.parent / "stranger", dtype="bfloat16", seed=9, **SIZES)


class Unmoved:
    """A progress that nothing may be told."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        raise AssertionError(f"{stage} has begun")


def refused(source: Path, at: Path, **options: Any) -> MegtoolError:
    """The error of a run, which is that of a dry run too."""
    errors = []
    options = (KEPT if "calibration" in options else SMALL) | options
    for dry_run in (True, False):
        with pytest.raises(MegtoolError) as caught:
            quantize(source, at / "out", dry_run=dry_run, progress=Unmoved(), **options)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])
    assert not list(at.iterdir())
    return errors[0]


@pytest.mark.parametrize(
    ("recipe", "error", "told"),
    [
        ("nvfp4_gptq", RecipeError, "ModelOpt stores pre_quant_scale"),
    ],
)
def test_what_modelopt_cannot_do(
    folder: Path, tmp_path: Path, recipe: str, error: type[MegtoolError], told: str
) -> None:
    found = refused(folder, tmp_path, recipe=recipe, backend="modelopt")
    assert isinstance(found, error)
    assert told in str(found)


@pytest.mark.peers
def test_recipes_of_modelopt_that_choose_formats_are_scored_by_it(
    folder: Path, tmp_path: Path
) -> None:
    """By megtool's own scores they run anywhere, with ModelOpt's in one process alone."""
    shipped = Path(pytest.importorskip("modelopt_recipes").__path__[0])
    recipe = str(shipped / "general/auto_quantize/nvfp4_fp8_kl_div_at_5p4bits.yaml")
    error = refused(folder, tmp_path, recipe=recipe, backend="modelopt", tp=2)
    assert "ModelOpt scores the whole model in one process" in str(error)
    quantize(folder, tmp_path / "out", recipe=recipe, tp=2, dry_run=True, **SMALL)
    quantize(folder, tmp_path / "out", recipe=recipe, backend="modelopt", dry_run=True, **SMALL)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        ("{method: mse, step_size: -1}", "step_size: Input should be greater than 0"),
        (
            "{method: mse, fp8_scale_sweep: perhaps}",
            "fp8_scale_sweep: Input should be a valid",
        ),
        ("{method: awq_clip, min_clip_ratio: 2}", "min_clip_ratio: Input should be less than 1"),
        ("{method: mse, start_multiplier: 2, stop_multiplier: 1}", "begins at 2 times the amax"),
        ("{method: gptq, block_size: 0}", "block_size is 0"),
    ],
)
def test_options_that_modelopt_does_not_take(
    algorithm: str, told: str, folder: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipes" / "own.yaml"
    recipe.parent.mkdir()
    recipe.write_text(
        f"algorithm: {algorithm}\nquant_cfg:\n"
        "  - {quantizer_name: '*', enable: false}\n"
        "  - {quantizer_name: '*weight_quantizer', cfg: {num_bits: 4, block_sizes: {-1: 32}}}\n"
        "  - {quantizer_name: '*lm_head*', enable: false}\n"
    )
    (tmp_path / "at").mkdir()
    error = refused(folder, tmp_path / "at", recipe=str(recipe), backend="modelopt")
    assert isinstance(error, RecipeError)
    assert told in str(error)


def test_what_modelopt_alone_has_is_refused_without_it(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipes" / "headroom.yaml"
    recipe.parent.mkdir()
    recipe.write_text(
        "algorithm: nvfp4_act_headroom\nquant_cfg:\n"
        "  - {quantizer_name: '*', enable: false}\n"
        "  - {quantizer_name: '*proj.*_quantizer', cfg: {num_bits: e2m1, "
        "block_sizes: {-1: 16, type: dynamic, scale_bits: e4m3}}}\n"
        "  - {quantizer_name: '*output_quantizer', enable: false}\n"
    )
    (tmp_path / "at").mkdir()
    error = refused(folder, tmp_path / "at", recipe=str(recipe))
    assert isinstance(error, RecipeError)
    assert "--backend modelopt" in str(error)


def test_a_missing_package_before_any_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder.parent / "dist"
    reshard(folder, source, to="torch_dist", tp=2)
    monkeypatch.setitem(sys.modules, "modelopt", None)
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", None)
    (tmp_path / "at").mkdir()
    found = refused(source, tmp_path / "at", recipe="fp8", backend="modelopt")
    assert isinstance(found, MissingPackageError)
    assert "megtool[modelopt]" in str(found)


def test_options_that_modelopt_does_not_heed(folder: Path, kept: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "--calibration": {"calibration": [kept]},
        "--uncalibrated-experts": {"uncalibrated_experts": "share"},
    }
    for name, given in options.items():
        found = refused(folder, tmp_path, recipe="fp8", backend="modelopt", **given)
        assert isinstance(found, UsageError)
        assert f"{name} has no effect with --backend modelopt" in str(found)
        assert f"--backend megtool has {name}" in str(found)
    every = {key: value for given in options.values() for key, value in given.items()}
    told = str(refused(folder, tmp_path, recipe="fp8", backend="modelopt", **every))
    assert all(name in told for name in options)


def test_modelopt_that_nothing_asks_for_is_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize(folder, tmp_path / "out", recipe="mxfp8", backend="modelopt", dry_run=True, **SMALL)
    assert "ModelOpt is not run" in caplog.text


def told_of(values: dict[str, Any]) -> dict[str, Any]:
    """Options by their names on the command line, as `quantize` takes them."""
    names = {name: name.removeprefix("--").removeprefix("no-").replace("-", "_") for name in values}
    return {names[name]: value for name, value in values.items()}


@pytest.mark.parametrize(
    ("beside", "why", "idle"),
    [
        (
            {"recipe": "fp8", "calibration": ["KEPT"]},
            "with --calibration",
            {
                **{"--data": "x.txt", "--field": "text", "--split": "train", "--samples": 3},
                **{"--seq-length": 16, "--seed": 4, "--synthetic": True, "--calibrate-only": True},
                **{
                    "--offload-activations": True,
                    "--work-dir": "work",
                    "--tokenizer": ".",
                    "--device": "cpu",
                },
                **{
                    "--dtype": "float32",
                    "--kernels": "torch",
                    "--no-stream-layers": False,
                    "--tp": 1,
                },
                **{"--pp": 1, "--ep": 1, "--etp": 1},
            },
        ),
        (
            {"recipe": "fp8", "calibrate_only": True},
            "with --calibrate-only, which quantizes nothing",
            {
                **{"--eval-data": "x.txt", "--eval-tokens": 9, "--report": "x.html"},
                **{"--max-shard-size": "1GiB", "--memory": "1GiB", "--no-fsync": False},
            },
        ),
        (
            {"recipe": "fp8", "backend": "modelopt"},
            "with --backend modelopt",
            {"--save-calibration": "x", "--calibrate-only": True},
        ),
        (
            {"recipe": "fp8", "synthetic": True},
            "with --synthetic",
            {"--data": "x.txt", "--field": "text", "--split": "train", "--tokenizer": "."},
        ),
        ({"recipe": "fp8"}, "without --data", {"--field": "text", "--split": "train"}),
        ({"recipe": "fp8"}, "without --eval-data", {"--eval-tokens": 100}),
        (
            {"recipe": "fp8", "data": "x.bin"},
            "Megatron data set",
            {"--field": "a", "--split": "train"},
        ),
        ({"recipe": "fp8", "data": "TEXT.txt"}, "no fields", {"--field": "text"}),
        ({"recipe": "fp8", "data": "TEXT.txt"}, "no splits", {"--split": "train"}),
        ({"recipe": "fp8", "data": "TEXT.jsonl"}, "no splits", {"--split": "train"}),
        ({"recipe": "fp8"}, "chooses no format", {"--bits": 5.0}),
        ({"recipe": "mxfp8"}, "needs no data", {"--save-calibration": "x"}),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_an_option_that_could_have_no_effect(
    folder: Path,
    kept: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    beside: dict[str, Any],
    why: str,
    idle: dict[str, Any],
) -> None:
    given = dict(beside)
    if "calibration" in given:
        given["calibration"] = [kept]
    if "TEXT" in str(given.get("data")):
        text = tmp_path_factory.mktemp("text") / str(given["data"])
        text.write_text('{"text": "a"}\n')
        given["data"] = text
    for name, value in idle.items():
        found = refused(folder, tmp_path, **given, **told_of({name: value}))
        assert isinstance(found, UsageError)
        assert name in found.message
        assert why in found.message
        assert found.hint
    told = refused(folder, tmp_path, **given, **told_of(idle)).message
    assert sum(name in told for name in idle) == len(idle), "all of them at once"


def test_what_a_measurement_uses_is_no_idle_option(
    folder: Path, kept: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("It was a dark and stormy night.")
    plan = quantize(
        *(folder, tmp_path / "out"),
        **{"recipe": "fp8", "calibration": [kept], "eval_data": tmp_path / "text.txt"},
        **{"device": "cpu", "dtype": "float32", "kernels": "torch", "stream_layers": False},
        **{"tokenizer": folder, "eval_tokens": 16, "dry_run": True},
    )
    assert isinstance(plan, QuantizePlan)


@pytest.mark.parametrize(
    ("recipe", "told", "unheeded"),
    [
        (
            "mxfp8",
            "recipe mxfp8 needs no data",
            ["--samples", "--seq-length", "--device", "--work-dir"],
        ),
        ("fp8", "the model has no experts", ["--calibrate-all-experts", "--uncalibrated-experts"]),
    ],
)
def test_what_a_recipe_or_model_has_no_use_for_is_said(
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recipe: str,
    told: str,
    unheeded: list[str],
) -> None:
    given: dict[str, Any] = {"recipe": recipe, "dry_run": True, **SMALL}
    quantize(
        folder,
        tmp_path / "out",
        **given,
        calibrate_all_experts=True,
        uncalibrated_experts="none",
        work_dir=tmp_path / "w",
    )
    (line,) = [r.getMessage() for r in caplog.records if told in r.getMessage()]
    assert all(name in line for name in unheeded)
    assert "not used" in line
    assert "--threads" not in line


@pytest.mark.parametrize("given", [{"recipe": "mxfp8"}, {"recipe": "fp8", "calibration": ["KEPT"]}])
def test_processes_that_share_nothing_out(
    folder: Path,
    kept: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
) -> None:
    if "calibration" in given:
        given = given | {"calibration": [kept]}
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = refused(folder, tmp_path, **given)
    assert isinstance(found, UsageError)
    assert "2 processes" in found.message
    assert "no torchrun" in (found.hint or "")


def test_a_calibration_that_does_not_fit(
    folder: Path, stranger: Path, kept: Path, tmp_path: Path
) -> None:
    found = refused(stranger, tmp_path, recipe="fp8", calibration=[kept])
    assert isinstance(found, CalibrationError)
    assert "another model" in str(found)
    found = refused(folder, tmp_path, recipe="int4_awq", group_size=32, calibration=[kept])
    assert "awq needs the inputs" in str(found)


def test_a_choice_needs_what_formats_cost(folder: Path, kept: Path, tmp_path: Path) -> None:
    found = refused(folder, tmp_path, recipe="auto_nvfp4_fp8", calibration=[kept])
    assert isinstance(found, CalibrationError)
    assert "has no sensitivities by kl_div" in found.message
    assert "without --calibration" in (found.hint or "")


def test_a_plan_with_a_calibration_runs_nothing(folder: Path, kept: Path, tmp_path: Path) -> None:
    plan = quantize(
        folder, tmp_path / "out", recipe="fp8", calibration=[kept], dry_run=True, **KEPT
    )
    assert isinstance(plan, QuantizePlan)
    assert (plan.num_samples, plan.num_tokens) == (2, 64)
    assert plan.calibrate_seconds == 0
    told = "\n".join(plan.lines())
    assert f"calibration  2 samples, 64 tokens: read from {kept}" in told
    assert "(writing and verification" in told
    assert plan.to_json()["is_given"] is True


@pytest.mark.parametrize(
    ("option", "place", "told"),
    [
        ("save_calibration", "out", "DST and --save-calibration are the same path"),
        ("save_calibration", "out/c", "--save-calibration is inside DST"),
        ("save_calibration", "hf/config.json", "--save-calibration would replace a file of the s"),
        ("work_dir", "out", "DST and --work-dir are the same path"),
        ("work_dir", "out/w", "--work-dir is inside DST"),
    ],
)
def test_files_that_would_be_lost(
    folder: Path, tmp_path: Path, option: str, place: str, told: str
) -> None:
    at = folder.parent if place.startswith("hf") else tmp_path
    found = refused(folder, tmp_path, recipe="fp8", **{option: at / place})
    assert isinstance(found, DestinationError)
    assert told in str(found)
    assert found.hint
    both = {"save_calibration": tmp_path / "c.html", "report": tmp_path / "c.html"}
    assert "--report are the same path" in str(refused(folder, tmp_path, recipe="fp8", **both))


def test_a_calibration_is_not_lost_in_what_is_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DestinationError, match="inside DST"):
        quantize(
            folder,
            tmp_path / "out",
            recipe="fp8",
            overwrite=True,
            save_calibration=tmp_path / "out" / "c",
            **SMALL,
        )
