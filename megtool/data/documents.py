"""Documents read one by one from plain text, JSON lines, parquet and Hugging Face data sets."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megtool.errors import FormatError, MissingPackageError, StorageError, UsageError
from megtool.storage.local_copy import local_copy
from megtool.storage.location.path import location

MAX_DOCUMENT_BYTES = 32 << 20
"""The longest document: while it is tokenized, it takes about 75 times as much memory."""

_FIELDS = ("messages", "prompt", "text")
_JSON = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz")
_PARQUET = (".parquet",)
_PLAIN = (".txt",)
_KNOWN = (*_JSON, *_PARQUET, *_PLAIN)
_REFUSED = (".csv", ".tsv", ".zst", ".xz", ".bz2", ".zip", ".gz", ".arrow")
_INDEXED = (".bin", ".idx")
_ONE_A_LINE = "one object a line; `jq -c .[]` makes that of an array"
_HUB = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[^:]+))??(:(?P<split>[^:]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text, one prompt with its completion, or one conversation.

    `completion` is None where `text` is all there is; else `text` is the prompt. The first
    `num_given` messages are a prompt too: no turn of theirs is to be learned. `number` is the line
    or row in `file`, counted from 1; `num_bytes` is what was read of the source for it.
    """

    text: str = ""
    completion: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    num_given: int = 0
    file: str
    number: int
    num_bytes: int = 0
    extras: Mapping[str, Any] = dataclass_field(default_factory=dict)


class _Fields(NamedTuple):
    """The field that is the document, if it is chosen, and others to take along."""

    chosen: str | None = None
    extras: tuple[str, ...] = ()


def documents(
    source: str | Path,
    *,
    field: str | None = None,
    split: str | None = None,
    extras: tuple[str, ...] = (),
) -> Iterator[Document]:
    """The documents of a file, a folder or a data set, in order, one in memory at a time.

    A `.jsonl` file (also `.json` with an object a line, also gzipped) has a document a line, a
    `.parquet` file one a row, any other file is one document of plain text. A folder is a data set
    that `datasets` saved, or such files below it, sorted by path. Anything else is the name of a
    data set of Hugging Face, `NAME[:CONFIG][:SPLIT]`, which the `datasets` package fetches or
    finds in its cache. `field` names the column; without it a `messages`, a `prompt` with a
    `completion` (both texts, or both messages), or a `text` is taken, in this order. `split` is
    train unless given. Fields called `extras` come along, as they are, where a record has them.

    Raises:
        FormatError: bad JSON, bad UTF-8 or a missing field; it names the file and the line.
        StorageError: the data set cannot be read or fetched.
        MissingPackageError: `pyarrow` or `datasets` is needed.
        UsageError: no such file, and no name of a data set either.
    """
    path, fields = location(source), _Fields(field, extras)
    if path.is_dir():
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            yield from _saved(path, fields, split)
            return
        for file in _files(path, split):
            yield from _file(file, fields)
    elif path.exists():
        yield from _file(path, fields)
    else:
        yield from _hub(str(source), fields, split)


def has_fields(path: str | Path) -> bool:
    """Whether a file name is one of a format with records and fields, not plain text."""
    return location(path).name.lower().endswith((*_JSON, *_PARQUET))


def source_bytes(source: str | Path, *, split: str | None = None) -> int:
    """The total size of what `documents` reads, the sum of its documents' `num_bytes`; 0 if
    unknown.
    """
    path = location(source)
    if not path.is_dir():
        return path.stat().st_size if path.is_file() else 0
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return 0
    return sum(file.stat().st_size for file in _files(path, split))


# ---- one record


def _document(record: Any, fields: _Fields, *, file: str, number: int, num_bytes: int) -> Document:
    """The document in a record, from the requested field or the first known one."""
    location = f"line {number}: " if number else ""
    if not isinstance(record, Mapping):
        raise FormatError(
            f"{location}it is a {type(record).__name__}, not an object", file=file, hint=_ONE_A_LINE
        )
    field = fields.chosen
    chosen = field or next((name for name in _FIELDS if name in record), None)
    if chosen is None or chosen not in record:
        present = ", ".join(sorted(map(str, record))) or "none"
        missing = f"no field {field!r}" if field else f"none of the fields {', '.join(_FIELDS)}"
        raise FormatError(
            f"{location}{missing}", file=file, hint=f"--field NAME, one of: {present}"
        )
    place: dict[str, Any] = {"file": file, "number": number, "num_bytes": num_bytes}
    place["extras"] = {name: record[name] for name in fields.extras if name in record}
    value = record[chosen]
    if chosen == "prompt" and not field:
        answer = record.get("completion")
        if _is_text(value) and _is_text(answer):
            return Document(text=value, completion=answer, **place)
        if _is_conversation(value) and _is_conversation(answer):
            turns = (*value, *(answer or ()))
            return Document(messages=turns, num_given=len(value), **place)
        if answer is None or _is_text(value) or _is_conversation(value):
            kind = "text" if _is_text(value) else "list of messages"
            raise FormatError(
                f"{location}the prompt has no {kind} in completion",
                file=file,
                hint="--field prompt takes the prompts alone",
            )
    if _is_text(value):
        return Document(text=value, **place)
    if _is_conversation(value):
        return Document(messages=tuple(value), **place)
    kind = "half a character" if isinstance(value, str) else type(value).__name__
    raise FormatError(
        f"{location}field {chosen!r} holds {kind}, neither a text nor messages with role and "
        "content",
        file=file,
        hint="--field NAME takes another",
    )


