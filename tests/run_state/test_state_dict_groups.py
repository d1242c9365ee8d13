"""Megatron's param groups, step and loss scale go through a state dict of PyTorch and come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from megtool import reshard, verify
from megtool.megatron_state.param_groups import OptimizerGroups
from megtool.options.layout import ParallelConfig
from megtool.run_state.state_dict_groups import read_any_groups
from megtool.source.open import open_source
from tests.support.checkpoints import trained

BACK: dict[str, dict[str, Any]] = {
    "fully_reshardable": {"to": "torch_dist", "tp": 2},
    "dp_reshardable": {"to": "torch_dist", "optimizer_format": "dp_reshardable", "dp": 2},
    "rank files": {"to": "megatron", "pp": 2},
}


def groups_of(folder: Path, **known: Any) -> OptimizerGroups | None:
    return read_any_groups(open_source(folder, **known).catalogue)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, materialize: Callable[..., None]) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trained.write(folder, trained.config(num_layers=2), ParallelConfig(), materialize)
    return folder


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory, saved: Path) -> Path:
    """A Hugging Face folder of the model, which a plain state dict does not describe."""
    folder = tmp_path_factory.mktemp("like") / "hf"
    reshard(saved, folder, to="hf", family="llama", optimizer_format="none", fsync=False)
    return folder


@pytest.mark.parametrize("via", ["dcp", "torch_checkpointing"])
def test_groups_come_back_in_every_format(
    via: str, saved: Path, like: Path, tmp_path: Path
) -> None:
    known: dict[str, Any] = {"family": "llama", "like": like, "fsync": False}
    report = reshard(saved, tmp_path / via, to=via, dp=2, **known)
    assert not [d for d in report.dropped if "optimizer" in d.name]
    assert groups_of(tmp_path / via) == groups_of(saved)
    for name, options in BACK.items():
        reshard(tmp_path / via, tmp_path / name, **known, **options)
        assert groups_of(tmp_path / name) == groups_of(saved), name
        # Neither format has a place for the iteration.
        report = verify(tmp_path / name, saved)
        assert {(d.part, d.tensor) for d in report.differences} == {("training state", "iteration")}


def test_torch_reads_them_as_a_list(saved: Path, tmp_path: Path) -> None:
    """By its own loader, with the places of `planner_data`."""
    reshard(saved, tmp_path / "dcp", to="dcp", fsync=False)
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(tmp_path / "dcp"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert state["optimizer"]["param_groups"] == trained.GROUPS["param_groups"]


def test_experts_have_an_optimizer_of_their_own(materialize: Any, tmp_path: Path) -> None:
    """Its groups are others than the dense ones; both have the loss scale."""
    dense: list[dict[str, Any]] = [{**g, "lr": 0.5} for g in trained.GROUPS["param_groups"]]
    spread = [{**g, "is_expert_parallel": True, "lr": 0.25} for g in dense[:1]]
    chain = {
        number: {
            "optimizer": {"param_groups": groups},
            "grad_scaler": {"scale": 4096.0, "growth_tracker": 3},
            "param_state_sharding_type": "fully_reshardable",
        }
        for number, groups in enumerate((dense, spread))
    }
    model = trained.config(
        num_layers=2, num_experts=4, moe_ffn_hidden_size=24, num_experts_per_token=2
    )
    small = {"optimizer": chain}
    trained.write(tmp_path / "run", model, ParallelConfig(ep=2), materialize, small_state=small)
    known: dict[str, Any] = {"fsync": False, "family": "mixtral"}
    reshard(tmp_path / "run", tmp_path / "hf", to="hf", optimizer_format="none", **known)
    reshard(tmp_path / "run", tmp_path / "dcp", to="dcp", **known)
    assert groups_of(tmp_path / "dcp") == groups_of(tmp_path / "run")
    known["like"] = tmp_path / "hf"
    reshard(tmp_path / "dcp", tmp_path / "back", to="torch_dist", ep=2, **known)
    common = open_source(tmp_path / "back").catalogue.metadata["common"]
    assert common["optimizer"] == chain
