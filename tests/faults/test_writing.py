"""Writing faults W1-W10: whatever fails or is killed, the destination is absent or complete.

Every fault is injected into a real reshard at the n-th system call; the source stays as it is, and
the same command then ends with the same bytes as a run that nothing disturbed.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard
from megtool.errors import (
    DestinationError,
    SourceChangedError,
    StorageError,
)
from megtool.storage.files import Files
from tests.support.checkpoints.faulty_files import FaultyFiles, Killed
from tests.support.errors import raises
from tests.support.folders import contents, file_states, staging_folders
from tests.support.models import tiny_llama
from tests.support.paths import ROOT
from tests.support.runs.interrupted_runs import Job, strike

SMALL = {"num_hidden_layers": 1, "vocab_size": 5}
FAULTS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR, "short", "kill", "torn"]


SCENARIOS: dict[str, dict[str, Any]] = {
    "to torch_dist": {"to": "torch_dist", "tp": 2},
    "kernel copies": {"to": "torch_dist", "pp": 1, "digest": "buffered"},
    "many shards": {"max_shard_size": "2KB"},
    "cast": {"dtype": "float32", "digest": "none"},
    "one file": {"to": "safetensors"},
}


def make(root: Path, options: dict[str, Any]) -> Job:
    tiny_llama.save(root / "source", **SMALL)
    name = "out.safetensors" if options.get("to") == "safetensors" else "out"
    job = Job(
        root=root,
        options={"threads": 1, **options},
        expected={},
        source=file_states(root / "source"),
        name=name,
    )
    job.run()
    expected = contents(job.out)
    assert expected
    Files().remove(job.out)
    return Job(root=root, options=job.options, expected=expected, source=job.source, name=name)


@pytest.mark.parametrize(
    ("fault", "every"),
    [
        *[(fault, 4 if fault in (errno.ENOSPC, "torn") else 7) for fault in FAULTS],
        *[pytest.param(fault, 1, marks=pytest.mark.slow) for fault in FAULTS],
    ],
)
def test_one_fault_at_every_call(  # W1, W2
    tmp_path: Path, fault: int | str, every: int
) -> None:
    strike(make(tmp_path, SCENARIOS["to torch_dist"]), fault, old=False, every=every)


@pytest.mark.parametrize(
    ("fault", "every"),
    [
        pytest.param(errno.ENOSPC, 7, marks=pytest.mark.slow),
        ("kill", 7),
        ("torn", 5),
        pytest.param("torn", 1, marks=pytest.mark.slow),
    ],
)
def test_the_old_checkpoint_is_valid_until_the_new_one_is(
    tmp_path: Path, fault: int | str, every: int
) -> None:  # W5
    strike(make(tmp_path, SCENARIOS["to torch_dist"]), fault, old=True, every=every)


@pytest.mark.parametrize("old", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("fault", [errno.EIO, "short", "kill", "torn"])
@pytest.mark.parametrize("scenario", list(SCENARIOS)[1:])
def test_faults_in_other_jobs(tmp_path: Path, scenario: str, fault: int | str, old: bool) -> None:
    every = 5 if scenario == "one file" else 23
    strike(make(tmp_path, SCENARIOS[scenario]), fault, old=old, every=every)


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)])
def test_a_disk_that_stays_full_or_broken(tmp_path: Path, code: int) -> None:
    strike(make(tmp_path, SCENARIOS["to torch_dist"]), code, old=False, every=7, lasting=True)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("scenario", list(SCENARIOS)[:-1])
def test_run_after_run_is_killed(tmp_path: Path, scenario: str) -> None:  # W6
    job = make(tmp_path, SCENARIOS[scenario])
    calm = FaultyFiles()
    job.run(calm)
    Files().remove(job.out)
    for share in (0.3, 0.5, 0.45, 0.6, 0.7, 0.55):
        with pytest.raises(Killed):
            job.run(FaultyFiles(int(len(calm.calls) * share), "torn"))
        assert not job.out.exists()
    assert job.run().resumed_units > 0
    job.check_end()


@pytest.mark.usefixtures("small_units")
def test_resuming_writes_only_what_is_missing(tmp_path: Path) -> None:  # W6
    job = make(tmp_path, SCENARIOS["to torch_dist"])
    calm = FaultyFiles()
    job.run(calm)
    Files().remove(job.out)
    with pytest.raises(Killed):
        job.run(FaultyFiles(calm.calls.index("rename"), "kill"))
    again = FaultyFiles()
    report = job.run(again)
    assert report.resumed_units > 8
    assert report.repaired_units == 0
    assert "copy_file_range" not in again.calls
    job.check_end()


def test_what_a_crash_tore_is_repaired(tmp_path: Path) -> None:
    job = make(tmp_path, SCENARIOS["to torch_dist"])
    stopped = FaultyFiles()
    job.run(stopped)
    Files().remove(job.out)
    with pytest.raises(Killed):
        job.run(FaultyFiles(stopped.calls.index("fsync") + 1, "kill"))
    tree = tmp_path / ".out.megtool" / "tree"
    for file in tree.rglob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        file.write_bytes(data)
    assert job.run().repaired_units > 0
    job.check_end()


@pytest.mark.parametrize(
    "change",
    [{"tp": 1}, {"digest": "buffered"}, {"dtype": "float32"}, {"exclude": ["lm_head*"]}],
    ids=str,
)
def test_other_options_do_not_resume(tmp_path: Path, change: dict[str, Any]) -> None:
    job = make(tmp_path, SCENARIOS["to torch_dist"])
    calm = FaultyFiles()
    options = job.options | change
    reshard(tmp_path / "source", tmp_path / "out", files=calm, **options)
    expected = contents(job.out)
    Files().remove(job.out)
    with pytest.raises(Killed):
        job.run(FaultyFiles(len(calm.calls) - 30, "kill"))
    report = reshard(tmp_path / "source", tmp_path / "out", **options)
    assert report.resumed_units == 0
    assert contents(job.out) == expected


# ---- real processes


def command(job: Job, *more: str) -> list[str]:
    options = [f"--{k.replace('_', '-')}={v}" for k, v in job.options.items()]
    paths = [str(job.root / "source"), str(job.out)]
    return [sys.executable, "-m", "megtool", "reshard", *paths, *options, "-q", *more]


@pytest.mark.parametrize("seed", range(5))
def test_a_process_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    more = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 32}
    tiny_llama.save(tmp_path / "source", vocab_size=20_000, **more)
    before = file_states(tmp_path / "source")
    options = {"to": "torch_dist", "tp": 2, "threads": 2, "digest": "all"}
    reference = tmp_path / "reference"
    reshard(tmp_path / "source", reference, **options)
    expected = contents(reference)
    shutil.rmtree(reference)
    job = Job(root=tmp_path, options=options, expected=expected or {}, source=before)
    staging = tmp_path / ".out.megtool"
    killed = 0
    for _ in range(3):
        process = subprocess.Popen(command(job), cwd=ROOT)
        while process.poll() is None and not staging.exists():
            time.sleep(0.001)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        assert contents(job.out) in (None, expected)
        if job.out.exists():
            break
    assert file_states(tmp_path / "source") == before
    if not job.out.exists() or staging.exists():
        subprocess.run([*command(job), "--overwrite"], cwd=ROOT, check=True)
    job.check_end()


def test_interrupting_leaves_a_stage_that_resumes(tmp_path: Path) -> None:
    job = make(tmp_path, SCENARIOS["to torch_dist"])

    def interrupt(what: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(progress=interrupt)
    assert not job.out.exists()
    job.run()
    job.check_end()


# ---- W3: a failed fsync


def test_a_failed_flush_is_never_made_good_by_a_second_one(tmp_path: Path) -> None:
    job = make(tmp_path, SCENARIOS["to torch_dist"])
    calm = FaultyFiles()
    job.run(calm)
    rename = calm.calls.index("rename")
    flushes = [n for n, name in enumerate(calm.calls, 1) if name == "fsync"]
    journal = [n for n in flushes if n < rename][-2:]  # its own flush, and its folder's
    for n in flushes:
        Files().remove(job.out)
        with pytest.raises(StorageError) as e:
            job.run(FaultyFiles(n, errno.EIO))
        assert "flush" in e.value.message
        assert (contents(job.out) is None) == (n < rename), n
        if n < rename:
            # What the kernel dropped looks whole in its cache: nothing of it may be relied on.
            report = job.run()
            assert report.resumed_units == 0 or n in journal, n
        else:
            with raises(DestinationError, id="destination-exists"):
                job.run()
        job.check_end(n)


# ---- W4, W5: places


def test_a_rename_that_the_system_refuses(tmp_path: Path) -> None:
    job = make(tmp_path, SCENARIOS["to torch_dist"])
    calm = FaultyFiles()
    job.run(calm)
    Files().remove(job.out)
    for code in (errno.EXDEV, errno.EPERM, errno.EBUSY):
        with pytest.raises(StorageError, match="rename"):
            job.run(FaultyFiles(calm.calls.index("rename") + 1, code))
        assert not job.out.exists()
    assert job.run().resumed_units > 0
    job.check_end()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm to write to")
def test_the_destination_on_another_device(tmp_path: Path) -> None:
    job = make(tmp_path, SCENARIOS["to torch_dist"])
    place = Path("/dev/shm") / f"megtool-{os.getpid()}"
    place.mkdir()
    try:
        (tmp_path / "link").symlink_to(place / "out")
        reshard(tmp_path / "source", tmp_path / "link", **job.options)
        assert contents(place / "out") == job.expected
        assert [p.name for p in place.iterdir()] == ["out"]
    finally:
        shutil.rmtree(place)


# ---- W7: two writers


def test_a_second_writer_fails_at_once(tmp_path: Path) -> None:
    job = make(tmp_path, SCENARIOS["to torch_dist"])
    refused = []

    def second(what: str, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(DestinationError) as e:
                job.run()
            refused.append(e.value)

    job.run(progress=second)
    assert f"process {os.getpid()}" in refused[0].message
    assert refused[0].hint
    job.check_end()


def test_a_lock_left_behind_locks_nobody_out(tmp_path: Path) -> None:
    job = make(tmp_path, SCENARIOS["to torch_dist"])
    (tmp_path / ".out.megtool").mkdir()
    (tmp_path / ".out.megtool" / "lock").write_text("1 elsewhere\n")
    job.run()
    job.check_end()


# ---- W8: durability


def test_every_file_and_folder_is_flushed_before_the_rename(tmp_path: Path) -> None:
    job = make(tmp_path, SCENARIOS["to torch_dist"])
    flushed: list[Path] = []
    renamed: list[int] = []

    class Watching(Files):
        def fsync(self, path: Path) -> None:
            flushed.append(path)
            super().fsync(path)

        def rename(self, source: Path, target: Path, *, replace: bool = True) -> None:
            renamed.append(len(flushed))
            super().rename(source, target, replace=replace)

    job.run(Watching())
    tree = tmp_path / ".out.megtool" / "tree"
    wanted = {tree, *(tree / p.relative_to(job.out) for p in job.out.rglob("*"))}
    assert wanted <= set(flushed[: renamed[-1]])
    assert tmp_path in flushed[renamed[-1] :]
    Files().remove(job.out)
    without = FaultyFiles()
    job.run(without, fsync=False)
    assert "fsync" not in without.calls
    job.check_end()


# ---- W10: the source changes


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def shrink(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def rewrite(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def replace(file: Path) -> None:
    other = file.with_name("other")
    shutil.copy2(file, other)
    other.replace(file)


@pytest.mark.parametrize("digest", ["all", "buffered"])
@pytest.mark.parametrize("change", [grow, shrink, rewrite, replace, Path.unlink])
def test_a_source_that_changes_meanwhile(
    tmp_path: Path, change: Callable[[Path], object], digest: str
) -> None:
    job = make(tmp_path, {"to": "torch_dist", "digest": digest})
    file = tmp_path / "source" / "model.safetensors"
    told = []

    def progress(what: str, done: int, total: int) -> None:
        if not told:
            told.append(done)
            change(file)

    with pytest.raises(SourceChangedError) as e:
        job.run(progress=progress)
    assert str(file) in str(e.value)
    assert not job.out.exists()


def test_an_edited_source_starts_anew(tmp_path: Path) -> None:
    job = make(tmp_path, SCENARIOS["to torch_dist"])
    calm = FaultyFiles()
    job.run(calm)
    Files().remove(job.out)
    before_rename = max(i for i, name in enumerate(calm.calls) if "rename" in name) - 5
    with pytest.raises(Killed):
        job.run(FaultyFiles(before_rename, "kill"))
    assert not job.out.exists()
    shutil.rmtree(tmp_path / "source")
    tiny_llama.save(tmp_path / "source", seed=1, **SMALL)
    assert job.run().resumed_units == 0
    fresh = tmp_path / "fresh"
    reshard(tmp_path / "source", fresh, **job.options)
    assert contents(job.out) == contents(fresh) != job.expected
    assert staging_folders(tmp_path) == []
