"""Calibration of tiny models: what it sees, how it is resumed, and what it refuses."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import reshard
from megtool.errors import CalibrationError, DestinationError, StorageError, UsageError
from megtool.model.batch import Batch
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.quant.calibration import resume_folder, settings
from megtool.quant.calibration.calibrate import resolve_calibration
from megtool.quant.calibration.micro_batches import shard_micro_batches, split_batches
from megtool.spec import layer_sets
from megtool.storage.files import Files
from tests.support.emulated.graph_rules import check_graphs
from tests.support.errors import raises
from tests.support.models import family_models
from tests.support.quant.calibrated import case, interrupt_after, random_moe, saved_bytes, tokens


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_moe(tmp_path_factory.mktemp("random") / "moe")


def inputs_of_transformers(folder: Path, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """What the linear layers of a Llama are given, by canonical point."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: dict[str, list[torch.Tensor]] = {}
    ends = {"q_proj": "attn.qkv", "o_proj": "attn.o", "gate_proj": "mlp.fc1"}
    ends["down_proj"] = "mlp.down"
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        point = "head" if last == "lm_head" else None
        if last in ends:
            point = f"layers.{name.split('.')[2]}.{ends[last]}"
        if point is not None:
            kept = seen.setdefault(point, [])
            module.register_forward_pre_hook(
                lambda _, given, kept=kept: kept.append(given[0].flatten(0, 1))
            )
    with torch.no_grad():
        for batch in batches:
            model(batch.tokens_BS)
    return {name: torch.cat(rows) for name, rows in seen.items()}


def test_what_is_seen_is_what_transformers_multiplies(llama: Path) -> None:
    pytest.importorskip("transformers")
    made = case(llama)
    found = made.run()
    for name, x_TI in inputs_of_transformers(llama, made.batches).items():
        s = found.statistics[name]
        assert s.num_tokens == len(x_TI) == found.num_tokens, name
        np.testing.assert_allclose(s.amax, x_TI.abs().amax(0), rtol=2e-5, err_msg=name)
        np.testing.assert_allclose(s.abs_sum, x_TI.double().abs().sum(0), rtol=2e-5, err_msg=name)
    assert set(found.statistics) == {p.name for p in made.points}
    assert found.num_samples == 6


def test_resident_spilled_and_on_demand_are_the_same(llama: Path, tmp_path: Path) -> None:
    made = case(llama)
    wanted = saved_bytes(made.run(), tmp_path / "a")
    assert saved_bytes(made.run(stream_layers=False), tmp_path / "b") == wanted
    work = tmp_path / "work"
    assert (
        saved_bytes(made.run(resume_folder=work, offload_activations=True), tmp_path / "c")
        == wanted
    )
    assert not list(work.glob("into-*")), "activations are gone when they are needed no more"


def test_every_point_of_a_mixture_is_seen(mixture: Path) -> None:
    made = case(mixture)
    found = made.run()
    assert set(found.statistics) == {p.name for p in made.points}
    for layer in (1, 2, 3):
        counts = [
            found.statistics[f"layers.{layer}.mlp.experts.{e}.fc1"].num_tokens for e in range(4)
        ]
        assert sum(counts) == 2 * found.num_tokens
    everyone = made.run(calibrate_all_experts=True).statistics
    assert everyone["layers.1.mlp.experts.0.down"].num_tokens == found.num_tokens


def test_padding_does_not_count(llama: Path) -> None:
    (batch,) = tokens(128, count=1)
    padded = torch.nn.functional.pad(batch.tokens_BS, (0, 5), value=7)
    valid = torch.ones_like(padded, dtype=torch.bool)
    valid[:, -5:] = False
    whole = case(llama, batches=[batch]).run()
    found = case(llama, batches=[Batch(tokens_BS=padded, valid_BS=valid)]).run()
    assert found.num_tokens == whole.num_tokens == batch.tokens_BS.numel()
    for name, s in whole.statistics.items():
        assert found.statistics[name].num_tokens == s.num_tokens
        np.testing.assert_allclose(found.statistics[name].amax, s.amax, rtol=1e-5, err_msg=name)


def test_the_artefact_of_any_layout_is_the_same(llama: Path, tmp_path: Path) -> None:
    reshard(llama, tmp_path / "dist", to="torch_dist", tp=2, pp=2)
    wanted = saved_bytes(case(llama).run(), tmp_path / "a")
    assert saved_bytes(case(tmp_path / "dist").run(), tmp_path / "b") == wanted