def _is_text(value: Any) -> bool:
    """A string that UTF-8 can hold: JSON may escape lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_message(m) for m in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and "content" in value


# ---- files


def _file(path: Path, fields: _Fields) -> Iterator[Document]:
    name = path.name.lower()
    try:
        if name.endswith(_JSON):
            yield from _json_lines(path, fields)
        elif name.endswith(_PARQUET):
            yield from _parquet(path, fields)
        elif name.endswith(_INDEXED):
            missing = [p for p in map(path.with_suffix, _INDEXED) if not p.exists()]
            raise FormatError(
                f"half of a data set of Megatron's, without {missing[0].name}"
                if missing
                else "a data set of Megatron's, which has tokens and no text",
                file=path,
                hint="--data of finetune, evaluate and quantize takes both files by either name",
            )
        elif name.endswith(_REFUSED):
            raise FormatError(
                f"no text that megtool can read: {path.suffix}",
                file=path,
                hint=f"it reads {', '.join(_KNOWN)} and other files as plain text",
            )
        else:
            yield _plain(path)
    except OSError as e:
        raise StorageError(f"cannot read: {e.strerror or e}", file=path) from e


def _files(folder: Path, split: str | None) -> list[Path]:
    """The files of data below a folder, or those with the word `split` in their path."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and _is_data(p, folder))
    if not paths:
        raise FormatError(
            "it is not a text file", file=folder, hint=f"expected: {', '.join(_KNOWN)}"
        )
    if split is None:
        return paths
    word = re.compile(rf"(?:^|[-_./]){re.escape(split)}(?:$|[-_./])")
    chosen = [p for p in paths if word.search(p.relative_to(folder).as_posix())]
    if not chosen:
        some = ", ".join(p.relative_to(folder).as_posix() for p in paths[:4])
        raise FormatError(
            f"no file name contains the split {split!r}", file=folder, hint=f"there are: {some}"
        )
    return chosen


def _is_data(path: Path, folder: Path) -> bool:
    inner = path.relative_to(folder)
    return path.name.lower().endswith(_KNOWN) and not any(n.startswith(".") for n in inner.parts)


def _plain(path: Path) -> Document:
    size = path.stat().st_size
    if size > MAX_DOCUMENT_BYTES:
        raise FormatError(
            f"{size} bytes of plain text exceed the limit of one document",
            file=path,
            hint='write JSON lines, one document a line: {"text": "..."}',
        )
    data = path.read_bytes()
    return Document(text=_text(data, path), file=str(path), number=1, num_bytes=len(data))


def _text(data: bytes, path: Path, line: int | None = None) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        line = line or data.count(b"\n", 0, e.start) + 1
        raise FormatError(
            f"line {line} is not UTF-8: byte {data[e.start]:#04x} at {e.start}",
            file=path,
            hint="iconv -f latin1 -t utf-8 converts text from another encoding",
        ) from e


def _json_lines(path: Path, fields: _Fields) -> Iterator[Document]:
    with path.open("rb") as raw:
        zipped = path.name.lower().endswith(".gz")
        lines: BinaryIO = gzip.GzipFile(fileobj=raw) if zipped else raw  # type: ignore[assignment]
        before = number = 0
        while True:
            try:
                line = lines.readline(MAX_DOCUMENT_BYTES + 1)
            except (EOFError, gzip.BadGzipFile, zlib.error) as e:
                raise FormatError(
                    f"line {number + 1} cannot be unpacked, the gzip data is broken: {e}", file=path
                ) from e
            if not line:
                return
            number += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                raise FormatError(
                    f"line {number} has more than {MAX_DOCUMENT_BYTES} bytes", file=path
                )
            if not line.strip():
                continue
            try:
                record = json.loads(_text(line, path, number))
            except (ValueError, RecursionError) as e:
                raise FormatError(
                    f"line {number} is invalid JSON: {e}",
                    file=path,
                    hint=_ONE_A_LINE,
                ) from e
            now = raw.tell() if zipped else before + len(line)
            yield _document(record, fields, file=str(path), number=number, num_bytes=now - before)
            before = now


