"""torch.distributed.checkpoint folders: torch's own are opened, ours are loaded by torch."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megtool.dtypes import DTYPES, dtype
from megtool.errors import FormatError, UsageError
from megtool.formats.torch_dist import reader as torch_dist
from megtool.formats.torch_dist.layout import MegatronSave, plan_torch_dist_layout
from megtool.formats.torch_dist.reader import open_checkpoint
from megtool.pickles import zip_reader
from megtool.pickles.writer import make_namespace
from megtool.pickles.zip_writer import write_archive
from megtool.tensors.box import split
from megtool.tensors.catalogue import Catalogue, Destination
from megtool.tensors.sharded import GlobalTensor, Shards, widest
from tests.support.errors import raises

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Materialize = Callable[[Destination, Path, dict[str, np.ndarray]], None]


def view(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes as numpy, in the dtype that carries them."""
    kind = dtype(str(tensor.dtype)).view
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(kind).reshape(tensor.shape)


def contents(c: Catalogue) -> dict[str, np.ndarray]:
    """Every tensor, put together from the bytes at the places a catalogue gives."""
    out = {t.name: np.zeros(t.shape, t.dtype.view) for t in c.tensors}
    located = c.locate(np.arange(len(c.shards)))
    for row, t in enumerate(c.shards.tensor.tolist()):
        tensor = c.tensors[t]
        ndim = len(tensor.shape)
        lo, hi = c.shards.boxes.lo[row, :ndim], c.shards.boxes.hi[row, :ndim]
        shape, size = tuple(hi - lo), tensor.dtype.itemsize
        steps = located.strides.get(row)
        count = int(np.prod(shape)) * size
        with c.path(int(c.extents.file[row])).open("rb") as f:
            f.seek(int(located.offset[row]))
            array = np.frombuffer(f.read(count), tensor.dtype.view)
        if steps is not None:
            array = np.lib.stride_tricks.as_strided(array, shape, [size * s for s in steps])
        box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        out[tensor.name][box] = array.reshape(shape)
    return out


def values() -> dict[str, Any]:
    """A state dict of every dtype and of all shapes that are trouble."""
    out: dict[str, Any] = {}
    for kind in DTYPES:
        raw = torch.randint(0, 2, (12 * kind.itemsize,), dtype=torch.uint8)
        out[f"dtype.{kind}"] = raw.view(getattr(torch, kind.name)).reshape(3, 4)
    out |= {
        "transposed": torch.randn(5, 6).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "large": torch.randn(300, 200).bfloat16(),
        "slice": torch.randn(40, 10)[3:7],
        "deep": torch.randn(2, 1, 3, 1, 2),
        "nested": {"iteration": 7, "text": "x"},
    }
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain") / "dcp"
    state = values()
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder, state


def test_a_plain_checkpoint_is_opened(plain: tuple[Path, dict[str, Any]]) -> None:
    folder, state = plain
    assert torch_dist.detect(folder)
    c = open_checkpoint(folder)
    assert c.format == "dcp"
    assert set(c.objects) == {"nested.iteration", "nested.text"}
    assert c.metadata["planner_data"]["nested.iteration"] == ("nested", "iteration")
    found = contents(c)
    tensors = {k: v for k, v in state.items() if k != "nested"}
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert c[name].dtype is dtype(str(tensor.dtype))
        assert found[name].tobytes() == view(tensor).tobytes(), name
    assert found["transposed"].shape == (6, 5)
    number, offset, length = c.objects["nested.iteration"].extent or (0, 0, 0)
    fd = os.open(c.path(number), os.O_RDONLY)
    assert zip_reader.load_object(fd, offset, length, file="x") == 7
    os.close(fd)


