"""Finetune with adapters, with rounded passes, and with a teacher, end to end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import evaluate, finetune, quantize, reshard, verify
from megtool.commands.reports.finetune import FinetunePlan
from megtool.errors import (
    CalibrationError,
    CheckpointError,
    FormatError,
    LayoutError,
    MappingError,
    RecipeError,
    TrainingError,
    UsageError,
)
from tests.support.errors import raises
from tests.support.models import tiny_text
from tests.support.models.tiny_vocabularies import save_tokenizer
from tests.support.runs.finetune_runs import TEXT, curve, tune
from tests.support.worlds.gloo_world import run_world

LORA = {"lora_rank": 4, "lora_dropout": 0.1, "save_interval": 2, "train_iters": 4}


def test_a_lora_run_leaves_a_merged_model_and_an_adapter(model, data, tmp_path) -> None:
    report = tune(model, tmp_path / "out", data, **LORA, eval_split=0.1, lr=1e-2, to="hf")
    assert report.adapter == str(tmp_path / "out/iter_0000004/adapter")
    assert report.evaluations[-1][1] < report.evaluations[0][1]
    assert verify(tmp_path / "out").exit_status == 0
    peft = pytest.importorskip("peft", reason="the peft package is the oracle")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(theirs, report.adapter).eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(report.hf, dtype=torch.float32)
    ids = torch.tensor([list(TEXT[:60].encode())])
    with torch.no_grad():
        ours = merged(ids).logits
        assert torch.allclose(adapted(ids).logits, ours, atol=1e-5, rtol=1e-5)
        assert (adapted.unload()(ids).logits - ours).abs().max() > 1e-4


def test_a_lora_run_goes_on_with_the_same_bits(model, data, tmp_path) -> None:
    tune(model, tmp_path / "ref", data, **LORA)
    first = tune(model, tmp_path / "out", data, **LORA, exit_duration_in_mins=1e-9)
    assert (first.outcome.stop_reason, first.outcome.saved_iteration) == ("time", 1)
    second = tune(model, tmp_path / "out", data, **LORA)
    assert (second.start_iteration, second.outcome.iteration) == (1, 4)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    one, two = (tmp_path / n / "iter_0000004/adapter" for n in ("out", "ref"))
    names = {p.name for p in one.iterdir()}
    assert names == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "training_state.safetensors",
    }
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert verify(tmp_path / "out", tmp_path / "ref").exit_status == 0
    with raises(TrainingError, "lora_rank", "4", "8"):
        tune(model, tmp_path / "out", data, **LORA | {"lora_rank": 8, "train_iters": 5})
    loaded = tune(model, tmp_path / "on", data, **LORA | {"train_iters": 5}, load=tmp_path / "ref")
    assert loaded.start_iteration == 4
    tune(model, tmp_path / "full", data, train_iters=1)
    with pytest.raises(CheckpointError, match="no adapter to resume"):
        tune(model, tmp_path / "bad", data, **LORA, load=tmp_path / "full")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2}])
def test_a_lora_run_is_the_same_at_every_layout(model, data, tmp_path, layout) -> None:
    more = {"lora_dropout": 0.0}
    tune(model, tmp_path / "ref", data, **LORA | more)
    run_world(on_rank, 2, str(model), str(tmp_path / "out"), str(data), layout | more)
    ours, theirs = curve(tmp_path / "out"), curve(tmp_path / "ref")
    assert [x[1] for x in ours] == pytest.approx([x[1] for x in theirs], rel=1e-5)
    resumed = tune(
        model, tmp_path / "on", data, **LORA | more | {"train_iters": 5}, load=tmp_path / "out"
    )
    assert resumed.start_iteration == 4


def on_rank(rank: int, size: int, model: str, folder: str, data: str, more: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    tune(model, Path(folder), data, **LORA | more)


def test_a_plan_counts_what_learns(model, data, tmp_path) -> None:
    plan = finetune(
        model, tmp_path / "out", data=[str(data)], seq_length=32, dry_run=True, lora_rank=4
    )
    assert isinstance(plan, FinetunePlan)
    assert plan.rank_trainable < plan.num_parameters / 2


def test_a_run_that_knows_of_rounding_loses_less_by_it(data, tmp_path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 2}
    model = tiny_text.save(tmp_path / "model", **sizes, num_key_value_heads=2)
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": TEXT * 4}))

    def rounded_loss(path: Path | str | None) -> float:
        assert path is not None
        quantize(path, tmp_path / "quantized", recipe="mxfp4", fsync=False, overwrite=True)
        return float(evaluate(tmp_path / "quantized", data=text, window=64).to_json()["loss"])

    before = rounded_loss(model)
    report = tune(model, tmp_path / "out", data, qat="mxfp4", lr=5e-3, eval_split=0.1, to="hf")
    assert rounded_loss(report.hf) < before - 0.05
    plain = tune(model, tmp_path / "plain", data, lr=5e-3, eval_split=0.1)
    assert plain.evaluations[0][1] != report.evaluations[0][1]  # which is that of rounded passes


def test_rounding_takes_scales_of_inputs_from_a_calibration(model, data, tmp_path) -> None:
    with pytest.raises(CalibrationError, match="needs statistics of the model's inputs"):
        tune(model, tmp_path / "out", data, qat="fp8")
    quantize(
        model,
        tmp_path / "seen.safetensors",
        recipe="fp8",
        calibrate_only=True,
        synthetic=True,
        samples=2,
        seq_length=16,
    )
    more = {"qat": "fp8", "calibration": tmp_path / "seen.safetensors", "eval_split": 0.1}
    tune(model, tmp_path / "ref", data, **more)
    tune(model, tmp_path / "other", data, eval_split=0.1)
    assert curve(tmp_path / "ref") != curve(tmp_path / "other")
    tune(model, tmp_path / "out", data, **more, save_interval=3, exit_duration_in_mins=1e-9)
    tune(model, tmp_path / "out", data, **more, save_interval=3)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    other = tiny_text.save(tmp_path / "model", intermediate_size=64)
    with pytest.raises(CalibrationError):
        tune(other, tmp_path / "bad", data, **more)


def test_a_teacher_is_learned_from(model, data, tmp_path) -> None:
    teacher = tiny_text.save(tmp_path / "teacher", num_hidden_layers=3, hidden_size=64)
    reshard(teacher, tmp_path / "megatron", to="torch_dist", tp=2)
    more = {"distill_weight": 1.0, "distill_temperature": 2.0, "lr": 1e-2, "train_iters": 8}
    tune(model, tmp_path / "out", data, teacher=tmp_path / "megatron", **more)
    losses = [x[1] for x in curve(tmp_path / "out")]
    assert losses[-1] < losses[0]
    tune(model, tmp_path / "both", data, teacher=teacher, **more | LORA)
    small = tiny_text.save(tmp_path / "small", vocab_size=300)
    with pytest.raises(MappingError, match="vocabulary has 300"):
        tune(model, tmp_path / "bad", data, teacher=small)
    other = tiny_text.save(tmp_path / "other")
    rules = json.loads((other / "tokenizer.json").read_text())
    rules["model"]["vocab"] = {c: 255 - n for c, n in rules["model"]["vocab"].items() if n < 256}
    (other / "tokenizer.json").write_text(json.dumps(rules))
    with raises(
        MappingError, "another tokenizer: 256 token ids", hint="--distill-loss uld or gold"
    ):
        tune(model, tmp_path / "bad", data, teacher=other)
    with raises(FormatError, file=tmp_path / "none", hint="--teacher-tokenizer"):
        tune(model, tmp_path / "bad", data, teacher=teacher, teacher_tokenizer=tmp_path / "none")
    more = {"teacher": other, "teacher_tokenizer": model, "seq_length": 32, "dry_run": True}
    assert isinstance(finetune(model, tmp_path / "bad", data=[str(data)], **more), FinetunePlan)


@pytest.mark.parametrize("loss", ["uld", "gold"])
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_teacher_with_another_tokenizer_is_learned_from(
    loss, kind, model, data, tmp_path
) -> None:
    teacher = tiny_text.save(tmp_path / "teacher", vocab_size=430, hidden_size=64)
    save_tokenizer(teacher, kind, 420)
    taught = tune(teacher, tmp_path / "taught", data, lr=1e-2, train_iters=60, to="hf")
    teacher = Path(str(taught.hf))
    more = {"distill_weight": 1.0, "lr": 1e-2, "train_iters": 40, "teacher": teacher}
    with raises(MappingError, "vocabulary has 430", hint="--distill-loss uld or gold"):
        tune(model, tmp_path / "bad", data, **more)
    report = tune(model, tmp_path / "out", data, **more, distill_loss=loss, to="hf")
    losses = [x[1] for x in curve(tmp_path / "out")]
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    if loss == "gold":  # it learns from the teacher alone which tokens come next
        before, after = (
            evaluate(folder, data=data, window=32, device="cpu").to_json()["loss"]
            for folder in (model, report.hf)
        )
        assert after < before - 0.3
    reshard(teacher, tmp_path / "bare", to="torch_dist", fsync=False)
    for path in (tmp_path / "bare/release/hf").glob("tokenizer*"):
        path.unlink()
    more |= {"teacher": tmp_path / "bare", "distill_loss": loss}
    with raises(FormatError, id="no-tokenizer", file=tmp_path / "bare", hint="--teacher-tokenizer"):
        tune(model, tmp_path / "bad", data, **more)
    tune(model, tmp_path / "same", data, **more, teacher_tokenizer=teacher)
    assert [x[1] for x in curve(tmp_path / "same")] == losses
    with raises(LayoutError, "tp=2"):
        tune(model, tmp_path / "bad", data, **more, teacher_tokenizer=teacher, tp=2)


def test_a_model_without_some_layers_learns_from_the_whole_one(data, tmp_path) -> None:
    whole = tiny_text.save(tmp_path / "whole", num_hidden_layers=4)
    reshard(whole, tmp_path / "pruned", to="hf", layers="0,3", fsync=False)
    more = {"teacher": whole, "distill_weight": 0.0, "lr": 1e-2, "train_iters": 8}
    tune(tmp_path / "pruned", tmp_path / "plain", data, **more)
    more |= {"distill_hidden_weight": 4.0, "distill_layers": "0:0,1:3"}
    tune(tmp_path / "pruned", tmp_path / "out", data, **more, save_interval=4)
    losses = [x[1] for x in curve(tmp_path / "out")]
    assert losses[-1] < losses[0] > curve(tmp_path / "plain")[0][1]
    with raises(LayoutError, "pp=2", "--distill-hidden-weight"):
        tune(tmp_path / "pruned", tmp_path / "bad", data, **more, pp=2)
    wide = tiny_text.save(tmp_path / "wide", hidden_size=64)
    with raises(MappingError, "hidden size is 64", "32"):
        tune(tmp_path / "pruned", tmp_path / "bad", data, **more | {"teacher": wide})


def test_what_headers_forbid_is_refused_before_data_are_read(model, tmp_path) -> None:
    data = tmp_path / "nowhere.txt"
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3}
    teacher = tiny_text.save(tmp_path / "teacher", **odd)
    with raises(LayoutError, "tp=2", "num_heads=3"):
        tune(model, tmp_path / "out", data, tp=2, teacher=teacher)
    with raises(LayoutError, "tp=3", "num_heads=4"):
        tune(model, tmp_path / "out", data, tp=3)
    bare = reshard(model, tmp_path / "bare", to="torch_dist", fsync=False).destination
    shutil.rmtree(Path(bare) / "release/hf")  # which alone names the family
    with pytest.raises(UsageError, match="LoRA of a model of unknown family"):
        tune(bare, tmp_path / "out", data, lora_rank=2, tokenizer=model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"lr_warmup_iters": 10}, UsageError, "10 warm-up steps"),
        ({"micro_batch_size": 2, "global_batch_size": 3}, UsageError, "not a multiple"),
        ({"dp": 1, "seq_length": 5000}, UsageError, "128 positions"),
        ({"freeze": ("nothing",)}, UsageError, "--freeze 'nothing' matches no parameter"),
        ({"freeze": ("nothing",), "tp": 2, "pp": 2}, UsageError, "--freeze 'nothing'"),
        ({"lr_mult": ("nothing=2",), "optimizer": "muon"}, UsageError, "--lr-mult 'nothing'"),
        ({"wd_mult": ("*.mlp.*=2", "*.lora_A=2")}, UsageError, "--wd-mult '[*].lora_A'"),
        ({"fp8_recipe": "delayed", "num_layers_at_end_in_bf16": 9}, UsageError, "9 last"),
        ({"qat": "no_such_recipe"}, RecipeError, "no_such_recipe"),
        ({"qat": "fp8"}, CalibrationError, "needs statistics of the model's inputs"),
        ({"load": Path("nowhere")}, CheckpointError, "does not exist"),
    ],
)
def test_what_no_data_could_mend_is_refused_before_they_are_read(
    wrong, kind, message, model, tmp_path
) -> None:
    with pytest.raises(kind, match=message):
        tune(model, tmp_path / "out", tmp_path / "nowhere.txt", **wrong)
    assert not (tmp_path / "out").exists()


def test_what_excludes_each_other_is_refused(model, data, tmp_path) -> None:
    with pytest.raises(UsageError, match="--lora-dropout has no effect with --qat"):
        tune(model, tmp_path / "out", data, qat="mxfp4", lora_rank=4, lora_dropout=0.1)
    with pytest.raises(UsageError, match="--lora-alpha has no effect without --lora-rank"):
        tune(model, tmp_path / "out", data, lora_alpha=4.0)
    assert not (tmp_path / "out").exists()
