"""Impossible scales of one quantized folder: `verify` says what `lint` says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megtool import lint, quantize, verify
from megtool.lint import scale_rules
from tests.support.models import tiny_models

UP = "model.layers.1.mlp.up_proj.weight_scale"
RECIPES = ("fp8_block128", "fp8_per_channel", "int8_weight_only")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scales")
    source = tiny_models.llama(folder / "source", num_hidden_layers=2)
    for recipe in RECIPES:
        quantize(source, folder / recipe, recipe=recipe)
    return folder


def changed(folder: Path, to: Path, value: float) -> Path:
    """A copy in which one scale has another value, and nothing holds digests against it."""
    shutil.copytree(folder, to)
    (to / "megtool.json").unlink(missing_ok=True)
    file = to / "model.safetensors"
    stored = load_file(file)
    stored[UP].view(-1)[-1] = value
    save_file(stored, file, metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "value", [0.0, -1.0, float("nan"), float("inf"), 1e-45, 2e-41, 7e4, 1e10, 3e38]
)
def test_impossible_values_differ(made: Path, tmp_path: Path, recipe: str, value: float) -> None:
    folder = changed(made / recipe, tmp_path / "folder", value)
    module = UP.rpartition(".")[0]
    findings = lint(folder, target="vllm").findings
    assert any(f.module == module and f.severity == "error" for f in findings)
    report = verify(folder)
    assert report.exit_status == 7
    assert {d.tensor for d in report.differences} == {module}


@pytest.mark.parametrize("recipe", RECIPES)
def test_odd_values_are_notes(made: Path, tmp_path: Path, recipe: str) -> None:
    folder = changed(made / recipe, tmp_path / "folder", 1e-38)
    report = verify(folder)
    assert report.exit_status == 0
    assert any("subnormal" in text for text in report.notes)


def test_large_scales_are_read_too(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_rules, "MAX_ELEMENTS", 3)
    folder = changed(made / "fp8_per_channel", tmp_path / "folder", 3e38)
    assert not any(f.severity == "error" for f in lint(folder, target="vllm").findings)
    assert verify(folder).exit_status == 7


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_quantize_writes_is_sound(made: Path, recipe: str) -> None:
    assert not verify(made / recipe).differences