def test_opening_reads_no_tensor_data(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save(
        {f"t{i}": torch.zeros(1 << 20) for i in range(8)}, checkpoint_id=str(folder), no_dist=True
    )
    small = (folder / ".metadata").stat().st_size
    open_checkpoint(folder)  # imports
    before = read_so_far()
    c = open_checkpoint(folder)
    assert read_so_far() - before < small + 10_000
    c.locate(np.arange(8))
    assert read_so_far() - before < small + 10_000 + 8 * 4096
    again = read_so_far()
    c.locate(np.arange(8))
    assert read_so_far() - again < 1000


def read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_threads_may_locate_at_once(plain: tuple[Path, dict[str, Any]]) -> None:
    want = open_checkpoint(plain[0])
    rows = np.arange(len(want.shards))
    whole = want.locate(rows)
    c = open_checkpoint(plain[0])
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(c.locate(rows[::-1]))) for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8
    for one in found:
        assert np.array_equal(one.offset, whole.offset[::-1])
        assert len(one.strides) == len(whole.strides)


def cut(tensors: list[GlobalTensor], ranks: int) -> Shards:
    """Along the first dimension that is long enough, unevenly; the rest on the last rank."""
    rows = []
    for number, t in enumerate(tensors):
        dim = next((d for d, n in enumerate(t.shape) if n >= ranks), None)
        if dim is None:
            rows.append((number, [0] * len(t.shape), list(t.shape), ranks - 1))
            continue
        for rank, (a, b) in enumerate(split(t.shape[dim], ranks)):
            lo, hi = [0] * len(t.shape), list(t.shape)
            lo[dim], hi[dim] = a, b
            rows.append((number, lo, hi, rank))
    return Shards.build(rows, widest(tensors))


