"""Finetune of a mixture of experts: losses of routers, a bias that moves, and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import verify
from megtool.errors import UsageError
from megtool.megatron_state.saved_objects import saved_args
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.train.run_log import MEASUREMENTS, read_log
from megtool.transport.reading.reader import CheckpointReader
from tests.support.errors import raises
from tests.support.models import moe_models, tiny_text
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.finetune_runs import curve, tune
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.torchrun import torchrun

transformers = pytest.importorskip("transformers")

BALANCED: dict[str, Any] = {
    "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_z_loss_coeff": 0.001,
    "moe_router_bias_update_rate": 0.01,
    "save_interval": 2,
    "train_iters": 4,
    "bf16": True,
}

LONG: dict[str, Any] = {
    "train_iters": 20,
    "global_batch_size": 4,
    "lr": 1e-3,
    "eval_split": 0.1,
    "eval_interval": 10,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    family, _, keys = moe_models.CASES["deepseek_v3"]
    sizes = {"vocab_size": tiny_text.VOCABULARY, "eos_token_id": tiny_text.END}
    keys = keys | sizes | {"num_hidden_layers": 2}
    tiny_model(family, folder, sizes=moe_models.SIZES, **keys)
    tiny_text.save_tokenizer(folder)
    return folder


def test_a_run_with_balanced_experts_goes_on_with_the_same_bits(model, data, tmp_path) -> None:
    out = tmp_path / "out"
    tune(model, tmp_path / "ref", data, **BALANCED)
    first = tune(model, out, data, **BALANCED, exit_duration_in_mins=1e-9)
    assert first.outcome.iteration == 1
    tune(model, out, data, **BALANCED)
    assert curve(out) == curve(tmp_path / "ref")
    assert verify(out, tmp_path / "ref").exit_status == 0
    lines = [x for x in read_log(out / "log.jsonl") if "loss" in x]
    assert all(x["seq_aux_loss"] > 0.9 and x["z_loss"] > 0 for x in lines)
    assert all(0 <= x["min_expert_load"] <= 1 <= x["max_expert_load"] for x in lines)
    opened = open_source(out)
    kept = saved_args(opened.catalogue)
    assert {n: kept[n] for n in BALANCED if n.startswith("moe")} == {
        n: value for n, value in BALANCED.items() if n.startswith("moe")
    }
    with CheckpointReader(opened.catalogue, Files()) as reader:
        place = opened.view.placements["layers.1.mlp.router.expert_bias"]
        bias = torch.as_tensor(reader.open_canonical(place).read())
    assert bias.dtype == torch.float32
    assert torch.equal((bias * 100).round() / 100, bias)  # four steps of 0.01, up or down
    assert 0 < bias.abs().max() < 0.041


def on_rank(rank: int, size: int, model: str, out: str, data: str, more: dict[str, Any]) -> None:
    tune(model, out, data, **more)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"cp": 2}, {"cp": 2, "ep": 2}], ids=str)
def test_ranks_that_share_rows_draw_the_curve_of_one(layout, model, data, tmp_path) -> None:
    how = BALANCED | {"bf16": None, "save_interval": 100, "packing": False}
    run_world(on_rank, 1, str(model), str(tmp_path / "one"), str(data), how)
    run_world(on_rank, 2, str(model), str(tmp_path / "two"), str(data), how | layout)
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    changing = MEASUREMENTS
    for ours, theirs in zip(two, one, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - changing:
            assert ours[key] == pytest.approx(theirs[key], abs=2e-5), key


@pytest.fixture(scope="module")
def alone(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps on one process."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    tune(model, folder, data, **LONG)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [["--ep", "2"], ["--tp", "2", "--ep", "2", "--etp", "1"]], ids=" ".join
)
def test_ranks_that_share_out_experts_draw_the_curve_of_one(
    axes, model, data, alone, tmp_path
) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in LONG.items()]
    line = ["finetune", str(model), str(tmp_path / "out"), "--data", str(data), *options]
    done = torchrun(2, *line, "--seq-length=32", "--threads=1", *axes, "--device", "cpu", "-q")
    assert done.returncode == 0, done.stderr
    ours, theirs = (read_log(folder / "log.jsonl") for folder in (tmp_path / "out", alone))
    assert len([x for x in ours if "loss" in x]) == 20
    for key in ("loss", "eval_loss", "grad_norm"):
        found, expected = ([x[key] for x in run if key in x] for run in (ours, theirs))
        assert found == pytest.approx(expected, abs=1e-5), key
    assert verify(tmp_path / "out", alone, atol=1e-4).exit_status == 0


@pytest.mark.slow
def test_a_teacher_without_experts_teaches_ranks_that_share_them_out(model, data, tmp_path) -> None:
    teacher = tiny_text.save(tmp_path / "teacher")
    how = {"train_iters": 3, "global_batch_size": 2, "teacher": teacher}
    tune(model, tmp_path / "one", data, **how)
    run_world(on_rank, 2, str(model), str(tmp_path / "two"), str(data), how | {"ep": 2})
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    assert [x["loss"] for x in two] == pytest.approx([x["loss"] for x in one], abs=1e-5)


def test_an_exported_model_is_the_adapted_one(model, data, tmp_path) -> None:
    peft = pytest.importorskip("peft", reason="the peft package is the oracle")
    how: dict[str, Any] = {"lora_rank": 4, "lr": 1e-2, "train_iters": 2}
    report = tune(model, tmp_path / "out", data, **how, to="hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(theirs, report.adapter).eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(report.hf, dtype=torch.float32)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        ours = merged(ids).logits
        assert torch.allclose(adapted(ids).logits, ours, atol=1e-5, rtol=1e-5)
        assert (adapted.unload()(ids).logits - ours).abs().max() > 1e-4


def test_what_the_model_has_not_is_refused_before_data_are_read(model, tmp_path) -> None:
    dense, data = tiny_text.save(tmp_path / "dense"), tmp_path / "nowhere.txt"
    with pytest.raises(UsageError, match="a model without experts has no router losses"):
        tune(dense, tmp_path / "out", data, moe_aux_loss_coeff=0.1)
    with raises(UsageError, "--moe-losses-from-checkpoint"):
        tune(dense, tmp_path / "out", data, moe_losses_from_checkpoint=True)
    with pytest.raises(UsageError, match="--lora-rank, which trains adapters only"):
        tune(dense, tmp_path / "out", data, moe_router_bias_update_rate=0.1, lora_rank=2)
    with pytest.raises(UsageError, match="for experts, which take none"):
        tune(model, tmp_path / "out", data, lora_rank=2, lora_dropout=0.1)
