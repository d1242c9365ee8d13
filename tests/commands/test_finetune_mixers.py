"""Finetune of a model with recurrent mixers, packed: exact resume, ranks, and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megtool import reshard, verify
from megtool.source.open import open_source
from megtool.train.run_log import MEASUREMENTS, read_log
from tests.support.models import moe_models, tiny_text
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.finetune_runs import curve, tune
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("transformers")

HOW: dict[str, Any] = {"save_interval": 2, "train_iters": 4}


@pytest.fixture(scope="module", params=["nemotron_h"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    family, _, keys = moe_models.CASES[request.param]
    sizes = {"vocab_size": tiny_text.VOCABULARY, "eos_token_id": tiny_text.END}
    tiny_model(family, folder, sizes=moe_models.SIZES, **keys | sizes)
    tiny_text.save_tokenizer(folder)
    return folder


def test_a_run_goes_on_with_the_same_bits(model: Path, data: Path, tmp_path: Path) -> None:
    out, reference = tmp_path / "out", tmp_path / "reference"
    tune(model, reference, data, **HOW)
    assert tune(model, out, data, **HOW, exit_duration_in_mins=1e-9).outcome.iteration == 1
    tune(model, out, data, **HOW)
    assert curve(out) == curve(reference)
    assert verify(out, reference).exit_status == 0
    names = set(open_source(out).catalogue.index)
    assert "decoder.final_norm.weight" in names
    assert {"decoder.layers.0.mixer.A_log", "decoder.layers.1.mlp.router.weight"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("model", ["nemotron_h", "lfm2_moe"], indirect=True)
def test_state_in_buckets_goes_on_with_the_same_bits(
    model: Path, data: Path, tmp_path: Path
) -> None:
    """As Megatron saves it by default; a reshard of it holds the same, too."""
    out, reference = tmp_path / "out", tmp_path / "reference"
    how = HOW | {"dist_ckpt_optim_format": "dp_reshardable"}
    tune(model, reference, data, **HOW)
    assert tune(model, out, data, **how, exit_duration_in_mins=1e-9).outcome.iteration == 1
    tune(model, out, data, **how)
    assert curve(out) == curve(reference)
    assert verify(out, reference).verdict == "equal"
    layout = {"tp": 2, "pp": 2, "first_stage_layers": 2}
    reshard(out, tmp_path / "ranks", to="megatron", fsync=False, **layout)
    assert verify(reference, tmp_path / "ranks").verdict == "equal"


def on_rank(rank: int, size: int, model: str, out: str, data: str, more: dict[str, Any]) -> None:
    tune(model, out, data, **more)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"cp": 2, "packing": False}, {"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_draw_the_curve_of_one(layout, model, data, tmp_path) -> None:
    how = HOW | {"packing": layout.get("packing", True)}
    run_world(on_rank, 1, str(model), str(tmp_path / "one"), str(data), how)
    run_world(on_rank, 2, str(model), str(tmp_path / "two"), str(data), how | layout)
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    changing = MEASUREMENTS
    for ours, theirs in zip(two, one, strict=True):
        for key in ours.keys() - changing:
            assert ours[key] == pytest.approx(theirs[key], abs=2e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("model", ["nemotron_h", "lfm2_moe"], indirect=True)
def test_adapters_of_mixers_are_trained_and_merged(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tune(model, out, data, **HOW, lora_rank=2)
    assert len(curve(out)) == HOW["train_iters"]
    assert verify(out, model).exit_status != 0
