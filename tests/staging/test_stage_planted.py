"""What somebody has planted in the place of a run's own files is refused: not opened, not written.

Each plant is tried on a fresh staging folder and on one that a run resumes from.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megtool.errors import DestinationError, FormatError
from megtool.staging.open_stage import open_stage
from megtool.staging.stage import Stage
from megtool.storage.files import Files
from tests.support.errors import raises

NAMES = ("lock", "journal", "tree", "tree/a.bin", "tree/deep", "old")
VICTIM = b"somebody's own data"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A FIFO that is opened blocks for ever."""

    def expire(*_: object) -> None:
        raise TimeoutError("a planted file was opened")

    former = signal.signal(signal.SIGALRM, expire)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder of the user with a file, which no run may touch."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "file").write_bytes(VICTIM)
    yield folder
    assert os.listdir(folder) == ["file"]
    assert (folder / "file").read_bytes() == VICTIM


def plant_socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        former = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(former)


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "link to a file": lambda path, victim: path.symlink_to(victim / "file"),
    "link to a folder": lambda path, victim: path.symlink_to(victim),
    "link to nothing": lambda path, victim: path.symlink_to(victim / "new"),
    "hard link": lambda path, victim: path.hardlink_to(victim / "file"),
    "FIFO": lambda path, _: os.mkfifo(path),
    "socket": plant_socket,
}


def run(out: Path) -> Stage:
    stage = open_stage(out, files=Files(), fingerprint="f")
    with stage:
        stage.require_space(10)
        path = stage.create("a.bin", 10)
        stage.write("deep/b.bin", b"b")
        fd = stage.files.open_write(path)
        stage.files.pwrite_all(fd, b"0123456789", 0)
        stage.files.close(fd)
        stage.finish(0)
        stage.commit()
    return stage


