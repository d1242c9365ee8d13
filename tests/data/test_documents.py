"""Documents out of every kind of source, and malformed input by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megtool.data import documents as documents_module
from megtool.data.documents import documents, source_bytes
from megtool.errors import FormatError, StorageError, UsageError
from tests.support.errors import raises

RECORDS = [{"text": f"text {i} ä", "other": f"other {i}"} for i in range(700)]
TEXTS = [r["text"] for r in RECORDS]


def texts(source: Path | str, **options: Any) -> list[str]:
    return [d.text for d in documents(source, **options)]


def json_lines(records: list[Any]) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in records).encode()


def write(path: Path) -> Path:
    """`RECORDS` as what the file's suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=300)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(json_lines(RECORDS)))
    else:
        path.write_bytes(json_lines(RECORDS))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.jsonl.gz", "a.parquet"])
def test_records_of_every_format(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    found = list(documents(path))
    assert [d.text for d in found] == TEXTS
    assert [d.number for d in found] == list(range(1, 701))
    assert {d.file for d in found} == {str(path)}
    assert texts(path, field="other")[699] == "other 699"
    total = sum(d.num_bytes for d in found)
    assert 0 < total <= source_bytes(path) == path.stat().st_size
    assert total == source_bytes(path) or name.endswith(".gz")


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("ä\n\nb\n")
    (found,) = documents(tmp_path / "a.md")
    assert (found.text, found.num_bytes) == ("ä\n\nb\n", 6)


def test_lines_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(RECORDS) + b"broken\n")
    found = documents(tmp_path / "a.jsonl")
    assert next(found).text == TEXTS[0]
    with pytest.raises(FormatError, match="line 701 is invalid JSON"):
        list(found)


def test_a_folder_is_its_files_by_name_and_split(tmp_path: Path) -> None:
    for name in ("train-1.jsonl", "train-0.jsonl", "data/test/x.jsonl", ".hidden/x.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(json_lines([{"text": name}]))
    (tmp_path / "README.md").write_text("not data")
    assert texts(tmp_path) == ["data/test/x.jsonl", "train-0.jsonl", "train-1.jsonl"]
    assert texts(tmp_path, split="train") == ["train-0.jsonl", "train-1.jsonl"]
    assert texts(tmp_path, split="test") == ["data/test/x.jsonl"]
    with raises(FormatError, match="split 'dev'", hint="train-0.jsonl"):
        texts(tmp_path, split="dev")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="not a text file"):
        texts(tmp_path / "empty")


def test_conversations_and_completions(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        json_lines([{"messages": turns}, {"prompt": "p", "completion": "c"}, {"text": "t"}])
    )
    one, two, three = documents(path)
    assert one.messages == tuple(turns)
    assert (two.text, two.completion) == ("p", "c")
    assert (three.text, three.completion) == ("t", None)
    path.write_bytes(json_lines([{"prompt": "p"}, {"talk": turns}]))
    with pytest.raises(FormatError, match="line 1: the prompt has no text in completion"):
        texts(path)
    with raises(FormatError, "2", "'prompt'"):
        texts(path, field="prompt")


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        (b'{"text": "a', "line 3 is invalid JSON", "one object a line"),
        (b"[", "line 3 is invalid JSON", "jq"),
        (b'["a"]', "line 3: it is a list, not an object", "jq -c .[]"),
        (b'{"text": "\xff"}', "line 3 is not UTF-8: byte 0xff at 10", "iconv"),
        (b'{"txt": "a", "id": 1}', "line 3: none of the fields", "--field NAME, one of: id, txt"),
        (b'{"text": null}', "line 3: field 'text' holds NoneType", "--field"),
        (b'{"text": 5}', "line 3: field 'text' holds int", "--field"),
        (b'{"text": "\\ud800"}', "line 3: field 'text' holds half a character", ""),
        (b'{"text": [{"content": "a"}]}', "line 3: field 'text' holds list", ""),
        (b"[" * 100_000, "line 3 is invalid JSON", ""),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: bytes, message: str, hint: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")  # empty lines are skipped, and counted
    with raises(FormatError, file=path) as caught:
        texts(path)
    assert caught.value.message.startswith(message)
    assert hint in (caught.value.hint or "")


def test_other_broken_files(tmp_path: Path) -> None:
    plain, table, zipped = (tmp_path / n for n in ("a.txt", "a.parquet", "a.jsonl.gz"))
    plain.write_bytes(b"a\nb\xe4\n")
    with raises(FormatError, "2", "UTF-8", "0xe4", "3"):
        texts(plain)
    zipped.write_bytes(gzip.compress(json_lines(RECORDS))[:-400])
    with pytest.raises(FormatError, match="gzip data is broken"):
        texts(zipped)
    pytest.importorskip("pyarrow")
    write(table)
    with raises(FormatError, match="no field 'nope'", hint="other, text"):
        texts(table, field="nope")
    table.write_bytes(table.read_bytes()[:-40])
    with pytest.raises(FormatError, match="parquet file is invalid"):
        texts(table)


def test_documents_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT_BYTES", 10)
    (tmp_path / "a.txt").write_text("01234567890")
    with raises(FormatError, match="11 bytes of plain text", hint="JSON lines"):
        texts(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"text": "01234567890"}]))
    with raises(FormatError, "1", "10 bytes"):
        texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.zst", "a.zip"])
def test_formats_that_are_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(FormatError, match="no text that megtool can read"):
        texts(tmp_path / name)


def test_data_sets_of_tokens_are_no_text(tmp_path: Path) -> None:
    half = tmp_path / "a.bin"
    half.write_bytes(b"\1\0")
    with raises(FormatError, "without a.idx", file=half):
        texts(half)
    (tmp_path / "a.idx").touch()
    with raises(FormatError, "no text", file=half):
        texts(half)


@pytest.mark.parametrize("name", ["nothing.jsonl", "./nothing", "/no/such/folder", "a b"])
def test_what_is_neither_a_file_nor_a_name(name: str) -> None:
    with pytest.raises(UsageError, match="no such file"):
        texts(name)


def test_data_sets_that_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(RECORDS[:5])
    rows.save_to_disk(str(tmp_path / "one"))
    assert texts(tmp_path / "one") == TEXTS[:5]
    both = datasets.DatasetDict({"train": rows, "test": rows.select([1])})
    both.save_to_disk(str(tmp_path / "two"))
    assert texts(tmp_path / "two") == TEXTS[:5]
    assert texts(tmp_path / "two", split="test") == TEXTS[1:2]
    with raises(UsageError, match="no split 'dev'", hint="train, test"):
        texts(tmp_path / "two", split="dev")
    with pytest.raises(FormatError, match="line 1: no field 'x'"):
        texts(tmp_path / "one", field="x")


def test_a_hub_that_may_not_be_reached_says_so() -> None:
    pytest.importorskip("datasets")
    with raises(StorageError, match="cannot load the data set", hint="HF_HUB_OFFLINE"):
        texts("no-one/no-such-data-set:train")
