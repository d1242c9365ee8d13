"""`quantize` with a recipe that rotates: plan, report, calibration on ranks, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megtool import export, finetune, lint, quantize, reshard, verify
from megtool.cli.app import main
from megtool.digests.crc32c import read_sidecar
from megtool.errors import FormatError, MappingError, UsageError
from megtool.quant.recipes.dialects import read_recipe_text
from megtool.quant.recipes.rotation import RotationMatrices
from megtool.quantize.report import QuantizeReport
from tests.support.errors import raises
from tests.support.models import tiny_text
from tests.support.quant.quantize_sizes import save_llama
from tests.support.worlds.torchrun import torchrun

PAGE = Path(__file__).parents[2] / "docs/reference/recipe-format.md"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_llama(tmp_path_factory.mktemp("rotated") / "llama")


def rotated(name: str, path: Path, **rotation: Any) -> Path:
    """A shipped recipe with a rotation."""
    recipe = yaml.safe_load(read_recipe_text(name)[1])
    path.write_text(yaml.safe_dump(recipe | {"rotation": rotation}))
    return path


def test_plan_and_report_say_it(llama: Path, tmp_path: Path, capsys: Any) -> None:
    recipe = rotated("fp8_per_channel", tmp_path / "r.yaml", r1="random-hadamard", seed=4)
    words = [str(llama), "--recipe", str(recipe)]
    assert main(["recipe", "explain", *words]) == 0
    assert "R1 random-hadamard, seed 4" in capsys.readouterr().out
    assert main(["recipe", "show", str(recipe), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rotation"] == {"r1": "random-hadamard", "seed": 4}
    out = tmp_path / "out"
    assert main(["quantize", *words[:1], str(out), *words[1:], "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recipe"]["rotation"] == {"r1": "random-hadamard", "seed": 4}
    assert not out.exists()
    assert main(["quantize", *words[:1], str(out), *words[1:], "--no-fsync"]) == 0
    assert "R1 random-hadamard, seed 4" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert list(config["quantization_config"]["transform_config"]["config_groups"]) == ["R1"]
    assert "transform_config" not in (out / "hf_quant_config.json").read_text()


def test_calibration_sees_the_rotated_model(llama: Path, tmp_path: Path) -> None:
    """An outlier of the hidden state is spread: inputs have another amax."""
    data = {"samples": 4, "seq_length": 24, "device": "cpu", "fsync": False}
    reports = []
    recipe = rotated("fp8", tmp_path / "r.yaml", r1="hadamard", r2="hadamard")
    for name in ("fp8", str(recipe)):
        out = tmp_path / str(len(reports))
        reports.append(quantize(llama, out, recipe=name, eval_data=None, **data))
    amaxes = []
    for report in reports:
        assert isinstance(report, QuantizeReport)
        assert report.exit_status == 0
        assert report.calibration is not None
        amaxes.append([row.amax for row in report.calibration.inputs])
    assert len(amaxes[0]) == len(amaxes[1])
    assert all(a != b for a, b in zip(*amaxes, strict=True) if a)


def test_a_calibration_of_the_model_as_it_was_is_refused(llama: Path, tmp_path: Path) -> None:
    from megtool.errors import CalibrationError

    kept = tmp_path / "kept.safetensors"
    data = {"samples": 2, "seq_length": 24, "device": "cpu", "fsync": False}
    quantize(llama, tmp_path / "out", recipe="fp8", save_calibration=kept, **data)
    recipe = rotated("fp8", tmp_path / "r.yaml", r2="hadamard")
    with raises(CalibrationError, id="foreign-calibration"):
        quantize(llama, tmp_path / "more", recipe=recipe, calibration=[kept], fsync=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4_gptq", "int4_weight_only", "int8_sq"])
def test_formats_and_algorithms(llama: Path, tmp_path: Path, name: str) -> None:
    recipe = rotated(name, tmp_path / "r.yaml", r1="hadamard", r2="hadamard")
    report = quantize(
        *(llama, tmp_path / "out"),
        **{"recipe": recipe, "samples": 4, "seq_length": 24, "device": "cpu", "fsync": False}
        if name != "int4_weight_only"
        else {"recipe": recipe, "fsync": False},
    )
    assert isinstance(report, QuantizeReport)
    assert report.exit_status == 0, report.proof


@pytest.mark.slow
@pytest.mark.parametrize("axes", [["--tp", "2"], ["--pp", "2"]], ids=str)
def test_ranks_calibrate_as_one_process(axes: list[str], tmp_path: Path) -> None:
    source = tiny_text.save_wide(tmp_path / "hf", num_layers=2)
    recipe = rotated("fp8", tmp_path / "r.yaml", r1="random-hadamard", r2="hadamard")
    words = ("--samples", "5", "--seq-length", "24", "--device", "cpu", "-q", "--no-fsync")
    done = torchrun(
        *(2, "quantize", str(source), str(tmp_path / "out"), "--recipe", str(recipe)),
        *(*words, *axes),
    )
    assert done.returncode == 0, done.stderr
    quantize(
        *(source, tmp_path / "alone"),
        **{"recipe": recipe, "samples": 5, "seq_length": 24, "device": "cpu", "fsync": False},
    )
    tensors, wanted = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "alone"))
    assert tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if key.endswith("input_scale"):
            torch.testing.assert_close(tensors[key], tensor, rtol=1e-3, atol=0)
        else:
            bits = [t.reshape(-1).view(torch.uint8) for t in (tensors[key], tensor)]
            assert torch.equal(*bits), key


@pytest.fixture(scope="module")
def folder(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in FP8, rotated by random signs."""
    at = tmp_path_factory.mktemp("rotated folder")
    rotation = {"r1": "random-hadamard", "r2": "hadamard", "seed": 3}
    recipe = rotated("fp8_per_channel", at / "r.yaml", **rotation)
    quantize(llama, at / "out", recipe=recipe, fsync=False)
    return at / "out"


