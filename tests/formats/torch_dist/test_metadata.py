"""Metadata of torch.distributed.checkpoint: what torch pickles is read, what lies is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from megtool.dtypes import dtype
from megtool.errors import CoverageError, FormatError
from megtool.formats.torch_dist.metadata import read_metadata
from megtool.formats.torch_dist.reader import open_checkpoint, plan_torch_dist_layout
from megtool.tensors.sharded import GlobalTensor, Shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def metadata_of(folder: Path) -> Metadata:
    with (folder / ".metadata").open("rb") as f:
        return pickle.load(f)


def first_key(m: Metadata, name: str) -> MetadataIndex:
    return next(k for k in m.storage_data if k.fqn == name)


def set_entry(name: str, field: str, value: Any) -> Callable[[Metadata], None]:
    def change(m: Metadata) -> None:
        setattr(m.state_dict_metadata[name], field, value)

    return change


def set_item(field: str, value: Any) -> Callable[[Metadata], None]:
    def change(m: Metadata) -> None:
        object.__setattr__(m.storage_data[first_key(m, "large")], field, value)

    return change


def set_chunk(offsets: Any, sizes: Any) -> Callable[[Metadata], None]:
    return set_entry("large", "chunks", [ChunkStorageMetadata(offsets, sizes)])


def rename(new: str) -> Callable[[Metadata], None]:
    def change(m: Metadata) -> None:
        info = m.storage_data.pop(first_key(m, "large"))
        m.storage_data[MetadataIndex(new, [0, 0], 0)] = info

    return change


def double(m: Metadata) -> None:
    m.storage_data[MetadataIndex("large", [0, 0], 1)] = m.storage_data.pop(first_key(m, "large"))
    m.storage_data[MetadataIndex("large", [0, 1], 0)] = next(iter(m.storage_data.values()))


LIES: dict[str, tuple[Callable[[Metadata], None], type[Exception], str]] = {
    "up": (set_item("relative_path", "../x.distcp"), FormatError, "leaves the folder"),
    "absolute": (set_item("relative_path", "/etc/passwd"), FormatError, "leaves the folder"),
    "drive": (set_item("relative_path", "C:\\x"), FormatError, "leaves the folder"),
    "nul": (set_item("relative_path", "a\0b"), FormatError, "leaves the folder"),
    "long": (set_item("relative_path", "x" * 5000), FormatError, "leaves the folder"),
    "no path": (set_item("relative_path", 7), FormatError, "a file name that is not a string: 7"),
    "unhashable": (set_item("relative_path", []), FormatError, "no name"),
    "itself": (set_item("relative_path", "."), FormatError, "leaves the folder"),
    "negative": (set_item("offset", -1), FormatError, "item cannot be at"),
    "huge": (set_item("offset", 1 << 62), FormatError, "item cannot be at"),
    "huger": (set_item("length", 1 << 80), FormatError, "absurd"),
    "text": (set_item("length", "x"), FormatError, "absurd"),
    "past": (set_item("length", 1 << 40), FormatError, "outside"),
    "short": (set_item("length", 500), FormatError, "in an item of 500 bytes"),
    "transforms": (set_item("transform_descriptors", ["zstd"]), FormatError, "zstd"),
    "dtype": (
        set_entry("large", "properties", TensorProperties(dtype=torch.complex128)),
        FormatError,
        "dtype .* is unknown",
    ),
    "wide": (
        set_entry("large", "properties", TensorProperties(dtype=torch.float64)),
        FormatError,
        "float64",
    ),
    "layout": (
        set_entry("large", "properties", TensorProperties(layout=torch.sparse_coo)),
        FormatError,
        "layout",
    ),
    "shape": (
        set_entry("large", "size", torch.Size([1 << 40, 1 << 40])),
        FormatError,
        "impossible",
    ),
    "size": (set_entry("large", "size", (300, -200)), FormatError, "impossible"),
    "hole": (set_entry("large", "size", torch.Size([301, 200])), CoverageError, "no shard"),
    "no chunks": (set_entry("large", "chunks", []), FormatError, "no chunk|where"),
    "chunks": (set_entry("large", "chunks", [1]), FormatError, "damaged"),
    "outside": (
        set_chunk(torch.Size([0, 0]), torch.Size([300, 201])),
        CoverageError,
        "outside its tensor",
    ),
    "offset": (set_chunk(torch.Size([1, 0]), torch.Size([299, 200])), FormatError, "no chunk"),
    "width": (
        set_chunk(torch.Size([0]), torch.Size([300])),
        FormatError,
        "offsets or sizes .* impossible",
    ),
    "floats": (set_chunk((0, 0), (300.0, 200)), FormatError, "offsets or sizes .* impossible"),
    "overflow": (
        set_chunk(torch.Size([0, 0]), torch.Size([1 << 61, 1 << 61])),
        FormatError,
        "in an item",
    ),
    "unknown": (rename("other"), FormatError, "does not describe"),
    "object": (rename("nested.text"), FormatError, "twice"),
    "moved": (double, FormatError, "where no chunk starts"),
    "not stored": (
        lambda m: m.storage_data.pop(first_key(m, "large")),
        FormatError,
        "no item holds",
    ),
    "object not stored": (
        lambda m: m.storage_data.pop(first_key(m, "nested.text")),
        FormatError,
        "object has no item",
    ),
    "a key": (
        lambda m: m.state_dict_metadata.update({7: BytesStorageMetadata()}),
        FormatError,
        "a key that is not a name",
    ),
    "no storage": (
        lambda m: setattr(m, "storage_data", None),
        FormatError,
        "has no .*storage_data",
    ),
    "shared": (
        lambda m: m.storage_data.update(
            {first_key(m, "transposed"): m.storage_data[first_key(m, "large")]}
        ),
        FormatError,
        "shares bytes",
    ),
}


@pytest.fixture
def lied(tmp_path: Path) -> Path:
    """A checkpoint of torch's, whose metadata a test may change."""
    state = {
        "first": torch.arange(6.0),
        "large": torch.randn(300, 200).bfloat16(),
        "transposed": torch.randn(5, 6).t(),
        "nested": {"text": "x"},
    }
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    return tmp_path


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies_is_refused(name: str, lied: Path, audit: Any) -> None:
    change, error, message = LIES[name]
    m = metadata_of(lied)
    change(m)
    (lied / ".metadata").write_bytes(pickle.dumps(m))
    audit.seen.clear()
    audit.watching = True
    try:
        with pytest.raises(error, match=message):
            open_checkpoint(lied)
    finally:
        audit.watching = False
    outside = [s for s in audit.seen if s[0] == "open" and not str(s[1]).startswith(str(lied))]
    assert outside == []
    assert {e for e, _ in audit.seen} <= {"open", "os.listdir", "os.scandir"}


