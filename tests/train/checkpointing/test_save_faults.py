"""Saves that are stopped, run out of space, or go on behind the training."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from megtool import verify
from megtool.errors import DestinationError, StorageError
from megtool.formats.save_folder import find_iteration
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.train.checkpointing.save import TorchDistSaver
from tests.support.checkpoints.faulty_files import FaultyFiles, Killed
from tests.support.errors import raises
from tests.support.models import tiny_llama
from tests.support.runs.train_runs import Trained
from tests.support.worlds.gloo_world import WorldError, run_world

T = TypeVar("T")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("model") / "hf"
    tiny_llama.save(folder, dtype="float32", num_hidden_layers=2)
    return Trained(folder)


def newest(folder: Path) -> str:
    """The iteration that the save folder is opened at; it has to be complete."""
    found = find_iteration(folder, None)
    assert found is not None
    assert (found / "metadata.json").is_file()
    assert verify(folder).verdict in ("ok", "unverified")
    return found.name


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_save_killed_at_any_call_leaves_the_iteration_before_it(
    run: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    folder = tmp_path / "dst"
    with run.saver(folder) as saver:
        run.save(saver, 1)
    kept = bytes_of(folder / "iter_0000001")
    faults = itertools.cycle(["kill", "torn"])
    done = 0
    for at in itertools.count(1):
        files = FaultyFiles(at, next(faults))
        try:
            with run.saver(folder, files=files) as saver:
                run.save(saver, 2)
        except Killed:
            done += 1
        assert bytes_of(folder / "iter_0000001") == kept, at
        assert (folder / "latest_checkpointed_iteration.txt").read_text() in ("1", "2")
        if not files.hit:
            break
        Files().remove(folder / "iter_0000002")
        (folder / "latest_checkpointed_iteration.txt").write_text("1")
    assert done > 20
    assert newest(folder) == "iter_0000002"
    assert not (folder / ".megtool").exists()


def test_an_iteration_saved_again_is_replaced_whole(run: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "dst"
    with run.saver(folder) as saver:
        run.save(saver, 1)
        before = bytes_of(folder / "iter_0000001")
        run.save(saver, 1)
        assert bytes_of(folder / "iter_0000001").keys() == before.keys()
    assert newest(folder) == "iter_0000001"


def test_what_a_killed_save_left_is_removed_by_the_next_run(
    run: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "dst"
    left = folder / ".megtool" / "iter_0000003.2" / "tree"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(b"half")
    with run.saver(folder) as saver:
        assert not left.exists()
        assert "iter_0000003.2" in caplog.text
        run.save(saver, 3)
    assert newest(folder) == "iter_0000003"


def test_a_replacement_stopped_between_two_renames_is_undone(run: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "dst"
    with run.saver(folder) as saver:
        run.save(saver, 3)
    staging = folder / ".megtool" / "iter_0000003.1"
    staging.mkdir(parents=True)
    (folder / "iter_0000003").rename(staging / "old")
    with run.saver(folder):
        assert newest(folder) == "iter_0000003"


class Full(Files):
    """A disk that takes `left` more writes."""

    left = 1 << 30

    def system(self, function: Callable[..., T], /, *args: Any) -> T:
        if function in (os.pwrite, os.pwritev):
            if self.left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.left -= 1
        return super().system(function, *args)


def save_whole(run: Trained, saver: TorchDistSaver, asynchronous: bool) -> None:
    run.save(saver, 2, asynchronous=asynchronous)
    saver.finish()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_one_error_and_loses_nothing(
    asynchronous: bool, run: Trained, tmp_path: Path
) -> None:
    folder = tmp_path / "dst"
    disk = Full()
    with run.saver(folder, files=disk) as saver:
        before = disk.left
        run.save(saver, 1)
        count = before - disk.left
        assert count >= 6
        for left in range(count):
            disk.left = left
            with pytest.raises(StorageError, match=r"No space left|no space"):
                save_whole(run, saver, asynchronous)
            saver.check()  # nothing is said twice
            assert newest(folder) == "iter_0000001"
            assert sorted(p.name for p in (folder / ".megtool").iterdir()) == ["lock"]
        disk.left = count
        run.save(saver, 2, asynchronous=asynchronous)
    assert newest(folder) == "iter_0000002"


class NoRoom(Files):
    """A disk with little left, which says so."""

    def free_space(self, path: Path) -> int:
        return 1000


def test_too_little_space_is_found_out_before_anything_is_written(
    run: Trained, tmp_path: Path
) -> None:
    said = r"not enough space for iteration 5: .* 1,000 are free"
    with (
        run.saver(tmp_path / "dst", files=NoRoom()) as saver,
        pytest.raises(StorageError, match=said) as caught,
    ):
        run.save(saver, 5)
    assert (caught.value.hint or "").startswith("free some space")  # there is no earlier one
    assert not any((tmp_path / "dst").iterdir())


class Slow(Files):
    """A disk that waits for the test before it writes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def pwrite_gather(self, fd: int, buffers: Any, offset: int) -> None:
        assert self.gate.wait(60)
        super().pwrite_gather(fd, buffers, offset)


