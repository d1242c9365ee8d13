"""Finetune of layers of multi-token prediction: trained or left alone, on ranks, resharded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import finetune, reshard, verify
from megtool.errors import LayoutError, MappingError, UsageError
from megtool.megatron_state.saved_objects import saved_args
from megtool.source.open import open_source
from megtool.train.run_log import MEASUREMENTS, read_log
from tests.support.folders import read_config
from tests.support.models.mtp_reference import save_tunable
from tests.support.runs.finetune_runs import curve, tune
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("transformers")

HOW: dict[str, Any] = {"save_interval": 2, "train_iters": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    save_tunable(folder)
    return folder


@pytest.fixture(scope="module")
def ref(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, with several rows in a step."""
    out = tmp_path_factory.mktemp("ref") / "out"
    tune(model, out, data, **HOW, global_batch_size=4)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_run_goes_on_with_the_same_bits(model: Path, data: Path, tmp_path: Path) -> None:
    out, reference = tmp_path / "out", tmp_path / "reference"
    tune(model, reference, data, **HOW)
    assert tune(model, out, data, **HOW, exit_duration_in_mins=1e-9).outcome.iteration == 1
    tune(model, out, data, **HOW)
    assert curve(out) == curve(reference)
    assert verify(out, reference).exit_status == 0
    lines = read_log(reference / "log.jsonl")
    for depth in (1, 2):
        losses = [line[f"mtp_{depth}_loss"] for line in lines if "loss" in line]
        assert len(losses) == HOW["train_iters"]
        assert len(set(losses)) == len(losses)
    names = set(open_source(reference).catalogue.index)
    inner = "mtp.layers.1.transformer_layer.mlp.router.weight"
    assert {inner, f"optimizer.state.exp_avg_sq.{inner}"} <= names
    args = saved_args(open_source(reference).catalogue)
    assert (args["mtp_num_layers"], args["mtp_loss_scaling_factor"]) == (2, 0.1)


def test_layers_left_alone_are_saved_as_they_are(model: Path, data: Path, tmp_path: Path) -> None:
    tune(model, tmp_path / "out", data, to="hf", train_iters=2, mtp_loss_scaling_factor=0.0)
    before, after = weights(model), weights(tmp_path / "out" / "hf")
    further = {n for n in after if n.startswith(("model.layers.2.", "model.layers.3."))}
    assert len(further) > 40
    assert all(torch.equal(before[n], after[n]) for n in further)
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    assert not any("mtp" in key for x in read_log(tmp_path / "out/log.jsonl") for key in x)
    state = [n for n in open_source(tmp_path / "out").catalogue.index if "exp_avg" in n]
    assert state
    assert not any("mtp" in n for n in state)


@pytest.mark.slow
def test_adapters_leave_them_alone(model: Path, data: Path, tmp_path: Path) -> None:
    tune(model, tmp_path / "out", data, to="hf", train_iters=2, lora_rank=2)
    before, after = weights(model), weights(tmp_path / "out" / "hf")
    name = "model.layers.3.self_attn.o_proj.weight"
    assert torch.equal(before[name], after[name])
    assert not torch.equal(before[name.replace("3", "1")], after[name.replace("3", "1")])
    with pytest.raises(UsageError, match="no effect with --lora-rank"):
        tune(model, tmp_path / "b", data, lora_rank=2, mtp_loss_scaling_factor=0.3)


