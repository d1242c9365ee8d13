"""`finetune --qat` with a recipe that learns scales: trained, saved, resumed and exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megtool import audit, export, quantize, verify
from megtool.errors import CheckpointError, LayoutError, RecipeError, UsageError
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.fake_quant.learned_scales import learned_block_scale, round_with_scales
from megtool.quantize.layout.megatron_source import read_quantized_megatron
from tests.support.errors import raises
from tests.support.quant.quantize_sizes import SMALL, save_llama
from tests.support.quant.stored_values import canonical
from tests.support.runs.finetune_runs import curve, save_lines, tune
from tests.support.worlds.gloo_world import run_world

RECIPE = """
description: NVFP4 weights whose scales are learned
algorithm: {method: lsq, learnable_amax: [pre, post], quantize_pre_scale: PRE}
formats: {nvfp4: {algo: W4A16_NVFP4}}
rules:
  - match: {glob: [layers.*.attn.q, layers.*.attn.k, layers.*.attn.v, layers.*.attn.o]}
    format: nvfp4
  - match: {glob: layers.*.mlp.*}
    format: nvfp4
  - match: {glob: "*"}
    format: keep
"""
RESUMED = {"save_interval": 3, "lr": 1e-2, "eval_split": 0.1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_llama(tmp_path_factory.mktemp("llama") / "hf")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lines(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "lsq.yaml"
    path.write_text(RECIPE.replace("PRE", "false"))
    return str(path)


def test_what_is_trained_is_what_is_exported(
    llama: Path, data: Path, recipe: str, tmp_path: Path
) -> None:
    """Amaxes move, a run resumes with the same bits, and the folder has the codes under the pre
    scale with the post scale."""
    report = tune(llama, tmp_path / "ref", data, qat=recipe, **RESUMED, to="hf")
    assert report.evaluations[-1][1] < report.evaluations[0][1]
    tune(llama, tmp_path / "out", data, qat=recipe, **RESUMED, exit_duration_in_mins=1e-9)
    tune(llama, tmp_path / "out", data, qat=recipe, **RESUMED)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    ours, theirs = (tmp_path / n / "iter_0000006" for n in ("out", "ref"))
    assert verify(ours, theirs).exit_status == 0
    name = "layers.0.mlp.down"
    tables, others = (load_file(p / "learned_scales/state.safetensors") for p in (ours, theirs))
    assert all(torch.equal(t, others[n]) for n, t in tables.items())
    pre, post = tables[f"weight:{name}.pre"], tables[f"weight:{name}.post"]
    assert not torch.equal(pre, post)
    assert tables[f"exp_avg:{name}.pre"].abs().max() > 0
    q = read_quantized_megatron(ours).qparams.weights[name]
    stored = canonical(ours, name)
    assert torch.equal(fake_weight(stored, q), stored)
    top = tables[f"global_amax:{name}"]
    scales = (
        learned_block_scale(pre, top, rounds=False),
        learned_block_scale(post, top, rounds=True),
    )
    trained = canonical(ours, name, state="main")
    assert torch.equal(round_with_scales(trained, *scales), stored)
    assert not torch.equal(fake_weight(trained, replace(q, codes=None)), stored)
    decoded = canonical(Path(str(report.hf)), name)
    assert torch.equal(decoded, stored)
    assert audit(tmp_path / "ref", threads=1).exit_status == 0  # though main parameters differ
    config = json.loads((Path(str(report.hf)) / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}])
def test_ranks_shard_amaxes_and_their_moments(
    llama: Path, data: Path, recipe: str, tmp_path: Path, layout: dict[str, int]
) -> None:
    """A run of two ranks, resumed by one process, is that of one process."""
    steady = {"qat": recipe, "lr_decay_style": "constant", "lr": 1e-2}
    tune(llama, tmp_path / "ref", data, **steady)
    run_world(on_rank, 2, str(llama), str(tmp_path / "two"), str(data), steady | layout)
    resumed = tune(llama, tmp_path / "two", data, **steady)
    assert resumed.start_iteration == 3
    ours, theirs = curve(tmp_path / "two"), curve(tmp_path / "ref")
    assert [x[1] for x in ours] == pytest.approx([x[1] for x in theirs], rel=1e-3)
    tables, others = (
        load_file(tmp_path / n / "iter_0000006/learned_scales/state.safetensors")
        for n in ("two", "ref")
    )
    assert tables.keys() == others.keys()
    for n, t in tables.items():
        if n.startswith("weight:"):
            assert (t - others[n]).norm() < 0.05 * others[n].norm(), n
    assert export(tmp_path / "two/iter_0000003", tmp_path / "x", to="unified", threads=1).exact > 0


def on_rank(rank: int, size: int, model: str, folder: str, data: str, more: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    tune(model, folder, data, **more, train_iters=3)


THEIRS = """
quantize:
  algorithm: {method: lsq, learnable_amax: [pre, post], tied_amax: true,
              scale_algorithm: {method: mse, fp8_scale_sweep: true}}
  quant_cfg:
    - {quantizer_name: "*", enable: false}
    - quantizer_name: "*proj.weight_quantizer"
      cfg: {num_bits: e2m1, block_sizes: {-1: 16, type: static, scale_bits: e4m3}}
    - quantizer_name: "*proj.input_quantizer"
      cfg: {num_bits: e2m1, block_sizes: {-1: 16, type: dynamic, scale_bits: e4m3}}
