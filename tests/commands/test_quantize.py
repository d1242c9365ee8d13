"""`megtool quantize`: from any checkpoint by every shipped recipe to what an engine loads."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import quantize, reshard
from megtool.cli.app import main
from megtool.errors import (
    CalibrationError,
    DestinationError,
    MegtoolError,
    RecipeError,
    UsageError,
)
from megtool.quant.recipes.dialects import recipe_names
from megtool.quantize.plan import QuantizePlan
from megtool.quantize.report import QuantizeReport
from megtool.staging.folder.place import FolderPlace
from tests.support.errors import raises
from tests.support.models import tiny_models, tiny_text
from tests.support.quant.calibrated import random_moe
from tests.support.quant.quantize_sizes import SIZES, SMALL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("quantize")
    return tiny_text.save(root / "hf", dtype="bfloat16", **SIZES)


@pytest.fixture(scope="module")
def fp8(folder: Path) -> Path:
    """The folder quantized in the simplest way, with what it was calibrated by."""
    out = folder.parent / "fp8"
    done(folder, out, recipe="fp8", save_calibration=folder.parent / "fp8.safetensors")
    return out


def done(source: Path, destination: Path, **options: Any) -> QuantizeReport:
    usual = {"threads": 1} if "calibration" in options else SMALL  # which stands for data
    report = quantize(source, destination, **(usual | options))
    assert isinstance(report, QuantizeReport)
    return report


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != "megtool.json"
    }


def contents_of(folder: Path) -> dict[str, bytes]:
    """All files, with the digests that megtool leaves beside them."""
    return files_of(folder) | {"megtool.json": (folder / "megtool.json").read_bytes()}


def tensors_of(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open

    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as f:
            names = list(f.keys())
            out |= {name: f.get_tensor(name) for name in names}
    return out


@pytest.mark.parametrize(
    "recipe", sorted({*recipe_names()} - {"mxfp4_experts", "nvfp4_from_mxfp4"})
)
def test_every_shipped_recipe(folder: Path, tmp_path: Path, recipe: str) -> None:
    report = done(folder, tmp_path / "out", recipe=recipe)
    assert report.exit_status == 0
    errors = [f for f in report.proof.findings if f.severity == "error"]
    assert not errors
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    beside = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert beside["producer"]["name"] == "modelopt"  # engines look for it
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not list(tmp_path.glob(".*"))  # nothing of the work is left


@pytest.mark.parametrize(
    ("recipe", "group"),
    [
        ("int4_awq", 32),
        *(pytest.param(r, None, marks=pytest.mark.slow) for r in ("fp8", "kv_fp8")),
    ],
)
def test_the_same_bytes_from_every_layout(tmp_path: Path, recipe: str, group: int | None) -> None:
    thirds = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 32}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    folder = tiny_text.save(tmp_path / "hf", dtype="bfloat16", **(SIZES | thirds | heads))
    reshard(folder, tmp_path / "dist", to="torch_dist", tp=3, pp=2)
    kept = [tmp_path / f"{recipe}-{n}.safetensors" for n in ("hf", "dist")]
    for source, to in zip((folder, tmp_path / "dist"), kept, strict=True):
        out = to.with_suffix("")
        done(source, out, recipe=recipe, group_size=group, save_calibration=to)
    assert kept[0].read_bytes() == kept[1].read_bytes()
    same = [(tmp_path / f"{recipe}-{n}" / "megtool.json").read_bytes() for n in ("hf", "dist")]
    assert same[0] == same[1]
    hf, dist = (tensors_of(tmp_path / f"{recipe}-{n}") for n in ("hf", "dist"))
    assert hf.keys() == dist.keys()
    for name, tensor in hf.items():
        assert tensor.dtype == dist[name].dtype
        assert tensor.view(-1).view(dtype=_BYTES).equal(dist[name].view(-1).view(dtype=_BYTES))


def test_weights_stored_as_one(tmp_path: Path) -> None:
    """Phi-3 has queries, keys and values in one tensor, and gates and ups in another."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        original_max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "phi")
    report = done(tmp_path / "phi", tmp_path / "out", recipe="int8_weight_only", fsync=False)
    assert report.proof is not None
    assert {f.id for f in report.proof.findings} <= {"tokenizer"}
    assert report.proof.num_errors == 0
    assert {r.name.rpartition(".")[2] for r in report.proof.rows} == {*"qkvo", "gate", "up", "down"}
    held = tensors_of(tmp_path / "out")
    at = "model.layers.0.self_attn.qkv_proj"
    assert held[f"{at}.weight"].shape == (128, 64)
    assert held[f"{at}.weight_scale"].shape == (128,)


