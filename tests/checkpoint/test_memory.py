"""Memory as a destination: tensors over what a plan wrote, given back when the last one dies."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool.checkpoint import memory
from megtool.checkpoint.catalogue import Destination
from megtool.checkpoint.copy import execute
from megtool.checkpoint.formats import open_checkpoint
from megtool.checkpoint.plan import Fill, PlanSource
from megtool.checkpoint.planner import build_plan
from megtool.checkpoint.storage.files import Files
from megtool.dtypes import dtype
from megtool.errors import FormatError, StorageError
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

KINDS = ["float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn", "uint8"]


def stored(name: str, shape: tuple[int, ...], kind: str = "float32") -> GlobalTensor:
    return GlobalTensor(name=name, shape=shape, dtype=dtype(kind))


def loaded(source: Path, target: Destination, **how: Any) -> dict[str, torch.Tensor]:
    catalogue = open_checkpoint(source)
    places = {t.name: Placement.identity(t.name, t.shape) for t in catalogue.tensors}
    plan = build_plan([PlanSource(catalogue=catalogue, placements=places)], target, places, **how)
    with memory.MemoryStage() as stage:
        execute(plan, stage, files=Files(), threads=2)
        return stage.tensors(target.catalogue)


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
    target = memory.plan_memory_layout(open_checkpoint(path).tensors, lambda n: n[:1])
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
    target = memory.plan_memory_layout([stored("w", (8, 4), "bfloat16")], lambda _: "all")
    fill = Fill(stored="w", lo=(6, 0), hi=(8, 4), value=1.5)
    got = loaded(path, target, fills=[fill])["w"]
    assert got[:6].equal(source.bfloat16())
    assert (got[6:] == 1.5).all()


def test_tensors_can_be_written_and_share_nothing(saved: Callable[..., Path]) -> None:
    path = saved({"a": torch.ones(40), "b": torch.ones(40)})
    target = memory.plan_memory_layout(open_checkpoint(path).tensors, lambda _: "all")
    one, two = loaded(path, target), loaded(path, target)
    one["a"].zero_()
    assert (one["b"] == 1).all()
    assert (two["a"] == 1).all()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_memory_goes_back_with_the_last_tensor(saved: Callable[..., Path]) -> None:
    path = saved({"a": torch.ones(1 << 16), "b": torch.ones(1 << 16)})
    target = memory.plan_memory_layout(open_checkpoint(path).tensors, lambda _: "all")

    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:megtool")

    before = held()
    got = loaded(path, target)
    assert held() == (before[0] + 1, before[1] + 1)  # mmap has a descriptor of its own
    del got["a"]
    assert held()[1] == before[1] + 1
    got.clear()
    assert held() == before


def test_elsewhere_it_is_a_temporary_file(
    saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Systems without memfd_create: a file without a name, gone with its tensors."""
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(memory.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    path = saved({"a": torch.arange(50)})
    got = loaded(path, memory.plan_memory_layout(open_checkpoint(path).tensors, lambda _: "all"))
    assert got["a"].equal(torch.arange(50))
    assert not list((tmp_path / "tmp").iterdir())


def test_more_than_there_is_is_refused() -> None:
    with memory.MemoryStage() as stage, pytest.raises(StorageError, match="bytes of memory"):
        stage.create("all", 1 << 62)


def test_small_files_have_no_place() -> None:
    with memory.MemoryStage() as stage, pytest.raises(FormatError, match="not a tensor"):
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
