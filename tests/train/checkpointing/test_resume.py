"""Resuming: what was saved at one layout and format goes on at another, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard, verify
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from tests.support.checkpoints.trained import config, write
from tests.support.errors import raises
from tests.support.models import mtp_models, tiny_llama
from tests.support.runs.train_runs import ROWS, Trained
from tests.support.worlds.gloo_world import run_world

Materialize = Callable[[Any, Path, dict[str, Any]], None]


def train_and_save(
    rank: int, size: int, source: str, target: str, layout: dict[str, int], how: dict[str, Any]
) -> None:
    """Three steps from scratch, and a save."""
    save = how.pop("save", "fully_reshardable")
    run = Trained(Path(source), layout, **how)
    try:
        for _ in range(3):
            run.step()
        with run.saver(Path(target), save) as saver:
            run.save(saver, 3, asynchronous=True)
    finally:
        run.groups.stop()


def resume_and_save(
    rank: int, size: int, source: str, target: str, layout: dict[str, int], how: dict[str, Any]
) -> None:
    """Go on from a save folder, say where it stands, and save at once."""
    save = how.pop("save", "fully_reshardable")
    run = Trained(Path(source), layout, **how)
    try:
        found = run.resume()
        assert (found.iteration, found.consumed_train_samples) == (3, 3 * ROWS)
        assert found.scheduler == {"max_lr": 1e-2, "num_steps": 3 * ROWS}
        assert found.has_optimizer
        assert run.optimizer.num_steps == 3
        with run.saver(Path(target), save) as saver:
            run.save(saver, 3)
    finally:
        run.groups.stop()


@pytest.mark.parametrize(
    ("kind", "plain", "save"),
    [
        pytest.param("bfloat16", False, "fully_reshardable", marks=pytest.mark.slow),
        pytest.param("float32", True, "fully_reshardable", marks=pytest.mark.slow),
        pytest.param("bfloat16", False, "dp_reshardable", marks=pytest.mark.slow),
        pytest.param("bfloat16", True, "dp_reshardable", marks=pytest.mark.slow),
    ],
)
def test_two_replicas_become_two_stages_of_two_tensor_ranks(
    kind: str, plain: bool, save: str, tmp_path: Path
) -> None:
    hf, first, cut, second = (str(tmp_path / n) for n in ("hf", "first", "cut", "second"))
    tiny_llama.save(tmp_path / "hf", dtype="float32")
    how: dict[str, Any] = {"kind": kind, "plain": plain}
    run_world(train_and_save, 2, hf, first, {"dp": 2}, how | {"save": save})
    reshard(first, cut, tp=2, pp=2, fsync=False)
    assert verify(cut, first).verdict == "equal"
    run_world(resume_and_save, 4, cut, second, {"tp": 2, "pp": 2}, how | {"plain": False})
    assert verify(second, first).verdict == "equal"


@pytest.mark.parametrize("remainders", [False, True])
def test_a_resumed_run_is_the_run_that_was_not_stopped(remainders: bool, tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32", num_hidden_layers=2)
    settings = {"store_param_remainders": True, "exp_avg_dtype": "bf16"} if remainders else {}
    run = Trained(tmp_path / "hf", kind="bfloat16", settings=settings)
    for _ in range(3):
        run.step()
    with run.saver(tmp_path / "dst") as saver:
        run.save(saver, 3)
    again = Trained(tmp_path / "dst", kind="bfloat16", settings=settings)
    drawn = torch.rand(3)
    found = again.resume()
    assert found.has_random
    assert torch.equal(torch.rand(3), drawn)  # the state that was saved is from before the draw
    again.num_steps = found.iteration
    for one in (run, again):
        for _ in range(2):
            one.step()
    want, got = run.state(), again.state()
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


FORMATS = [
    ("torch_dist", {"optimizer_format": "fully_reshardable", "tp": 2, "dp": 2}),
    ("torch_dist", {"optimizer_format": "dp_reshardable", "tp": 2, "pp": 2, "dp": 2}),
    ("megatron", {"tp": 2, "pp": 2}),
]


@pytest.mark.parametrize("model", [{}, {"tied_embeddings": True}], ids=["", "tied"])
def test_state_comes_out_of_every_format(
    model: dict[str, Any], materialize: Materialize, tmp_path: Path
) -> None:
    write(tmp_path / "src", config(**model), ParallelConfig(), materialize)
    whole = Trained(tmp_path / "src", kind="bfloat16")
    assert whole.resume().has_optimizer
    assert whole.optimizer.num_steps == 7
    want = whole.state()
    for number, (to, how) in enumerate(FORMATS):
        folder = tmp_path / str(number)
        reshard(tmp_path / "src", folder, to=to, fsync=False, **how)
        run = Trained(folder, kind="bfloat16")
        found = run.resume()
        assert found.has_optimizer, to
        assert found.iteration == 7, to
        assert run.optimizer.num_steps == 7, to
        got = run.state()
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), (to, name)


def test_layers_that_were_frozen_have_no_state(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32")

    def frozen(folder: Path) -> Trained:
        run = Trained(folder)
        for name, p in run.stages[0].named_parameters():
            p.requires_grad_(".layers.3." in name or "norm" in name)
        named = list(run.stages[0].named_parameters())
        run.optimizer = type(run.optimizer)(named, run.optimizer.settings, run.groups)
        return run

    run = frozen(tmp_path / "hf")
    run.step()
    with run.saver(tmp_path / "dst") as saver:
        run.save(saver, 1)
    again = frozen(tmp_path / "dst")
    assert again.resume().has_optimizer
    want, got = run.state(), again.state()
    assert want.keys() == got.keys()
    assert all(torch.equal(got[n], t) for n, t in want.items())
    other = Trained(tmp_path / "dst")
    with raises(MappingError, "optimizer", "28", "81 tensors", "exp_avg"):
        other.resume()


def test_another_optimizer_is_told_what_it_lacks(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32", num_hidden_layers=2)
    run = Trained(tmp_path / "hf", settings={"optimizer": "sgd"})
    run.step()
    with run.saver(tmp_path / "dst") as saver:
        run.save(saver, 1)
    assert Trained(tmp_path / "dst", settings={"optimizer": "sgd"}).resume().has_optimizer
    with raises(
        MappingError,
        "30",
        "45 tensors",
        "exp_avg",
        hint="start a new run from this checkpoint's weights",
    ):
        Trained(tmp_path / "dst").resume()


def test_a_checkpoint_without_state_says_so(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32", num_hidden_layers=2)
    run = Trained(tmp_path / "hf")
    found = run.resume()
    assert not found.has_optimizer
    assert found.iteration == 0


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("glm4_moe", "mimo", "qwen3_5_moe", "nemotron_h", "deepseek_v32")
        ),
    ],
)
def test_all_state_of_models_with_further_layers_comes_back(family: str, tmp_path: Path) -> None:
    """Bit for bit: moments too of weights that are stored shifted, or as several tensors, or
    nested in a larger model."""
    pytest.importorskip("transformers")
    mtp_models.save(family, tmp_path / "hf")
    run = Trained(tmp_path / "hf", plain=True)
    run.step()
    with run.saver(tmp_path / "out") as saver:
        run.save(saver, 1)
    again = Trained(tmp_path / "out", plain=True)
    again.resume()
    before, after = run.state(), again.state()
    assert before.keys() == after.keys()
    assert any("exp_avg_sq:mtp." in name for name in before)
    assert [n for n in before if not torch.equal(before[n], after[n])] == []
