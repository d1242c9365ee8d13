"""Finetune of DeepSeek-V4: compressed keys, residuals side by side, multi-token prediction."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megtool import reshard, verify
from megtool.errors import MappingError
from megtool.train.run_log import read_log
from tests.support.errors import raises
from tests.support.folders import stored_tensors
from tests.support.models import moe_cases, moe_models, mtp_models, tiny_text
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.finetune_runs import curve, tune
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("transformers")

HOW: dict[str, Any] = {"save_interval": 2, "train_iters": 4}
NO_ORDER = "stands among a rank's parameters is not known"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    family, _, keys = moe_models.CASES["deepseek_v4"]
    keys = keys | {"vocab_size": tiny_text.VOCABULARY, "eos_token_id": tiny_text.END}
    tiny_model(family, folder, sizes=moe_models.SIZES, fill=moe_models.fill_routed, **keys)
    moe_cases.publish("deepseek_v4", folder)
    mtp_models.add_deepseek_v4_layer(folder)
    moe_cases.change_config(folder, num_nextn_predict_layers=1)
    tiny_text.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one process, of packed texts."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    tune(model, folder, data, **HOW)
    return folder


def test_a_run_goes_on_with_the_same_bits(
    model: Path, data: Path, alone: Path, tmp_path: Path
) -> None:
    """Its state goes to another layout; Megatron's buckets have none."""
    out = tmp_path / "out"
    assert tune(model, out, data, **HOW, exit_duration_in_mins=1e-9).outcome.iteration == 1
    tune(model, out, data, **HOW)
    assert curve(out) == curve(alone)
    assert verify(out, alone).verdict == "equal"
    reshard(out, tmp_path / "split", tp=2, ep=2, fsync=False)
    assert verify(tmp_path / "split", alone).verdict == "equal"
    for name, how in (
        ("ranks", {"to": "megatron"}),
        ("flat", {"optimizer_format": "dp_reshardable"}),
    ):
        with raises(MappingError, NO_ORDER, hint="fully_reshardable"):
            reshard(out, tmp_path / name, fsync=False, **how)
    with raises(MappingError, NO_ORDER):
        tune(model, tmp_path / "flat", data, **HOW, dist_ckpt_optim_format="dp_reshardable")
    assert curve(tmp_path / "flat") == []


@pytest.mark.slow
def test_tables_and_indexers_stay_and_all_else_is_trained(
    model: Path, data: Path, tmp_path: Path
) -> None:
    before = stored_tensors(model)
    after = stored_tensors(Path(tune(model, tmp_path / "out", data, **HOW, to="hf").hf))
    copies = {"mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"}
    assert set(before) - copies == set(after)
    before = {n: t for n, t in before.items() if n in after}
    fixed = {n for n in before if before[n] == after[n]}
    assert fixed == {n for n in before if ".indexer." in n or n.endswith((".tid2eid", "gate.bias"))}


@pytest.mark.slow
def test_layers_of_multi_token_prediction_are_trained_or_saved_as_they_are(
    model: Path, data: Path, alone: Path, tmp_path: Path
) -> None:
    assert all(x["mtp_1_loss"] > 1 for x in read_log(alone / "log.jsonl"))
    how = HOW | {"mtp_loss_scaling_factor": 0, "to": "hf"}
    out = Path(tune(model, tmp_path / "out", data, **how).hf)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, out))
    layer = {n for n in after if n.startswith("mtp.")}
    assert layer
    assert all(torch.equal(after[n].float(), before[n].float()) for n in layer)
    name = "layers.0.attn.wkv.weight"
    assert not torch.equal(after[name], before[name].float())


def on_rank(rank: int, size: int, model: str, out: str, data: str, more: dict[str, Any]) -> None:
    tune(model, out, data, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2, "ep": 2}, {"dp": 2}],
    ids=str,
)
def test_ranks_go_on_with_the_curve_of_one(
    layout: dict[str, int], model: Path, data: Path, alone: Path, tmp_path: Path
) -> None:
    """The second half of the run at another layout than the first."""
    out = tmp_path / "out"
    shutil.copytree(alone, out)
    shutil.rmtree(out / "iter_0000004")
    (out / "latest_checkpointed_iteration.txt").write_text("2")
    layout = layout | ({"first_stage_layers": 2} if "pp" in layout else {})
    run_world(on_rank, 2, str(model), str(out), str(data), HOW | layout)
    one, two = (read_log(folder / "log.jsonl") for folder in (alone, out))
    assert [x["iteration"] for x in two] == [x["iteration"] for x in one]
    for ours, theirs in zip(two, one, strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], abs=2e-5), key
