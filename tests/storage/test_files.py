"""Reads, writes and copies are whole or typed errors, whatever single calls do."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megtool.errors import FormatError, StorageError
from megtool.storage.files import Files
from megtool.storage.open_files import OpenFiles
from tests.support.checkpoints.faulty_files import FaultyFiles
from tests.support.errors import raises

DATA = np.random.default_rng(0).bytes((1 << 20) + 12345)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


def every_fault(job: Callable[[FaultyFiles], None], fault: int | str) -> None:
    """Run the job with the fault at each of its calls; it must succeed each time."""
    counting = FaultyFiles()
    job(counting)
    for n in range(1, len(counting.calls) + 1):
        files = FaultyFiles(n, fault)
        job(files)
        assert files.hit


@pytest.mark.parametrize("fault", ["short", errno.EINTR])
def test_short_and_interrupted_calls_are_continued(
    tmp_path: Path, source: Path, fault: int | str
) -> None:
    def job(files: FaultyFiles) -> None:
        fd, out = files.open_read(source), files.open_write(tmp_path / "out")
        try:
            whole, rows = bytearray(5000), np.zeros((3, 700), "<u2")
            files.pread_into(fd, memoryview(whole), 77)
            assert whole == DATA[77:5077]
            files.pread_scatter(fd, [*rows], 1)
            assert rows.tobytes() == DATA[1:4201]
            files.pwrite_all(out, rows, 3)
            files.pwrite_all(out, DATA[:999], 5000)
            files.copy_range(fd, 4096 + 5, out, 5, 900_001)
        finally:
            files.close(fd)
            files.close(out)
        assert (tmp_path / "out").read_bytes()[5 : 5 + 900_001] == DATA[4101 : 4101 + 900_001]

    every_fault(job, fault)


@pytest.mark.parametrize(
    ("refused", "used"),
    [
        ([], "copy_file_range"),
        (["copy_file_range"], "sendfile"),
        (["copy_file_range", "sendfile"], "pwrite"),
    ],
)
@pytest.mark.parametrize("code", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_copy_falls_back_and_remembers(
    tmp_path: Path, source: Path, refused: list[str], used: str, code: int
) -> None:
    class Refusing(FaultyFiles):
        def system(self, function, /, *args):  # type: ignore[no-untyped-def]
            result = super().system(function, *args) if function.__name__ not in refused else None
            if function.__name__ in refused:
                self.calls.append(function.__name__)
                raise OSError(code, os.strerror(code))
            return result

    files = Refusing()
    fd, out = files.open_read(source), files.open_write(tmp_path / "out")
    files.copy_range(fd, 11, out, 7, len(DATA) - 11)
    assert (tmp_path / "out").read_bytes()[7:] == DATA[11:]
    assert used in files.calls
    files.calls.clear()
    files.copy_range(fd, 0, out, 0, len(DATA))
    assert (tmp_path / "out").read_bytes()[: len(DATA)] == DATA
    assert not set(refused) & set(files.calls)
    files.close(fd)
    files.close(out)


def test_a_copy_between_devices(source: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == source.stat().st_dev:
        pytest.skip("no second file system at /dev/shm")
    path = memory / f"megtool-test-{os.getpid()}"
    files = Files()
    try:
        fd, out = files.open_read(source), files.open_write(path)
        files.copy_range(fd, 1, out, 0, len(DATA) - 1)
        assert path.read_bytes() == DATA[1:]
        files.close(fd)
        files.close(out)
    finally:
        path.unlink()


def test_copies_of_equal_misalignment_reach_a_block_first(tmp_path: Path, source: Path) -> None:
    files = FaultyFiles()
    fd, out = files.open_read(source), files.open_write(tmp_path / "out")
    files.copy_range(fd, 4096 + 100, out, 100, 500_000)
    assert files.calls.count("copy_file_range") == 2
    assert (tmp_path / "out").read_bytes()[100:] == DATA[4196 : 4196 + 500_000]
    files.close(fd)
    files.close(out)


def test_the_end_of_a_file_is_told(tmp_path: Path, source: Path) -> None:
    files = Files()
    fd, out = files.open_read(source), files.open_write(tmp_path / "out")
    with raises(FormatError, match="truncated", file=source):
        files.pread_into(fd, memoryview(bytearray(100)), len(DATA) - 99)
    rows = [np.zeros(60, np.uint8) for _ in range(2)]
    with pytest.raises(FormatError, match="truncated"):
        files.pread_scatter(fd, rows, len(DATA) - 70)
    with pytest.raises(FormatError, match="truncated"):
        files.copy_range(fd, 10, out, 0, len(DATA))
    files.close(fd)
    files.close(out)


def test_more_buffers_than_one_call_takes(source: Path) -> None:
    files = Files()
    fd = files.open_read(source)
    rows = np.zeros((2500, 37), np.uint8)
    files.pread_scatter(fd, list(rows), 9)
    files.close(fd)
    assert rows.tobytes() == DATA[9 : 9 + rows.nbytes]


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permissions"),
        (errno.EIO, "dmesg"),
    ],
)
def test_refusals_come_with_file_and_hint(tmp_path: Path, code: int, hint: str) -> None:
    path = tmp_path / "out"
    files = FaultyFiles(4, code)
    fd = files.open_write(path)
    with pytest.raises(StorageError, match="cannot write") as caught:
        files.pwrite_all(fd, b"x" * 1234, 0)
    os.close(fd)
    assert caught.value.file == str(path)
    assert hint in (caught.value.hint or "")
    assert ("1,234 bytes needed" in caught.value.message) == (code in (errno.ENOSPC, errno.EDQUOT))


def test_a_full_device_is_told() -> None:
    files = Files()
    fd = os.open("/dev/full", os.O_RDWR)  # `open_write` refuses devices
    with raises(StorageError, match="No space left", file="/dev/full"):
        files.pwrite_all(fd, b"x", 0)
    files.close(fd)


def test_a_failed_fsync_is_an_error_and_not_repeated(source: Path) -> None:
    files = FaultyFiles(4, errno.EIO)
    with pytest.raises(StorageError, match="cannot flush"):
        files.fsync(source)
    assert files.calls == ["stat", "open", "fstat", "fsync", "close"]


def test_folders_without_fsync_are_accepted(tmp_path: Path) -> None:
    FaultyFiles(4, errno.EINVAL).fsync_dir(tmp_path)
    with pytest.raises(StorageError):
        FaultyFiles(4, errno.EIO).fsync_dir(tmp_path)


def test_exchange_swaps_or_says_it_cannot(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert Files().exchange(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["b"]
    assert not FaultyFiles(1, errno.EINVAL).exchange(tmp_path / "a", tmp_path / "b")
    with pytest.raises(StorageError, match="rename"):
        Files().exchange(tmp_path / "a", tmp_path / "missing")


def test_rename_may_refuse_to_replace(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    for files in (Files(), FaultyFiles(1, errno.ENOSYS)):
        with pytest.raises(StorageError, match="exists"):
            files.rename(tmp_path / "a", tmp_path / "b", replace=False)
    Files().rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "a"


def test_remove_does_not_follow_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    inside = tmp_path / "inside"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "link").symlink_to(outside)
    (inside / "dangling").symlink_to("nowhere")
    Files().remove(inside)
    Files().remove(inside)
    assert not inside.exists()
    assert (outside / "kept").exists()


def test_new_files_and_folders_respect_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        files = Files()
        files.close(files.open_write(tmp_path / "file"))
        files.mkdir(tmp_path / "folder")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o750


def test_read_whole_has_a_limit(source: Path) -> None:
    assert Files().read_whole(source) == DATA
    assert Files().read_whole(source / "below") is None
    with pytest.raises(FormatError, match="more than the 1,000"):
        Files().read_whole(source, at_most=1000)


def test_few_descriptors_serve_many_files(tmp_path: Path) -> None:
    paths = [tmp_path / str(n) for n in range(20)]
    for n, path in enumerate(paths):
        path.write_bytes(bytes([n]))
    files = FaultyFiles()
    with OpenFiles(files, limit=4) as opened:
        held = opened.acquire(paths[0])
        failures: list[int] = []

        def read() -> None:
            for _ in range(10):
                for n, path in enumerate(paths):
                    byte = bytearray(1)
                    with opened.use(path) as fd:
                        files.pread_into(fd, memoryview(byte), 0)
                    if byte[0] != n:
                        failures.append(n)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert failures == []
        assert len(files.open_fds) <= 4
        assert opened.acquire(paths[0]) == held
        opened.release(paths[0])
        opened.release(paths[0])
    assert not files.open_fds


def test_recent_files_stay_open(tmp_path: Path) -> None:
    files = FaultyFiles()
    with OpenFiles(files, writing=True, limit=2) as opened:
        for name in ("a", "b", "a", "c", "a"):
            with opened.use(tmp_path / name):
                pass
    assert files.calls.count("open") == 3