@pytest.mark.parametrize("recipe", ["int4_gptq", "int8_sq"])
def test_algorithms_run_layer_by_layer(llama: Path, recipe: str, tmp_path: Path) -> None:
    made = case(llama, recipe)
    found = made.run(resume_folder=tmp_path / "work")
    quantized = {d.module.name for d in made.decided.matched.decisions if d.format is not None}
    assert set(found.qparams.weights) == quantized
    assert saved_bytes(found, tmp_path / "a") == saved_bytes(made.run(), tmp_path / "b")


def test_sequential_layers_see_what_was_made_of_those_before(llama: Path) -> None:
    made = case(llama, "int8_sq")
    alone, behind = made.run(sequential=False).statistics, made.run(sequential=True).statistics
    first, last = "layers.0.attn.qkv", "layers.3.mlp.down"
    np.testing.assert_array_equal(alone[first].amax, behind[first].amax)
    assert (alone[last].amax != behind[last].amax).any()


# ---- killed and resumed


class Told:
    """What a progress bar is told."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, stage: str, num_bytes: int, total_bytes: int) -> None:
        self.counts.append(num_bytes)


@pytest.mark.parametrize("recipe", ["fp8", pytest.param("int4_gptq", marks=pytest.mark.slow)])
def test_killed_behind_every_layer_and_resumed(llama: Path, recipe: str, tmp_path: Path) -> None:
    wanted = saved_bytes(case(llama, recipe).run(), tmp_path / "whole")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["megtool.quant.calibration.calibrate", "tests.support.quant.calibrated"]
    )
    for unit in range(5):
        work = tmp_path / f"work-{unit}"
        process = context.Process(target=interrupt_after, args=(unit, llama, recipe, work))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        told = Told()
        found = case(llama, recipe).run(resume_folder=work, progress=told)
        assert saved_bytes(found, tmp_path / f"resumed-{unit}") == wanted, unit
        assert told.counts[0] == (unit + 1) * 6 * 24, "what was done is not done again"


def cut_short(name: str) -> Callable[[Path], None]:
    def damage(work: Path) -> None:
        path = work / name
        os.truncate(path, path.stat().st_size - 7)

    return damage


def flip(name: str) -> Callable[[Path], None]:
    def damage(work: Path) -> None:
        data = bytearray((work / name).read_bytes())
        data[len(data) // 2] ^= 4
        (work / name).write_bytes(data)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        cut_short("unit-00002.safetensors"),
        flip("unit-00002.safetensors"),
        flip("unit-00000.safetensors"),
        cut_short("into-00003-0000.bin"),
        flip("into-00003-0000.bin"),
        lambda work: (work / "into-00003-0000.bin").unlink(),
    ],
)
def test_what_is_torn_is_made_again(
    llama: Path, tmp_path: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = case(llama)
    wanted = saved_bytes(made.run(), tmp_path / "whole")
    stop_behind(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        made.run(resume_folder=tmp_path / "work")
    monkeypatch.undo()
    damage(tmp_path / "work")
    assert saved_bytes(made.run(resume_folder=tmp_path / "work"), tmp_path / "resumed") == wanted


def stop_behind(monkeypatch: pytest.MonkeyPatch, unit: int) -> None:
    whole = resume_folder.ResumeFolder.write_unit

    def write_unit(self: Any, number: int, *facts: Any) -> None:
        whole(self, number, *facts)
        if number == unit:
            raise KeyboardInterrupt

    monkeypatch.setattr(resume_folder.ResumeFolder, "write_unit", write_unit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "unit"), [("fp8", 1), ("int8_sq", 0), ("int8_sq", 2), ("int8_sq", 3)]
)
def test_layers_that_share_keys_are_resumed(
    recipe: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4 E2B's, which also read an embedding of their own: files hold the residual alone."""
    folder = family_models.save("gemma4-small", tmp_path / "model")
    made = case(folder, recipe)
    assert layer_sets.shared_kv_layers(made.source.config) == {2, 3}
    wanted = saved_bytes(made.run(), tmp_path / "whole")
    with monkeypatch.context() as patched:
        stop_behind(patched, unit)
        with pytest.raises(KeyboardInterrupt):
            made.run(resume_folder=tmp_path / "work")
    assert (tmp_path / "work").exists()
    assert saved_bytes(made.run(resume_folder=tmp_path / "work"), tmp_path / "resumed") == wanted