def test_a_calibration_serves_again(folder: Path, fp8: Path, tmp_path: Path) -> None:
    kept = folder.parent / "fp8.safetensors"
    done(folder, tmp_path / "again", recipe="fp8", calibration=[kept])
    assert files_of(tmp_path / "again") == files_of(fp8)
    other = done(folder, tmp_path / "other", recipe="nvfp4", calibration=[kept])
    direct = done(folder, tmp_path / "direct", recipe="nvfp4")
    assert other.exit_status == direct.exit_status == 0
    assert files_of(tmp_path / "other") == files_of(tmp_path / "direct")
    with pytest.raises(CalibrationError, match="awq"):
        done(folder, tmp_path / "awq", recipe="int4_awq", calibration=[kept])
    stranger = tiny_text.save(tmp_path / "stranger", dtype="bfloat16", seed=9, **SIZES)
    with raises(CalibrationError, id="foreign-calibration"):
        done(stranger, tmp_path / "wrong", recipe="fp8", calibration=[kept])
    with raises(CalibrationError, id="foreign-calibration"):
        done(stranger, tmp_path / "wrong", recipe="mxfp8", calibration=[kept])
    assert not (tmp_path / "awq").exists()
    assert not (tmp_path / "wrong").exists()


def test_calibrations_of_two_machines_add_up(folder: Path, tmp_path: Path) -> None:
    text = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 8
    for n, part in enumerate((text[:320], text[320:640])):
        (tmp_path / f"{n}.txt").write_text(part)
        quantize(
            folder,
            tmp_path / f"{n}.safetensors",
            recipe="fp8",
            data=tmp_path / f"{n}.txt",
            calibrate_only=True,
            **(SMALL | {"samples": None}),
        )
    both = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    report = done(folder, tmp_path / "both", recipe="fp8", calibration=both)
    assert report.exit_status == 0
    scales = {
        n: float(t) for n, t in tensors_of(tmp_path / "both").items() if n.endswith("input_scale")
    }
    for n in (0, 1):
        done(folder, tmp_path / f"one{n}", recipe="fp8", calibration=[both[n]])
        for name, t in tensors_of(tmp_path / f"one{n}").items():
            if name.endswith("input_scale"):
                assert float(t) <= scales[name]


def test_a_model_whose_experts_saw_nothing(tmp_path: Path) -> None:
    source = tiny_models.moe(tmp_path / "moe")
    for recipe in ("fp8", "nvfp4", "int8_sq"):
        report = done(
            source, tmp_path / recipe, recipe=recipe, synthetic=True, samples=1, seq_length=16
        )
        assert report.exit_status == 0
        for name, t in tensors_of(tmp_path / recipe).items():
            if name.endswith("_scale"):
                values = t.float()
                assert bool((values > 0).all()), name
                assert bool(values.isfinite().all()), name