@pytest.mark.parametrize("behind", [False, True], ids=["copied", "copied behind"])
@pytest.mark.parametrize("plain", [False, True], ids=["distributed", "plain"])
def test_steps_behind_an_asynchronous_save_change_nothing_in_it(
    plain: bool, behind: bool, tmp_path: Path
) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32", num_hidden_layers=2)
    run = Trained(tmp_path / "hf", plain=plain)
    run.step()
    with run.saver(tmp_path / "want") as saver:
        run.save(saver, 1)
    files = Slow()
    with run.saver(tmp_path / "got", files=files) as saver:
        saver.prepare(run.stages, run.optimizer)
        run.save(saver, 1, asynchronous=True, copy_behind=behind)
        for _ in range(2):
            saver.wait_for_copy()
            run.step()
            saver.check()
        assert saver.is_busy
        files.gate.set()
    assert verify(tmp_path / "got", tmp_path / "want").verdict == "equal"
    again = Trained(tmp_path / "got")
    again.resume()
    assert again.optimizer.num_steps == 1


def test_an_error_behind_training_comes_up_at_the_next_step(run: Trained, tmp_path: Path) -> None:
    with run.saver(tmp_path / "dst", files=NoRoom()) as saver:
        run.save(saver, 1, asynchronous=True)
        while saver.is_busy:
            time.sleep(0.01)
        with raises(StorageError, id="no-space"):
            saver.check()
        saver.check()


def test_two_runs_cannot_write_one_folder(run: Trained, tmp_path: Path) -> None:
    busy = raises(DestinationError, id="destination-locked")
    with run.saver(tmp_path / "dst"), busy:
        run.saver(tmp_path / "dst")
    with run.saver(tmp_path / "dst"):
        pass


def killed(rank: int, size: int, source: str, target: str, after_s: float) -> None:
    """Save over and over, rank 1 (then all) killed at some moment."""
    run = Trained(Path(source), {"dp": size})
    with run.saver(Path(target)) as saver:
        run.save(saver, 1)
        if rank == 1:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for iteration in itertools.count(2):
            run.save(saver, iteration, asynchronous=iteration % 2 == 0)


def goes_on(rank: int, size: int, source: str, target: str) -> str:
    """The next run on the same folder."""
    run = Trained(Path(source), {"dp": size})
    try:
        with run.saver(Path(target)) as saver:
            run.save(saver, 1000)
        return (Path(target) / "latest_checkpointed_iteration.txt").read_text()
    finally:
        run.groups.stop()


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.013, 0.037, 0.11, 0.3])
def test_a_rank_killed_for_real_leaves_a_whole_iteration(after_s: float, tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32", num_hidden_layers=2)
    with pytest.raises(WorldError):
        run_world(killed, 2, str(tmp_path / "hf"), str(tmp_path / "dst"), after_s)
    found = newest(tmp_path / "dst")
    assert verify(tmp_path / "dst" / found, tmp_path / "hf").verdict == "equal"
    said = run_world(goes_on, 2, str(tmp_path / "hf"), str(tmp_path / "dst"))
    assert said == ["1000", "1000"]
    assert newest(tmp_path / "dst") == "iter_0001000"
    assert not (tmp_path / "dst" / ".megtool").exists()


def refusals(rank: int, size: int, source: str, target: str) -> str:
    """Rank 1's disk is full; what each rank says."""
    run = Trained(Path(source), {"dp": size})
    files = Full()
    files.left = 0 if rank == 1 else 1000
    try:
        with run.saver(Path(target)) as saver:
            run.save(saver, 1)
        with run.saver(Path(target), files=files) as saver:
            with pytest.raises(StorageError) as e:
                run.save(saver, 2)
            saver.check()
            return str(e.value)
    finally:
        run.groups.stop()


def test_all_ranks_say_so_where_one_cannot_write(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32", num_hidden_layers=2)
    said = run_world(refusals, 2, str(tmp_path / "hf"), str(tmp_path / "dst"))
    assert "rank 1 could not write its part of iteration 2" in said[0]
    assert "No space left" in said[1] or "no space" in said[1].lower()
    assert newest(tmp_path / "dst") == "iter_0000001"


def test_no_run_inside_a_folder_that_another_is_about_to_replace(
    run: Trained, tmp_path: Path
) -> None:
    for inner in ("out", "out/run"):
        with (
            open_stage(tmp_path / "out", files=Files(), fingerprint="f"),
            raises(DestinationError, os.getpid()),
            run.saver(tmp_path / inner),
        ):
            pass
        assert os.listdir(tmp_path) == []