@pytest.mark.slow
def test_residuals_side_by_side_are_spilled_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4 has several for each token, which weights of the head make one of: rows are
    wider than the hidden size, on every way to a layer's input."""
    made = case(family_models.save("deepseek_v4", tmp_path / "model", **family_models.SHORT_V4))
    config = made.source.config
    assert config.residual_size == 2 * config.hidden_size
    wanted = saved_bytes(made.run(stream_layers=False), tmp_path / "resident")
    assert saved_bytes(made.run(), tmp_path / "loaded on demand") == wanted
    work = tmp_path / "work"
    with monkeypatch.context() as patched:
        stop_behind(patched, 0)
        with pytest.raises(KeyboardInterrupt):
            made.run(resume_folder=work, offload_activations=True)
    assert list(work.glob("into-*")), "the input of the next layer is kept"
    assert (
        saved_bytes(made.run(resume_folder=work, offload_activations=True), tmp_path / "resumed")
        == wanted
    )


def test_a_finished_run_loads_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = case(llama)
    wanted = saved_bytes(made.run(resume_folder=tmp_path / "work"), tmp_path / "a")

    def load_nothing(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(settings, "load", load_nothing)
    assert saved_bytes(made.run(resume_folder=tmp_path / "work"), tmp_path / "b") == wanted


def test_work_of_another_calibration_is_refused(llama: Path, tmp_path: Path) -> None:
    made = case(llama)
    made.run(resume_folder=tmp_path / "work")
    with raises(CalibrationError, match="different recipe", hint="--work-dir"):
        case(llama, "int8_sq").run(resume_folder=tmp_path / "work")
    with pytest.raises(CalibrationError, match="data"):
        case(llama, batches=tokens(128, seed=3)).run(resume_folder=tmp_path / "work")
    with pytest.raises(CalibrationError, match="dtype"):
        made.run(resume_folder=tmp_path / "work", dtype="bfloat16")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(CalibrationError, match=r"thesis\.tex"):
        made.run(resume_folder=tmp_path / "other")
    assert [p.name for p in (tmp_path / "other").iterdir() if p.name != "lock"] == ["thesis.tex"]


def test_a_full_disk_is_an_error_and_the_run_goes_on_later(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = case(llama)
    wanted = saved_bytes(made.run(), tmp_path / "whole")
    whole, count = Files.system, 0

    def system(self: Files, function: Any, /, *args: Any) -> Any:
        nonlocal count
        if getattr(function, "__name__", "").startswith("pwrite"):
            count += 1
            if count == 40:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(self, function, *args)

    monkeypatch.setattr(Files, "system", system)
    with pytest.raises(StorageError):
        made.run(resume_folder=tmp_path / "work")
    monkeypatch.undo()
    assert not [p for p in (tmp_path / "work").iterdir() if p.name.endswith(".tmp")]
    assert saved_bytes(made.run(resume_folder=tmp_path / "work"), tmp_path / "resumed") == wanted


# ---- refused


def test_nan_in_a_weight_is_named(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with raises(CalibrationError, tensor="decoder.layers.2.mlp.linear_fc1.weight") as e:
        case(folder).run()
    assert "layer" in e.value.message
    assert "2" in e.value.message


def test_overflow_names_layer_and_sample(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "large")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[17] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    batches = tokens(16, rows=2, count=2)
    batches[1].tokens_BS[1, 4] = 17
    with pytest.raises(CalibrationError, match="sample 3") as e:
        case(folder, batches=batches).run()
    assert "0" in e.value.message, "the layer"


def test_no_data_and_no_room_to_spill(llama: Path) -> None:
    with pytest.raises(CalibrationError, match="no tokens"):
        case(llama, batches=[]).run()
    blank = Batch(
        tokens_BS=torch.zeros(1, 4, dtype=torch.int64),
        valid_BS=torch.zeros(1, 4, dtype=torch.bool),
    )
    with pytest.raises(CalibrationError, match="no tokens"):
        case(llama, batches=[blank]).run()
    with pytest.raises(UsageError, match="needs a folder"):
        case(llama).run(offload_activations=True)


def test_two_runs_do_not_share_a_folder(llama: Path, tmp_path: Path) -> None:
    made = case(llama)

    def run(stage: str, done: int, total: int) -> None:
        with raises(DestinationError, id="destination-locked"):
            made.run(resume_folder=tmp_path / "work")

    made.run(resume_folder=tmp_path / "work", progress=run)


# ---- pieces, graphs, another recipe


def test_pieces_hold_every_row_once(llama: Path) -> None:
    config = case(llama).source.config
    assert config is not None
    batches = tokens(128, rows=7, count=2, width=1000)
    pieces = split_batches(batches, config)
    assert [p.first_row for p in pieces] == [0, 4, 7, 11]
    whole = torch.cat([b.tokens_BS for b in batches])
    assert torch.equal(torch.cat([p.batch.tokens_BS for p in pieces]), whole)
    alone = ProcessGroups.alone()
    ranks = [
        shard_micro_batches(pieces, replace(alone, dp=Group(ranks=(0, 1, 2), rank=r)))
        for r in range(3)
    ]
    assert [len(own) for own in ranks] == [2, 2, 2]
    counted = [p.first_row for own in ranks for p in own if p.is_counted]
    assert sorted(counted) == [0, 4, 7, 11]
    halves = [
        shard_micro_batches(pieces, replace(alone, cp=Group(ranks=(0, 1, 2), rank=r)))
        for r in range(3)
    ]
    assert {p.batch.shape[1] for own in halves for p in own} == {1002}
    observed = [sum(int(p.valid_T.sum()) for p in own if p.valid_T is not None) for own in halves]
    assert sum(observed) == whole.numel()


@pytest.mark.parametrize("recipe", ["fp8", "int8_sq"])
@pytest.mark.parametrize("model", ["llama", "mixture"])
def test_layers_may_be_recorded_as_graphs(
    model: str, recipe: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """By the rehearsal, which checks what a graph may do, and replays nothing else."""
    batches = tokens(128, rows=1, count=9, width=8)
    cut = torch.arange(8) >= 3
    batches += [
        replace(b, documents_BS=cut.long()[None], positions_BS=(torch.arange(8) - 3 * cut)[None])
        for b in batches
    ]
    made = case(request.getfixturevalue(model), recipe, batches=batches)
    wanted = made.run(stream_layers=False)
    with check_graphs(), caplog.at_level("INFO", logger="megtool"):
        found = made.run(stream_layers=False)
    assert found.statistics.keys() == wanted.statistics.keys()
    for name, s in wanted.statistics.items():
        assert found.statistics[name].num_tokens == s.num_tokens
        np.testing.assert_allclose(found.statistics[name].amax, s.amax, rtol=1e-6)
    assert "CUDA graphs: 72 of 88 layer runs were replays (82%)" in caplog.messages
    assert "16 without: runs to capture the graphs" in caplog.messages


def test_why_layers_are_not_graphs(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = case(llama, batches=tokens(128, rows=1, count=3, width=8))
    with check_graphs(), caplog.at_level("INFO", logger="megtool"):
        made.run()
    assert caplog.messages == [
        "CUDA graphs: 0 of 12 layer runs were replays (0%)",
        "12 without: fewer than 8 micro-batches of the same shape",
    ]


@pytest.mark.slow
def test_experts_that_tokens_choose_see_those_of_each_batch(tmp_path: Path) -> None:
    """The first layer of DeepSeek-V4 looks its experts up in a table by the token."""
    pytest.importorskip("transformers")
    folder = family_models.save("deepseek_v4", tmp_path / "model", **family_models.SHORT_V4)
    batches = tokens(200, count=2, width=16)
    name = "layers.0.mlp.experts.0.fc1"
    alone = [case(folder, batches=[b]).run().statistics[name].num_tokens for b in batches]
    assert alone[0] != alone[1]
    assert case(folder, batches=batches).run().statistics[name].num_tokens == sum(alone)


def test_another_recipe_is_settled_without_data(llama: Path) -> None:
    made, other = case(llama, "fp8"), case(llama, "nvfp4")
    found = resolve_calibration(
        made.run(),
        other.source,
        other.decided.matched.decisions,
        other.decided.recipe,
        other.points,
    )
    wanted = other.run()
    assert found.qparams.weights.keys() == wanted.qparams.weights.keys()
    for name, t in wanted.qparams.weights.items():
        assert found.qparams.weights[name].input_amax == t.input_amax, name
        assert t.format.algo == "NVFP4"
