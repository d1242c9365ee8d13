"""Two runs of which one writes inside the other's destination: never both, in either order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megtool.data.dataset_writer import DatasetFiles
from megtool.errors import DestinationError
from megtool.staging.folder import place as commit
from megtool.staging.nested_runs import check_runs_above
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.storage.lock import LockFile
from tests.support.errors import raises
from tests.support.paths import ROOT

RUN = """
import sys, time
from pathlib import Path
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files

out, is_quick = Path(sys.argv[1]), sys.argv[2] == "quick"
stage = open_stage(out, files=Files(), fingerprint="f", overwrite=True)
if is_quick:
    print("ready", flush=True)
    time.sleep(float(sys.stdin.readline()))
with stage:
    began = time.monotonic_ns()
    stage.write("model.bin", str(out).encode())
    stage.finish(0)
    if not is_quick:
        print("locked", flush=True)
        sys.stdin.readline()
    stage.commit(fsync=False)
print(began, time.monotonic_ns())
"""


def start(out: Path, *, mode: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(out), mode],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def another_run(out: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes `out`, has locked it, and commits when the `with` ends."""
    with start(out) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            if process.poll() is None:
                _, errors = process.communicate("go\n", timeout=60)
                assert process.returncode == 0, errors


def kill(out: Path) -> None:
    """Leave what a killed run leaves."""
    with another_run(out) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()


def run(out: Path, *, overwrite: bool = True) -> None:
    stage = open_stage(out, files=Files(), fingerprint="f", overwrite=overwrite)
    with stage:
        stage.write("model.bin", str(out).encode())
        stage.commit(fsync=False)


