"""Finetune with adapters and FP8 together, other bases and types, and plans of what cannot run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megtool import finetune, quantize, reshard, verify
from megtool.commands.reports.finetune import FinetunePlan, FinetuneReport
from megtool.errors import (
    CalibrationError,
    CheckpointError,
    LayoutError,
    MappingError,
    RecipeError,
    TrainingError,
    UsageError,
)
from megtool.fp8_state.inspect import inspect_amax
from megtool.megatron_state.extra_states.te_state import decode
from megtool.megatron_state.saved_objects import read_object
from megtool.source.open import open_source
from megtool.train.run_log import read_log
from tests.support.models import tiny_text

DELAYED = {"fp8_recipe": "delayed", "fp8_amax_history_len": 8, "bf16": True}


def tune(model: Path, folder: Path, text: Path, **more: Any) -> FinetuneReport | FinetunePlan:
    options: dict[str, Any] = {
        "seq_length": 32,
        "train_iters": 2,
        "global_batch_size": 2,
        "lr": 1e-3,
        "threads": 1,
        "fsync": False,
    }
    return finetune(model, folder, data=[str(text)], **(options | more))


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder / "log.jsonl") if "loss" in line]


def delayed_states(folder: Path) -> set[str]:
    """The extra states of a save folder that hold scales and histories."""
    catalogue = open_source(folder).catalogue
    found = set()
    for name, held in catalogue.objects.items():
        if "_extra_state" in name:
            state = decode(read_object(catalogue, held))
            if state is not None and state.is_delayed:
                found.add(name)
    return found


def test_a_lora_run_in_fp8_that_was_stopped_is_the_one_that_was_not(model, text, tmp_path) -> None:
    how = {**DELAYED, "lora_rank": 4, "train_iters": 4, "lr_decay_iters": 4, "save_interval": 2}
    tune(model, tmp_path / "whole", text, **how)
    tune(model, tmp_path / "cut", text, **(how | {"train_iters": 2}))
    tune(model, tmp_path / "cut", text, **how)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert verify(tmp_path / "cut", tmp_path / "whole").verdict == "equal"
    names = [
        f"iter_0000004/adapter/{n}"
        for n in ("adapter_model.safetensors", "training_state.safetensors")
    ]
    for name in names:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # Nothing learns before the first layer's queries: their product never has a gradient.
    seen = inspect_amax(tmp_path / "whole")
    assert seen.exit_status == 0, list(seen.lines())


def test_scales_of_layers_that_are_not_in_fp8_are_not_kept(model, text, tmp_path) -> None:
    tune(model, tmp_path / "fp8", text, **DELAYED)
    before = delayed_states(tmp_path / "fp8")
    assert before
    tune(tmp_path / "fp8", tmp_path / "plain", text, bf16=True)
    assert not delayed_states(tmp_path / "plain")
    tune(tmp_path / "fp8", tmp_path / "less", text, **DELAYED, num_layers_at_end_in_bf16=1)
    left = delayed_states(tmp_path / "less")
    assert left
    assert left < before


def test_an_adapter_goes_on_with_its_own_base_and_type_alone(model, text, tmp_path) -> None:
    how = {"lora_rank": 4, "lora_target": "qkv"}
    tune(model, tmp_path / "out", text, **how, bf16=True)
    with pytest.raises(CheckpointError, match="trained in bfloat16, and the run computes in float"):
        tune(model, tmp_path / "out", text, **how, fp32=True, train_iters=3)
    # Of the same values in another order, in a layer without an adapter.
    safetensors = pytest.importorskip("safetensors.torch")
    other = shutil.copytree(model, tmp_path / "other")
    weights = safetensors.load_file(other / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name].roll(1, 0).contiguous()
    safetensors.save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    more: dict[str, Any] = how | {"bf16": True, "train_iters": 3}
    with pytest.raises(TrainingError, match="weights of SRC differ"):
        tune(other, tmp_path / "out", text, **more)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        tune(other, tmp_path / "new", text, **more, load=tmp_path / "out")
    # What means the same is the same run.
    report = tune(model, tmp_path / "out", text, **more, lora_alpha=8.0)
    assert isinstance(report, FinetuneReport)
    assert report.start_iteration == 2


def calibrated(model: Path, file: Path, samples: int) -> Path:
    how: dict[str, Any] = {"recipe": "fp8", "calibrate_only": True, "synthetic": True}
    quantize(model, file, **how, samples=samples, seq_length=16)
    return file


def test_another_calibration_makes_another_run(model, text, tmp_path) -> None:
    one = calibrated(model, tmp_path / "one.safetensors", 2)
    other = calibrated(model, tmp_path / "other.safetensors", 3)
    tune(model, tmp_path / "out", text, qat="fp8", calibration=one)
    moved = Path(shutil.copy(one, tmp_path / "moved.safetensors"))
    tune(model, tmp_path / "out", text, qat="fp8", calibration=moved, train_iters=3)
    with pytest.raises(TrainingError, match="calibration was"):
        tune(model, tmp_path / "out", text, qat="fp8", calibration=other, train_iters=4)


def test_a_plan_refuses_what_the_run_would(model, text, tmp_path) -> None:
    small = tiny_text.save(tmp_path / "small", vocab_size=300)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"qat": "no_such_recipe"}, RecipeError, "no_such_recipe"),
        ({"qat": "fp8"}, CalibrationError, "needs statistics of the model's inputs"),
        ({"teacher": tmp_path / "nowhere"}, CheckpointError, "nowhere"),
        ({"teacher": small}, MappingError, "vocabulary has 300"),
        ({"fp8_recipe": "delayed", "fp8_margin": 99}, UsageError, "--fp8-margin is 99"),
        ({"fp8_recipe": "delayed", "num_layers_at_end_in_bf16": 99}, UsageError, "99 last"),
    ]
    for wrong, kind, message in cases:
        with pytest.raises(kind) as caught:
            tune(model, tmp_path / "out", text, dry_run=True, **wrong)
        assert message in str(caught.value), wrong
    plan = tune(model, tmp_path / "out", text, dry_run=True, teacher=model)
    assert isinstance(plan, FinetunePlan)
    assert plan.teacher_bytes == plan.weight_bytes
    assert any("teacher" in line for line in plan.lines())
    assert not (tmp_path / "out").exists()


def test_an_adapter_goes_on_with_its_base_in_another_format(model, text, tmp_path) -> None:
    how: dict[str, Any] = {"lora_rank": 4, "save_interval": 2}
    tune(model, tmp_path / "ref", text, **how, train_iters=4)
    tune(model, tmp_path / "out", text, **how, train_iters=4, exit_duration_in_mins=1e-9)
    reshard(model, tmp_path / "base", to="torch_dist", tp=2, pp=2)
    report = tune(tmp_path / "base", tmp_path / "out", text, **how, train_iters=4)
    assert (report.start_iteration, report.outcome.iteration) == (1, 4)
    assert losses(tmp_path / "out") == losses(tmp_path / "ref")
    assert verify(tmp_path / "out", tmp_path / "ref").exit_status == 0
    safetensors = pytest.importorskip("safetensors.torch")
    other = shutil.copytree(model, tmp_path / "other")
    weights = safetensors.load_file(other / "model.safetensors")
    weights = {n: t + 1e-3 for n, t in weights.items()}
    safetensors.save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    reshard(other, tmp_path / "others", to="torch_dist", tp=2)
    with pytest.raises(TrainingError, match="weights of SRC differ"):
        tune(tmp_path / "others", tmp_path / "out", text, **how, train_iters=6)


def test_a_plan_counts_what_is_kept_beside_the_weights(text, tmp_path) -> None:
    model = tiny_text.save(tmp_path / "model", hidden_size=64, intermediate_size=64)

    def plan(**more: Any) -> FinetunePlan:
        found = tune(model, tmp_path / "out", text, dry_run=True, **more)
        assert isinstance(found, FinetunePlan)
        return found

    bare = plan()
    assert (bare.fake_quant_bytes, bare.adapter_bytes, bare.teacher_bytes) == (0, 0, 0)
    rounded = plan(qat="mxfp4")
    opened = open_source(model)
    linear = [
        t.numel
        for n, t in opened.view.canonical.items()
        if n.startswith("layers.") and len(t.shape) == 2
    ]
    assert rounded.fake_quant_bytes == 4 * sum(linear)
    assert any("copies of rounded weights" in line for line in rounded.lines())
    assert plan(qat="mxfp4", tp=2).fake_quant_bytes == rounded.fake_quant_bytes // 2
    adapted = plan(lora_rank=4)
    assert adapted.adapter_bytes == adapted.weight_bytes - bare.weight_bytes
    assert adapted.adapter_bytes == 4 * adapted.rank_trainable
    piped = plan(teacher=model, pp=2)
    assert bare.weight_bytes / 2 < piped.teacher_bytes < bare.weight_bytes
    with pytest.raises(LayoutError):
        plan(teacher=model, pp=3)