"""


def test_recipes_of_modelopt_are_trained(llama: Path, data: Path, tmp_path: Path) -> None:
    """With inputs in NVFP4 of a calibration file, and one amax for both sides."""
    recipe, seen = tmp_path / "theirs.yaml", tmp_path / "seen.safetensors"
    recipe.write_text(THEIRS)
    quantize(llama, seen, recipe=str(recipe), calibrate_only=True, synthetic=True, **SMALL)
    more = {"qat": str(recipe), "calibration": seen, "eval_split": 0.1, "lr": 1e-2, "bf16": True}
    report = tune(llama, tmp_path / "out", data, **more, to="hf")
    assert report.evaluations[-1][1] < report.evaluations[0][1]
    iteration = tmp_path / "out/iter_0000006"
    tables = load_file(iteration / "learned_scales/state.safetensors")
    assert not any(n.endswith(".pre") for n in tables)
    q = read_quantized_megatron(iteration).qparams.weights["layers.1.attn.q"]
    post, top = (
        tables[f"{n}"] for n in ("weight:layers.1.attn.q.post", "global_amax:layers.1.attn.q")
    )
    assert np.array_equal(q.amax, np.maximum(post.numpy(), float(top) / 512))
    assert q.input_amax > 0
    config = json.loads((Path(str(report.hf)) / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4"


def test_what_does_not_go_with_learned_scales_is_refused(
    llama: Path, data: Path, recipe: str, tmp_path: Path
) -> None:
    with raises(LayoutError, "equal on all tensor-parallel ranks", hint="--tp 1"):
        tune(llama, tmp_path / "x", data, qat=recipe, tp=2)
    with raises(UsageError, "--lora-rank", "mse or max", hint=True):
        tune(llama, tmp_path / "x", data, qat=recipe, lora_rank=4)
    with raises(UsageError, "--freeze", hint=True):
        tune(llama, tmp_path / "x", data, qat=recipe, freeze=("*embedding*",))
    wrong = tmp_path / "fp8.yaml"
    dynamic = THEIRS.replace("type: static", "type: dynamic").replace("algorithm:", "algorithm: ")
    wrong.write_text(dynamic)
    with raises(UsageError, "learns the scales of NVFP4 weights", hint="type: static"):
        seen = tmp_path / "seen.safetensors"
        quantize(llama, seen, recipe=str(wrong), calibrate_only=True, synthetic=True, **SMALL)
        tune(llama, tmp_path / "x", data, qat=str(wrong), calibration=seen)
    wrong.write_text(RECIPE.replace("PRE", "maybe"))
    with raises(RecipeError, "quantize_pre_scale is 'maybe'"):
        tune(llama, tmp_path / "x", data, qat=str(wrong))
    assert not (tmp_path / "x").exists()
    tune(llama, tmp_path / "out", data, qat=recipe, train_iters=2)
    state = tmp_path / "out/iter_0000002/learned_scales/state.safetensors"
    state.rename(tmp_path / "away")
    with raises(CheckpointError, "no learned scales to resume", file=state):
        tune(llama, tmp_path / "out", data, qat=recipe)
