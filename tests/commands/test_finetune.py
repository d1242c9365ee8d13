"""Finetune, end to end on one process: what it leaves, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from megtool import finetune, generate, reshard, verify
from megtool.cli.app import main
from megtool.commands.reports.finetune import FinetunePlan
from megtool.errors import (
    DestinationError,
    FormatError,
    LayoutError,
    TrainingError,
    UsageError,
)
from megtool.train.run_log import read_log
from tests.support.errors import raises
from tests.support.folders import contents
from tests.support.models import tiny_text
from tests.support.runs.finetune_runs import TEXT, curve, interrupt_and_resume, tune


def test_a_run_leaves_a_checkpoint_a_log_and_a_curve(model, data, tmp_path) -> None:
    report = tune(model, tmp_path / "out", data, eval_split=0.1, eval_interval=3, save_interval=3)
    out = tmp_path / "out"
    assert (out / "latest_checkpointed_iteration.txt").read_text().strip() == "6"
    assert {p.name for p in out.glob("iter_*")} == {"iter_0000003", "iter_0000006"}
    lines = read_log(out / "log.jsonl")
    assert [x["iteration"] for x in lines if "loss" in x] == [1, 2, 3, 4, 5, 6]
    assert [n for n, _ in report.evaluations] == [0, 3, 6]
    assert report.evaluations[-1][1] < report.evaluations[0][1]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    outcome = report.outcome
    assert (outcome.stop_reason, outcome.saved_iteration, outcome.iteration) == ("done", 6, 6)
    assert report.last_loss == lines[-2]["loss"]
    assert verify(out).exit_status == 0
    assert generate(out, prompt=["When"], max_new_tokens=2).to_json()["answers"]


def test_the_same_command_goes_on_with_the_same_bits(model, data, tmp_path) -> None:
    more = {"eval_split": 0.1, "eval_interval": 2, "save_interval": 2}
    tune(model, tmp_path / "ref", data, **more)
    first = tune(model, tmp_path / "out", data, **more, exit_duration_in_mins=1e-9)
    assert (first.outcome.stop_reason, first.outcome.iteration, first.outcome.saved_iteration) == (
        "time",
        1,
        1,
    )
    second = tune(model, tmp_path / "out", data, **more)
    assert (second.start_iteration, second.outcome.iteration) == (1, 6)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    assert verify(tmp_path / "out", tmp_path / "ref").exit_status == 0  # moments too
    third = tune(model, tmp_path / "out", data, **more)
    assert (third.start_iteration, third.outcome.tokens) == (6, 0)


def test_two_runs_save_the_same_bytes(model, data, tmp_path) -> None:
    """Random states too, whatever the process did before."""
    folders = [tmp_path / name for name in "ab"]
    for number, folder in enumerate(folders):
        random.seed(number)
        tune(model, folder, data, train_iters=2)
    first, second = (contents(folder / "iter_0000002") for folder in folders)
    assert first == second


def test_a_run_goes_on_from_a_resharded_checkpoint(model, data, tmp_path) -> None:
    tune(model, tmp_path / "ref", data, save_interval=3)
    reshard(tmp_path / "ref/iter_0000003", tmp_path / "other", to="torch_dist", pp=2, dp=2)
    report = tune(model, tmp_path / "out", data, load=tmp_path / "other")
    assert report.start_iteration == 3
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")[3:]


def test_only_so_many_checkpoints_are_kept(model, data, tmp_path) -> None:
    tune(model, tmp_path / "out", data, save_interval=1, most_recent_k=2)
    assert len(list((tmp_path / "out").glob("iter_*"))) <= 3
    assert (tmp_path / "out/iter_0000006").is_dir()


def test_the_model_is_exported_and_transformers_gives_the_same_loss(model, data, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from megtool import evaluate

    report = tune(model, tmp_path / "out", data, to="hf")
    assert report.hf == str(tmp_path / "out/hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(report.hf, dtype=torch.float32)
    ids = torch.tensor([list(TEXT[:60].encode())])
    with torch.no_grad():
        expected = theirs(ids, labels=ids).loss.item()
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT[:60]}))
    ours = evaluate(tmp_path / "out", data=tmp_path / "text.jsonl", window=64)
    tokens = transformers.AutoTokenizer.from_pretrained(report.hf)(TEXT[:60]).input_ids
    with torch.no_grad():
        ids = torch.tensor([tokens])
        expected = theirs(ids, labels=ids).loss.item()
    assert ours.to_json()["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_note_says_which_iteration_an_older_export_is_of(model, data, tmp_path) -> None:
    out = tmp_path / "out"
    assert not tune(model, out, data, train_iters=1, to="hf").notes
    exported = (out / "hf/model.safetensors").read_bytes()
    for _ in range(2):  # also where nothing is left to train
        report = tune(model, out, data, train_iters=2)
        (note,) = report.notes
        assert "hf/ is of iteration 1" in note
        assert "--to hf" in note
        assert any(note in line for line in report.lines())
        assert report.to_json()["hf"] is None
    assert (out / "hf/model.safetensors").read_bytes() == exported
    assert not tune(model, out, data, train_iters=2, to="hf").notes
    assert (out / "hf/model.safetensors").read_bytes() != exported
    assert not tune(model, out, data, train_iters=2).notes
    shutil.rmtree(out / "iter_0000002")
    (out / "latest_checkpointed_iteration.txt").write_text("1")
    (note,) = tune(model, out, data, train_iters=2, lr=2e-3).notes  # other weights of iteration 2
    assert "another iteration" in note
    shutil.rmtree(out / "hf")
    assert not tune(model, out, data, train_iters=2).notes


def test_a_plan_with_context_parallelism_shares_rows_and_optimizer_state(
    model, data, tmp_path
) -> None:
    more = {"data": [str(data)], "dry_run": True, "cp": 2}
    plan = finetune(model, tmp_path / "out", seq_length=32, **more)
    assert isinstance(plan, FinetunePlan)
    assert plan.layout["cp"] == 2
    assert plan.rank_parameters >= plan.num_parameters
    assert plan.optimizer_bytes == 4 * plan.rank_trainable  # half of 8
    assert "cp=2" in "\n".join(plan.lines())
    with raises(LayoutError, "34 tokens") as e:
        finetune(model, tmp_path / "out", seq_length=34, **more)
    assert "32 or 36" in str(e.value)


def test_a_plan_writes_nothing(model, data, tmp_path, capsys) -> None:
    plan = finetune(model, tmp_path / "out", data=[str(data)], seq_length=32, dry_run=True, tp=2)
    assert isinstance(plan, FinetunePlan)
    assert not (tmp_path / "out").exists()
    assert plan.layout["tp"] == 2
    assert plan.num_parameters > plan.rank_parameters > plan.num_parameters / 2
    assert plan.optimizer_bytes == 8 * plan.rank_trainable  # float32: the weights are the masters
    assert plan.tokens_per_step == 32
    assert plan.train_iters == plan.samples
    shown = "\n".join(plan.lines())
    assert "tp=2" in shown
    assert json.loads(json.dumps(plan.to_json()))["train_iters"] == plan.train_iters


def test_the_command_line_reads_a_yaml(model, data, tmp_path, capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {data}\nseq-length: 32\ntrain-iters: 9\nlr: 1e-3\nthreads: 1\n")
    out = str(tmp_path / "out")
    status = main(
        ["finetune", str(model), out, "--config", str(file), "--train-iters", "2", "--json", "-q"]
    )
    told = json.loads(capsys.readouterr().out)
    assert (status, told["iteration"], told["saved_iteration"]) == (0, 2, 2)


def test_another_model_or_other_data_are_refused(model, data, tmp_path) -> None:
    out = tmp_path / "out"
    tune(model, out, data, train_iters=2)
    other = tiny_text.save(tmp_path / "other", intermediate_size=64)
    with raises(TrainingError, "ffn_hidden_size", "48", "64"):
        tune(other, out, data)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    with pytest.raises(TrainingError, match="has another data"):
        tune(model, out, text)
    with raises(TrainingError, "seq_length", "32", "16"):
        tune(model, out, data, seq_length=16)
    with pytest.raises(DestinationError, match="it has iteration 2 of a run"):
        tune(model, out, data, resume=False)
    assert curve(out)[-1][0] == 2
    tune(model, out, data, train_iters=3)  # nothing is lost


def test_a_folder_of_something_else_is_left_alone(model, data, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    with raises(DestinationError, id="destination-exists"):
        tune(model, tmp_path / "out", data)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ('{"text": "one"}\n{"text": \n', FormatError, "line 2 is invalid JSON"),
        ("", FormatError, "nothing to train on"),
    ],
)
def test_bad_data_is_one_clear_error(text, kind, message, model, tmp_path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(text)
    with pytest.raises(kind, match=message):
        tune(model, tmp_path / "out", file)
    assert not list((tmp_path / "out").glob("iter_*"))


def test_long_samples_are_split_truncated_or_refused_and_counted(model, data, tmp_path) -> None:
    counts = {
        long: tune(model, tmp_path / long, data, overflow=long, packing=False, train_iters=1).counts
        for long in ("split", "truncate")
    }
    assert counts["split"]["split"] == counts["truncate"]["truncated"] == 20
    with pytest.raises(FormatError, match="a row has 32"):
        tune(model, tmp_path / "error", data, overflow="error", packing=False)


def test_what_does_not_fit_is_said_before_anything_is_loaded(model, data, tmp_path) -> None:
    with raises(LayoutError, "--tp 2", "2 processes"):
        tune(model, tmp_path / "out", data, tp=2)
    with pytest.raises(UsageError, match="the model's 128 positions"):
        tune(model, tmp_path / "out", data, seq_length=256)
    with pytest.raises(UsageError, match="nothing to train on"):
        finetune(model, tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("iter_*"))


def test_a_loss_turned_nan_keeps_the_last_good_checkpoint(model, data, tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(TrainingError) as caught:
        tune(model, out, data, lr=1e30, clip_grad=0.0, save_interval=1, lr_warmup_iters=2)
    assert caught.value.tensor
    good = int((out / "latest_checkpointed_iteration.txt").read_text())
    assert f"iteration {good}, the last good checkpoint" in (caught.value.hint or "")
    assert verify(out).exit_status == 0


@pytest.mark.slow
def test_killed_it_goes_on_with_the_identical_curve(model, data, tmp_path) -> None:
    options = ["--eval-split", "0.1", "--eval-interval", "10"]
    interrupt_and_resume(model, data, tmp_path, options, steps=40, lines=18)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    assert verify(tmp_path / "out", tmp_path / "ref").exit_status == 0
