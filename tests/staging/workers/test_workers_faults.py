"""Workers that die, start twice, late, or with other options: the result is whole or absent."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard
from megtool.errors import DestinationError, FormatError, MegtoolError, StorageError
from megtool.staging.manifest import PUBLISHED
from megtool.storage.files import Files
from tests.support.checkpoints.faulty_files import FaultyFiles, Killed
from tests.support.errors import raises
from tests.support.folders import contents, file_states
from tests.support.models import tiny_llama
from tests.support.runs.worker_runs import run_workers, start_worker, state_of

OPTIONS: dict[str, dict[str, Any]] = {
    "torch_dist": {"to": "torch_dist", "tp": 2},
    "one file": {"to": "safetensors"},
    "compressed": {"to": "zarr", "compress": "zstd"},
}


pytestmark = pytest.mark.usefixtures("small_units")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    return tiny_llama.save(folder, num_hidden_layers=1, vocab_size=64)


class Run:
    """A reshard to be done by workers, and what one process makes of it."""

    def __init__(self, root: Path, source: Path, kind: str) -> None:
        self.source, self.options = source, OPTIONS[kind] | {"threads": 1}
        name = "out.safetensors" if kind == "one file" else "out"
        self.out = root / name
        reshard(source, root / "one" / name, **self.options)
        self.expected = contents(root / "one" / name)

    def worker(self, index: int, count: int = 2, **more: Any) -> Any:
        return reshard(
            self.source, self.out, worker=f"{index}/{count}", **self.options | more
        ).worker

    @property
    def staging(self) -> Path:
        return self.out.parent / f".{self.out.name}.megtool"


@pytest.fixture(params=list(OPTIONS))
def run(request: pytest.FixtureRequest, tmp_path: Path, hf: Path) -> Run:
    return Run(tmp_path, hf, request.param)


@pytest.fixture
def simple(tmp_path: Path, hf: Path) -> Run:
    return Run(tmp_path, hf, "torch_dist")


# ---- every call may be the last


def strike(run: Run, fault: int | str, index: int, *, every: int, old: bool = False) -> None:
    """Strike one of two workers at every n-th call; started again, they end the run."""
    files = Files()

    def prepare() -> None:
        files.remove(run.staging)
        files.remove(run.out)
        if old:
            run.out.mkdir()
            (run.out / "old.bin").write_bytes(b"old")
        if index == 1:  # the second publishes
            assert run.worker(0, overwrite=old).state == "waiting"

    before = {"old.bin": b"old"} if old else None
    prepare()
    calm = FaultyFiles()
    run.worker(index, files=calm, overwrite=old)
    for n in range(1, len(calm.calls) + 1, every):
        where = (n, calm.calls[n - 1])
        prepare()
        faulty = FaultyFiles(n, fault)
        try:
            run.worker(index, files=faulty, overwrite=old)
        except (MegtoolError, Killed) as e:
            assert isinstance(e, Killed | StorageError | DestinationError), (where, e)
        assert faulty.hit, where
        assert contents(run.out) in (before, run.expected), where
        states = [run.worker(k, overwrite=old).state for k in (0, 1)]
        assert contents(run.out) == run.expected, (where, states)
        assert states[1] in ("published", "complete"), where
        assert os.listdir(run.staging) == [PUBLISHED], where


@pytest.mark.parametrize("fault", ["kill", "torn", errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_is_interrupted_anywhere_goes_on(
    run: Run, index: int, fault: int | str
) -> None:
    strike(run, fault, index, every=131)


def test_what_is_replaced_stays_until_all_are_complete(simple: Run) -> None:
    strike(simple, "kill", 1, every=97, old=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "torn", errno.ENOSPC])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("old", [False, True])
def test_every_call_may_be_the_last(run: Run, index: int, fault: int | str, old: bool) -> None:
    if old and run.options["to"] == "safetensors":
        pytest.skip("what is replaced is a folder here")
    strike(run, fault, index, every=1, old=old)


# ---- who may take part


def test_workers_of_another_run_are_refused_and_the_first_goes_on(simple: Run) -> None:
    simple.worker(0)
    before = file_states(simple.staging)
    for more in ({"count": 3}, {"tp": 4}, {"dtype": "float32"}):
        with raises(DestinationError, id="foreign-workers") as caught:
            simple.worker(1, **more)
        assert "megtool clean" in str(caught.value.hint)
    with raises(DestinationError, id="interrupted-run"):
        reshard(simple.source, simple.out, **simple.options)
    with raises(DestinationError, id="interrupted-run"):
        reshard(simple.source, simple.out, **simple.options, overwrite=True)
    after = file_states(simple.staging)
    assert {k: v for k, v in after.items() if k != "lock"} == {
        k: v for k, v in before.items() if k != "lock"
    }
    assert simple.worker(1).state == "published"
    assert contents(simple.out) == simple.expected


def test_workers_do_not_take_over_what_one_process_began(simple: Run) -> None:
    with pytest.raises(Killed):
        reshard(
            simple.source,
            simple.out,
            files=FaultyFiles().killed_at_first("rename"),
            **simple.options,
        )
    with raises(DestinationError, id="interrupted-run"):
        simple.worker(0)
    reshard(simple.source, simple.out, **simple.options)
    assert contents(simple.out) == simple.expected


def test_a_run_that_did_nothing_leaves_nothing(simple: Run, tmp_path: Path) -> None:
    simple.out.mkdir()
    (simple.out / "old.bin").write_bytes(b"old")
    before = sorted(os.listdir(tmp_path))
    with raises(DestinationError, id="destination-exists"):
        simple.worker(0)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_worker_started_twice_is_refused(simple: Run) -> None:
    seen: list[str] = []

    class Waiting(Files):
        def pwrite_all(self, fd: int, data: Any, offset: int) -> None:
            if not seen:
                seen.append("")
                with raises(DestinationError, id="destination-locked") as caught:
                    simple.worker(0)
                seen.append(caught.value.message)
            super().pwrite_all(fd, data, offset)

    # The first writes its journal under its lock.
    assert simple.worker(1).state == "waiting"
    simple.worker(0, files=Waiting())
    assert "worker 0 of 2 is running already" in seen[1]
    assert contents(simple.out) == simple.expected


# ---- after the publication


def test_a_worker_that_is_late_finds_the_result_complete(simple: Run) -> None:
    run_workers("reshard", simple.source, simple.out, 3, **simple.options)
    before = file_states(simple.out)
    for overwrite in (False, True):
        status = simple.worker(1, count=3, overwrite=overwrite)
        assert (status.state, status.is_committed) == ("complete", True)
    assert file_states(simple.out) == before
    with raises(DestinationError, id="destination-exists"):
        simple.worker(0, tp=4)
    with raises(DestinationError, id="destination-exists"):
        reshard(simple.source, simple.out, **simple.options)


def test_a_result_that_was_changed_since_is_not_complete(simple: Run) -> None:
    run_workers("reshard", simple.source, simple.out, 2, **simple.options)
    victim = next(p for p in sorted(simple.out.rglob("*")) if p.is_file())
    victim.write_bytes(b"edited" + victim.read_bytes())
    with raises(DestinationError, id="destination-exists"):
        simple.worker(0)
    run_workers("reshard", simple.source, simple.out, 2, overwrite=True, **simple.options)
    assert contents(simple.out) == simple.expected


def test_one_process_replaces_what_workers_have_written(simple: Run) -> None:
    run_workers("reshard", simple.source, simple.out, 2, **simple.options)
    reshard(simple.source, simple.out, overwrite=True, **simple.options)
    assert contents(simple.out) == simple.expected
    assert not simple.staging.exists()


def test_two_that_find_all_complete_publish_once(simple: Run) -> None:
    simple.worker(1, count=3)
    states: list[str] = []

    def work(index: int) -> None:
        states.append(simple.worker(index, count=3).state)

    for _ in range(8):
        Files().remove(simple.staging)
        Files().remove(simple.out)
        states.clear()
        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert states.count("published") == 1, states
        assert contents(simple.out) == simple.expected


def test_a_damaged_record_is_named_and_can_be_made_again(simple: Run) -> None:
    simple.worker(0)
    record = simple.staging / "worker-0.record"
    record.write_bytes(record.read_bytes().replace(b"tensors", b"tensorz"))
    with raises(FormatError, file=str(record)):
        simple.worker(1)
    record.unlink()
    assert simple.worker(0).state == "published"
    assert contents(simple.out) == simple.expected


# ---- processes that are killed


def kill_at_random(run: Run, seed: int) -> None:
    """Four processes, one of them killed at a random moment and started again."""
    rng = random.Random(seed)
    victim = rng.randrange(4)
    runs = {n: start_worker(run.source, run.out, f"{n}/4", **run.options) for n in range(4)}
    try:
        time.sleep(rng.uniform(0, 3))
        runs[victim].send_signal(signal.SIGKILL)
        runs[victim].communicate()
        was_killed = runs[victim].returncode == -signal.SIGKILL
        states = [state_of(runs[n]) for n in range(4) if n != victim]
        if was_killed:
            states.append(state_of(start_worker(run.source, run.out, f"{victim}/4", **run.options)))
    finally:
        for process in runs.values():
            process.kill()
            process.communicate()
    assert contents(run.out) == run.expected, (seed, states)
    if was_killed:
        assert {"published", "complete"} & {*states}, (seed, states)


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_is_started_again(simple: Run, seed: int) -> None:
    kill_at_random(simple, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 124))
def test_processes_killed_at_any_moment(run: Run, seed: int) -> None:
    kill_at_random(run, seed)


def test_four_processes_at_once(simple: Run) -> None:
    runs = [start_worker(simple.source, simple.out, f"{n}/4", **simple.options) for n in range(4)]
    states = [state_of(process) for process in runs]
    assert states.count("published") == 1, states
    assert contents(simple.out) == simple.expected


def test_a_file_that_somebody_removed_is_not_published_as_zeros(simple: Run) -> None:
    simple.options = {"to": "hf", "max_shard_size": "8KB"}
    simple.worker(0)
    victim = min((simple.staging / "tree").glob("*.safetensors"))
    victim.unlink()
    with raises(FormatError, file=str(victim)) as caught:
        simple.worker(1)
    assert "megtool clean" in str(caught.value.hint)
    assert not simple.out.exists()


def test_what_is_cleaned_away_is_never_published(simple: Run) -> None:
    simple.worker(0)
    removed: list[str] = []

    class Watching(Files):
        def remove(self, path: Path) -> None:
            removed.append(path.name)
            super().remove(path)

    from megtool.staging import left_overs

    (found,) = left_overs.find_left_overs(simple.out)
    assert found.staging == simple.staging
    left_overs._remove_folder(Watching(), simple.staging)
    assert removed.index("worker-0.record") < removed.index("tree")
    assert not simple.staging.exists()
    run_workers("reshard", simple.source, simple.out, 3, **simple.options)
    assert contents(simple.out) == simple.expected


class WithoutLocks(Files):
    """A file system that has no locks."""

    def lock(self, fd: int, *, shared: bool = False) -> bool | None:
        return None


def test_workers_end_on_a_file_system_without_locks(simple: Run) -> None:
    states = [simple.worker(n, count=3, files=WithoutLocks()).state for n in (2, 0, 1, 2)]
    assert states == ["waiting", "waiting", "published", "complete"]
    assert contents(simple.out) == simple.expected


class DyingWithoutLocks(WithoutLocks):
    """It has no locks, and this process dies as it renames the checkpoint."""

    def rename(self, source: Path, target: Path, *, replace: bool = True) -> None:
        if source.name == "tree":
            raise Killed
        super().rename(source, target, replace=replace)


def test_only_the_worker_of_another_host_that_began_to_publish_goes_on(simple: Run) -> None:
    simple.worker(0, files=WithoutLocks())
    with pytest.raises(Killed):
        simple.worker(1, files=DyingWithoutLocks())
    (simple.staging / "publisher").write_text("1 another.host\n")
    for files in (Files(), WithoutLocks()):
        status = simple.worker(0, files=files)
        assert (status.state, status.publisher) == ("publishing", 1)
        assert "start it again" in status.describe()
    assert not simple.out.exists()
    assert simple.worker(1, files=WithoutLocks()).state == "published"
    assert contents(simple.out) == simple.expected


def test_another_worker_of_the_host_publishes_for_one_that_died(simple: Run) -> None:
    simple.worker(0)
    with pytest.raises(Killed):
        simple.worker(1, files=DyingWithoutLocks())
    assert (simple.staging / "publisher").exists()
    assert simple.worker(0).state == "published"
    assert contents(simple.out) == simple.expected


def test_files_of_several_workers_are_locked_while_they_are_written(simple: Run) -> None:
    kinds: dict[str, set[bool]] = {}

    class Watching(Files):
        def lock(self, fd: int, *, shared: bool = False) -> bool | None:
            kinds.setdefault(self._paths[fd].suffix, set()).add(shared)
            return super().lock(fd, shared=shared)

    simple.worker(0, files=Watching())
    assert kinds[".distcp"] == {True}


def test_runs_beside_a_worker_and_around_it_are_refused(simple: Run, tmp_path: Path) -> None:
    simple.out = tmp_path / "parent" / "out"
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "old.bin").write_bytes(b"old")
    refused: list[str] = []

    class Trying(Files):
        def pwrite_all(self, fd: int, data: Any, offset: int) -> None:
            if not refused:
                refused.append("")
                for destination in (simple.out, simple.out.parent):
                    with raises(DestinationError, id="destination-locked"):
                        reshard(simple.source, destination, overwrite=True, **simple.options)
                    refused.append(str(destination))
            super().pwrite_all(fd, data, offset)

    assert simple.worker(0).state == "waiting"
    assert simple.worker(1, files=Trying()).state == "published"
    assert len(refused) == 3
    assert contents(simple.out) == simple.expected
