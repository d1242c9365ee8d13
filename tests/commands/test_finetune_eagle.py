"""Finetune with an EAGLE-3 head: what a run leaves, how it resumes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megtool import finetune, lint, verify
from megtool.commands.reports.finetune import FinetunePlan
from megtool.errors import CheckpointError, LayoutError, RecipeError, TrainingError, UsageError
from megtool.train.run_log import read_log
from tests.support.errors import raises
from tests.support.models import tiny_text
from tests.support.runs.finetune_runs import curve, tune
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("modelopt", reason="ModelOpt makes the head")

HEAD = {"eagle": "default", "train_iters": 4, "save_interval": 2}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=5)


def test_a_run_leaves_the_model_and_a_head(deep: Path, data: Path, tmp_path: Path) -> None:
    report = tune(deep, tmp_path / "ref", data, **HEAD)
    assert report.draft_head == str(tmp_path / "ref/iter_0000004/eagle")
    assert report.adapter is None
    assert verify(deep, tmp_path / "ref").verdict == "equal"  # the model is as it was
    head = Path(report.draft_head)
    assert {p.name for p in head.iterdir()} == {"config.json", "model.safetensors"}
    assert not any(lint(head).findings)
    config = json.loads((head / "config.json").read_bytes())
    base = json.loads((deep / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["torch_dtype"] == "float32"
    same = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "eos_token_id")
    assert all(config[n] == base[n] for n in same)
    lines = [line for line in read_log(tmp_path / "ref/log.jsonl") if "loss" in line]
    assert {f"eagle_{n}_accuracy" for n in (1, 2, 3)} <= lines[-1].keys()
    assert lines[-1]["loss"] < lines[0]["loss"]
    cut = {**HEAD, "exit_duration_in_mins": 1e-9}
    assert tune(deep, tmp_path / "out", data, **cut).outcome.saved_iteration == 1
    resumed = tune(deep, tmp_path / "out", data, **HEAD)
    assert (resumed.start_iteration, resumed.outcome.iteration) == (1, 4)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    state = "eagle_training/training_state.safetensors"
    for name in ("eagle/config.json", "eagle/model.safetensors", state):
        first, second = (tmp_path / run / "iter_0000004" / name for run in ("ref", "out"))
        assert first.read_bytes() == second.read_bytes(), name
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("eagle:\n  eagle_ttt_steps: 1\n")
    with raises(TrainingError, "eagle"):
        tune(deep, tmp_path / "out", data, **HEAD | {"eagle": str(recipe), "train_iters": 5})
    (tmp_path / "out/iter_0000004" / state).unlink()
    with raises(CheckpointError, "no draft head"):
        tune(deep, tmp_path / "out", data, **HEAD | {"train_iters": 5})


def test_evaluations_are_of_the_head(deep: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "Yes. " * n}) + "\n" for n in (5, 3, 4, 2)))
    options = {**HEAD, "train_iters": 2, "global_batch_size": 4}
    tune(deep, tmp_path / "out", data, **options, eval_data=str(data), eval_interval=2)
    tune(deep, tmp_path / "plain", data, **options)
    before, step, _, after = read_log(tmp_path / "out/log.jsonl")  # all rows are in every step
    assert before["eval_loss"] == pytest.approx(step["loss"], rel=1e-6)
    assert before["eval_labels"] == step["labels"]
    for n in (1, 2, 3):
        share = step[f"eagle_{n}_accuracy"]
        assert before[f"eval_eagle_{n}_accuracy"] == pytest.approx(share, abs=1e-6)
    assert after["eval_loss"] < before["eval_loss"]
    losses = [x["loss"] for x in read_log(tmp_path / "out/log.jsonl") if "loss" in x]
    assert losses == [x["loss"] for x in read_log(tmp_path / "plain/log.jsonl")]


def test_a_plan_has_the_head(deep: Path, data: Path, tmp_path: Path) -> None:
    report = tune(deep, tmp_path / "out", data, **HEAD | {"train_iters": 1})
    assert report.draft_head is not None
    stored = load_file(Path(report.draft_head) / "model.safetensors")
    stored.pop("lm_head.weight")  # the model's own
    options: dict[str, Any] = {**HEAD, "seq_length": 32, "dry_run": True}
    plan = finetune(deep, tmp_path / "plan", data=[str(data)], **options)
    assert isinstance(plan, FinetunePlan)
    assert plan.rank_trainable == sum(t.numel() for t in stored.values())


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"packing": True}, UsageError, ("--packing",)),
        ({"lora_rank": 2}, UsageError, ("--lora-rank",)),
        ({"qat": "nvfp4"}, UsageError, ("--qat",)),
        ({"to": "hf"}, UsageError, ("--to hf",)),
        ({"seq_length": 4}, UsageError, ("4 tokens", "--seq-length 5")),
        ({"tp": 2}, LayoutError, ("tp=2",)),
        ({"eagle": "missing.yaml"}, RecipeError, ("missing.yaml",)),
    ],
)
def test_what_a_head_excludes(
    deep: Path, data: Path, tmp_path: Path, more: Any, error: Any, words: Any
) -> None:
    with raises(error, *words):
        tune(deep, tmp_path / "out", data, **HEAD | more)
    assert not (tmp_path / "out").exists()


def on_rank(rank: int, size: int, model: str, folder: str, data: str, more: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    tune(model, Path(folder), data, **HEAD | more)


@pytest.mark.slow
def test_two_replicas_train_what_one_process_does(deep: Path, data: Path, tmp_path: Path) -> None:
    tune(deep, tmp_path / "ref", data, **HEAD)
    run_world(on_rank, 2, str(deep), str(tmp_path / "out"), str(data), {"dp": 2})
    ours, theirs = curve(tmp_path / "out"), curve(tmp_path / "ref")
    assert [x[1] for x in ours] == pytest.approx([x[1] for x in theirs], rel=1e-5)
    resumed = tune(deep, tmp_path / "out", data, **HEAD | {"train_iters": 5})  # on one process
    assert resumed.start_iteration == 4
