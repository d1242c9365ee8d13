"""Folders of torch_checkpointing: its own are opened, ours are loaded by it."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_checkpointing.metadata_manager as metadata_manager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

import megtool
from megtool import reshard, verify
from megtool.dtypes import DTYPES
from megtool.errors import CoverageError, FormatError, UsageError
from megtool.formats import open_checkpoint
from megtool.formats.torch_checkpointing.metadata import METADATA, read_metadata
from megtool.formats.torch_checkpointing.reader import detect
from tests.support.errors import raises
from tests.support.folders import contents
from tests.support.models import tiny_llama
from tests.support.runs.worker_runs import run_workers
from tests.support.worlds.gloo_world import run_world

State = dict[str, Any]


def manager(items: Mapping[str, ItemSpec] | None = None) -> CheckpointManager:
    """The library's own manager; a temporary folder may lack direct I/O."""
    config = CheckpointManager.Config.with_sync_save()
    config.items = dict(items or {})
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)
    return CheckpointManager(config)


def resharded(*items: str) -> dict[str, ItemSpec]:
    return {item: ItemSpec(resharder=DefaultResharder()) for item in items}


def save(folder: Path, state: State, items: Mapping[str, ItemSpec] | None = None) -> None:
    one = manager(items)
    one.save(str(folder), state)
    one.close()


def load(folder: Path, into: State, items: Mapping[str, ItemSpec] | None = None) -> State:
    one = manager(items)
    out = dict(one.load(str(folder), into=into, strict=True))
    one.close()
    return out


