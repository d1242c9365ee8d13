"""Weights and optimizer state under parts of a nested state dict, as trainers save them by DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import megtool
from megtool import reshard
from megtool.errors import MegtoolError
from tests.support.models import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

PARTS: dict[str, tuple[str, ...]] = {
    "model": ("model",),
    "app": ("app", "model"),
    "actor": ("actor", "module"),
    "deep": ("trainer", "actor", "policy"),
}


def nest(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return dict(value)


def save(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("part", PARTS)
def test_a_model_finds_its_names(tmp_path: Path, part: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    save(tmp_path / "in", nest(PARTS[part], net.state_dict()))
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    megtool.load_state_dict(other, tmp_path / "in")
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_two_models_of_the_same_names_are_not_mixed(tmp_path: Path) -> None:
    nets = [torch.nn.Linear(3, 4) for _ in range(2)]
    save(tmp_path / "in", {"actor": nets[0].state_dict(), "ref": nets[1].state_dict()})
    with pytest.raises(MegtoolError):
        megtool.load_state_dict(torch.nn.Linear(3, 4), tmp_path / "in")


@pytest.mark.parametrize("part", PARTS)
def test_weights_and_state_are_read_under_a_part(tmp_path: Path, part: str) -> None:
    base = tiny_llama.save(tmp_path / "base", dtype="float32")
    weights = load_file(base / "model.safetensors")
    moments = {n: {"exp_avg": w + 1, "exp_avg_sq": w * w} for n, w in weights.items()}
    state = nest(PARTS[part], weights)
    top = state[PARTS[part][0]] if len(PARTS[part]) > 1 else state
    top["optim"] = {"state": moments, "param_groups": [{"lr": 0.5}]}
    save(tmp_path / "in", state)
    reshard(tmp_path / "in", tmp_path / "out", to="hf", family="llama", like=base)
    found = load_file(tmp_path / "out/model.safetensors")
    assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in weights.items()}
    states = {t.name for t in megtool.open(tmp_path / "in", like=base).source.view.tensors}
    assert sum("exp_avg" in name for name in states) == 2 * len(weights)
    if part == "model":
        return  # the names of the result begin so, too
    renames = [".".join(PARTS[part]) + ".*=*"]
    reshard(
        tmp_path / "in",
        tmp_path / "renamed",
        to="hf",
        family="llama",
        like=base,
        optimizer_format="none",
        rename=renames,
    )
    assert load_file(tmp_path / "renamed/model.safetensors").keys() == weights.keys()
