"""Indexed data sets: Megatron's own reader and writer as the oracle, and broken files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megtool.data.token_cache import is_indexed
from megtool.errors import FormatError, StorageError, UsageError
from tests.support.errors import raises

DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [[65499, 0, 7]], [[]]]


def write(prefix: Path, documents: list[list[list[int]]], dtype: object = np.uint16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:  # type: ignore[arg-type]
        for document in documents:
            for sequence in document:
                writer.add(sequence)
            writer.end_document()
    return prefix


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65499), max_size=6), max_size=3)),
    dtype=st.sampled_from([np.uint16, np.int32]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], dtype: type
) -> None:
    data = IndexedDataset(write(tmp_path_factory.mktemp("x") / "a.b", documents, dtype))
    assert data.dtype == dtype
    assert [d.tolist() for d in data.documents()] == [[i for s in d for i in s] for d in documents]
    sequences = [s for d in documents for s in d]
    assert [data[i].tolist() for i in range(len(data))] == sequences
    assert data.num_tokens == sum(map(len, sequences))
    assert data.num_documents == len(documents)
    assert data.modes is None


def test_either_file_names_the_data_set(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a.v1", DOCUMENTS)
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        assert IndexedDataset(name).num_tokens == 9


def test_the_vocabulary_chooses_the_dtype() -> None:
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_a_token_that_does_not_fit(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        with raises(UsageError, "70000", "uint16"):
            writer.add([1, 70000])
        with pytest.raises(UsageError, match="token -1 "):
            writer.add([-1])
    with pytest.raises(UsageError, match="dtype"):
        IndexedWriter(tmp_path / "b", np.uint64)


def interrupted(prefix: Path) -> None:
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add([1])
        raise KeyboardInterrupt


def test_an_error_leaves_no_index(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "a")
    assert not (tmp_path / "a.idx").exists()
    with pytest.raises(UsageError, match="no document"), IndexedWriter(tmp_path / "a", "u2") as w:
        w.add([1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:20], "20 bytes are not an index"),
        (lambda b: b"X" + b[1:], "not a Megatron index"),
        (lambda b: b[:9] + b"\x02" + b[10:], "version 2"),
        (lambda b: b[:17] + b"\x09" + b[18:], "dtype code 9"),
        (lambda b: b[:18] + struct.pack("<Q", 1 << 60) + b[26:], "sequences with"),
        (lambda b: b[:-1], "sequences with"),
        (lambda b: b + b"\0", "sequences with"),
        (lambda b: b[:34] + struct.pack("<i", -1) + b[38:], "lies outside"),
        (lambda b: b[:34] + struct.pack("<i", 10**6) + b[38:], "lies outside"),
        (lambda b: b[:54] + struct.pack("<q", (1 << 63) - 2) + b[62:], "lies outside"),
        (lambda b: b[:-8] + struct.pack("<q", 4), "document indices"),
        (lambda b: b[:94] + struct.pack("<q", 9) + b[102:], "document indices"),
    ],
)
def test_a_corrupt_index_is_refused(tmp_path: Path, change: object, message: str) -> None:
    write(tmp_path / "a", DOCUMENTS)
    index = tmp_path / "a.idx"
    index.write_bytes(change(index.read_bytes()))  # type: ignore[operator]
    with raises(FormatError, match=message, file=index):
        IndexedDataset(tmp_path / "a")


def test_data_that_is_cut_off_or_missing(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    data = tmp_path / "a.bin"
    data.write_bytes(data.read_bytes()[:-2])
    with raises(FormatError, "16 bytes", "a.bin"):
        IndexedDataset(tmp_path / "a")
    data.unlink()
    with pytest.raises(StorageError, match="cannot read"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_files_are_megatrons_byte_for_byte(tmp_path: Path, dtype: type, multimodal: bool) -> None:
    peer = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    builder = peer.IndexedDatasetBuilder(
        str(tmp_path / "peer.bin"), dtype=dtype, multimodal=multimodal
    )
    mode = 1 if multimodal else None
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        for document in DOCUMENTS[:3]:
            for sequence in document:
                builder.add_item(torch.tensor(sequence), *([mode] if multimodal else []))
                writer.add(sequence, mode=mode)
            builder.end_document()
            writer.end_document()
    builder.finalize(str(tmp_path / "peer.idx"))
    for suffix in (".bin", ".idx"):
        ours, theirs = (tmp_path / f"{n}{suffix}" for n in ("ours", "peer"))
        assert ours.read_bytes() == theirs.read_bytes()

    read = peer.IndexedDataset(str(tmp_path / "ours"), multimodal=multimodal)
    back = IndexedDataset(tmp_path / "peer")
    assert len(read) == len(back) == 4
    assert read.document_indices.tolist() == back.document_ends.tolist() == [0, 1, 3, 4]
    for i in range(4):
        item = read[i][0] if multimodal else read[i]
        assert item.tolist() == back[i].tolist()
    assert (back.modes is not None) == multimodal


def test_a_text_beside_its_data_set_is_the_text(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    write(text, DOCUMENTS)
    assert is_indexed(text)
    text.write_text('{"text": "a"}\n')
    assert not is_indexed(text)
    assert is_indexed(f"{text}.bin")
    assert is_indexed(f"{text}.idx")
