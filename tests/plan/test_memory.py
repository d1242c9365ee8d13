"""Memory as a destination: what a plan writes is in the memory it was given."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool.dtypes import dtype
from megtool.errors import FormatError, StorageError
from megtool.formats import open_checkpoint
from megtool.options.execution import DigestMode
from megtool.plan import memory
from megtool.plan.copies import Fill, PlanSource
from megtool.plan.execute import execute
from megtool.plan.planner import build_plan
from megtool.plan.worker import FILL_BYTES
from megtool.storage.files import Files
from megtool.tensors.catalogue import Destination
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

KINDS = ["float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn", "uint8"]


def stored(name: str, shape: tuple[int, ...], kind: str = "float32") -> GlobalTensor:
    return GlobalTensor(name=name, shape=shape, dtype=dtype(kind))


def loaded(source: Path, target: Destination, **how: Any) -> dict[str, torch.Tensor]:
    catalogue = open_checkpoint(source)
    places = {t.name: Placement.identity(t.name, t.shape) for t in catalogue.tensors}
    plan = build_plan([PlanSource(catalogue=catalogue, placements=places)], target, places, **how)
    filled = memory.allocate(target.catalogue.tensors)
    with memory.MemoryStage(filled) as stage:
        execute(plan, stage, files=Files(), threads=2)
    return {t.name: memory.as_torch(filled[t.name], t) for t in target.catalogue.tensors}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[dict[str, torch.Tensor]], Path]:
    def save(tensors: dict[str, torch.Tensor]) -> Path:
        from safetensors.torch import save_file

        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"

    return save


def test_every_type_comes_back(saved: Callable[..., Path]) -> None:
    tensors = {k: torch.randint(0, 2, (3, 5)).to(getattr(torch, k)) for k in KINDS}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    path = saved(tensors)
    target = memory.plan_memory_layout(open_checkpoint(path).tensors)
    got = loaded(path, target)
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert got[name].float().equal(tensor.float()), name
        assert got[name].data_ptr() % memory.ALIGNMENT == 0


def test_casts_and_padding_are_the_plans(saved: Callable[..., Path]) -> None:
    source = torch.randn(6, 4)
    path = saved({"w": source})
    target = memory.plan_memory_layout([stored("w", (8, 4), "bfloat16")])
    fill = Fill(stored="w", lo=(6, 0), hi=(8, 4), value=1.5)
    got = loaded(path, target, fills=[fill])["w"]
    assert got[:6].equal(source.bfloat16())
    assert (got[6:] == 1.5).all()


def test_tensors_can_be_written_and_share_nothing(saved: Callable[..., Path]) -> None:
    path = saved({"a": torch.ones(40), "b": torch.ones(40)})
    target = memory.plan_memory_layout(open_checkpoint(path).tensors)
    one, two = loaded(path, target), loaded(path, target)
    one["a"].zero_()
    assert (one["b"] == 1).all()
    assert (two["a"] == 1).all()


def test_columns_are_assigned_to_the_callers_memory(saved: Callable[..., Path]) -> None:
    """Short runs on both sides, and a cast: what passes through tiles."""
    source = torch.randn(300, 70)
    path = saved({"w": source, "x": source.clone()})
    columns = [stored("w", (70, 300)), stored("x", (300, 70), "float64")]
    target = memory.plan_memory_layout(columns)
    catalogue = open_checkpoint(path)
    there = {n: Placement.identity(n, (300, 70)) for n in "wx"}
    turned = replace(there["w"], dims=(1, 0))
    plan = build_plan(
        [PlanSource(catalogue=catalogue, placements=there)], target, there | {"w": turned}
    )
    mine = torch.zeros(70, 300)
    given = {"w": mine.view(-1).view(torch.uint8).numpy(), "x": np.zeros(300 * 70 * 8, np.uint8)}
    with memory.MemoryStage(given) as stage:
        execute(plan, stage, files=Files(), memory_bytes=1 << 20, digest=DigestMode.NONE)
    assert mine.equal(source.T)
    assert torch.from_numpy(given["x"]).view(torch.float64).view(300, 70).equal(source.double())


def test_a_whole_tensor_is_read_into_its_place_in_steps(saved: Callable[..., Path]) -> None:
    """Into memory that got its pages right before; nothing is read twice, and nothing copied."""
    lengths: list[int] = []

    class Counting(Files):
        def system(self, function: Callable[..., Any], /, *args: Any) -> Any:
            if function is os.preadv:
                lengths.append(sum(b.nbytes for b in args[1]))
            return super().system(function, *args)

    count = (5 << 18) + 3  # of four bytes: two steps and a half, and three elements
    path = saved({"a": torch.arange(count, dtype=torch.float32), "b": torch.ones(3)})
    catalogue = open_checkpoint(path)
    places = {t.name: Placement.identity(t.name, t.shape) for t in catalogue.tensors}
    target = memory.plan_memory_layout(catalogue.tensors)
    plan = build_plan([PlanSource(catalogue=catalogue, placements=places)], target, places)
    filled = memory.allocate(catalogue.tensors)
    with memory.MemoryStage(filled) as stage:
        execute(plan, stage, files=Counting(), digest=DigestMode.NONE)
    assert lengths == [FILL_BYTES, FILL_BYTES, FILL_BYTES // 2 + 4 * (3 + 3)]
    assert (filled["a"].view(np.float32) == np.arange(count)).all()
    assert (filled["b"].view(np.float32) == 1).all()


def test_column_shards_fill_the_rows_of_memory_directly(saved: Callable[..., Path]) -> None:
    """Two shards that follow each other in a file are read by one call, and nothing is copied."""

    buffers: list[int] = []

    class Counting(Files):
        def system(self, function: Callable[..., Any], /, *args: Any) -> Any:
            if function is os.preadv:
                buffers.append(len(args[1]))
            return super().system(function, *args)

    halves = {n: torch.randn(64, 256) for n in "ab"}
    catalogue, files = open_checkpoint(saved(halves)), Counting()
    there = {n: Placement.identity(n, (64, 256)) for n in "ab"}
    base = {"a": (0, 0), "b": (0, 256)}
    inside = {n: replace(there[n], stored="w", base=base[n]) for n in "ab"}
    target = memory.plan_memory_layout([stored("w", (64, 512))])
    plan = build_plan([PlanSource(catalogue=catalogue, placements=there)], target, inside)
    filled = memory.allocate(target.catalogue.tensors)
    with memory.MemoryStage(filled) as stage:
        execute(plan, stage, files=files, digest=DigestMode.NONE)
    got = memory.as_torch(filled["w"], target.catalogue.tensors[0])
    assert got.equal(torch.cat([halves["a"], halves["b"]], dim=1))
    assert buffers == [128]


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(StorageError, match="bytes of memory"):
        memory.allocate([stored("w", (1 << 60,))])


def test_memory_of_another_size_is_refused() -> None:
    given = {"w": np.zeros(7, np.uint8)}
    with memory.MemoryStage(given) as stage, pytest.raises(StorageError, match="resized"):
        stage.create("w", 8)


def test_small_files_have_no_place() -> None:
    with memory.MemoryStage({}) as stage, pytest.raises(FormatError, match="not a tensor"):
        stage.write("config.json", b"{}")


def test_free_memory_is_the_least_of_its_limits(tmp_path: Path) -> None:
    found = memory.free_memory()
    assert found is None or found > 1 << 20
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 50000\nactive_file 7\n")
    assert memory._cgroup_memory(tmp_path) == 350000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_memory(tmp_path) is None
