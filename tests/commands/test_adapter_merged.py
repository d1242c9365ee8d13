"""Verbs that merge an adapter as they read weights do what they do with the merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megtool import evaluate, export, generate, quantize, reshard
from megtool.cli.app import main
from megtool.errors import DestinationError, UsageError
from megtool.inference.generation.text_engine import Engine
from tests.support.errors import raises
from tests.support.folders import contents
from tests.support.models import tiny_text
from tests.support.models.adapted_models import save_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that speaks, the adapter of it, and the two merged."""
    folder = tmp_path_factory.mktemp("merged")
    tiny_text.save(folder / "base")
    targets = ["q_proj", "v_proj", "down_proj"]
    save_adapter(folder / "base", folder / "adapter", target_modules=targets, lora_alpha=64)
    reshard(folder / "base", folder / "merged", adapter=folder / "adapter")
    reshard(folder / "base", folder / "megatron", to="torch_dist", tp=2)
    (folder / "text.txt").write_text("The end of the story is near. " * 20)
    return folder


def test_generated_texts_are_those_of_the_merged_model(base: Path) -> None:
    options: dict[str, Any] = {"prompt": ["Hello", "The end"], "max_new_tokens": 12, "logprobs": 1}

    def answers(source: Path, **more: Any) -> Any:
        return generate(source, device="cpu", **options, **more).answers

    report = generate(base / "base", device="cpu", **options, adapter=base / "adapter")
    assert [*report.to_json()["adapters"]] == [str(base / "adapter")]
    assert not [*report.rows(), *report.note_rows()], "the texts are all there is"
    merged, adapter = answers(base / "merged"), base / "adapter"
    assert answers(base / "base", adapter=adapter) == merged
    assert answers(base / "megatron", adapter=[adapter]) == merged
    assert answers(base / "base") != merged
    with Engine(base / "megatron", device="cpu", adapter=adapter) as engine:
        text = engine.submit("Hello", max_new_tokens=12).result()
    assert text.text == merged[0].text


def test_a_loss_is_that_of_the_merged_model(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["evaluate", str(base / "base"), "--data", str(base / "text.txt"), "--device", "cpu"]
    call += ["--adapter", str(base / "adapter"), "--against", str(base / "merged"), "--json"]
    assert main(call) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["loss"] == report["against"]["loss"]
    assert f"merged into the weights: {base / 'adapter'}" in report["notes"]
    assert report["loss"] != evaluate(base / "base", data=base / "text.txt").loss


@pytest.mark.parametrize("recipe", ["fp8", "w4a16_nvfp4"])
def test_a_quantized_model_is_that_of_the_merged_one(
    recipe: str, base: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"recipe": recipe}
    options |= {"synthetic": True, "samples": 2, "seq_length": 16} if recipe == "fp8" else {}
    quantize(base / "merged", tmp_path / "a", fsync=False, **options)
    report = quantize(
        base / "megatron", tmp_path / "b", adapter=base / "adapter", fsync=False, **options
    )
    wanted, ours = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert wanted is not None
    assert ours is not None
    assert {n for n in wanted if wanted[n] != ours[n]} <= {"megtool_report.json"}
    assert any("merged into the weights" in note for note in report.notes)


@pytest.mark.parametrize("to", ["hf", "gguf", "trtllm-legacy"])
def test_exported_files_are_those_of_the_merged_model(to: str, base: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a" / "model", tmp_path / "b" / "model"  # GGUF has the name
    export(base / "merged", a, to=to, fsync=False)
    export(base / "megatron", b, to=to, adapter=base / "adapter", fsync=False)
    assert contents(a) == contents(b)


def test_codes_are_not_copied_without_the_adapter(base: Path, tmp_path: Path) -> None:
    quantize(base / "base", tmp_path / "fp8", recipe="fp8", fsync=False)
    with raises(UsageError, "an adapter changes the weights"):
        export(tmp_path / "fp8", tmp_path / "out", to="vllm", adapter=base / "adapter")
    report = evaluate(tmp_path / "fp8", data=base / "text.txt", adapter=base / "adapter")
    reshard(tmp_path / "fp8", tmp_path / "merged", adapter=base / "adapter")
    assert report.loss == evaluate(tmp_path / "merged", data=base / "text.txt").loss
    assert not (tmp_path / "out").exists()


def test_the_adapter_is_not_replaced(base: Path) -> None:
    adapter = base / "adapter"
    before = contents(adapter)
    with raises(DestinationError, id="destination-in-source"):
        quantize(base / "base", adapter, recipe="fp8", adapter=adapter, overwrite=True)
    with raises(DestinationError, id="destination-in-source"):
        export(base / "base", adapter, to="hf", adapter=adapter, overwrite=True)
    with raises(DestinationError, id="destination-in-source"):
        export(base / "base", adapter / "m.gguf", to="gguf", adapter=adapter, overwrite=True)
    assert contents(adapter) == before
