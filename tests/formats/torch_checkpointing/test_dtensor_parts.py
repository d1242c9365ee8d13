"""Files of ranks with DTensors, as FSDP trainers save them: which part each rank has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import megtool
from megtool.errors import FormatError
from megtool.formats import open_checkpoint
from megtool.formats.torch_checkpointing.dtensor_parts import DTensorPlacement, cut_dtensor
from tests.support.errors import raises
from tests.support.worlds.gloo_world import run_world

WHOLE = {
    "rows": torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3),
    "columns": torch.arange(4 * 10, dtype=torch.float32).reshape(4, 10),
    "one": torch.tensor([5.0]),
    "bias": torch.arange(6, dtype=torch.bfloat16),
}


CASES: dict[str, tuple[tuple[int, ...], dict[str, list[Placement]]]] = {
    "4": ((4,), {"rows": [Shard(0)], "columns": [Shard(1)]}),
    "2x2": ((2, 2), {"rows": [Replicate(), Shard(0)], "columns": [Shard(1), Shard(0)]}),
    "twice": ((2, 2), {"rows": [Shard(0), Shard(0)], "columns": [Shard(0), Replicate()]}),
}


def save(rank: int, size: int, root: str) -> None:
    """Save the tensors of every case as torch distributes them to this rank."""
    dist.init_process_group("gloo")
    for case, (mesh, placements) in CASES.items():
        device_mesh = init_device_mesh("cpu", mesh)
        rest: list[Placement] = [Shard(0), *[Replicate()] * (len(mesh) - 1)]
        state = {
            name: distribute_tensor(tensor, device_mesh, placements.get(name, rest))
            for name, tensor in WHOLE.items()
        }
        Path(root, case).mkdir(exist_ok=True)
        torch.save(state, Path(root, case, f"model_world_size_{size}_rank_{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def test_parts_are_put_where_torch_cut_them(tmp_path: Path) -> None:
    run_world(save, 4, str(tmp_path))
    for case in CASES:
        tensors = megtool.open(tmp_path / case).as_("stored")
        assert sorted(tensors) == sorted(WHOLE)
        for name, whole in WHOLE.items():
            assert torch.equal(tensors[name].torch(), whole), (case, name)
    (tmp_path / "4/model_world_size_4_rank_1.pt").unlink()
    with raises(FormatError, "model_world_size_4_rank_1.pt", id="missing-shard"):
        open_checkpoint(tmp_path / "4")


@pytest.mark.parametrize("size", [0, 1, 5, 8])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_cuts_are_those_of_chunk(size: int, num_ranks: int) -> None:
    placements = {
        rank: DTensorPlacement(coordinate=(rank,), cut_dims=(0,)) for rank in range(num_ranks)
    }
    parts = cut_dtensor((size, 2), placements)
    assert parts is not None
    chunks = torch.arange(size).chunk(num_ranks)
    expected = [len(c) for c in chunks] + [0] * (num_ranks - len(chunks))
    assert [part.shape for part in parts] == [(n, 2) for n in expected]
