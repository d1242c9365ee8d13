"""Small parquet files that hold gigabytes: read in little memory, or refused."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from megtool.data.documents import documents
from megtool.errors import FormatError
from tests.support.errors import raises

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def test_rows_that_share_a_text(tmp_path: Path) -> None:
    shared = pa.DictionaryArray.from_arrays(
        pa.array([0] * 100, pa.int32()), pa.array(["a" * 4_000_000])
    )
    pq.write_table(pa.table({"text": shared}), tmp_path / "a.parquet", compression="zstd")
    before = peak_mib()
    assert sum(len(d.text) for d in documents(tmp_path / "a.parquet")) == 400_000_000
    assert peak_mib() - before < 200


def test_a_text_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a" * (40 << 20)], "image": ["b" * (40 << 20)]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    with raises(FormatError, "unpack to", file=path):
        next(iter(documents(path)))
    pq.write_table(
        table.set_column(0, "text", [["a"]]), path, compression="zstd", use_dictionary=False
    )
    assert [d.text for d in documents(path)] == ["a"]  # a column that is not read


def test_nested_columns_are_read_as_before(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pq.write_table(pa.Table.from_pylist([{"messages": turns}] * 600), tmp_path / "a.parquet")
    read = list(documents(tmp_path / "a.parquet"))
    assert [d.number for d in read] == list(range(1, 601))
    assert {tuple(map(str, d.messages)) for d in read} == {tuple(map(str, turns))}
