"""Finetune on several processes: the same curve at every layout, and from one layout to another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megtool import finetune, verify
from megtool.commands.reports.finetune import FinetuneReport
from megtool.errors import MegtoolError
from megtool.megatron_state.saved_objects import saved_args
from megtool.source.open import open_source
from megtool.train.run_log import read_log
from tests.support.models import tiny_text
from tests.support.worlds.gloo_world import run_world

STEPS = 20
ZERO_2 = {"data_parallel_sharding_strategy": "optim_grads"}
ZERO_3 = {"data_parallel_sharding_strategy": "optim_grads_params"}


def tune(model: str, folder: str, data: str, **more: Any) -> FinetuneReport:
    """A run of 20 steps on this rank."""
    options = {
        "seq_length": 16,
        "train_iters": STEPS,
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "eval_split": 0.1,
        "eval_interval": 10,
        "lr": 1e-3,
        "threads": 1,
        "fsync": False,
    } | more
    report = finetune(model, folder, data=[data], **options)
    assert isinstance(report, FinetuneReport)
    return report


def on_rank(rank: int, size: int, *args: Any) -> Any:
    """What `tune` reports, or what it raises."""
    *places, more = args
    try:
        return tune(*places, **more)
    except MegtoolError as e:
        return type(e).__name__, str(e)


def curve(folder: Path) -> list[float]:
    return [x.get("loss", x.get("eval_loss")) for x in read_log(folder / "log.jsonl")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """A model, a text, and the run of one process."""
    place = tmp_path_factory.mktemp("made")
    model = tiny_text.save(place / "model", num_hidden_layers=4)
    (place / "text.txt").write_text("Prudence, indeed, will dictate that Governments long. " * 30)
    tune(str(model), str(place / "ref"), str(place / "text.txt"), save_interval=10)
    return str(model), str(place / "text.txt"), place / "ref"


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"dp": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"dp": 2, **ZERO_2},
        {"dp": 2, **ZERO_3},
        {"dp": 2, "dist_ckpt_optim_format": "dp_reshardable", **ZERO_3},
        {"cp": 2, **ZERO_3},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2},
        {"pp": 2, "vpp": 2},
        {"cp": 2},
        {"cp": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"cp": 2, "cp_comm_type": "p2p", "overlap_grad_reduce": True},
        {"cp": 2, "cp_comm_type": "a2a"},
        {"cp": 2, "cp_comm_type": "p2p,allgather,a2a,p2p"},
    ],
    ids=str,
)
@pytest.mark.slow
def test_two_processes_draw_the_curve_of_one(layout, made, tmp_path) -> None:
    model, data, ref = made
    reports = run_world(on_rank, 2, model, str(tmp_path / "out"), data, layout)
    assert [r.outcome.stop_reason for r in reports] == ["done", "done"]
    assert curve(tmp_path / "out") == pytest.approx(curve(ref), abs=1e-5)
    assert verify(tmp_path / "out", ref, atol=1e-4).exit_status == 0


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 4},
        {"cp": 2, "dp": 2},
        {"cp": 2, "tp": 2, "sequence_parallel": True},
        {"cp": 2, "pp": 2},
        {"cp": 4, "use_distributed_optimizer": False},
        {
            "cp": 4,
            "cp_comm_type": "a2a+p2p",
            "hierarchical_context_parallel_sizes": "2,2",
            "recompute_granularity": "selective",
        },
        {"dp": 4, "num_distributed_optimizer_instances": 2, **ZERO_3},
        {"tp": 2, "dp": 2, "sequence_parallel": True, **ZERO_3},
        {"pp": 2, "dp": 2, **ZERO_2},
    ],
    ids=str,
)
@pytest.mark.slow
def test_four_processes_draw_the_curve_of_one(layout, made, tmp_path) -> None:
    model, data, ref = made
    run_world(on_rank, 4, model, str(tmp_path / "out"), data, layout)
    assert curve(tmp_path / "out") == pytest.approx(curve(ref), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_run_goes_on_at_another_layout(layout, made, tmp_path) -> None:
    model, data, ref = made
    out = tmp_path / "out"
    shutil.copytree(ref, out)
    shutil.rmtree(out / "iter_0000020")
    (out / "latest_checkpointed_iteration.txt").write_text("10")
    reports = run_world(on_rank, 2, model, str(out), data, layout)
    assert {(r.start_iteration, r.outcome.iteration) for r in reports} == {(10, STEPS)}
    assert curve(out) == pytest.approx(curve(ref), abs=1e-5)
    assert curve(out)[:11] == curve(ref)[:11]  # what was logged before stays


@pytest.fixture(scope="module")
def shared_out(made, tmp_path_factory) -> Path:
    """The run at cp=2 and dp=2, as it was after 10 steps."""
    model, data, _ = made
    out = tmp_path_factory.mktemp("shared") / "out"
    more = {"cp": 2, "dp": 2, "save_interval": 10}
    run_world(on_rank, 4, model, str(out), data, more)
    shutil.rmtree(out / "iter_0000020")
    (out / "latest_checkpointed_iteration.txt").write_text("10")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_a_run_with_context_parallelism_goes_on_at_another_layout(
    layout, made, shared_out, tmp_path
) -> None:
    model, data, ref = made
    out = shutil.copytree(shared_out, tmp_path / "out")
    args = saved_args(open_source(out).catalogue)
    assert (args["context_parallel_size"], args["data_parallel_size"]) == (2, 2)
    run_world(on_rank, 2 if layout else 1, model, str(out), data, layout)
    assert curve(out) == pytest.approx(curve(ref), abs=1e-5)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"cp": 2}, {"dp": 2, **ZERO_3}], ids=str)
def test_two_processes_take_the_first_steps_of_one(layout, made, tmp_path) -> None:
    model, data, ref = made
    more = layout | {"train_iters": 3, "lr_decay_iters": STEPS, "eval_interval": 100}
    run_world(on_rank, 2, model, str(tmp_path / "out"), data, more)
    found = [x["loss"] for x in read_log(tmp_path / "out/log.jsonl") if "loss" in x]
    expected = [x["loss"] for x in read_log(ref / "log.jsonl") if "loss" in x]
    assert found == pytest.approx(expected[:3], abs=1e-5)


def test_a_world_that_does_not_fit_is_refused_on_every_rank(made, tmp_path) -> None:
    model, data, _ = made
    for found in run_world(on_rank, 2, model, str(tmp_path / "out"), data, {"tp": 4}):
        assert found[0] == "LayoutError"
        assert "tp=4 needs 4 processes, and there are 2" in found[1]
    odd = {"cp": 2, "seq_length": 18}
    for found in run_world(on_rank, 2, model, str(tmp_path / "out"), data, odd):
        assert found[0] == "LayoutError"
        assert "multiple of 4 tokens: 16 or 20" in found[1]
    odd = {"tp": 2, "seq_length": 15, "sequence_parallel": True}
    for found in run_world(on_rank, 2, model, str(tmp_path / "out"), data, odd):
        assert found[0] == "LayoutError"
        assert "multiple of tp: 16 tokens" in found[1]
    batch = {"dp": 2, "global_batch_size": 3}
    for found in run_world(on_rank, 2, model, str(tmp_path / "out"), data, batch):
        assert found[0] == "LayoutError"
        assert "the nearest multiple: 2 or 4" in found[1]


def test_a_broken_line_is_the_same_error_on_every_rank(made, tmp_path) -> None:
    model, _, _ = made
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a"}\nnot json\n')
    for found in run_world(on_rank, 2, model, str(tmp_path / "out"), str(text), {"dp": 2}):
        assert found[0] == "FormatError"
        assert "line 2" in found[1]


def test_weights_turned_nan_stop_every_rank_before_the_save(made, tmp_path) -> None:
    model, data, _ = made
    more = {"tp": 2, "lr": 1e38, "weight_decay": 1e38, "clip_grad": 0.0, "lr_warmup_iters": 1}
    more |= {"train_iters": 2, "save_interval": 1, "most_recent_k": 1, "eval_split": 0.0}
    found = run_world(on_rank, 2, model, str(tmp_path / "out"), data, more)
    assert found[0] == found[1]
    assert found[0][0] == "TrainingError"
    assert "iteration 1, the last good checkpoint" in found[0][1]
    assert [p.name for p in (tmp_path / "out").glob("iter_*")] == ["iter_0000001"]