def test_transformers_loads_compressed_tensors_of_it(
    llama: Path, folder: Path, tmp_path: Path
) -> None:
    """The library parses the description, and its model predicts what the original does."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.transform import TransformConfig
    from transformers import AutoModelForCausalLM

    export(folder, tmp_path / "ct", to="compressed-tensors", fsync=False)
    section = json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]
    config = TransformConfig.model_validate(section["transform_config"])
    assert {n: g.type for n, g in config.config_groups.items()} == {
        **{"R1": "random-hadamard", "R2": "hadamard"}
    }
    assert not any(a.is_online() for g in config.config_groups.values() for a in g.apply)
    tokens = torch.arange(48).view(2, 24) * 37 % 128
    outputs = []
    for path in (llama, tmp_path / "ct"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            outputs.append(model(tokens).logits.float())
    assert float((outputs[0] - outputs[1]).norm() / outputs[0].norm()) < 0.1
    for written in (folder, tmp_path / "ct"):
        assert not [
            f
            for f in lint(written, target=["vllm", "sglang", "trtllm"]).findings
            if f.id == "transforms"
        ]
    export(tmp_path / "ct", tmp_path / "back", to="unified", fsync=False)
    back = json.loads((tmp_path / "back/config.json").read_text())["quantization_config"]
    assert back["transform_config"] == section["transform_config"]


def test_verify_rotates_the_original(llama: Path, folder: Path, tmp_path: Path) -> None:
    export(folder, tmp_path / "ct", to="compressed-tensors", fsync=False)
    for written in (folder, tmp_path / "ct"):
        for pair in ((llama, written), (written, llama)):
            report = verify(*pair)
            assert report.exit_status == 0
            assert any("R1 random-hadamard, R2 hadamard, seed 3" in note for note in report.notes)
    sidecar = tmp_path / "ct/megtool.json"
    sidecar.unlink()
    with raises(MappingError, file=tmp_path / "ct", hint=True, id="unsupported-rotation"):
        verify(llama, tmp_path / "ct")


@pytest.mark.parametrize("settings", [{"r1": "x"}, {"seed": -1}, 3, None])
def test_a_damaged_record_is_refused(settings: Any, tmp_path: Path) -> None:
    with raises(FormatError, file=tmp_path / "megtool.json", hint=True, id="damaged-digests"):
        RotationMatrices.of_record({"settings": settings}, tmp_path)


def test_rotated_weights_are_not_rotated_again(folder: Path, tmp_path: Path) -> None:
    recipe = rotated("mxfp8", tmp_path / "r.yaml", r1="hadamard")
    with raises(MappingError, "rotated already", hint=True, id="unsupported-rotation"):
        quantize(folder, tmp_path / "out", recipe=recipe)


@pytest.fixture(scope="module")
def plain(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model rotated by the page's recipe without formats, and made plain by a reshard."""
    at = tmp_path_factory.mktemp("rotated plain")
    recipe = PAGE.read_text().split('```yaml title="rotate.yaml"\n')[1].split("```")[0]
    (at / "rotate.yaml").write_text(recipe)
    quantize(llama, at / "kept", recipe=at / "rotate.yaml", fsync=False)
    reshard(at / "kept", at / "plain", to="hf", fsync=False)
    return at / "plain"


def test_a_plain_folder_says_that_it_is_rotated(llama: Path, plain: Path, tmp_path: Path) -> None:
    """By config.json itself, without a quantization config, which engines would stop at."""
    from transformers import AutoModelForCausalLM

    config, kept = (json.loads((p / "config.json").read_text()) for p in (plain, plain / "../kept"))
    assert "quantization_config" not in config
    assert list(config["transform_config"]["config_groups"]) == ["R1", "R2"]
    assert config["transform_config"] == kept["quantization_config"]["transform_config"]
    assert verify(llama, plain).exit_status == 0
    tokens = torch.arange(48).view(2, 24) * 37 % 128
    outputs = []
    for path in (llama, plain):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            outputs.append(model(tokens).logits.float())
    assert float((outputs[0] - outputs[1]).norm() / outputs[0].norm()) < 0.05
    reshard(plain, tmp_path / "megatron", to="torch_dist", fsync=False)
    reshard(tmp_path / "megatron", tmp_path / "back", to="hf", fsync=False)
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    assert verify(llama, tmp_path / "back").exit_status == 0


