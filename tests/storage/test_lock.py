"""One run at a time: the second learns who is first, and the dead lock nobody out."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megtool.errors import DestinationError
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.storage.lock import LockFile
from tests.support.checkpoints.faulty_files import FaultyFiles
from tests.support.errors import raises
from tests.support.paths import ROOT


def no_folder() -> None:
    """The folder is there already."""


def test_a_second_run_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    with open_stage(tmp_path / "out", files=Files(), fingerprint="f") as stage:
        stage.write("a", b"a")
        for fingerprint in ("f", "another"):
            second = open_stage(tmp_path / "out", files=Files(), fingerprint=fingerprint)
            who = f"process {os.getpid()} on host {socket.gethostname()}"
            with pytest.raises(DestinationError, match=who), second:
                pass
        stage.commit()
    assert (tmp_path / "out" / "a").read_bytes() == b"a"
    assert os.listdir(tmp_path) == ["out"]


def test_another_process_is_refused_until_the_first_dies(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from megtool.storage.lock import LockFile\n"
        "from megtool.storage.files import Files\n"
        "lock = LockFile(Files(), pathlib.Path(sys.argv[1]), lambda: None)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(DestinationError, match=f"process {process.pid} on host"):
            LockFile(Files(), path, no_folder)
        process.kill()
    LockFile(Files(), path, no_folder).release()


def test_without_locks_living_processes_of_this_host_count(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(f"{os.getpid()} {socket.gethostname()}\n")
    with pytest.raises(DestinationError, match=f"process {os.getpid()}"):
        LockFile(FaultyFiles(4, errno.ENOSYS), path, no_folder)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    path.write_text(f"{gone.pid} {socket.gethostname()}\n")
    lock = LockFile(FaultyFiles(4, errno.ENOLCK), path, no_folder)
    assert not lock.is_certain
    lock.release()


def test_a_lock_file_removed_while_taken_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"

    class Racing(FaultyFiles):
        def lock(self, fd: int) -> bool | None:
            if self.calls.count("flock") == 0:
                path.unlink()
                path.parent.rmdir()
            return super().lock(fd)

    def make_folder() -> None:
        path.parent.mkdir(exist_ok=True)

    lock = LockFile(Racing(), path, make_folder)
    assert path.read_text() == f"{os.getpid()} {socket.gethostname()}\n"
    lock.release()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_read_only_place_is_a_wrong_destination(tmp_path: Path, code: int) -> None:
    with raises(DestinationError, hint=True):
        LockFile(FaultyFiles(1, code), tmp_path / "lock", no_folder)