def interrupt(out: Path) -> Path:
    """A staging folder from which a run resumes."""
    stage = open_stage(out, files=Files(), fingerprint="f")

    def work() -> None:
        with stage:
            stage.create("a.bin", 10)
            stage.write("deep/b.bin", b"b")
            stage.finish(0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    return stage.staging


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("resumes", [False, True], ids=["fresh", "resumes"])
def test_nothing_is_opened_through_a_plant(
    tmp_path: Path, victim: Path, name: str, kind: str, resumes: bool
) -> None:
    out = tmp_path / "out"
    staging = tmp_path / ".out.megtool"
    if resumes:
        interrupt(out)
        Files().remove(staging / name)
    else:
        (staging / name).parent.mkdir(mode=0o700, parents=True)
        staging.chmod(0o700)
    PLANTS[kind](staging / name, victim)
    if name.startswith("tree") and not resumes:
        run(out)  # nothing to resume: what is staged is removed, links are not followed
        assert not (out / "a.bin").is_symlink()
        assert (out / "a.bin").read_bytes() == b"0123456789"
        return
    with raises(DestinationError, hint=True) as caught:
        run(out)
    assert str(staging) in str(caught.value.file)
    assert not out.exists()
    assert not out.is_symlink()
    Files().remove(staging)  # the way out
    run(out)
    assert sorted(os.listdir(tmp_path)) == ["home", "out"]


@pytest.mark.parametrize("kind", PLANTS)
def test_the_staging_folder_itself(tmp_path: Path, victim: Path, kind: str) -> None:
    PLANTS[kind](tmp_path / ".out.megtool", victim)
    for act in (run, lambda out: open_stage(out, files=Files(), fingerprint="f").check()):
        with raises(DestinationError, file=tmp_path / ".out.megtool", hint=True):
            act(tmp_path / "out")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_staging_folder_that_others_may_write_in(tmp_path: Path, mode: int) -> None:
    (tmp_path / ".out.megtool").mkdir()
    (tmp_path / ".out.megtool").chmod(mode)
    with raises(DestinationError, "other users", file=tmp_path / ".out.megtool", hint=True):
        run(tmp_path / "out")


def test_a_staging_folder_is_closed_to_others(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with open_stage(tmp_path / "out", files=Files(), fingerprint="f") as stage:
            assert stat.S_IMODE(stage.staging.stat().st_mode) == 0o700
            assert stat.S_IMODE(stage.tree.stat().st_mode) == 0o777  # the checkpoint's own mode
    finally:
        os.umask(old)


@needs_root
@pytest.mark.parametrize("name", ["", "lock", "journal", "tree", "tree/a.bin", "tree/deep"])
def test_what_belongs_to_another_user(tmp_path: Path, name: str) -> None:
    staging = interrupt(tmp_path / "out")
    os.chown(staging / name, 65534, 65534)
    with raises(DestinationError, "65534", file=staging / name, hint=True):
        run(tmp_path / "out")


@needs_root
def test_a_file_system_that_gives_new_files_to_another_user(tmp_path: Path) -> None:
    """As NFS does with root's: then the owner tells nothing, and is no reason to refuse."""

    class Squashed(Files):
        def mkdir(self, path: Path, mode: int = 0o777) -> bool:
            made = super().mkdir(path, mode)
            if made:
                os.chown(path, 65534, 65534)
            return made

        def _open(self, path: Path, *flags: int) -> int:
            fd = super()._open(path, *flags)
            if flags[0] & os.O_CREAT:
                os.fchown(fd, 65534, 65534)
            return fd

    for _ in range(2):
        stage = open_stage(tmp_path / "out", files=Squashed(), fingerprint="f", overwrite=True)
        with stage:
            stage.write("a", b"a")
            stage.commit()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["FIFO", "socket"])
@pytest.mark.parametrize("is_file", [False, True])
def test_overwrite_replaces_no_special_file(
    tmp_path: Path, victim: Path, kind: str, is_file: bool
) -> None:
    out = tmp_path / "out"
    PLANTS[kind](out, victim)
    (tmp_path / "link").symlink_to("out")
    for name in ("out", "link"):
        stage = open_stage(
            tmp_path / name, files=Files(), fingerprint="f", overwrite=True, is_file=is_file
        )
        with raises(DestinationError, kind, file=out, hint=True):
            stage.check()
        with raises(DestinationError, kind, file=out, hint=True), stage:
            pass
    assert not stat.S_ISREG(out.stat().st_mode)


def test_overwrite_replaces_no_device() -> None:
    stage = open_stage(
        Path("/dev/null"), files=Files(), fingerprint="f", overwrite=True, is_file=True
    )
    with raises(DestinationError, "character device", file="/dev/null"):
        stage.check()


@pytest.mark.parametrize("kind", ["FIFO", "socket"])
def test_a_folder_with_a_special_file_is_no_checkpoint(
    tmp_path: Path, victim: Path, kind: str
) -> None:
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True)
    PLANTS[kind](out / "deep" / "x", victim)
    stage = open_stage(out, files=Files(), fingerprint="f", overwrite=True)
    with raises(DestinationError, kind, file=out / "deep" / "x", hint=True), stage:
        pass
    assert os.listdir(out / "deep") == ["x"]


@pytest.mark.parametrize("kind", ["FIFO", "socket"])
def test_reading_never_opens_a_special_file(tmp_path: Path, victim: Path, kind: str) -> None:
    PLANTS[kind](tmp_path / "x", victim)
    (tmp_path / "link").symlink_to("x")
    for name in ("x", "link"):
        with raises(FormatError, kind, file=tmp_path / name, hint=True):
            Files().open_read(tmp_path / name)
        with raises(FormatError, kind, file=tmp_path / name, hint=True):
            Files().read_whole(tmp_path / name)
    with raises(FormatError, "character device", file="/dev/zero"):
        Files().read_whole(Path("/dev/zero"))


def test_removing_stays_inside_a_folder_whose_parts_become_links(
    tmp_path: Path, victim: Path
) -> None:
    """Whoever may write in a folder that is removed can put links there at any moment."""
    (tmp_path / "old" / "inner").mkdir(parents=True)
    (tmp_path / "old" / "inner" / "file").touch()

    class Racing(Files):
        def call(self, file, verb, function, /, *args):  # type: ignore[no-untyped-def]
            if verb == "list" and file == tmp_path / "old" / "inner":
                (tmp_path / "old" / "inner").rename(tmp_path / "moved")
                (tmp_path / "old" / "inner").symlink_to(victim)
            return super().call(file, verb, function, *args)

    with pytest.raises(Exception, match="old/inner"):
        Racing().remove(tmp_path / "old")
