"""A journal is believed line by line, and no further than it is intact."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.staging.folder import journal
from megtool.staging.folder.journal import Journal, JournalRecord, read_journal
from megtool.storage.files import Files


def written(path: Path, units: int) -> bytes:
    log = Journal(Files(), path, JournalRecord(fingerprint="f"))
    for unit in range(units):
        log.finish(unit, f"note \u00e4 {unit}")
    log.close()
    log.close()
    return path.read_bytes()


def test_what_was_told_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert read_journal(Files(), path) is None
    data = written(path, 3)
    record = read_journal(Files(), path)
    assert record
    assert record.fingerprint == "f"
    assert record.finished == {n: f"note \u00e4 {n}" for n in range(3)}
    assert (record.lost, record.commit, record.num_bytes) == (0, None, len(data))


def test_a_torn_line_is_ignored_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = written(path, 5)
    for size in range(len(data)):
        path.write_bytes(data[:size] + b"\0" * (size % 3))
        record = read_journal(Files(), path)
        if record is None:
            assert size <= data.index(b"\n")
            continue
        assert sorted(record.finished) == list(range(len(record.finished)))
        log = Journal(Files(), path, record)
        log.finish(77)
        log.commit(123)
        log.close()
        after = read_journal(Files(), path)
        assert after
        assert after.finished == record.finished | {77: ""}
        assert after.commit == 123


@given(st.data())
def test_a_changed_byte_is_never_believed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    good = bytearray(written(path, 4))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(good)
    record = read_journal(Files(), path)
    if record is not None:
        assert record.fingerprint == "f"
        assert all(record.finished[n] == f"note \u00e4 {n}" for n in record.finished)


def test_units_are_safe_from_a_restart_once_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    log = Journal(Files(), path, JournalRecord(fingerprint="f"))
    log.finish(0)
    log.durable()
    log.finish(1)
    log.close()
    monkeypatch.setattr(journal, "boot_id", lambda _: "another")
    record = read_journal(Files(), path)
    assert record
    assert (set(record.finished), record.lost) == ({0}, 1)
    log = Journal(Files(), path, record)
    log.finish(2)
    log.close()
    monkeypatch.setattr(journal, "boot_id", lambda _: "third")
    record = read_journal(Files(), path)
    assert record
    assert (set(record.finished), record.lost) == ({0}, 2)


def test_a_note_is_one_line(tmp_path: Path) -> None:
    log = Journal(Files(), tmp_path / "journal", JournalRecord(fingerprint="f"))
    with pytest.raises(ValueError, match="one line"):
        log.finish(0, "a\nb")
    log.close()