def on_rank(rank: int, size: int, model: str, out: str, data: str, more: dict[str, Any]) -> None:
    tune(model, out, data, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2},
        {"pp": 2, "pipeline_layout": "Ett|mmL"},
        {"ep": 2},
        {"cp": 2, "packing": False},
        {"dp": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"dp": 2, "dist_ckpt_optim_format": "dp_reshardable"},
        {"pp": 2, "dist_ckpt_optim_format": "dp_reshardable"},
        {"recompute_granularity": "full"},
    ],
    ids=str,
)
def test_ranks_draw_the_curve_of_one(layout, model, ref, data, tmp_path) -> None:
    how = HOW | {"global_batch_size": 4} | layout
    size = 1 if "recompute_granularity" in layout else 2
    out, one = tmp_path / "out", ref
    if layout.get("packing", True) is False:
        one = tmp_path / "one"
        tune(model, one, data, **HOW, global_batch_size=4, packing=False)
    run_world(on_rank, size, str(model), str(out), str(data), how)
    changing = MEASUREMENTS
    for ours, theirs in zip(read_log(out / "log.jsonl"), read_log(one / "log.jsonl"), strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - changing:
            assert ours[key] == pytest.approx(theirs[key], abs=3e-5), key
    assert verify(out, one, atol=1e-4).exit_status == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("torch_dist", {"tp": 2, "pp": 2}),
        ("torch_dist", {"dp": 2, "optimizer_format": "dp_reshardable"}),
        ("megatron", {"tp": 2, "pp": 2}),
    ],
    ids=str,
)
def test_a_run_goes_on_from_what_was_resharded(to, options, model, ref, data, tmp_path) -> None:
    """Through another layout and format: the moments of these layers come along."""
    reshard(ref / "iter_0000002", tmp_path / "other", to=to, **options)
    tune(model, tmp_path / "out", data, **HOW, global_batch_size=4, load=tmp_path / "other")
    expected = [line for line in curve(ref) if line[0] > 2]
    for ours, theirs in zip(curve(tmp_path / "out"), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert verify(tmp_path / "out", ref, atol=1e-6).exit_status == 0


def test_refusals(model: Path, data: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"data": [str(data)], "seq_length": 32, "dry_run": True}
    bare = tmp_path / "bare"
    reshard(model, bare, to="hf", exclude=["model.layers.2.*", "model.layers.3.*"])
    with pytest.raises(UsageError, match="no effect for a model without layers of multi-token"):
        finetune(bare, tmp_path / "out", **how, mtp_loss_scaling_factor=0.3)
    finetune(bare, tmp_path / "out", **how)
    plain = finetune(model, tmp_path / "out", **how)
    frozen = finetune(model, tmp_path / "out", **how, mtp_loss_scaling_factor=0.0)
    assert plain.rank_trainable > frozen.rank_trainable
    assert plain.rank_parameters == frozen.rank_parameters
    with pytest.raises(LayoutError, match="on another stage than the loss") as caught:
        finetune(model, tmp_path / "out", **how, pp=2, pipeline_layout="Ettmm|L")
    assert "mL" in (caught.value.hint or "")
    with pytest.raises(LayoutError, match="has 1 layers of multi-token prediction"):
        finetune(model, tmp_path / "out", **how, pp=2, pipeline_layout="Et|tmL")


@pytest.mark.parametrize("missing", ["eh_proj", "mlp.experts.3.up_proj", "shared_head.norm"])
def test_a_tensor_that_is_missing_is_named(
    missing: str, model: Path, data: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    held = weights(model)
    del held[f"model.layers.3.{missing}.weight"]
    save_file(held, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MappingError, match=r"1 tensor is missing: 'mtp\.1\.") as caught:
        finetune(broken, tmp_path / "out", data=[str(data)], seq_length=32)
    assert f"model.layers.3.{missing}.weight" in caught.value.message
    assert "counts 2 layers of multi-token prediction" in (caught.value.hint or "")


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
@pytest.mark.parametrize(
    ("count", "problem", "hint"),
    [
        (1, r"'model\.layers\.3\..* is l=3, but", "multi-token prediction than the 1 it counts"),
        (3, r"tensors are missing: 'mtp\.2\.", "counts 3 layers of multi-token prediction"),
    ],
)
def test_another_number_of_layers_than_the_configuration_s(
    count: int, problem: str, hint: str, to: str, model: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(model, wrong)
    config = read_config(wrong) | {"num_nextn_predict_layers": count}
    (wrong / "config.json").write_text(json.dumps(config))
    with pytest.raises(MappingError, match=problem) as caught:
        reshard(wrong, tmp_path / "out", to=to, fsync=False)
    assert hint in (caught.value.hint or "")
