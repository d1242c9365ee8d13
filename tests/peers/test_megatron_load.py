"""Real megatron-core loads any checkpoint through `megtool.megatron`, and trains on from it."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard
from megtool.frameworks.megatron_core.keys import split_flat_range
from tests.support.paths import PEERS
from tests.support.peers.run_trained import ITERATION, read_with_torch
from tests.support.peers.run_trained import run_world as run_trained

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.peers

LAYOUTS: dict[str, tuple[str, str, dict[str, int], int]] = {
    "rank files at TP2": ("legacy", "load", {"tp": 2}, 2),
    "rank files at PP2": ("legacy", "load", {"pp": 2}, 2),
    "buckets at TP2 and PP2": ("dp_reshardable", "install", {"tp": 2, "pp": 2}, 4),
    "torch_dist by core's load": ("fully_reshardable", "strategy", {"tp": 2, "pp": 2}, 4),
}


def begin_training(world: int, runs: list[Any], **known: Any) -> list[list[float]]:
    """The losses of every run of megatron_load_world.py."""
    options = {"world": world, "runs": runs, "known": known}
    done = subprocess.run(
        [sys.executable, str(PEERS / "megatron_load_world.py"), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("losses "))
    losses: list[list[float]] = json.loads(line.removeprefix("losses "))
    return losses


def assert_same(folder: Path, truth: Path) -> None:
    """Weights, master weights and moments are equal to the last bit."""
    loaded, want = read_with_torch(folder), read_with_torch(truth)
    assert set(loaded) == set(want)
    for name, tensor in want.items():
        rows = min(len(loaded[name]), len(tensor))  # the vocabulary is padded for another TP
        assert torch.equal(loaded[name][:rows], tensor[:rows]), name
    assert sum(k.startswith("optimizer.state.exp_avg_sq.") for k in want) >= 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training state of two data-parallel ranks, saved in three formats."""
    folder = tmp_path_factory.mktemp("trained")
    kinds = ("fully_reshardable", "dp_reshardable", "legacy")
    run_trained("train", saves=[[k, str(folder / k)] for k in kinds], layout={})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_optimizer_comes_along(trained: Path, tmp_path: Path, name: str) -> None:
    kind, via, layout, world = LAYOUTS[name]
    out = run_trained(
        "load",
        kind=kind,
        folder=str(trained / kind),
        dump=str(tmp_path / "dump"),
        layout=layout,
        world=world,
        via=via,
    )
    assert "loaded [2.0" in out
    assert_same(tmp_path / "dump", trained / "fully_reshardable")


@pytest.mark.slow
def test_experts_at_another_layout(tmp_path: Path) -> None:
    kinds = ("fully_reshardable", "dp_reshardable")
    saves = [[k, str(tmp_path / k)] for k in kinds]
    run_trained("train", saves=saves, layout={"ep": 2}, experts=4)
    run_trained(
        "load",
        kind=kinds[1],
        folder=str(tmp_path / kinds[1]),
        dump=str(tmp_path / "dump"),
        layout={"pp": 2, "ep": 2},
        world=4,
        via="install",
        experts=4,
    )
    assert_same(tmp_path / "dump", tmp_path / kinds[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world"), [({"tp": 2}, 2), ({"pp": 2}, 2), ({"tp": 2, "pp": 2}, 4)]
)
def test_losses_are_those_of_the_converted_copy(
    trained: Path, tmp_path: Path, layout: dict[str, int], world: int
) -> None:
    """A Hugging Face folder and rank files, read without conversion, train as core's copy does."""
    reshard(
        trained / "fully_reshardable",
        tmp_path / "hf",
        to="hf",
        optimizer_format="none",
        family="llama",
    )
    reshard(tmp_path / "hf", tmp_path / "ranks", to="megatron", tp=4)
    reshard(tmp_path / "hf", tmp_path / "copy", to="torch_dist", **layout)
    runs = [
        [layout, "core", str(tmp_path / "copy" / "release")],
        [layout, "megtool", str(tmp_path / "hf")],
        [layout, "installed", str(tmp_path / "ranks")],
    ]
    core, *others = begin_training(world, runs)
    assert len(core) == 4
    assert core[0] != core[-1]
    assert others == [core, core]


def test_every_fault_is_named_before_anything_is_read(trained: Path) -> None:
    """Missing and misshapen tensors of a state dict come in one error; nothing is filled."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    import megtool
    import megtool.errors

    def shard(key: str, *shape: int) -> Any:
        return ShardedTensor.from_rank_offsets(key, torch.full(shape, 7.0))

    state = {
        "fits": shard("decoder.final_layernorm.weight", 32),
        "long": shard("decoder.layers.0.mlp.linear_fc2.weight", 32, 49),
        "none": shard("decoder.layers.9.mlp.linear_fc2.weight", 32, 48),
        "other": shard("decoder.layers.0.mlp.linear_fc3.weight", 32, 48),
    }
    folder = trained / "fully_reshardable" / ITERATION
    with pytest.raises(megtool.errors.MappingError) as caught:
        megtool.megatron.load(dict(state), folder)
    for name in ("layers.0.mlp.linear_fc2", "layers.9.mlp", "linear_fc3", "[32, 49]", "[32, 48]"):
        assert name in str(caught.value)
    assert (state["fits"].data == 7).all()
    out = megtool.megatron.load(
        {"fits": state["fits"], "own": {"seed": 3}}, folder, strict="log_all"
    )
    assert not (out["fits"] == 7).any()
    assert out["iteration"] == 7
    assert out["own"] == {"seed": 3}


def test_keys_of_every_spelling_are_the_same_elements(trained: Path, tmp_path: Path) -> None:
    """Layers with an axis or a key each, and halves with keys of their own; no optimizer in hf."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    import megtool
    import megtool.errors

    hf = tmp_path / "hf"
    reshard(trained / "fully_reshardable", hf, to="hf", optimizer_format="none", family="llama")
    stacked = ShardedTensor.from_rank_offsets(
        "decoder.layers.mlp.linear_fc2.weight", torch.zeros(32, 48), (0, 2, 4), prepend_axis_num=1
    )
    half = ShardedTensor.from_rank_offsets(
        "decoder.layers.2.mlp.linear_fc1.weight_v", torch.zeros(24, 32), (0, 1, 2)
    )
    out = megtool.megatron.load({"stacked": stacked, "half": half}, hf)
    want = megtool.open(hf, framework="torch").tensors
    down, up = (want[f"model.layers.2.mlp.{n}_proj.weight"].torch() for n in ("down", "up"))
    assert torch.equal(out["stacked"], down.float())
    assert torch.equal(out["half"], up[24:].float())
    state = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.decoder.final_layernorm.weight", torch.zeros(32)
    )
    with pytest.raises(megtool.errors.MappingError, match="no such optimizer state"):
        megtool.megatron.load({"state": state}, hf)


def test_flat_ranges_are_boxes_in_order() -> None:
    rng = random.Random(3)
    for _ in range(200):
        shape = [rng.randint(1, 4) for _ in range(rng.randint(0, 4))]
        size = math.prod(shape)
        start = rng.randint(0, size)
        stop = rng.randint(start, size)
        numbers = []
        for lo, hi in split_flat_range(shape, start, stop):
            for index in itertools.product(*map(range, lo, hi)):
                number = 0
                for extent, i in zip(shape, index, strict=True):
                    number = number * extent + i
                numbers.append(number)
        assert numbers == list(range(start, stop))
