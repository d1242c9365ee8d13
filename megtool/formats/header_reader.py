"""Strict reading of headers: bounded reads, strict JSON, and file names that stay in the folder.

Every format uses this before it trusts an input file.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from megtool.errors import FormatError
from megtool.storage.files import Files
from megtool.storage.location.path import resolve_links
from megtool.storage.stores.json_size import MAX_PARSED_BYTES, estimate_parsed_bytes

_FILES = Files()
_PLAIN_HINT = "file names in a checkpoint must be plain names inside its folder"
DAMAGED = "the file is damaged, or a faulty tool wrote it: fetch or write it again"
"""The hint for bytes that cannot be interpreted."""


def short_repr(value: object) -> str:
    """`repr(value)`, cut to a length that fits a message."""
    try:
        text = _REPR.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


_MAX_SHOWN = 160
_REPR = reprlib.Repr()
_REPR.maxlevel = 3


def read_exact(path: Path, offset: int, length: int) -> bytes:
    """Bytes `offset` to `offset + length` of a file.

    Raises:
        FormatError: the file is shorter.
        StorageError: the read failed.
    """
    data = bytearray(length)
    fd = _FILES.open_read(path)
    try:
        _FILES.pread_into(fd, memoryview(data), offset)
    finally:
        _FILES.close(fd)
    return bytes(data)


def read_start(path: Path, length: int) -> bytes:
    """The first `length` bytes of a file, or all of them if it has fewer."""
    status = _FILES.stat(path)
    return read_exact(path, 0, min(length, status.st_size if status else 0))


def list_names(folder: Path, *suffixes: str) -> list[str]:
    """Sorted names in `folder` that end with one of `suffixes` (all, without).

    Raises:
        StorageError: the folder cannot be read.
    """
    return [n for n in _FILES.names(folder) if not suffixes or n.endswith(suffixes)]


NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.safetensors|\.bin)")
"""The name of a file of several that transformers writes: stem, number, count, suffix."""


def check_numbered(
    folder: Path, present: Collection[str], match: re.Match[str], *, index: str
) -> None:
    """Check that all files of the set that one belongs to (a match of `NUMBERED`) are there.

    Raises:
        FormatError: one is missing, and `index`, which would say what it has, is as well.
    """
    stem, _, count, suffix = match.groups()
    for number in range(1, min(int(count), len(present) + 1) + 1):
        name = f"{stem}-{number:05d}-of-{int(count):05d}{suffix}"
        if name not in present:
            raise FormatError(
                f"{name!r} is missing, and so is {index}",
                file=folder,
                hint="is the download complete?",
                error_id="missing-shard",
            )


Pairs = list[tuple[str, Any]]


def parse_json(data: bytes, path: Path, *, hook: Callable[[Pairs], Any] | None = None) -> Any:
    """The value of a JSON text, read strictly; `hook` turns each object's pairs into its value.

    Rejected, although many readers accept them: duplicate keys, NaN and Infinity, a byte order
    mark, text that is not UTF-8, escapes of lone surrogates, nesting too deep for the stack, and
    values that would take more memory than `MAX_PARSED_BYTES`.

    Raises:
        FormatError: the text is not JSON, or one of the above.
    """
    if hook is None and estimate_parsed_bytes(data) > MAX_PARSED_BYTES:
        raise FormatError("the JSON has too many values", file=path, hint=DAMAGED)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise FormatError(f"text is not UTF-8 at byte {e.start}", file=path, hint=DAMAGED) from e
    if text.startswith("\ufeff"):
        raise FormatError("text begins with a byte order mark", file=path, hint=DAMAGED)
    try:
        value = json.loads(
            text, object_pairs_hook=hook or unique_keys, parse_constant=_reject_constant
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as e:
        raise FormatError("JSON is nested too deeply", file=path, hint=DAMAGED) from e
    except UnicodeEncodeError as e:
        raise FormatError(
            "JSON contains an escape of a lone surrogate", file=path, hint=DAMAGED
        ) from e
    except ValueError as e:
        raise FormatError(f"the JSON is invalid: {e}", file=path, hint=DAMAGED) from e
    return value


def unique_keys(pairs: Pairs) -> dict[str, Any]:
    """The dictionary of an object's pairs.

    Raises:
        ValueError: a duplicate key.
    """
    out = dict(pairs)
    if len(out) != len(pairs):
        names: set[str] = set()
        for key, _ in pairs:
            if key in names:
                raise ValueError(f"key {short_repr(key)} occurs twice in one object")
            names.add(key)
    return out


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def check_plain_name(name: object, path: Path) -> str:
    """Check that a file name in `path` (an index) is a plain name, and return it.

    Raises:
        FormatError: it leaves the folder, is absolute, or is not a string.
    """
    if type(name) is not str:
        raise FormatError(
            f"{short_repr(name)} is not a file name",
            file=path,
            hint=_PLAIN_HINT,
            error_id="unsafe-path",
        )
    drive = len(name) > 1 and name[1] == ":"
    if name in ("", ".", "..") or drive or any(c in name for c in "/\\\0"):
        raise FormatError(
            f"{short_repr(name)} leaves the folder",
            file=path,
            hint=_PLAIN_HINT,
            error_id="unsafe-path",
        )
    return name


def check_inside(folder: Path, name: str) -> None:
    """Check that `folder/name` belongs to `folder` (see `stays_inside`).

    Raises:
        FormatError: it is a link that leaves the folder.
    """
    if not stays_inside(folder, name):
        raise FormatError(
            f"{name!r} is a link that leaves the folder",
            file=folder / name,
            hint="put the file itself there (links are followed in Hugging Face's cache only)",
            error_id="unsafe-path",
        )


def stays_inside(folder: Path, name: str) -> bool:
    """Whether `folder/name`, with its links resolved, is a file that belongs to `folder`.

    Links inside the folder are allowed, and so is the Hugging Face cache, whose
    `snapshots/REVISION/` holds links into `blobs/` next to `snapshots/`. Any other link that leaves
    the folder is not.
    """
    home = resolve_links(folder)
    full = resolve_links(home / name)
    if full.is_relative_to(home):
        return True
    cache = home.parent.parent
    return home.parent.name == "snapshots" and full.parent == cache / "blobs"