def described(state: dict[str, Any]) -> list[GlobalTensor]:
    return [
        GlobalTensor(name=k, shape=tuple(v.shape), dtype=dtype(str(v.dtype)))
        for k, v in state.items()
        if isinstance(v, torch.Tensor)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_we_lay_out_torch_loads(
    ranks: int, plain: tuple[Path, dict[str, Any]], tmp_path: Path, materialize: Materialize
) -> None:
    state = plain[1]
    tensors = described(state)
    laid = plan_torch_dist_layout(
        tensors,
        cut(tensors, ranks),
        num_files=ranks,
        objects={"nested.iteration": 7, "nested.text": "x"},
        key_paths={"nested.iteration": ("nested", "iteration"), "nested.text": ("nested", "text")},
        small_files={"hf/config.json": b"{}"},
    )
    arrays = {t.name: view(state[t.name]) for t in tensors}
    materialize(laid, tmp_path, arrays)
    empty = {k: torch.zeros_like(v) for k, v in state.items() if k != "nested"}
    into: dict[str, Any] = {**empty, "nested": {"iteration": 0, "text": ""}}
    dcp.load(into, checkpoint_id=str(tmp_path), no_dist=True)
    assert into["nested"] == state["nested"]
    for name in arrays:
        assert view(into[name]).tobytes() == arrays[name].tobytes(), name
    dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["nested"] == {"iteration": 7, "text": "x"}
    assert view(whole["large"]).tobytes() == arrays["large"].tobytes()
    c = open_checkpoint(tmp_path)
    expected = laid.catalogue
    assert [t.name for t in c.tensors] == [t.name for t in expected.tensors]
    assert np.array_equal(c.shards.boxes.lo, expected.shards.boxes.lo)
    assert np.array_equal(c.locate(np.arange(len(c.shards))).offset, expected.extents.offset)
    assert list(c.auxiliary_files) == ["hf/config.json"]
    large = [r for r, n in enumerate(expected.extents.length) if n >= 65536]
    assert all(expected.extents.offset[r] % 4096 == 0 for r in large)
    assert large or ranks > 1


def save_folder(root: Path, materialize: Materialize, iteration: int | None = 5) -> Path:
    tensors = [
        GlobalTensor(name="a.weight", shape=(4, 6), dtype=dtype("float32")),
        GlobalTensor(name="b.weight", shape=(7,), dtype=dtype("bfloat16")),
    ]
    laid = plan_torch_dist_layout(
        tensors,
        cut(tensors, 2),
        num_files=2,
        objects={"rng_state/shard_0.0_1.1": {"seed": 1}},
        small_files={"hf/config.json": b"{}", "tokenizer/vocab.txt": b"x"},
        megatron=MegatronSave(
            common={
                "args": make_namespace({"num_layers": 2, "kind": "x"}),
                "iteration": iteration or 0,
                "checkpoint_version": 3.0,
                "content_metadata": {"a": 1},
            },
            iteration=iteration,
        ),
    )
    arrays = {
        "a.weight": np.arange(24, dtype="<f4").reshape(4, 6),
        "b.weight": np.arange(7, dtype="<u2"),
    }
    materialize(laid, root, arrays)
    return root / ("release" if iteration is None else f"iter_{iteration:07d}")


def test_a_megatron_save_folder_is_opened(tmp_path: Path, materialize: Materialize) -> None:
    folder = save_folder(tmp_path, materialize)
    save_folder(tmp_path, materialize, 12)
    for path, iteration, want in (
        (tmp_path, None, 12),
        (tmp_path, 5, 5),
        (tmp_path, "5", 5),
        (folder, None, 5),
        (folder, 5, 5),
    ):
        assert torch_dist.detect(path)
        c = open_checkpoint(path, iteration=iteration)
        assert c.format == "torch_dist"
        assert c.metadata["iteration"] == want
        assert c.metadata["args"] == {"num_layers": 2, "kind": "x"}
        assert c.metadata["content_metadata"] == {"a": 1}
        assert c.metadata["common"]["args"].state["num_layers"] == 2
        assert sorted(c.auxiliary_files) == ["hf/config.json", "tokenizer/vocab.txt"]
        assert contents(c)["a.weight"][3, 5] == 23
        assert list(c.objects) == ["rng_state/shard_0.0_1.1"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    common = torch.load(folder / "common.pt", weights_only=False)
    assert common["args"] == argparse.Namespace(num_layers=2, kind="x")
    assert set(json.loads((folder / "metadata.json").read_text())) == {
        "sharded_backend",
        "sharded_backend_version",
        "common_backend",
        "common_backend_version",
    }
    with pytest.raises(FormatError, match="iteration 6, requested, does not exist"):
        open_checkpoint(tmp_path, iteration=6)


def test_a_release_is_opened(tmp_path: Path, materialize: Materialize) -> None:
    save_folder(tmp_path, materialize, None)
    assert open_checkpoint(tmp_path).root == tmp_path / "release"
    assert open_checkpoint(tmp_path, iteration="release").format == "torch_dist"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("nonsense")
    with pytest.raises(FormatError, match="nonsense"):
        open_checkpoint(tmp_path)


def test_common_state_inside_is_read_as_newer_cores_write_it(
    tmp_path: Path, materialize: Materialize
) -> None:
    tensors = [GlobalTensor(name="a", shape=(4,), dtype=dtype("float32"))]
    common = {"args": make_namespace({"x": 1}), "iteration": 3}
    laid = plan_torch_dist_layout(
        tensors,
        cut(tensors, 1),
        num_files=1,
        objects={"common_state/shard_0_1": common},
        megatron=MegatronSave(common={}, iteration=3),
    )
    materialize(laid, tmp_path, {"a": np.zeros(4, "<f4")})
    folder = tmp_path / "iter_0000003"
    (folder / "common.pt").unlink()
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))
    c = open_checkpoint(tmp_path)
    assert c.metadata["args"] == {"x": 1}
    assert c.objects == {}
    (folder / "metadata.json").unlink()
    with raises(FormatError, id="unfinished-save"):
        open_checkpoint(tmp_path)