def test_what_it_costs_is_measured(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    (tmp_path / "held-out.txt").write_text("A tale told by someone else, of other things. " * 6)
    report = done(
        folder,
        tmp_path / "out",
        recipe="int4_weight_only",
        group_size=32,
        eval_data=tmp_path / "held-out.txt",
        report=tmp_path / "report.html",
    )
    assert report.evaluation is not None
    assert report.evaluation.perplexity_after != report.evaluation.perplexity_before
    assert report.evaluation.kl_mean > 0
    page = (tmp_path / "report.html").read_text()
    assert "Error and bits by module" in page
    json.dumps(report.to_json())
    assert any("perplexity" in line for line in report.lines())


def test_a_dry_run_says_what_would_be(folder: Path, tmp_path: Path) -> None:
    plan = quantize(folder, tmp_path / "out", recipe="fp8", dry_run=True, **SMALL)
    assert isinstance(plan, QuantizePlan)
    assert plan.num_samples == 4
    assert plan.num_tokens == 128
    assert plan.explained.num_bytes < plan.explained.source_bytes
    assert "about" in "\n".join(plan.lines())
    assert not (tmp_path / "out").exists()
    report = done(folder, tmp_path / "out", recipe="fp8")
    assert abs(report.num_bytes - plan.explained.num_bytes) < 64


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"recipe": "fp9"}, RecipeError, "fp9"),
        ({"recipe": "mxfp4", "target": "vllm"}, RecipeError, "does not load"),
        ({"recipe": "fp8", "samples": 4000}, UsageError, "tokens"),
        ({"recipe": "fp8", "seq_length": 4000}, UsageError, "positions"),
        ({"recipe": "fp8", "synthetic": True, "data": "x.txt"}, UsageError, "synthetic"),
        ({"recipe": "fp8", "bits": 4.0}, UsageError, "chooses"),
        ({"recipe": "fp8", "data": "nowhere.txt"}, MegtoolError, "nowhere"),
        ({"recipe": "mxfp8", "calibrate_only": True}, UsageError, "needs no data"),
        ({"recipe": "fp8", "calibration": ["nowhere.safetensors"]}, MegtoolError, "nowhere"),
        ({"recipe": "mxfp8", "calibration": ["nowhere.safetensors"]}, MegtoolError, "nowhere"),
        ({"recipe": "fp8", "eval_data": "nowhere.txt"}, MegtoolError, "nowhere"),
        ({"recipe": "fp8", "eval_data": os.devnull}, UsageError, "no text to evaluate on"),
        (
            {"recipe": "fp8", "report": "nowhere/x.html"},
            DestinationError,
            "the folder 'nowhere' does not exist",
        ),
        ({"recipe": "fp8", "save_calibration": "nowhere/x"}, DestinationError, "does not exist"),
        ({"recipe": "fp8", "report": "."}, UsageError, "--report is '.'"),
        ({"recipe": "fp8", "report": "/"}, UsageError, "--report is '/'"),
        (
            {"recipe": "fp8", "calibrate_only": True, "eval_data": "x.txt"},
            UsageError,
            "quantizes nothing",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(
    folder: Path, tmp_path: Path, options: dict[str, Any], error: type[MegtoolError], match: str
) -> None:
    with pytest.raises(error, match=match):
        done(folder, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_a_group_that_does_not_divide_names_the_one_that_does(tmp_path: Path, folder: Path) -> None:
    odd = tiny_text.save(tmp_path / "odd", dtype="bfloat16", **(SIZES | {"hidden_size": 192}))
    with pytest.raises(RecipeError, match="--group-size 64"):
        done(odd, tmp_path / "out", recipe="int4_weight_only")
    assert done(odd, tmp_path / "out", recipe="int4_weight_only", group_size=64).exit_status == 0


def test_a_destination_that_exists_stays(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(DestinationError):
        done(folder, tmp_path / "out", recipe="fp8")
    assert (tmp_path / "out" / "mine").read_text() == "x"


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = tiny_text.save(tmp_path / "hf", dtype="bfloat16", **SIZES)
    held = load_file(source / "model.safetensors")
    held["model.layers.2.mlp.up_proj.weight"][5, 7] = float("nan")
    save_file({n: t.contiguous() for n, t in held.items()}, source / "model.safetensors")
    assert torch.isnan(held["model.layers.2.mlp.up_proj.weight"]).any()
    for recipe in ("fp8", "mxfp8"):
        with pytest.raises(MegtoolError, match=r"nan|NaN") as caught:
            done(source, tmp_path / "out", recipe=recipe)
        assert "layers.2" in str(caught.value)
        assert [p.name for p in tmp_path.iterdir()] == ["hf"], "nothing that stands in the way"


def test_what_is_kept_and_no_number_is_not_shipped(tmp_path: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tmp_path / "hf"
    shutil.copytree(folder, source)
    held = load_file(source / "model.safetensors")
    held["lm_head.weight"][3, 3] = float("nan")
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    report = done(source, tmp_path / "out", recipe="fp8")
    assert report.exit_status == 7
    assert "kept-nan" in [f.id for f in report.proof.findings]
    assert [p.name for p in tmp_path.iterdir()] == ["hf"], "nothing that stands in the way"
    shutil.rmtree(source)
    shutil.copytree(folder, source)
    assert done(source, tmp_path / "out", recipe="fp8").exit_status == 0


def test_no_tokenizer_is_told_before_any_work(tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(folder, source, ignore=shutil.ignore_patterns("tokenizer*"))
    (tmp_path / "text.txt").write_text("It was the best of times. " * 9)
    with pytest.raises(MegtoolError, match="no tokenizer"):
        done(
            source,
            tmp_path / "out",
            recipe="fp8",
            synthetic=True,
            eval_data=tmp_path / "text.txt",
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "text.txt"]


def test_a_page_may_lie_in_what_is_written(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("plotly")
    out = tmp_path / "new" / "out"
    kept = tmp_path / "new" / "kept"
    done(folder, out, recipe="fp8", report=out / "report.html", save_calibration=kept)
    assert (out / "report.html").exists()
    assert kept.exists()


def test_how_unseen_experts_are_settled_is_chosen_after_calibration(tmp_path: Path) -> None:
    source = random_moe(tmp_path / "moe")
    few = {"recipe": "fp8", "synthetic": True, "samples": 1, "seq_length": 16}
    kept = tmp_path / "kept"
    done(source, kept, calibrate_only=True, **few)
    again = {"recipe": "fp8", "calibration": [kept]}
    for policy in ("share", "none"):
        done(source, tmp_path / policy, uncalibrated_experts=policy, **few)
        done(source, tmp_path / f"{policy}-again", uncalibrated_experts=policy, **again)
        assert files_of(tmp_path / policy) == files_of(tmp_path / f"{policy}-again")
    assert files_of(tmp_path / "share") != files_of(tmp_path / "none")


def test_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--samples", "2", "--seq-length", "32", "--device", "cpu", "--threads", "1"]
    out = str(tmp_path / "out")
    assert main(["quantize", str(folder), out, "--recipe", "fp8", *said, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["recipe"] == "fp8"
    assert main(["quantize", str(folder), out, "--recipe", "fp8", *said]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["quantize", str(folder), out + "2", "--recipe", "fp0", *said]) == 4


def killed_at(place: int, source: Path, out: Path, options: dict[str, Any]) -> None:
    """Quantize, and be killed when `place` boundaries were passed; for a process of its own.

    A boundary is the end of a layer, before and behind its record, and the end of the head.
    """
    import torch

    from megtool.quant.calibration.resume_folder import ResumeFolder

    torch.set_num_threads(1)
    whole, passed = ResumeFolder.write_unit, 0

    def boundary() -> None:
        nonlocal passed
        if passed == place:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    def record(self: ResumeFolder, *facts: Any) -> None:
        boundary()
        whole(self, *facts)
        boundary()

    ResumeFolder.write_unit = record  # type: ignore[method-assign]
    done(source, out, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("fp8", {}),
        ("int4_gptq", {"group_size": 64, "offload_activations": True}),
        ("w4a8_awq", {"group_size": 64, "stream_layers": False}),
        ("auto_nvfp4_fp8", {}),
    ],
)
def test_killed_at_every_boundary_of_a_layer_it_ends_the_same(
    tmp_path: Path, recipe: str, more: dict[str, Any]
) -> None:
    """Killed at one boundary after the other, each time by a run that goes on behind the last."""
    pytest.importorskip("transformers")
    layers = 3
    small = SIZES | {"num_hidden_layers": layers}
    folder = tiny_text.save(tmp_path / "hf", dtype="bfloat16", **small)

    def options(at: str) -> dict[str, Any]:
        kept = tmp_path / f"{at}.calibration"
        told = {"recipe": recipe, "save_calibration": kept, "fsync": False}
        return told | {"synthetic": True} | more

    done(folder, tmp_path / "whole", **options("whole"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "megtool.quantize.finalize",
            "megtool.quant.calibration.calibrate",
            "megtool.quant.mixed_precision.auto_quantize",
            "tests.commands.test_quantize",
        ]
    )

    def run(place: int) -> int | None:
        process = context.Process(
            target=killed_at, args=(place, folder, tmp_path / "out", options("out"))
        )
        process.start()
        process.join()
        return process.exitcode

    for boundary in range(2 * (layers + 1)):
        # What is recorded is not done again, so that the next boundary is the run's first, or
        # behind the record that the last run did not live to make its second.
        assert run(boundary % 2) == -signal.SIGKILL, boundary
        assert (tmp_path / ".out.calibration").is_dir()
        assert not (tmp_path / "out").exists()
    assert run(0) == 0, "those were all"
    assert contents_of(tmp_path / "out") == contents_of(tmp_path / "whole")
    kept = [tmp_path / f"{name}.calibration" for name in ("out", "whole")]
    assert kept[0].read_bytes() == kept[1].read_bytes()
    assert not list(tmp_path.glob(".out*")), "nothing of the work is left"


@pytest.mark.slow
def test_a_killed_run_goes_on(folder: Path, fp8: Path, tmp_path: Path) -> None:
    """Killed again and again, wherever it happens to be, it ends with the same bytes."""
    out = tmp_path / "out"
    told = ["--recipe", "fp8", "--samples", "4", "--seq-length", "32", "--device", "cpu"]
    command = [sys.executable, "-m", "megtool", "quantize", str(folder), *told]
    command += ["--threads", "1", "-q"]
    began = time.monotonic()
    subprocess.run([*command, str(tmp_path / "whole")], check=True)
    usual = time.monotonic() - began  # what a run takes here, and now
    for attempt in range(40):
        process = subprocess.Popen([*command, str(out)], env=dict(os.environ))
        try:
            assert process.wait(usual * (0.3 + 0.1 * attempt)) == 0
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            if out.exists():  # it was done, and died while it told so
                break
    assert files_of(out) == files_of(fp8)
    assert np.array_equal(*(sorted(os.listdir(p)) for p in (out, fp8)))


def _bytes() -> Any:
    import torch

    return torch.uint8


_BYTES = _bytes()


def test_what_a_run_left_that_was_stopped_after_its_commit_is_removed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(place: FolderPlace) -> None:
        place.release()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FolderPlace, "remove_staged", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize(folder, tmp_path / "out", recipe="int8_weight_only")
    assert {p.name for p in tmp_path.iterdir()} == {"out", ".out.megtool"}
    with pytest.raises(DestinationError, match="already exists"):
        quantize(folder, tmp_path / "out", recipe="int8_weight_only")
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
