"""Rounding learned layer by layer: its error, and that it is run and resumed like calibration."""

from __future__ import annotations

import multiprocessing
import signal
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml

from megtool.errors import UsageError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.quant.calibration.layer_runner import LayerRunner
from megtool.quant.calibration.micro_batches import split_batches
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel
from megtool.quant.qparams import QParams
from tests.support.errors import raises
from tests.support.quant.calibrated import (
    Case,
    case,
    interrupt_after,
    random_moe,
    saved_bytes,
    tokens,
)

ALGOS = {"W4A16_AWQ": 32, "NVFP4": 16, "MXFP4": 32}


def recipe(folder: Path, algo: str = "MXFP4", **algorithm: object) -> Path:
    """The recipe mxfp4 with another format or algorithm, by default learned from nearest codes."""
    text = yaml.safe_load((files("megtool.quant_recipes") / "mxfp4.yaml").read_text())
    text["algorithm"] = algorithm or {"method": "learned_rounding", "steps": 30, "batch_size": 2}
    text["formats"] = {"mxfp4": {"algo": algo, "group_size": ALGOS[algo]}}
    path = folder / f"{algo}-{'-'.join(map(str, text['algorithm'].values()))}.yaml"
    path.write_text(yaml.safe_dump(text))
    return path


def layer_error(made: Case, qparams: QParams, layer: int = 0) -> float:
    """The squared error of the output of a layer, behind unquantized ones."""
    config = made.source.config
    assert config is not None
    decoder = load(made.source, groups=ProcessGroups.alone("cpu"), dtype="float32")
    layers = LayerRunner(decoder, split_batches(made.batches, config))
    inputs = list(layers.embed())
    for below in range(layer):
        inputs = [layers.run(below, n, x) for n, x in enumerate(inputs)]
    exact = [layers.run(layer, n, x) for n, x in enumerate(inputs)]
    sites = [p for p in made.points if p.layer == layer]
    with FakeQuantModel(decoder, sites, qparams):
        found = [layers.run(layer, n, x) for n, x in enumerate(inputs)]
    return sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("algo", list(ALGOS))
def test_the_error_is_below_that_of_rounding_to_nearest(
    llama: Path, tmp_path: Path, algo: str
) -> None:
    calibrates = "max" if algo == "NVFP4" else "none"
    nearest = case(llama, recipe(tmp_path, algo, method=calibrates))
    learned = case(llama, recipe(tmp_path, algo))
    before, after = (layer_error(made, made.run().qparams) for made in (nearest, learned))
    assert after < 0.9 * before


def test_it_begins_with_the_result_of_gptq(llama: Path, tmp_path: Path) -> None:
    gptq = {"method": "gptq", "scale_search": True, "damping": 0.01}
    alone = case(llama, recipe(tmp_path, **gptq))
    one_step = {"learned_rounding": True, "steps": 1, "learning_rate": 0.0001}
    learned = case(llama, recipe(tmp_path, **gptq, **one_step))
    first = "layers.0.attn.q"
    codes = [made.run().qparams.weights[first].codes for made in (alone, learned)]
    assert codes[0] is not None
    assert codes[1] is not None
    assert (codes[0] == codes[1]).mean() > 0.99
    more = {"learned_rounding": True, "steps": 30, "batch_size": 2}
    learned = case(llama, recipe(tmp_path, **gptq, **more))
    assert layer_error(learned, learned.run().qparams) < layer_error(alone, alone.run().qparams)


def test_experts_and_padding(tmp_path: Path) -> None:
    (batch,) = tokens(128, count=1, rows=4)
    valid = torch.ones_like(batch.tokens_BS, dtype=torch.bool)
    valid[1, -5:] = False
    ragged = Batch(tokens_BS=batch.tokens_BS, valid_BS=valid)
    made = case(random_moe(tmp_path / "moe"), recipe(tmp_path), batches=[ragged])
    found = made.run().qparams.weights
    quantized = {d.module.name for d in made.decided.matched.decisions if d.format is not None}
    assert set(found) == quantized
    assert any(".experts." in name and found[name].codes is not None for name in found)


def test_a_step_takes_rows_of_several_micro_batches(llama: Path, tmp_path: Path) -> None:
    path = recipe(tmp_path, method="learned_rounding", steps=10, batch_size=6)
    apart = tokens(case(llama, path).source.config.embedding.vocab_size, rows=2, count=3)  # type: ignore[union-attr]
    together = [Batch(tokens_BS=torch.cat([b.tokens_BS for b in apart]))]
    made = [
        case(llama, path, batches=batches).run().qparams.weights for batches in (apart, together)
    ]
    for module in ("layers.0.attn.q", "layers.0.mlp.down"):
        codes = [weights[module].codes for weights in made]
        assert codes[0] is not None
        assert codes[1] is not None
        assert (codes[0] == codes[1]).mean() > 0.99, module


def test_resident_spilled_and_on_demand_are_the_same(llama: Path, tmp_path: Path) -> None:
    made = case(llama, recipe(tmp_path))
    wanted = saved_bytes(made.run(), tmp_path / "a")
    assert saved_bytes(made.run(stream_layers=False), tmp_path / "b") == wanted
    work = tmp_path / "work"
    assert (
        saved_bytes(made.run(resume_folder=work, offload_activations=True), tmp_path / "c")
        == wanted
    )
    assert not list(work.glob("*into-*")), "activations are gone when they are needed no more"


@pytest.mark.parametrize("unit", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_and_resumed(llama: Path, tmp_path: Path, unit: int) -> None:
    path = recipe(tmp_path)
    wanted = saved_bytes(case(llama, path).run(), tmp_path / "whole")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.quant.calibrated"])
    work = tmp_path / "work"
    process = context.Process(target=interrupt_after, args=(unit, llama, str(path), work))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(work.glob("unquantized-into-*"))) >= 1
    found = case(llama, path).run(resume_folder=work)
    assert saved_bytes(found, tmp_path / "resumed") == wanted


def test_several_processes_are_refused(llama: Path, tmp_path: Path) -> None:
    groups = replace(ProcessGroups.alone("cpu"), world=Group(ranks=(0, 1)))
    with raises(UsageError, id="learned-rounding"):
        case(llama, recipe(tmp_path)).run(groups=groups)