HOSTILE = {
    "executes": b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00false\x85R.",
    "no metadata": pickle.dumps({"a": 1}),
    "no state": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.",
    "argument": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nK\x01\x85R.",
    "size of list": b"\x80\x02ctorch\nSize\n]\x85R.",
    "state of size": b"\x80\x02ctorch\nSize\n}b.",
    "empty": b"",
    "text": b"hello",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused(name: str, lied: Path, audit: Any) -> None:
    (lied / ".metadata").write_bytes(HOSTILE[name])
    audit.seen.clear()
    audit.watching = True
    try:
        with pytest.raises(FormatError):
            open_checkpoint(lied)
    finally:
        audit.watching = False
    assert {e for e, _ in audit.seen} <= {"open", "os.listdir", "os.scandir"}


@given(st.data())
def test_damaged_metadata_is_refused_or_harmless(data: st.DataObject) -> None:
    good = bytearray(SMALL_METADATA)
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_metadata(bytes(good), file="x")
    except FormatError:
        return


def small_metadata() -> bytes:
    tensors = [GlobalTensor(name="a", shape=(4, 6), dtype=dtype("float32"))]
    shards = Shards.build([(0, [0, 0], [2, 6], 0), (0, [2, 0], [4, 6], 1)], 2)
    return plan_torch_dist_layout(tensors, shards, num_files=2).final_files[".metadata"]


SMALL_METADATA = small_metadata()


def test_every_truncation_of_metadata_is_an_error() -> None:
    for end in range(len(SMALL_METADATA)):
        with pytest.raises(FormatError):
            read_metadata(SMALL_METADATA[:end], file="x")


def test_chunks_listed_twice_share_their_item(lied: Path) -> None:
    m = metadata_of(lied)
    entry = m.state_dict_metadata["large"]
    entry.chunks.append(entry.chunks[0])
    (lied / ".metadata").write_bytes(pickle.dumps(m))
    c = open_checkpoint(lied)
    assert len(c.shards) == len(c.locate(np.arange(len(c.shards))).offset) == 3


def test_the_savers_own_plans_are_dropped(lied: Path) -> None:
    m = metadata_of(lied)
    items = [WriteItem(index=k, type=WriteItemType.TENSOR) for k in m.storage_data]
    m.all_local_plans = [SavePlan(items)]
    (lied / ".metadata").write_bytes(pickle.dumps(m))
    assert len(open_checkpoint(lied).tensors) == 3