@pytest.mark.parametrize("record", [True, False], ids=["record", "no record"])
@pytest.mark.parametrize("name", ["kept", "plain"])
def test_a_recipe_without_rotation_keeps_the_description(
    llama: Path, plain: Path, tmp_path: Path, name: str, record: bool
) -> None:
    source = shutil.copytree(plain.parent / name, tmp_path / name)
    if not record:
        (source / "megtool.json").unlink()
    out = tmp_path / "out"
    report = quantize(source, out, recipe="int8_weight_only", fsync=False)
    assert isinstance(report, QuantizeReport)
    assert report.exit_status == 0, report.proof
    config = json.loads((out / "config.json").read_text())
    before = json.loads((plain / "config.json").read_text())
    assert config["quantization_config"]["transform_config"] == before["transform_config"]
    assert "transform_config" not in config
    if record:
        assert verify(llama, out).exit_status == 0
    else:
        with raises(MappingError, file=out, hint=True, id="unsupported-rotation"):
            verify(llama, out)


def test_a_megatron_checkpoint_says_it_by_its_config(
    llama: Path, plain: Path, tmp_path: Path
) -> None:
    """Without the record too; another model's config.json says nothing of these weights."""
    reshard(plain, tmp_path / "megatron", to="torch_dist", fsync=False)
    (record,) = (tmp_path / "megatron").rglob("megtool.json")
    record.unlink()
    recipe = plain.parent / "rotate.yaml"
    with raises(MappingError, "rotated already", hint=True, id="unsupported-rotation"):
        quantize(tmp_path / "megatron", tmp_path / "out", recipe=recipe)
    reshard(tmp_path / "megatron", tmp_path / "back", to="hf", fsync=False)
    assert "transform_config" in json.loads((tmp_path / "back/config.json").read_text())
    reshard(llama, tmp_path / "original", to="torch_dist", fsync=False)
    reshard(tmp_path / "original", tmp_path / "like", to="hf", like=plain, fsync=False)
    assert "transform_config" not in json.loads((tmp_path / "like/config.json").read_text())


@pytest.mark.parametrize("record", [True, False], ids=["record", "no record"])
@pytest.mark.parametrize("name", ["kept", "plain"])
def test_what_a_config_calls_rotated_is_not_rotated_again(
    plain: Path, tmp_path: Path, name: str, record: bool
) -> None:
    """A second Hadamard matrix would undo the first."""
    source = shutil.copytree(plain.parent / name, tmp_path / name)
    if not record:
        (source / "megtool.json").unlink()
    recipes = [plain.parent / "rotate.yaml", rotated("mxfp8", tmp_path / "r.yaml", r2="hadamard")]
    for recipe in recipes:
        with raises(
            *(MappingError, "rotated already"), file=source, hint=True, id="unsupported-rotation"
        ):
            quantize(source, tmp_path / "out", recipe=recipe)
    assert not (tmp_path / "out").exists()


def test_a_trained_model_is_compared_as_the_rotated_one_that_it_was(
    llama: Path, plain: Path, tmp_path: Path
) -> None:
    """Saves carry the record, of a resumed run too; another rotation is refused."""
    (tmp_path / "text.jsonl").write_text('{"text": "The rain fell in torrents."}\n' * 8)
    options: dict[str, Any] = {
        **{"data": [tmp_path / "text.jsonl"], "seq_length": 16, "global_batch_size": 2},
        **{"device": "cpu", "fsync": False, "lr": 1e-3},
    }
    finetune(plain, tmp_path / "run", train_iters=2, save_interval=1, **options)
    wanted = read_sidecar(plain / "megtool.json")
    assert wanted is not None
    for source in ("run/iter_0000001", "run"):
        report = verify(llama, tmp_path / source, atol=0.02)
        assert any("as if it were rotated by R1" in note for note in report.notes)
        assert report.exit_status == 0
        assert verify(llama, tmp_path / source).exit_status == 7, "it was trained"
    for record in (tmp_path / "run").rglob("megtool.json"):
        sidecar = read_sidecar(record)
        assert sidecar is not None
        assert sidecar.rotation == wanted.rotation
    finetune(plain, tmp_path / "run", train_iters=3, **options)
    reshard(tmp_path / "run", tmp_path / "hf", to="hf", fsync=False)
    for written in ("run", "hf"):
        assert any("rotated by R1" in n for n in verify(llama, tmp_path / written).notes)
    recipe = plain.parent / "rotate.yaml"
    with raises(MappingError, "rotated already", id="unsupported-rotation"):
        quantize(tmp_path / "run", tmp_path / "out", recipe=recipe)


def test_training_does_not_rotate(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "The rain fell in torrents."}\n' * 4)
    recipe = rotated("fp8_per_channel", tmp_path / "r.yaml", r1="hadamard")
    with raises(UsageError, "--qat", "rotates", hint=True, id="option-without-effect"):
        finetune(
            *(llama, tmp_path / "out"),
            **{"data": [tmp_path / "text.jsonl"], "qat": str(recipe), "train_iters": 1},
        )