def _parquet(path: Path, fields: _Fields) -> Iterator[Document]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "parquet files need the pyarrow package", hint="pip install 'megtool[data]'"
        ) from e
    size = path.stat().st_size
    try:
        with path.open("rb") as raw, pq.ParquetFile(raw, buffer_size=_BUFFER_BYTES) as head:
            read_names = {fields.chosen} if fields.chosen else {*_FIELDS, "completion"}
            _check_expansion(head.metadata, read_names | set(fields.extras), path)
            texts = [c.path for c in head.schema if c.physical_type == "BYTE_ARRAY"]
        # A text that many rows share is one text in memory as long as its column is a dictionary.
        options = {"read_dictionary": texts, "buffer_size": _BUFFER_BYTES}
        with path.open("rb") as raw, pq.ParquetFile(raw, **options) as file:
            columns = file.schema_arrow.names
            names = [fields.chosen] if fields.chosen else [*_FIELDS, "completion"]
            names = [n for n in names if n in columns]
            rows, number, before = file.metadata.num_rows, 0, 0
            if not names:
                _document(dict.fromkeys(columns), fields, file=str(path), number=0, num_bytes=0)
            names += [n for n in fields.extras if n in columns and n not in names]
            for batch in file.iter_batches(batch_size=_ROWS, columns=names):
                for row in range(batch.num_rows):
                    (record,) = batch.slice(row, 1).to_pylist()
                    number += 1
                    now = size * number // rows
                    yield _document(
                        record, fields, file=str(path), number=number, num_bytes=now - before
                    )
                    before = now
    except pa.ArrowException as e:
        raise FormatError(f"the parquet file is invalid: {e}", file=path) from e


def _check_expansion(metadata: Any, names: set[str], path: Path) -> None:
    """Refuse columns of `names` that are packed better than any text, and take gigabytes.

    Raises:
        FormatError: there is one.
    """
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            size = chunk.total_uncompressed_size
            is_read = chunk.path_in_schema.partition(".")[0] in names
            if is_read and size > max(
                _MOST_EXPANSION * chunk.total_compressed_size, MAX_DOCUMENT_BYTES
            ):
                raise FormatError(
                    f"column {chunk.path_in_schema!r} has {chunk.total_compressed_size:,} bytes "
                    f"that unpack to {size:,}",
                    file=path,
                    hint="no text is packed as well: fetch the file again",
                )


_BUFFER_BYTES = 1 << 20
_MOST_EXPANSION = 250
"""How many times a column of text may grow when it is unpacked."""

_ROWS = 256
"""Rows of a parquet file that are decoded at once; a row group may hold a million."""


# ---- data sets of Hugging Face


def _saved(folder: Path, fields: _Fields, split: str | None) -> Iterator[Document]:
    datasets = _datasets()
    with local_copy(folder) as local:
        try:
            dataset = datasets.load_from_disk(str(local))
        except (OSError, ValueError, KeyError) as e:
            raise StorageError(f"cannot read the data set: {e}", file=folder) from e
        if isinstance(dataset, Mapping):
            dataset = dataset[_split(tuple(dataset), split, folder)]
        yield from _rows(dataset, fields, str(folder))


def _split(available: tuple[str, ...], split: str | None, place: str | Path) -> str:
    chosen = split or (
        "train" if "train" in available else available[0] if len(available) == 1 else None
    )
    if chosen not in available:
        raise UsageError(
            f"{place} has no split {chosen!r}" if chosen else f"{place} has several splits",
            hint=f"--split NAME, one of: {', '.join(available)}",
        )
    return str(chosen)


def _hub(source: str, fields: _Fields, split: str | None) -> Iterator[Document]:
    match = _HUB.fullmatch(source)
    if match is None or source.lower().endswith((*_KNOWN, *_REFUSED)) or source.startswith("."):
        raise UsageError(
            f"there is no such file: {source!r}",
            hint="a file or folder, or a data set's name: NAME[:CONFIG][:SPLIT]",
        )
    datasets = _datasets()
    name, config = match["name"], match["config"]
    offline = bool(datasets.config.HF_HUB_OFFLINE)
    try:
        dataset = datasets.load_dataset(
            name, config, split=split or match["split"] or "train", streaming=not offline
        )
    except (OSError, ValueError, RuntimeError) as e:
        message = " ".join(str(e).split())
        raise StorageError(
            f"cannot load the data set {name!r}: {message}",
            hint="HF_HUB_OFFLINE is set: only data sets in the cache are found"
            if offline
            else "no such file either; a data set is named NAME[:CONFIG][:SPLIT]",
        ) from e
    yield from _rows(dataset, fields, source)


def _rows(dataset: Any, fields: _Fields, name: str) -> Iterator[Document]:
    try:
        for number, record in enumerate(dataset, 1):
            yield _document(record, fields, file=name, number=number, num_bytes=0)
    except OSError as e:
        raise StorageError(f"cannot read the data set: {e}", file=name) from e


def _datasets() -> Any:
    try:
        import datasets
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "Hugging Face data sets need the datasets package",
            hint="pip install 'megtool[data]'",
        ) from e
    return datasets