def content(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.bin").write_text("old")
    return tmp_path / "out"


@pytest.mark.parametrize("inner", ["sub", "deep/er/sub"])
def test_the_outer_run_came_first(tmp_path: Path, out: Path, inner: str) -> None:
    with another_run(out) as process:
        with raises(DestinationError, process.pid, out, file=out / inner, hint=True):
            run(out / inner)
        assert content(out) == {"old.bin": "old"}
        assert os.listdir(out) == ["old.bin"]
    assert content(out) == {"model.bin": str(out)}
    assert os.listdir(tmp_path) == ["out"]


def test_the_outer_run_came_first_and_its_destination_is_new(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with another_run(out) as process:
        with raises(DestinationError, process.pid, out):
            run(out / "deep" / "sub")
        assert not out.exists()
    assert content(out) == {"model.bin": str(out)}


@pytest.mark.parametrize("inner", ["sub", "deep/er/sub"])
def test_the_inner_run_came_first(tmp_path: Path, out: Path, inner: str) -> None:
    with another_run(out / inner) as process:
        with raises(DestinationError, process.pid, out / inner, file=out, hint=True):
            run(out)
        assert os.listdir(tmp_path) == ["out"]
    assert content(out) == {"old.bin": "old", f"{inner}/model.bin": str(out / inner)}
    run(out)
    assert content(out) == {"model.bin": str(out)}


def test_through_a_link(tmp_path: Path, out: Path) -> None:
    (tmp_path / "link").symlink_to("out")
    with another_run(tmp_path / "link") as process, raises(DestinationError, process.pid):
        run(out / "sub")
    with another_run(tmp_path / "link" / "sub") as process, raises(DestinationError, process.pid):
        run(out)


def test_the_work_of_a_killed_inner_run_is_kept(out: Path) -> None:
    kill(out / "sub")
    staging = out / ".sub.megtool"
    with raises(DestinationError, staging, file=out, hint=True):
        run(out)
    assert (staging / "tree" / "model.bin").exists()
    run(out / "sub")  # the way out: finish it
    run(out)
    assert content(out) == {"model.bin": str(out)}


def test_a_lock_without_work_keeps_nobody_out(out: Path) -> None:
    (out / ".sub.megtool").mkdir()
    (out / ".sub.megtool" / "lock").write_text("1 elsewhere\n")
    run(out)
    assert content(out) == {"model.bin": str(out)}


def test_a_killed_outer_run_keeps_nobody_out(out: Path) -> None:
    kill(out)
    run(out / "sub")
    assert content(out) == {"old.bin": "old", "sub/model.bin": str(out / "sub")}


def test_no_destination_inside_a_staging_folder(tmp_path: Path, out: Path) -> None:
    kill(out)
    with raises(DestinationError, file=tmp_path / ".out.megtool", hint=True):
        run(tmp_path / ".out.megtool" / "tree" / "sub")


def test_siblings_do_not_disturb_each_other(tmp_path: Path, out: Path) -> None:
    with another_run(out / "a"):
        run(out / "b")
        run(tmp_path / "other")
    assert sorted(content(out)) == ["a/model.bin", "b/model.bin", "old.bin"]


def test_a_training_run_inside(out: Path) -> None:
    """A save folder of finetune has a lock of its own, and keeps it when it has ended."""
    (out / "run" / ".megtool").mkdir(parents=True)
    lock = LockFile(Files(), out / "run" / ".megtool" / "lock", lambda: None)
    with raises(DestinationError, os.getpid(), file=out):
        run(out)
    lock.release()
    run(out)


def test_a_data_set_inside_or_below(out: Path) -> None:
    with DatasetFiles(out / "data", Files()), raises(DestinationError, os.getpid(), file=out):
        run(out)
    with another_run(out) as process, raises(DestinationError, process.pid):
        DatasetFiles(out / "data", Files()).__enter__()
    assert not (out / ".data.bin.megtool").exists()


# ---- what the first look has missed


def test_the_outer_run_looks_again_before_its_rename(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_TRANSIENT_S", 0.1)
    stage = open_stage(out, files=Files(), fingerprint="f", overwrite=True)
    with stage:
        stage.write("model.bin", b"x")
        stage.finish(0)
        (out / ".sub.megtool").mkdir()
        lock = LockFile(Files(), out / ".sub.megtool" / "lock", lambda: None)
        with raises(DestinationError, os.getpid(), file=out):
            stage.commit(fsync=False)
        lock.release()
    assert content(out).keys() == {"old.bin", ".sub.megtool/lock"}
    run(out)  # resumes
    assert content(out) == {"model.bin": str(out)}


def test_the_inner_run_notices_that_its_folder_was_replaced(tmp_path: Path, out: Path) -> None:
    stage = open_stage(out / "sub", files=Files(), fingerprint="f")
    with raises(DestinationError, file=out / ".sub.megtool", hint=True), stage:
        stage.write("model.bin", b"x")
        stage.finish(0)
        out.rename(tmp_path / "moved")
        kill(out / "sub")  # another run begins at the same place
        stage.commit(fsync=False)
    assert (out / ".sub.megtool" / "tree" / "model.bin").exists()  # nothing of it was removed
    assert not (out / "sub").exists()


def test_a_run_that_is_refused_at_once_stops_no_other(out: Path) -> None:
    """It holds its lock for a moment, which may be that of the other's commit."""
    with open_stage(out, files=Files(), fingerprint="f", overwrite=True) as stage:
        stage.write("model.bin", b"x")
        (out / ".sub.megtool").mkdir()
        lock = LockFile(Files(), out / ".sub.megtool" / "lock", lambda: None)
        timer = threading.Timer(0.3, lock.release)
        timer.start()
        stage.commit(fsync=False)
        timer.join()
    assert content(out) == {"model.bin": "x"}


def test_a_look_at_a_lock_keeps_nobody_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    files = Files()
    fd = files.open_read(path)
    assert files.lock(fd, shared=True)  # as `find_holder` does
    timer = threading.Timer(0.02, files.close, [fd])
    timer.start()
    LockFile(Files(), path, lambda: None).release()
    timer.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_in_a_sticky_folder_only_owners_count(tmp_path: Path) -> None:
    """Otherwise anybody could keep others from writing below /tmp."""
    tmp_path.chmod(0o1777)
    (tmp_path / ".home.megtool").mkdir()
    (tmp_path / "home").mkdir()
    lock = LockFile(Files(), tmp_path / ".home.megtool" / "lock", lambda: None)
    with raises(DestinationError, os.getpid()):
        check_runs_above(Files(), tmp_path / "home" / "out")
    os.chown(tmp_path / ".home.megtool", 65534, 65534)
    check_runs_above(Files(), tmp_path / "home" / "out")
    os.chown(tmp_path / "home", 65534, 65534)
    with raises(DestinationError, os.getpid()):
        check_runs_above(Files(), tmp_path / "home" / "out")
    lock.release()


def test_two_that_start_at_once(tmp_path: Path, out: Path) -> None:
    """Of two that overlap in time at most one ends well, and what ended well is there."""
    ended = {"both": 0, "one": 0, "none": 0}
    for n in range(12):
        pair = [start(place, mode="quick") for place in (out, out / "sub")]
        for process in pair:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        for process, pause in zip(pair, [(0, 0), (0, 0.002), (0.002, 0)][n % 3], strict=True):
            assert process.stdin
            process.stdin.write(f"{pause}\n")
            process.stdin.flush()
        results = [process.communicate(timeout=60) for process in pair]
        times = []
        for process, (text, errors) in zip(pair, results, strict=True):
            if process.returncode == 0:
                times.append(tuple(int(x) for x in text.split()))
            else:
                assert "DestinationError" in errors, errors
        ended[("none", "one", "both")[len(times)]] += 1
        if len(times) == 2:
            first, second = sorted(times)
            assert first[1] < second[0]
        if pair[1].returncode == 0 and (len(times) == 1 or times[0] < times[1]):
            assert (out / "sub" / "model.bin").read_text() == str(out / "sub")
        assert not list(tmp_path.rglob("*.megtool"))
        assert sorted(os.listdir(tmp_path)) == ["out"]
        time.sleep(0.01)
    assert sum(ended.values()) == 12
