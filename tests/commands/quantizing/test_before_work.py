"""What a run of `megtool quantize` would refuse in the end is refused before any work."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megtool.commands.quantize import quantize
from megtool.commands.quantizing.plan import QuantizePlan
from megtool.commands.reshard import reshard
from megtool.errors import (
    CalibrationError,
    MegtoolError,
    MissingPackageError,
    RecipeError,
    UsageError,
)
from tests.inference import tiny_text

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 2}
SMALL: dict[str, Any] = {"samples": 2, "length": 32, "device": "cpu", "threads": 1}


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
    for dry_run in (True, False):
        with pytest.raises(MegtoolError) as caught:
            quantize(source, at / "out", dry_run=dry_run, progress=Unmoved(), **SMALL, **options)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])
    assert not list(at.iterdir())
    return errors[0]


@pytest.mark.parametrize(
    ("recipe", "error", "told"),
    [
        ("auto_nvfp4_fp8", RecipeError, "ModelOpt is not asked for 'kl_div'"),
        ("int4_gptq", RecipeError, "ModelOpt is not asked for 'gptq'"),
        ("nvfp4_awq", UsageError, "on a GPU alone"),
    ],
)
def test_what_modelopt_cannot_do(
    folder: Path, tmp_path: Path, recipe: str, error: type[MegtoolError], told: str
) -> None:
    group = 32 if recipe == "int4_gptq" else None
    found = refused(folder, tmp_path, recipe=recipe, backend="modelopt", group_size=group)
    assert isinstance(found, error)
    assert told in str(found)


def test_a_missing_package_before_the_source_is_resharded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, temporary = folder.parent / "dist", tmp_path / "temporary"
    reshard(folder, source, to="torch_dist", tp=2)
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setitem(sys.modules, "modelopt", None)
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", None)
    (tmp_path / "at").mkdir()
    found = refused(source, tmp_path / "at", recipe="fp8", backend="modelopt")
    assert isinstance(found, MissingPackageError)
    assert "nvidia-modelopt" in str(found)
    assert not list(temporary.iterdir())


def test_modelopt_in_several_processes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "2 processes" in str(refused(folder, tmp_path, recipe="fp8", backend="modelopt", tp=2))
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "3 processes" in str(refused(folder, tmp_path, recipe="fp8", backend="modelopt"))


def test_options_that_modelopt_does_not_heed(folder: Path, kept: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "--calibration": {"calibration": [kept]},
        "--route-all": {"route_all": True},
        "--unseen-experts": {"unseen": "share"},
        "--resident": {"resident": True},
        "--spill": {"spill": True},
        "--work": {"work": tmp_path / "work"},
    }
    for name, given in options.items():
        found = refused(folder, tmp_path, recipe="fp8", backend="modelopt", **given)
        assert isinstance(found, UsageError)
        assert f"{name} with --backend modelopt" in str(found)
        assert f"--backend megtool has {name}" in str(found)
    every = {key: value for given in options.values() for key, value in given.items()}
    told = str(refused(folder, tmp_path, recipe="fp8", backend="modelopt", **every))
    assert all(name in told for name in options)


def test_modelopt_that_nothing_asks_for_is_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize(folder, tmp_path / "out", recipe="mxfp8", backend="modelopt", dry_run=True, **SMALL)
    assert "ModelOpt is not run" in caplog.text


def test_a_calibration_that_does_not_fit(
    folder: Path, stranger: Path, kept: Path, tmp_path: Path
) -> None:
    found = refused(stranger, tmp_path, recipe="fp8", calibration=[kept])
    assert isinstance(found, CalibrationError)
    assert "another model" in str(found)
    found = refused(folder, tmp_path, recipe="int4_awq", group_size=32, calibration=[kept])
    assert "awq needs the inputs" in str(found)


def test_a_choice_is_measured_on_data(folder: Path, kept: Path, tmp_path: Path) -> None:
    found = refused(folder, tmp_path, recipe="auto_nvfp4_fp8", calibration=[kept])
    assert isinstance(found, UsageError)
    assert "leave out --calibration" in str(found)


def test_a_plan_with_a_calibration_runs_nothing(folder: Path, kept: Path, tmp_path: Path) -> None:
    plan = quantize(
        folder, tmp_path / "out", recipe="fp8", calibration=[kept], dry_run=True, **SMALL
    )
    assert isinstance(plan, QuantizePlan)
    assert (plan.num_samples, plan.num_tokens) == (2, 64)
    assert plan.calibrate_seconds == 0
    told = "\n".join(plan.lines())
    assert f"calibration 2 samples, 64 tokens: read from {kept}" in told
    assert "(writing and proof" in told
    assert plan.to_json()["is_given"] is True
