"""PyTorch's FSDP2 saves with DCP, megtool cuts it anew, FSDP2 loads it, with its optimizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megtool import reshard
from tests.support.paths import PEERS

pytestmark = [pytest.mark.slow, pytest.mark.peers]
WORLD = PEERS / "fsdp_world.py"


def _world(*args: object) -> None:
    done = subprocess.run(
        [sys.executable, str(WORLD), *map(str, args)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fsdp")
    _world("save", root / "saved", root / "truth.pt")
    return root


def test_cut_anew_it_loads_back(saved: Path) -> None:
    report = reshard(saved / "saved", saved / "three", to="dcp", dp=3)
    assert not report.dropped
    _world("load", saved / "three", saved / "truth.pt")


def test_weights_and_moments_that_came_another_way(saved: Path) -> None:
    """Out of one bare file, by the names torch gives an optimizer's state dict."""
    file = saved / "all.safetensors"
    report = reshard(saved / "saved", file, to="safetensors")
    assert "step" in {d.name.rpartition(".")[2] for d in report.dropped}
    assert not [d for d in report.dropped if "exp_avg" in d.name]
    reshard(file, saved / "parts", to="dcp", dp=3, like=saved / "saved" / "hf")
    _world("load-parts", saved / "parts", saved / "truth.pt")


def test_moments_of_a_hugging_face_model_in_megatrons_names(saved: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    truth = torch.load(saved / "truth.pt")
    reshard(saved / "saved", saved / "stacked", to="torch_dist")
    folder = next((saved / "stacked").glob("*/.metadata")).parent
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    wanted = {name: torch.empty(2, 20, 36)}
    dcp.load(wanted, checkpoint_id=folder)
    for layer in range(2):
        moment = truth[f"model.layers.{layer}.mlp.down_proj.weight.exp_avg"]
        assert torch.equal(wanted[name][layer], moment)
