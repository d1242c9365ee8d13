"""Columns: text, lists of names and bytes, and plain values, as numpy arrays and JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]
Stored = Mapping[str, NDArray[Any]]


def put_blobs(columns: Columns, key: str, blobs: Sequence[bytes]) -> None:
    """Keep byte strings as one uint8 column and a column of their lengths."""
    columns[f"{key}.bytes"] = np.frombuffer(b"".join(blobs), np.uint8)
    columns[f"{key}.sizes"] = np.array([len(b) for b in blobs], np.int64)


def blobs(columns: Stored, key: str) -> list[bytes]:
    """What `put_blobs` kept."""
    data, begin, out = columns[f"{key}.bytes"].tobytes(), 0, []
    for size in columns[f"{key}.sizes"].tolist():
        out.append(data[begin : begin + size])
        begin += size
    if begin != len(data):
        raise ValueError(f"{key!r} holds {len(data)} bytes, {begin} expected")
    return out


def put_names(columns: Columns, key: str, names: Sequence[str]) -> None:
    """Keep many strings."""
    put_blobs(columns, key, [n.encode("utf-8", "surrogatepass") for n in names])


def names(columns: Stored, key: str) -> list[str]:
    """What `put_names` kept."""
    return [b.decode("utf-8", "surrogatepass") for b in blobs(columns, key)]


def put_text(columns: Columns, key: str, text: str) -> None:
    """Keep one text."""
    columns[key] = np.frombuffer(text.encode(), np.uint8)


def text(columns: Stored, key: str) -> str:
    """What `put_text` kept."""
    return columns[key].tobytes().decode()


class NotPlainError(ValueError):
    """A value that is not plain data."""


def to_plain(value: Any) -> Any:
    """A value as JSON can hold it, with a tag where JSON has no such type.

    Raises:
        NotPlainError: it is, or holds, something else than None, numbers, text, bytes, paths,
            lists, tuples and dictionaries.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_plain(v) for v in value]
    if type(value) is tuple:
        return {"tuple": [to_plain(v) for v in value]}
    if type(value) is dict:
        return {"dict": [[to_plain(k), to_plain(v)] for k, v in value.items()]}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"path": str(value)}
    raise NotPlainError(f"a {type(value).__name__} is not plain data")


def from_plain(value: Any) -> Any:
    """The value that `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((tag, inner),) = value.items()
    if tag == "tuple":
        return tuple(from_plain(v) for v in inner)
    if tag == "dict":
        return {from_plain(k): from_plain(v) for k, v in inner}
    if tag == "bytes":
        return base64.b64decode(inner)
    if tag == "path":
        return Path(inner)
    raise ValueError(f"unknown tag {tag!r}")
