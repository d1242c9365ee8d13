"""Every family into FSDP2 on two ranks, by both loaders, against the converted copy."""

from __future__ import annotations

import math
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import megtool
from tests.support.folders import torch_tensors
from tests.support.models.every_family import MODELS
from tests.support.models.named_modules import modules_named
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("transformers")

PARTS = 8


def shard(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Modules of these names under FSDP2: each numbered layer, and the rest but scalars."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = modules_named(tensors)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    scalars = {p for p in model.parameters() if not p.ndim}  # which FSDP2 does not shard
    for name, module in [*model.named_modules()]:
        if name.rpartition(".")[2].isdigit() and name.count(".") < 4:
            fully_shard(module, mesh=mesh, ignored_params=scalars)
    fully_shard(model, mesh=mesh, ignored_params=scalars)
    return model


def part_of(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's rows: FSDP2 gives every rank but the last ones as many, rounded up."""
    rows = math.ceil(len(tensor) / size)
    return tensor[rows * rank : rows * (rank + 1)]


def load_families(rank: int, size: int, folder: Path, families: list[str]) -> list[str]:
    """What is wrong with any of them."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    faults = []
    for family in families:
        try:
            faults += load_family(rank, size, folder / family)
        except Exception:
            faults.append(f"{family}: {traceback.format_exc()[-1500:]}")
    return faults


def load_family(rank: int, size: int, folder: Path) -> list[str]:
    whole = torch_tensors(folder / "copy")
    model = shard(whole)
    faults = []
    for source in ("hf", "torch_dist"):
        for through_dcp in (False, True):
            state: dict[str, Any] = model.state_dict()
            for tensor in state.values():
                tensor.fill_(7)
            if through_dcp:
                dcp.load(state, storage_reader=megtool.dcp.Reader(folder / source))
            else:
                report = megtool.load_state_dict(model, folder / source)
                assert report.num_tensors == len(whole)
            for name, tensor in state.items():
                is_sharded = isinstance(tensor, dist.tensor.DTensor)
                local = tensor.to_local() if is_sharded else tensor
                expected = part_of(whole[name], rank, size) if is_sharded else whole[name]
                if not local.equal(expected):
                    faults.append(f"{folder.name} {source} {through_dcp=}: {name}")
    return faults


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_is_filled(part: int, tmp_path: Path) -> None:
    """From its Hugging Face folder and from `torch_dist` of two tensor ranks."""
    families = sorted(MODELS)[part::PARTS]
    for family in families:
        folder = tmp_path / family
        MODELS[family](folder / "hf")
        megtool.reshard(folder / "hf", folder / "torch_dist", to="torch_dist", tp=2, fsync=False)
        megtool.reshard(folder / "torch_dist", folder / "copy", to="hf", fsync=False)
    for faults in run_world(load_families, 2, tmp_path, families, timeout_s=900):
        assert not faults
