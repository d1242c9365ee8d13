"""Records of workers: read back as written, and refused when anything in them is damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megtool.digests.crc32c import crc32c
from megtool.errors import FormatError
from megtool.plan.copies import Op
from megtool.plan.worker_status import WorkerStatus
from megtool.staging.record import (
    FileSections,
    WorkerRecord,
    encode_record,
    parse_record,
)
from tests.support.errors import raises

RECORD = WorkerRecord(
    fingerprint="f" * 64,
    index=1,
    count=3,
    num_units=7,
    tensors={"w": (0xDEADBEEF, 12), "": (0, 0)},
    files={"a/b": FileSections(first=2, crcs=(1, 0, 0xFFFFFFFF)), "whole": None},
    kernel_files=("whole",),
    span=(5, 16),
    file_bytes={"a/b": 11},
    num_bytes={Op.COPY: 5, Op.CAST: 6},
    kernel_bytes=1,
    verified=2,
    repaired=1,
    overflowed={3: 4},
    rounded={5: 6},
    fed_overflowed={"x": 1},
)
PATH = Path("worker-1.record")


def test_a_record_is_read_back() -> None:
    assert parse_record(encode_record(RECORD), PATH) == RECORD


def test_any_changed_or_missing_byte_is_found() -> None:
    data = encode_record(RECORD)
    for n in range(len(data)):
        for damaged in (data[:n], data[:n] + bytes([data[n] ^ 4]) + data[n + 1 :]):
            with raises(FormatError, file=str(PATH)) as caught:
                parse_record(damaged, PATH)
            assert caught.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"kernel_files": "whole"},
        {"kernel_files": [1]},
        {"span": [5]},
        {"span": [-1, 5]},
        {"file_bytes": {"a/b": -1}},
        {"file_bytes": ["a/b"]},
        {"num_units": -1},
        {"num_units": True},
        {"kernel_bytes": 1.0},
        {"fingerprint": 5},
        {"tensors": {"w": ["dead", 1]}},
        {"tensors": {"w": ["", 1]}},
        {"tensors": {"w": ["00000000"]}},
        {"tensors": []},
        {"files": {"a": [0, "0000000g"]}},
        {"files": {"a": [-1, "00000000"]}},
        {"num_bytes": {"magic": 1}},
        {"overflowed": {"x": 1}},
        {"count": None},
    ],
)
def test_values_of_other_kinds_are_refused(change: dict[str, Any]) -> None:
    values = json.loads(encode_record(RECORD).splitlines()[0]) | change
    data = json.dumps(values).encode() + b"\n"
    with raises(FormatError, file=str(PATH)):
        parse_record(data + b"%08x\n" % crc32c(data), PATH)


def test_a_status_says_who_is_missing() -> None:
    waiting = WorkerStatus(index=2, count=4, state="waiting", missing=(0, 3))
    assert "2 of 4 workers are complete; missing: 0, 3" in waiting.describe()
    assert "the last worker to be complete publishes" in waiting.describe()
    assert "(Slurm's A and B)" in replace(waiting, origin="Slurm's A and B").describe()
    assert not waiting.is_committed
