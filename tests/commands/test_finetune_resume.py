"""Finetune started again: on what it goes on, what it warns of, refuses, and never loses."""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from megtool import finetune, reshard, verify
from megtool.commands.reports.finetune import FinetunePlan, FinetuneReport
from megtool.errors import DestinationError, TrainingError, UsageError
from megtool.storage.files import Files
from megtool.storage.lock import LockFile
from megtool.train.run_log import read_log
from tests.support.errors import raises
from tests.support.models import tiny_text
from tests.support.runs.finetune_runs import TEXT, curve, interrupt_and_resume
from tests.support.runs.finetune_runs import tune as any_run

SHORT = {"exit_duration_in_mins": 1e-9}
"""Ends a run after its first step."""

tune = partial(any_run, train_iters=4)


@pytest.fixture(scope="module")
def done(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, each kept; not to be changed."""
    folder = tmp_path_factory.mktemp("done") / "out"
    tune(model, folder, data, train_iters=3, save_interval=1)
    return folder


@pytest.fixture
def out(done: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(done, tmp_path / "out"))


def warned(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


@pytest.mark.parametrize("kind", ["fully_reshardable", "dp_reshardable"])
def test_fp16_is_saved_as_megatron_reads_it_and_goes_on(kind, model, data, tmp_path) -> None:
    how = {"fp16": True, "loss_scale_window": 2, "dist_ckpt_optim_format": kind, "dp": 1}
    how["use_distributed_optimizer"] = True
    tune(model, tmp_path / "ref", data, **how)
    assert tune(model, tmp_path / "out", data, **how, **SHORT).outcome.iteration == 1
    assert tune(model, tmp_path / "out", data, **how).start_iteration == 1
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    assert len({x[-1] for x in curve(tmp_path / "out")}) > 1  # the scale has grown
    if kind == "fully_reshardable":
        file = tmp_path / "out/iter_0000004/common.pt"
        scaler = torch.load(file, weights_only=False)["optimizer"]["grad_scaler"]
        assert scaler["scale"].cpu().shape == (1,)  # `.cuda()` is called on it
        assert scaler["scale"].dtype == torch.float32
        assert scaler["scale"].item() > 1
        assert {type(scaler[f"{x}_tracker"]) for x in ("growth", "hysteresis")} == {int}


def test_fp16_lora_goes_on(model, data, tmp_path) -> None:
    how = {"fp16": True, "lora_rank": 2, "loss_scale_window": 2}
    tune(model, tmp_path / "ref", data, **how)
    tune(model, tmp_path / "out", data, **how, **SHORT)
    tune(model, tmp_path / "out", data, **how)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")


@pytest.mark.slow
def test_fp16_killed_goes_on_with_the_identical_curve(model, data, tmp_path) -> None:
    options = ["--fp16", "--loss-scale-window", "4"]
    interrupt_and_resume(model, data, tmp_path, options, steps=30, lines=13)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    assert verify(tmp_path / "out", tmp_path / "ref").exit_status == 0


def test_weights_turned_nan_are_not_saved(model, data, tmp_path) -> None:
    out = tmp_path / "out"
    more = {"lr_warmup_iters": 1, "clip_grad": 0.0, "save_interval": 1, "most_recent_k": 1}
    # The first step has a rate of zero; the second makes weights infinite.
    with raises(
        TrainingError, match="NaN or Inf", hint="iteration 1, the last good checkpoint"
    ) as caught:
        tune(model, out, data, lr=1e38, weight_decay=1e38, train_iters=2, **more)
    assert caught.value.tensor
    assert {p.name for p in out.glob("iter_*")} == {"iter_0000001"}
    assert verify(out).exit_status == 0


def test_an_evaluation_that_is_no_number_comes_before_the_save(model, data, tmp_path) -> None:
    out = tmp_path / "out"
    more = {"lr_warmup_iters": 1, "clip_grad": 0.0, "save_interval": 1, "eval_split": 0.1}
    with raises(TrainingError, "2", "validation loss"):
        tune(model, out, data, lr=1e38, weight_decay=1e38, train_iters=2, eval_interval=1, **more)
    assert {p.name for p in out.glob("iter_*")} == {"iter_0000001"}


def test_a_second_start_leaves_the_running_one_alone(model, data, out) -> None:
    before = {n: (out / n).read_bytes() for n in ("log.jsonl", "finetune.json")}
    with (out / "log.jsonl").open("a") as file:
        file.write('{"iteration": 4, "loss": 1.0}\n')  # of the running one's next step
    before["log.jsonl"] = (out / "log.jsonl").read_bytes()
    staging = out / ".megtool"
    lock = LockFile(Files(), staging / "lock", lambda: staging.mkdir(exist_ok=True))
    with raises(DestinationError, id="destination-locked"):
        tune(model, out, data, lr=2e-3)
    lock.release()
    assert {n: (out / n).read_bytes() for n in before} == before


def test_the_batch_of_the_run_is_kept(model, data, out) -> None:
    report = tune(model, out, data, global_batch_size=None, micro_batch_size=1)
    assert report.start_iteration == 3
    assert [x["consumed_samples"] for x in read_log(out / "log.jsonl")] == [2, 4, 6, 8]
    plan = finetune(model, out, data=[str(data)], seq_length=32, train_iters=9, dry_run=True)
    assert isinstance(plan, FinetunePlan)
    assert plan.global_batch_size == 2


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_batch_of_another_size_goes_on_in_the_schedule(
    is_loaded, model, data, out, tmp_path, caplog
) -> None:
    # The schedule is at step 3 of 6, whatever the number of rows of a step.
    place = tmp_path / "new" if is_loaded else out
    more = {"load": out} if is_loaded else {}
    tune(model, place, data, global_batch_size=4, train_iters=6, **more)
    rates = {x["iteration"]: x["lr"] for x in read_log(place / "log.jsonl")}
    assert [rates[n] for n in (4, 5, 6)] == pytest.approx([5e-4, 1e-3 / 3, 1e-3 / 6])
    assert "the global batch size was 2 and is 4" in warned(caplog)


def test_another_model_is_not_loaded(model, data, out, tmp_path) -> None:
    other = tiny_text.save(tmp_path / "other", intermediate_size=64)
    with raises(TrainingError, "SRC", "ffn_hidden_size", "48"):
        tune(other, tmp_path / "new", data, load=out)


def test_a_run_that_is_loaded_at_its_end_is_told(model, data, out, tmp_path) -> None:
    with raises(UsageError, match="is at step 3, and the run has 3", hint="--train-iters"):
        tune(model, tmp_path / "new", data, load=out, train_iters=3)
    report = tune(model, tmp_path / "new", data, load=out, train_iters=4)
    assert (report.start_iteration, report.outcome.saved_iteration) == (3, 4)


def test_other_weights_in_src_are_told(model, data, done, out, tmp_path, caplog) -> None:
    same = shutil.copytree(model, tmp_path / "same")
    tune(same, out, data)
    assert "SRC" not in warned(caplog)
    again = Path(shutil.copytree(done, tmp_path / "again"))
    other = tmp_path / "other"
    reshard(done, other, to="hf", optimizer_format="none")
    tune(other, again, data)
    assert "the weights of SRC differ" in warned(caplog)


def test_a_tracker_of_what_is_not_there(model, data, out, caplog) -> None:
    before = curve(out)
    (out / "latest_checkpointed_iteration.txt").write_text("70")
    assert tune(model, out, data).start_iteration == 3
    assert "names iteration 70, which is not in" in warned(caplog)
    assert curve(out)[:3] == before


def test_iterations_that_are_not_whole_are_not_begun_anew(model, data, out) -> None:
    before = curve(out)
    for folder in out.glob("iter_*"):
        for file in folder.glob("*.distcp"):
            file.unlink()
        (folder / ".metadata").unlink()
    with pytest.raises(DestinationError, match="it should have iteration 3 of a run"):
        tune(model, out, data)
    assert curve(out) == before
    for folder in out.glob("iter_*"):
        shutil.rmtree(folder)
    with pytest.raises(DestinationError, match="it should have iteration 3 of a run"):
        tune(model, out, data)


def test_src_in_dst_is_refused(model, data, out, tmp_path) -> None:
    with pytest.raises(UsageError, match="DST is SRC"):
        tune(out, out, data)
    shutil.copytree(model, out / "hf")
    with raises(UsageError, match="SRC is inside DST", hint="give another DST"):
        tune(out / "hf", out, data, to="hf")


def test_a_dst_that_cannot_be_is_refused_before_data_are_read(model, tmp_path) -> None:
    data = tmp_path / "nowhere.txt"
    with pytest.raises(UsageError, match="DST is inside SRC"):
        tune(model, model / "out", data)
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError, match="a folder of the destination is a file"):
        tune(model, tmp_path / "file/out", data)


def test_what_a_kill_leaves_of_the_first_moments_does_no_harm(model, data, tmp_path) -> None:
    out = tmp_path / "out"
    (out / ".megtool").mkdir(parents=True)
    (out / ".megtool/lock").write_text("")
    (out / ".megtool/iter_0000001.adapter").write_text("half of")
    (out / ".finetune.json.new").write_text('{"mod')
    assert tune(model, out, data, train_iters=1).outcome.saved_iteration == 1
    assert not (out / ".finetune.json.new").exists()
    assert not (out / ".megtool").exists()


def test_nothing_left_to_train_is_said(model, data, tmp_path) -> None:
    with pytest.raises(UsageError, match="nothing is left to train"):
        tune(model, tmp_path / "out", data, freeze=("*",))


def test_data_are_known_by_what_they_are(model, data, out, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(data.parent)
    assert tune(model, out, f"./{data.name}").start_iteration == 3
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "another"}\n')
    with pytest.raises(TrainingError, match=r"has another data: --data was .*, and is "):
        tune(model, out, other, train_iters=5)


def test_what_changes_the_curve_is_told(model, data, out, caplog) -> None:
    tune(model, out, data, bf16=True, exp_avg_dtype="bf16", lr_warmup_init=1e-4, eval_split=0.0)
    told = warned(caplog)
    assert "dtype was 'float32', and is 'bfloat16'" in told
    assert "exp_avg_dtype was 'fp32', and is 'bf16'" in told
    assert "lr_warmup_init was 0.0, and is 0.0001" in told


def test_a_run_that_was_tired_stays_so(model, data, tmp_path) -> None:
    out, more = tmp_path / "out", {"eval_split": 0.1, "eval_interval": 1, "patience": 1}
    # So small a rate changes no weight: no evaluation is better than the one before.
    first = tune(model, out, data, lr=1e-30, weight_decay=0.0, **more)
    assert (first.outcome.stop_reason, first.outcome.iteration) == ("patience", 1)
    second = tune(model, out, data, lr=1e-30, weight_decay=0.0, **more)
    assert (
        second.outcome.stop_reason,
        second.outcome.iteration,
        second.outcome.saved_iteration,
    ) == ("patience", 1, 1)
    assert second.outcome.tokens == 0


def test_no_more_checkpoints_lie_there_than_have_to(model, data, tmp_path, monkeypatch) -> None:
    from megtool.train.checkpointing.staged_iteration import StagedIteration

    seen = []

    def counting(place: StagedIteration, num_bytes: int) -> None:
        seen.append(len(list(place.folder.glob("iter_*"))))

    monkeypatch.setattr(StagedIteration, "require_space", counting)
    tune(model, tmp_path / "out", data, save_interval=1, most_recent_k=1)
    assert seen == [0, 1, 1, 1]
    assert [p.name for p in (tmp_path / "out").glob("iter_*")] == ["iter_0000004"]


def test_what_became_of_documents_is_said(model, data, tmp_path) -> None:
    report = tune(model, tmp_path / "out", data, train_iters=1)
    n, rows = report.counts["split"], report.counts["rows"]
    assert f"  data        20 documents in {rows} rows of 32 tokens, {n} split" in report.lines()
    plan = finetune(model, tmp_path / "new", data=[str(data)], seq_length=32, dry_run=True)
    assert isinstance(plan, FinetunePlan)
    assert f"  data        20 documents in {rows} rows of 32 tokens, {n} split" in plan.lines()


def test_micro_batches_that_do_not_divide_the_runs_steps(model, data, out) -> None:
    with raises(
        UsageError,
        match="global batch size of 2, not a multiple",
        hint="--micro-batch-size that divides it",
    ):
        tune(model, out, data, global_batch_size=None, micro_batch_size=4)
    assert tune(model, out, data, global_batch_size=None, micro_batch_size=2).start_iteration == 3


def test_every_row_that_is_held_out_of_a_blend_is_measured_once(model, data, tmp_path) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text("".join(json.dumps({"text": f"{n} {TEXT}"}) + "\n" for n in range(6)))
    both, more = [str(data), str(small)], {"train_iters": 1, "seq_length": 32, "eval_split": 0.25}
    report = finetune(
        model, tmp_path / "out", data=both, blend="0.1,0.9", threads=1, fsync=False, **more
    )
    assert isinstance(report, FinetuneReport)
    assert report.evaluations[0][1] == pytest.approx(mean_held_out(model, both), rel=1e-6)


def mean_held_out(model: Path, files: list[str]) -> float:
    """The mean loss of what is held out of files, each measured on its own."""
    from megtool.data.open_dataset import RowForm, open_dataset
    from megtool.parallel.process_groups import ProcessGroups
    from megtool.source.open import open_decoder
    from megtool.train.evaluation import evaluate
    from megtool.train.model.build import load_for_training

    runnable = open_decoder(model)
    stored = runnable
    stages = load_for_training(stored, ProcessGroups.alone(), dtype="float32", threads=1)
    total, labels = 0.0, 0
    for file in files:
        feed = open_dataset(
            [file], runnable.tokenizer(), RowForm(length=32), cache=None, vocab_size=262
        )
        found = evaluate(stages, feed.divided(0.25)[1], micro_batch_size=1)
        total, labels = total + found.loss * found.num_labels, labels + found.num_labels
    return total / labels
