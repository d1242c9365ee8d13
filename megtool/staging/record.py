"""The record with which a worker signs off: what it did, and the digests of what it wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megtool.digests.crc32c import crc32c, reject_constant
from megtool.errors import FormatError
from megtool.plan.copies import Op
from megtool.staging.manifest import Manifest, clean_command

VERSION = 2
MAX_RECORD_BYTES = 1 << 30

_HINT = "start this worker again: without its record it checks its share and signs off anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSections:
    """Linear CRCs of consecutive sections of a file, from section `first` on (see `FileDigests`).

    They cover the bytes that one worker wrote.
    """

    first: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """What worker `index` of `count` did for the plan with this fingerprint.

    `tensors` are the linear CRC and the bytes that it digested of canonical tensors, `files` the
    sections that it wrote by path in the checkpoint; None: the file has to be read. `kernel_files`
    are those of which the kernel wrote some bytes. Of a share that was planned alone, `span` are
    its bytes in the order of the target (see `PlanShare`), and `file_bytes` those of tensors in
    each file. `num_bytes` are bytes of the target by operation. `overflowed` and `rounded` count by
    entry of the plan, `fed_overflowed` by stored tensor.
    """

    fingerprint: str
    index: int
    count: int
    num_units: int
    tensors: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    files: Mapping[str, FileSections | None] = field(default_factory=dict)
    kernel_files: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    file_bytes: Mapping[str, int] = field(default_factory=dict)
    num_bytes: Mapping[Op, int] = field(default_factory=dict)
    kernel_bytes: int = 0
    verified: int = 0
    repaired: int = 0
    overflowed: Mapping[int, int] = field(default_factory=dict)
    rounded: Mapping[int, int] = field(default_factory=dict)
    fed_overflowed: Mapping[str, int] = field(default_factory=dict)


def encode_record(record: WorkerRecord) -> bytes:
    """The bytes of a record; the last line is their own digest."""
    values = {
        "version": VERSION,
        "fingerprint": record.fingerprint,
        "index": record.index,
        "count": record.count,
        "num_units": record.num_units,
        "num_bytes": {op.value: n for op, n in sorted(record.num_bytes.items())},
        "kernel_bytes": record.kernel_bytes,
        "kernel_files": list(record.kernel_files),
        "span": None if record.span is None else list(record.span),
        "file_bytes": dict(sorted(record.file_bytes.items())),
        "verified": record.verified,
        "repaired": record.repaired,
        "rounded": {str(n): count for n, count in sorted(record.rounded.items())},
        "overflowed": {str(n): count for n, count in sorted(record.overflowed.items())},
        "fed_overflowed": dict(sorted(record.fed_overflowed.items())),
        "tensors": {
            name: [f"{crc:08x}", num_bytes]
            for name, (crc, num_bytes) in sorted(record.tensors.items())
        },
        "files": {
            path: None if s is None else [s.first, "".join(f"{crc:08x}" for crc in s.crcs)]
            for path, s in sorted(record.files.items())
        },
    }
    data = json.dumps(values, separators=(",", ":")).encode() + b"\n"
    return data + b"%08x\n" % crc32c(data)


def parse_record(data: bytes, path: Path) -> WorkerRecord:
    """Parse a record; errors name `path`.

    Raises:
        FormatError: it is damaged, or written by another version.
    """
    body, end = data[:-9], data[-9:]
    try:
        if end != b"%08x\n" % crc32c(body):
            raise ValueError("it differs from its own digest")
        values = json.loads(body.decode(), parse_constant=reject_constant)
        return _parse(values)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise FormatError(
            f"the record of a worker is damaged: {e}",
            file=path,
            hint=f"remove this file, and {_HINT}",
        ) from e


def parse_record_of(manifest: Manifest, index: int, data: bytes, path: Path) -> WorkerRecord:
    """Parse the record of worker `index` of a run, which is at `path` in its staging folder.

    Raises:
        FormatError: it is damaged, or of another worker or run.
    """
    record = parse_record(data, path)
    expected = (manifest.fingerprint, manifest.count, index)
    if (record.fingerprint, record.count, record.index) != expected:
        raise FormatError(
            f"the record is of worker {record.index} of {record.count}, or of another plan",
            file=path,
            hint=f"remove what was left, and start again: {clean_command(path.parent)}",
        )
    return record


def _parse(values: Any) -> WorkerRecord:
    if not isinstance(values, dict) or values.get("version") != VERSION:
        raise ValueError("it has another version")
    if not isinstance(values["fingerprint"], str):
        raise ValueError("the fingerprint is no text")
    return WorkerRecord(
        fingerprint=values["fingerprint"],
        **{
            name: _count(values[name])
            for name in ("index", "count", "num_units", "kernel_bytes", "verified", "repaired")
        },
        kernel_files=_names(values["kernel_files"]),
        span=_span(values["span"]),
        file_bytes=_mapping(values["file_bytes"], str, _count),
        num_bytes=_mapping(values["num_bytes"], Op, _count),
        overflowed=_mapping(values["overflowed"], int, _count),
        rounded=_mapping(values["rounded"], int, _count),
        fed_overflowed=_mapping(values["fed_overflowed"], str, _count),
        tensors=_mapping(values["tensors"], str, _tensor),
        files=_mapping(values["files"], str, _sections),
    )


def _mapping(values: Any, key: Callable[[str], Any], value: Callable[[Any], Any]) -> dict[Any, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{type(values).__name__} is no object")
    return {key(k): value(v) for k, v in values.items()}


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def _names(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(name, str) for name in values):
        raise ValueError("names of files are no list of texts")
    return tuple(values)


def _span(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    begin, end = value
    return _count(begin), _count(end)


def _tensor(value: Any) -> tuple[int, int]:
    crc, num_bytes = value
    (linear,) = _crcs(crc)
    return linear, _count(num_bytes)


def _sections(value: Any) -> FileSections | None:
    if value is None:
        return None
    first, digits = value
    return FileSections(first=_count(first), crcs=_crcs(digits))


def _crcs(digits: Any) -> tuple[int, ...]:
    if not isinstance(digits, str) or not re.fullmatch("(?:[0-9a-f]{8})*", digits):
        raise ValueError("a digest is not 8 hexadecimal digits")
    return tuple(int(digits[i : i + 8], 16) for i in range(0, len(digits), 8))
