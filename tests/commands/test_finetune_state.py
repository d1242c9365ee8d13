"""Finetune and the optimizer's state as Megatron has it: scales, buckets, steps, formats."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megtool.errors import FormatError, MappingError, UsageError
from megtool.train.run_log import read_log
from tests.support.errors import raises
from tests.support.runs.finetune_runs import tune as any_run
from tests.support.worlds.gloo_world import run_world

SCALE = 2.0**14
FP16 = {"fp16": True, "initial_loss_scale": SCALE, "micro_batch_size": 1}

tune = partial(any_run, train_iters=2)


def common(folder: Path, iteration: int) -> tuple[Path, dict[str, Any]]:
    path = folder / f"iter_{iteration:07d}" / "common.pt"
    return path, torch.load(path, weights_only=False)


def change(folder: Path, iteration: int, how: Callable[[dict[str, Any]], None]) -> None:
    """Write a saved iteration's common state with a change, as torch writes it."""
    path, state = common(folder, iteration)
    how(state)
    torch.save(state, path)


def test_the_loss_scale_is_saved_as_megatrons(model, data, tmp_path) -> None:
    """A loss of Megatron's is a mean over the 32 tokens of a pass, and its scale so many times."""
    tune(model, tmp_path / "out", data, **FP16)
    used = [x["loss_scale"] for x in read_log(tmp_path / "out/log.jsonl")]
    assert used == [SCALE] * 2
    _, state = common(tmp_path / "out", 2)
    held = state["optimizer"]["grad_scaler"]
    assert torch.equal(torch.as_tensor(held["scale"]).reshape(1), torch.tensor([SCALE]))
    assert held["growth_tracker"] == 2


def test_a_run_saves_no_class_that_checkpoints_do_not_need(model, data, tmp_path) -> None:
    tune(model, tmp_path / "src", data)
    change(tmp_path / "src", 2, lambda state: setattr(state["args"], "share", Fraction(1, 3)))
    with raises(FormatError, "fractions.Fraction", hint="--drop-objects", id="hostile-pickle"):
        tune(tmp_path / "src", tmp_path / "out", data)
    assert not (tmp_path / "out").exists()
    tune(tmp_path / "src", tmp_path / "out", data, drop_objects=True)
    _, state = common(tmp_path / "out", 2)
    assert not hasattr(state["args"], "share")
    assert state["args"].iteration == 2


@pytest.mark.peers
def test_a_run_goes_on_with_the_loss_scale_of_megatron(model, data, tmp_path) -> None:
    real = pytest.importorskip("megatron.core.optimizer.grad_scaler").DynamicGradScaler
    tune(model, tmp_path / "src", data, **FP16)
    scaler = real.__new__(real)  # its own __init__ puts tensors on CUDA
    scaler._scale, scaler._growth_tracker, scaler._hysteresis_tracker = torch.tensor([1024.0]), 5, 1

    def put(state: dict[str, Any]) -> None:
        state["optimizer"]["grad_scaler"] = scaler.state_dict()
        for group in state["optimizer"]["optimizer"]["param_groups"]:
            group["step"] = torch.tensor(group["step"], dtype=torch.int32)  # a capturable Adam's

    change(tmp_path / "src", 2, put)
    more = FP16 | {"train_iters": 4, "load": tmp_path / "src", "loss_scale_window": 7}
    # Passes of two rows: of the mean over 64 tokens it is the same scale, as the log has it.
    tune(model, tmp_path / "out", data, **more | {"micro_batch_size": 2})
    used = [x["loss_scale"] for x in read_log(tmp_path / "out/log.jsonl")]
    assert used == [1024.0] * 2
    _, state = common(tmp_path / "out", 4)
    held = state["optimizer"]["grad_scaler"]
    # 5 steps and 2 more are a window: it has grown.
    assert torch.equal(torch.as_tensor(held["scale"]).reshape(1), torch.tensor([2048.0]))
    assert {g["step"] for g in state["optimizer"]["optimizer"]["param_groups"]} == {4}


def test_moments_without_a_step_are_refused(model, data, tmp_path) -> None:
    tune(model, tmp_path / "src", data)

    def forget(state: dict[str, Any]) -> None:
        for group in state["optimizer"]["optimizer"]["param_groups"]:
            del group["step"]

    change(tmp_path / "src", 2, forget)
    with pytest.raises(MappingError, match="without a number of steps"):
        tune(model, tmp_path / "out", data, train_iters=4, load=tmp_path / "src")
    change(tmp_path / "src", 2, lambda state: state.pop("optimizer"))
    with pytest.raises(MappingError, match="without a number of steps"):
        tune(model, tmp_path / "out2", data, train_iters=4, load=tmp_path / "src")


@pytest.mark.parametrize(
    "more", [{"optimizer": "muon"}, {"freeze": ["*embedding*"]}], ids=["muon", "freeze"]
)
def test_state_that_buckets_cannot_hold_is_refused_before_a_step(
    more, model, data, tmp_path
) -> None:
    more = more | {"dist_ckpt_optim_format": "dp_reshardable", "async_save": False}
    with raises(UsageError, "dp_reshardable", hint="fully_reshardable"):
        tune(model, tmp_path / "out", data, **more)
    assert not [x for x in read_log(tmp_path / "out/log.jsonl") if "loss" in x]


def on_rank(rank: int, size: int, model: str, folder: str, data: str, more: dict[str, Any]) -> None:
    tune(model, folder, data, **more)


@pytest.mark.slow
@pytest.mark.parametrize("in_bf16", [False, True])
def test_buckets_are_saved_as_the_run_cuts_them(in_bf16: bool, model, data, tmp_path) -> None:
    more = {
        "dp": 2,
        "bf16": True,
        "overlap_grad_reduce": True,
        "ddp_bucket_size": 5000,
        "grad_reduce_in_bf16": in_bf16,
        "ddp_pad_buckets_for_high_nccl_busbw": in_bf16,
        "dist_ckpt_optim_format": "dp_reshardable",
    }
    out = tmp_path / "out"
    run_world(on_rank, 2, str(model), str(out), str(data), more)
    stored = FileSystemReader(out / "iter_0000002").read_metadata().state_dict_metadata
    flat = {name for name in stored if ".bucket_idx_" in name}
    grad = "bfloat16" if in_bf16 else "float32"
    assert all(f"dtype_(torch.bfloat16, torch.{grad})" in name for name in flat)
    assert len({name.rpartition(".")[0] for name in flat}) > 2
    _, state = common(out, 2)
    args = state["args"]
    assert (args.overlap_grad_reduce, args.ddp_bucket_size) == (True, 5000)
    assert args.accumulate_allreduce_grads_in_fp32 is not in_bf16
    assert args.ddp_pad_buckets_for_high_nccl_busbw is in_bf16
    # Read by its own word, and gone on with.
    run_world(on_rank, 2, str(model), str(out), str(data), more | {"train_iters": 3})
    assert [x["iteration"] for x in read_log(out / "log.jsonl") if "loss" in x] == [1, 2, 3]