def test_an_unfinished_save_says_which_one_is_complete(
    tmp_path: Path, materialize: Materialize
) -> None:
    save_folder(tmp_path, materialize, 5)
    newer = save_folder(tmp_path, materialize, 6)
    (newer / "metadata.json").unlink()
    for path in (tmp_path, newer):
        with raises(FormatError, id="unfinished-save") as e:
            open_checkpoint(path)
        assert "iter_0000005" in str(e.value)
    (newer / ".metadata").unlink()
    with pytest.raises(FormatError, match=r"unfinished save: \.metadata"):
        open_checkpoint(tmp_path)
    assert torch_dist.detect(newer)
    assert not torch_dist.detect(tmp_path / "nothing")


def test_missing_stale_and_truncated_files(tmp_path: Path, materialize: Materialize) -> None:
    folder = save_folder(tmp_path, materialize)
    (folder / "__7_0.distcp").write_bytes(b"x")
    assert "__7_0.distcp" in open_checkpoint(tmp_path).warnings[0]
    data = folder / "__1_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(FormatError, match="outside"):
        open_checkpoint(tmp_path)
    data.unlink()
    with raises(FormatError, "1", "2 data", "__1_0.distcp"):
        open_checkpoint(tmp_path)
    data.symlink_to("/etc/passwd")
    with raises(FormatError, id="unsafe-path"):
        open_checkpoint(tmp_path)


def test_swapped_files_are_noticed_at_first_use(tmp_path: Path, materialize: Materialize) -> None:
    tensors = [
        GlobalTensor(name=str(n), shape=(n, 24 // n), dtype=dtype("float32")) for n in (4, 6)
    ]
    shards = Shards.build([(i, [0, 0], list(t.shape), i) for i, t in enumerate(tensors)], 2)
    laid = plan_torch_dist_layout(tensors, shards, num_files=2)
    materialize(laid, tmp_path, {t.name: np.zeros(t.shape, t.dtype.view) for t in tensors})
    (tmp_path / "__0_0.distcp").rename(tmp_path / "x")
    (tmp_path / "__1_0.distcp").rename(tmp_path / "__0_0.distcp")
    (tmp_path / "x").rename(tmp_path / "__1_0.distcp")
    with raises(FormatError, "[6, 4] float32", "[4, 6]"):
        open_checkpoint(tmp_path).locate(np.arange(2))


EXECUTES = b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00false\x85R."


def test_a_hostile_common_state_is_refused(
    tmp_path: Path, materialize: Materialize, audit: Any
) -> None:
    folder = save_folder(tmp_path, materialize)
    (folder / "common.pt").write_bytes(write_archive({"data.pkl": EXECUTES}))
    audit.seen.clear()
    audit.watching = True
    try:
        with pytest.raises(FormatError, match="hostile"):
            open_checkpoint(tmp_path)
    finally:
        audit.watching = False
    assert {e for e, _ in audit.seen} <= {"open", "os.listdir", "os.scandir"}


def test_our_metadata_says_to_torch_what_we_meant(tmp_path: Path, materialize: Materialize) -> None:
    folder = save_folder(tmp_path, materialize)
    m = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(m, Metadata)
    entry = m.state_dict_metadata["a.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == torch.Size([4, 6])
    assert entry.properties == TensorProperties(dtype=torch.float32)
    assert entry.chunks[1] == ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 6]))
    key = MetadataIndex("a.weight", [2, 0])
    assert m.storage_data[key].relative_path == "__1_0.distcp"
    assert [k.index for k in m.storage_data if k.fqn == "a.weight"] == [0, 1]
    assert m.planner_data is None


def test_what_cannot_be_laid_out_says_so() -> None:
    tensors = [GlobalTensor(name="a", shape=(4, 6), dtype=dtype("float32"))]
    shards = cut(tensors, 2)
    with raises(UsageError, "1", "1 files"):
        plan_torch_dist_layout(tensors, shards, num_files=1)
    with pytest.raises(UsageError, match="named 'a'"):
        plan_torch_dist_layout(tensors, shards, num_files=2, objects={"a": 1})
    with pytest.raises(UsageError, match="common state"):
        plan_torch_dist_layout(tensors, shards, num_files=2, megatron=MegatronSave(common=None))