def tensors_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors of a checkpoint, read whole, as raw elements."""
    c = open_checkpoint(folder)
    located = c.locate(np.arange(len(c.shards)))
    out = {t.name: np.zeros(t.shape, t.dtype.view) for t in c.tensors}
    for row, number in enumerate(c.shards.tensor.tolist()):
        tensor = c.tensors[number]
        size, ndim = tensor.dtype.itemsize, len(tensor.shape)
        lo, hi = (x[row, :ndim].tolist() for x in (c.shards.boxes.lo, c.shards.boxes.hi))
        shape = [b - a for a, b in zip(lo, hi, strict=True)]
        steps = located.strides.get(row)
        data = c.path(int(c.extents.file[row])).read_bytes()[int(located.offset[row]) :]
        array = np.frombuffer(data[: len(data) // size * size], tensor.dtype.view)
        if steps is not None:
            array = np.lib.stride_tricks.as_strided(array, shape, [size * s for s in steps])
        box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        out[tensor.name][box] = array.reshape(-1)[: int(np.prod(shape))].reshape(shape)
    return out


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def state_dict() -> State:
    """A state dict of every dtype, and of everything that is trouble."""
    torch.manual_seed(3)
    model: State = {}
    for kind in DTYPES:
        data = torch.randint(0, 2, (12 * kind.itemsize,), dtype=torch.uint8)
        model[f"dtype.{kind}"] = data.view(getattr(torch, kind.name)).reshape(3, 4)
    model |= {
        "transposed": torch.randn(5, 6).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "large": torch.randn(300, 200).bfloat16(),
        "slice": torch.randn(40, 10)[3:7],
        "_extra": {"text": "x", "none": None},
    }
    model["tied"] = model["large"]
    return {
        "model": model,
        "opt": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3)}},
            "param_groups": [{"lr": 1e-3, "params": [0]}],
        },
        "loop": {"step": 7, "parts": [torch.ones(2), {"deep": (1, torch.zeros(3))}], "no": {}},
        "step": 7,
    }


def zeroed(value: Any) -> Any:
    """The same structure without its values, to load into."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {k: zeroed(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(zeroed, value))
    return value if isinstance(value, str) or value is None else type(value)(0)


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert raw(a) == raw(b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert (type(a), a) == (type(b), b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "one"
    save(folder, state_dict(), resharded("model", "opt"))
    return folder


def test_a_folder_is_opened(saved: Path) -> None:
    state = state_dict()
    assert detect(saved)
    c = open_checkpoint(saved)
    assert c.format == "torch_checkpointing"
    assert set(c.objects) == {
        *("_extra.text", "_extra.none", "optimizer.param_groups.0.lr"),
        *("optimizer.param_groups.0.params", "loop.step", "loop.no", "step", "loop.parts.1.deep.0"),
    }
    found = tensors_of(saved)
    expected = {n: t for n, t in state["model"].items() if n not in ("tied", "_extra")}
    expected["optimizer.state.0.step"] = state["opt"]["state"][0]["step"]
    expected["optimizer.state.0.exp_avg"] = state["opt"]["state"][0]["exp_avg"]
    expected["loop.parts.0"] = state["loop"]["parts"][0]
    expected["loop.parts.1.deep.1"] = state["loop"]["parts"][1]["deep"][1]
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert c[name].shape == tuple(tensor.shape)
        assert np.ascontiguousarray(found[name]).tobytes() == raw(tensor), name
    assert c.metadata["aliases"] == {"tied": "large"}
    assert [i.name for i in c.ignored] == ["tied"]
    assert c.metadata["nested_paths"]["optimizer.state.0.exp_avg"] == ("opt", "state", 0, "exp_avg")


@pytest.mark.parametrize("dp", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_is_written_is_what_the_library_wrote(tmp_path: Path, saved: Path, dp: int) -> None:
    report = reshard(saved, tmp_path / "out", to="torch_checkpointing", dp=dp)
    assert [d.name for d in report.dropped] == ["tied"]  # written as a second name
    assert verify(saved, tmp_path / "out").verdict == "equal"
    sidecar = json.loads((tmp_path / "out" / "megtool.json").read_text())
    assert set(sidecar["tensors"]) == set(tensors_of(saved))
    state = state_dict()
    items = resharded("model", "opt")
    into = {k: zeroed(state[k]) for k in ("model", "opt")}
    loaded = load(tmp_path / "out", into, items)
    loaded["model"]["_extra"] = state["model"]["_extra"]  # the library reshards tensors only
    loaded["opt"]["param_groups"] = state["opt"]["param_groups"]
    assert_same(loaded, {k: state[k] for k in into})
    if dp == 1:  # each rank's own files, whole, without metadata.pkl
        os.unlink(tmp_path / "out" / METADATA)
        assert_same(load(tmp_path / "out", zeroed(state)), state)
        assert set(tensors_of(tmp_path / "out")) == set(tensors_of(saved))


@pytest.mark.slow
def test_torch_distributed_checkpoint_gets_the_same_names(tmp_path: Path, saved: Path) -> None:
    reshard(saved, tmp_path / "dcp", to="dcp")
    state = {k: v for k, v in state_dict().items() if k != "model"}
    theirs = tmp_path / "theirs"
    state["optimizer"] = state.pop("opt")
    state["optimizer"]["state"] = {"0": state["optimizer"]["state"][0]}
    torch.distributed.checkpoint.save(state, checkpoint_id=str(theirs), no_dist=True)
    ours, expected = open_checkpoint(tmp_path / "dcp"), open_checkpoint(theirs)
    assert set(expected.objects) - set(ours.objects) <= {"loop.parts.1.deep"}  # a tuple is a value
    paths = expected.metadata["planner_data"]
    assert {n: p for n, p in paths.items() if n in ours.metadata["planner_data"]}.items() <= (
        ours.metadata["planner_data"].items()
    )
    reshard(tmp_path / "dcp", tmp_path / "back", to="torch_checkpointing")
    assert verify(saved, tmp_path / "back").verdict == "equal"
    loaded = load(tmp_path / "back", {"step": 0, "loop": zeroed(state["loop"])})
    assert loaded["step"] == 7
    assert loaded["loop"]["step"] == 7


def test_files_of_other_kinds_are_read(tmp_path: Path) -> None:
    state = {"model": {"a": {"b": torch.randn(4, 3)}, "c": torch.arange(3)}, "config": {"x": [1]}}
    layout = LayoutInfo("weights/0.safetensors", SafetensorsSerialization())
    items = {"model": ItemSpec(resharder=DefaultResharder(), layout=layout)}
    save(tmp_path / "s", state, items)
    found = tensors_of(tmp_path / "s")
    assert found["a.b"].tobytes() == raw(state["model"]["a"]["b"])
    assert found["c"].tobytes() == raw(state["model"]["c"])
    assert set(open_checkpoint(tmp_path / "s").objects) == {"config.x"}


# -- ranks


def gather(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """The library's collective over its metadata, which it makes with CUDA tensors only."""
    out: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(out, data, group=process_group)
    return dict(enumerate(out))


def make_model(rank: int, size: int) -> torch.nn.Module:
    """A model in FSDP2 over two ranks, or in TP and FSDP2 over four."""
    metadata_manager.DefaultMetadataManager._all_gather_pickled_data = gather
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 5))
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    model.register_buffer("count", torch.arange(3))
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_on_a_rank(rank: int, size: int, folder: str, items: list[str]) -> dict[str, bytes]:
    model = make_model(rank, size)
    state = {"model": model.state_dict(), "rng": torch.arange(4) + rank, "seen": rank}
    save(Path(folder), state, resharded(*items))
    return {name: raw(full(t)) for name, t in model.state_dict().items()}


def load_on_a_rank(rank: int, size: int, folder: str) -> dict[str, bytes]:
    model = make_model(rank, size)
    state = model.state_dict()
    for tensor in state.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    load(Path(folder), {"model": state}, resharded("model"))
    return {name: raw(full(t)) for name, t in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_ranks_are_joined_and_cut_again(tmp_path: Path, size: int) -> None:
    expected = run_world(save_on_a_rank, size, str(tmp_path / "in"), ["model"])[0]
    c = open_checkpoint(tmp_path / "in")
    found = tensors_of(tmp_path / "in")
    assert {n: a.tobytes() for n, a in found.items()} == expected
    assert len(c.replicas) == {2: 1, 4: 3 + 2}[size]  # the buffer, and in TP 1.bias
    assert [i.name for i in c.ignored] == ["rng"]  # each rank's own
    assert any("seen" in w for w in c.warnings)
    reshard(tmp_path / "in", tmp_path / "out", to="torch_checkpointing", dp=3)
    again = run_world(load_on_a_rank, size, str(tmp_path / "out"))
    assert again == [expected] * size


@pytest.mark.slow
def test_dtensors_say_themselves_where_they_lie(tmp_path: Path) -> None:
    expected = run_world(save_on_a_rank, 2, str(tmp_path / "in"), [])[0]
    found = tensors_of(tmp_path / "in")
    assert {n: a.tobytes() for n, a in found.items()} == expected


def test_parts_that_nothing_describes_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.full((2,), rank)}, tmp_path / f"model_{rank}.pt")
    assert [i.name for i in open_checkpoint(tmp_path).ignored] == ["w"]
    for rank in range(2):
        torch.save({"w": torch.full((2,), float(rank))}, tmp_path / f"model_{rank}.pt")
    with raises(FormatError, 0, 1, tensor="w", hint="resharder"):
        open_checkpoint(tmp_path)


# -- the arithmetic of meshes

MESHES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = [
    ((7, 5), (2, 3), (Shard(0), Shard(1))),
    ((7, 5), (3, 2), (Shard(0), Shard(0))),
    ((7,), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((13, 2), (2, 3), (_StridedShard(0, split_factor=3), Shard(0))),
    ((13,), (2, 2, 2), (_StridedShard(0, split_factor=4), Shard(0), Shard(0))),
    ((2, 3), (4,), (Shard(0),)),
    ((4, 4), (2, 2), (Replicate(), Shard(1))),
    ((3, 9), (2,), (_StridedShard(0, split_factor=2),)),
]


def describe(placement: Placement) -> dict[str, Any]:
    if isinstance(placement, _StridedShard):
        split = int(placement.split_factor)
        return {"type": "StridedShard", "dim": placement.dim, "split_factor": split}
    return (
        {"type": "Shard", "dim": placement.dim}
        if isinstance(placement, Shard)
        else {"type": "Replicate"}
    )


def table(group: dict[str, Any] | list[Any], size: int, **changes: Any) -> dict[str, Any]:
    groups = group if isinstance(group, list) else [group]
    item = {
        "nested_path_to_metadata": {'["w"]': groups},
        "rank_to_layout_info": dict.fromkeys(range(size)),
    }
    return {"metadata": {"model": item | changes.pop("item", {})}, "world_size": size,
            "version": "2.0"} | changes  # fmt: skip


def dtensor_group(shape: Any, mesh: Any, placements: Any, **changes: Any) -> dict[str, Any]:
    size = int(np.prod(mesh))
    spec = {"device_type": "cpu", "mesh_shape": mesh, "mesh_data": tuple(range(size))}
    data = {"global_shape": shape, "dtype": "torch.float32", "placements": placements}
    data |= {"mesh_spec": spec | changes.pop("spec", {})}
    return {
        "sharding_metadata": {"type": "DTensorShardingMetadata", "data": data | changes},
        "ranks": tuple(range(size)),
    }


@pytest.mark.parametrize(("shape", "mesh", "placements"), MESHES)
def test_parts_are_cut_as_torch_cuts_them(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    size = int(np.prod(mesh))
    group = dtensor_group(list(shape), mesh, [describe(p) for p in placements])
    sharded = read_metadata(pickle.dumps(table(group, size)), file=Path("m"))
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    for part, at in zip(
        sharded.items["model"].tensors[("w",)].parts, np.ndindex(*mesh), strict=True
    ):
        expected = whole
        for placement, n, k in zip(placements, mesh, at, strict=True):
            if isinstance(placement, Shard | _StridedShard):
                pieces, _ = placement._split_tensor(expected, n, with_padding=False)
                expected = pieces[k]
        assert part.shape == tuple(expected.shape)
        found = torch.full(part.shape, -1)
        for lo, hi, corner in part.windows:
            box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
            here = tuple(slice(c, c + b - a) for a, b, c in zip(lo, hi, corner, strict=True))
            found[here] = whole[box]
        assert torch.equal(found, expected)


def test_uneven_strided_parts_and_listed_boxes_are_joined(tmp_path: Path) -> None:
    whole = torch.arange(26.0).reshape(13, 2)
    placements = (_StridedShard(0, split_factor=3),)
    pieces, _ = placements[0]._split_tensor(whole, 2, with_padding=False)
    group = dtensor_group([13, 2], (2,), [describe(p) for p in placements])
    data = {
        "global_shape": [4, 4],
        "dtype": "torch.float32",
        "global_offsets": [[0, 0], [2, 2]],
        "local_offsets": [[0, 0], [2, 0]],
        "local_sizes": [[2, 4], [2, 2]],
    }
    rest = data | {"global_offsets": [[2, 0]], "local_offsets": [[0, 0]], "local_sizes": [[2, 2]]}
    listed = [
        {"sharding_metadata": {"type": "default_tensor_v1", "data": d}, "ranks": [rank]}
        for rank, d in enumerate((data, rest))
    ]
    metadata = table(group, 2)
    metadata["metadata"]["model"]["nested_path_to_metadata"]['["v"]'] = listed
    grid = torch.arange(16.0).reshape(4, 4)
    local = torch.zeros(4, 4)
    local[:2], local[2:, :2] = grid[:2], grid[2:, 2:]
    torch.save({"w": pieces[0], "v": local}, tmp_path / "model_0.pt")
    torch.save({"w": pieces[1], "v": grid[2:, :2].clone()}, tmp_path / "model_1.pt")
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with raises(FormatError, tensor="v"):  # a column of a wider part, next to another box
        open_checkpoint(tmp_path)
    del metadata["metadata"]["model"]["nested_path_to_metadata"]['["v"]']
    for rank in range(2):
        torch.save({"w": pieces[rank]}, tmp_path / f"model_{rank}.pt")
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    assert tensors_of(tmp_path)["w"].tobytes() == raw(whole)


# -- damage


def stored_as(path: str, kind: str) -> dict[str, Any]:
    layout = {"file_path": path, "serialization_format": {"type": kind}}
    return {"rank_to_layout_info": {rank: layout for rank in range(2)}}


GROUP = dtensor_group([4, 2], (2,), [{"type": "Shard", "dim": 0}])
DAMAGED: dict[str, Any] = {
    "no dict": [1],
    "no world": table(GROUP, 2, world_size=0),
    "a huge world": table(GROUP, 2, world_size=1 << 40),
    "another version": table(GROUP, 2, version="9.0"),
    "too few ranks": table(GROUP, 2, world_size=3),
    "an item's name": {"metadata": {"../x": {}}, "world_size": 1, "version": "2.0"},
    "no groups": table([], 2),
    "a rank twice": table([GROUP, GROUP], 2),
    "a path": table(GROUP, 2, item={"nested_path_to_metadata": {"[[1]]": [GROUP]}}),
    "a deep path": table(GROUP, 2, item={"nested_path_to_metadata": {"[" * 9999: [GROUP]}}),
    "a kind": table({**GROUP, "sharding_metadata": {"type": "New", "data": {}}}, 2),
    "sizes": table(dtensor_group([4, -2], (2,), [{"type": "Shard", "dim": 0}]), 2),
    "a dim": table(dtensor_group([4, 2], (2,), [{"type": "Shard", "dim": 2}]), 2),
    "a placement": table(dtensor_group([4, 2], (2,), [{"type": "Partial"}]), 2),
    "too few placements": table(dtensor_group([4, 2], (2,), []), 2),
    "a split": table(
        dtensor_group([4, 2], (2,), [{"type": "StridedShard", "dim": 0, "split_factor": 1 << 60}]),
        2,
    ),
    "a mesh": table(
        dtensor_group([4, 2], (2,), [{"type": "Shard", "dim": 0}], spec={"mesh_data": (0, 0)}), 2
    ),
    "a dtype": table(
        dtensor_group([4, 2], (2,), [{"type": "Shard", "dim": 0}], dtype="torch.float16"), 2
    ),
    "a shape": table(dtensor_group([6, 2], (2,), [{"type": "Shard", "dim": 0}]), 2),
    "a file outside": table(GROUP, 2, item=stored_as("../model_0.pt", "TorchSerialization")),
    "a serialization": table(GROUP, 2, item=stored_as("model_0.pt", "PickleSerialization")),
}


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two ranks of one tensor, as the library describes them."""
    for rank in range(2):
        torch.save({"w": torch.ones(2, 2) + rank}, tmp_path / f"model_{rank}.pt")
    (tmp_path / METADATA).write_bytes(pickle.dumps(table(GROUP, 2)))
    assert tensors_of(tmp_path)["w"].shape == (4, 2)
    return tmp_path


def test_damaged_metadata_is_refused(two: Path) -> None:
    for title, tree in DAMAGED.items():
        (two / METADATA).write_bytes(pickle.dumps(tree))
        with pytest.raises(FormatError) as e:
            open_checkpoint(two)
        assert str(two) in str(e.value.file), title
    whole = pickle.dumps(table(GROUP, 2))
    for end in range(0, len(whole), 7):
        (two / METADATA).write_bytes(whole[:end])
        with pytest.raises(FormatError):
            open_checkpoint(two)


def test_damaged_files_are_refused(two: Path) -> None:
    good = (two / "model_1.pt").read_bytes()
    for end in (0, 1, 100, len(good) - 1):
        (two / "model_1.pt").write_bytes(good[:end])
        with pytest.raises(FormatError):
            open_checkpoint(two)
    os.unlink(two / "model_1.pt")
    with raises(FormatError, "model_1.pt", id="missing-shard"):
        open_checkpoint(two)
    torch.save({"other": torch.ones(2, 2)}, two / "model_1.pt")
    with raises(CoverageError, tensor="w"):
        open_checkpoint(two)
    torch.save({"w": torch.ones(3, 2)}, two / "model_1.pt")
    with raises(FormatError, tensor="w", file="model_1.pt"):
        open_checkpoint(two)
    (two / "model_1.pt").unlink()
    shutil.copy(two / "model_0.pt", two.parent / "outside.pt")
    (two / "model_1.pt").symlink_to(two.parent / "outside.pt")
    with raises(FormatError, id="unsafe-path"):
        open_checkpoint(two)


class Evil:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_nothing_that_a_pickle_names_is_run(two: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    good = (two / METADATA).read_bytes()
    (two / METADATA).write_bytes(pickle.dumps(table(GROUP, 2) | {"evil": Evil(str(mark))}))
    with raises(FormatError, id="hostile-pickle"):
        open_checkpoint(two)
    (two / METADATA).write_bytes(good)
    torch.save({"x": Evil(str(mark))}, two / "extra_0.pt")
    with raises(FormatError, id="hostile-pickle"):
        open_checkpoint(two)
    torch.save({"x": pickle.dumps(Evil(str(mark)))}, two / "extra_0.pt")
    with raises(FormatError, id="hostile-pickle"):
        reshard(two, tmp_path / "out", to="torch_checkpointing")
    assert not mark.exists()


# -- models


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("model") / "hf", num_hidden_layers=1)


def test_a_model_goes_there_and_back(tmp_path: Path, hf: Path) -> None:
    reshard(hf, tmp_path / "m", to="torch_dist", tp=2)
    reshard(tmp_path / "m", tmp_path / "tc", to="torch_checkpointing", dp=2)
    reshard(tmp_path / "tc", tmp_path / "tc1", to="torch_checkpointing", dp=1)
    reshard(tmp_path / "tc1", tmp_path / "back", to="hf")
    assert verify(hf, tmp_path / "tc").verdict == "equal"
    assert verify(hf, tmp_path / "back").verdict == "equal"
    assert megtool.inspect(tmp_path / "tc").format == "torch_checkpointing"
    with raises(UsageError, "--tp", hint="--dp"):
        reshard(hf, tmp_path / "no", to="torch_checkpointing", tp=2)


def test_workers_write_the_same_bytes(tmp_path: Path, hf: Path) -> None:
    options: dict[str, Any] = {"to": "torch_checkpointing", "dp": 2, "threads": 1}
    (tmp_path / "one").mkdir()
    reshard(hf, tmp_path / "one" / "out", **options)
    (tmp_path / "many").mkdir()
    run_workers("reshard", hf, tmp_path / "many" / "out", 3, [2, 0, 1], **options)
    assert contents(tmp_path / "many" / "out") == contents(tmp_path / "one" / "out")
