"""Whichever call fails or is the last: the destination is absent or complete, a rerun ends it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megtool.errors import DestinationError, FormatError, MegtoolError, StorageError
from megtool.staging.open_stage import open_stage
from megtool.staging.stage import Stage
from megtool.storage.files import Files
from tests.support.checkpoints.faulty_files import FaultyFiles, Killed
from tests.support.errors import raises
from tests.support.paths import ROOT

UNIT = 5000
NAMES = ("a.bin", "deep/b.bin")
CONTENT = {
    **{name: bytes([65 + n]) * 2 * UNIT for n, name in enumerate(NAMES)},
    "config.json": b"{}",
}
OLD = {"old.bin": b"old", "deep/b.bin": b"old b"}


def save(folder: Path, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def load(folder: Path) -> dict[str, bytes] | None:
    """Contents of all files below a folder; None where there is none."""
    if not folder.exists():
        return None
    found = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def reshard(files: Files, root: Path, *, overwrite: bool = False) -> Stage:
    """A job in units: copies `root/source` to `root/out`, two files by size, one at once."""
    source = root / "source"
    stage = open_stage(
        root / "out",
        files=files,
        fingerprint="f",
        overwrite=overwrite,
        sources=[source],
    )
    with stage:
        stage.require_space(3 * 2 * UNIT)
        paths = [stage.create(name, 2 * UNIT) for name in NAMES]
        stage.write("config.json", CONTENT["config.json"])
        for unit in range(4):
            if unit in stage.resumed:
                continue
            read = files.open_read(source / NAMES[unit // 2])
            write = files.open_write(paths[unit // 2])
            files.copy_range(read, unit % 2 * UNIT, write, unit % 2 * UNIT, UNIT)
            files.close(read)
            files.close(write)
            stage.finish(unit)
        stage.commit()
    return stage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "source", CONTENT)
    return tmp_path


def count(root: Path, *, old: bool) -> list[str]:
    if old:
        save(root / "out", OLD)
    files = FaultyFiles()
    reshard(files, root, overwrite=old)
    assert load(root / "out") == CONTENT
    Files().remove(root / "out")
    return files.calls


def check_faults(root: Path, fault: int | str, *, old: bool, lasting: bool = False) -> None:
    """Strike at every call; then the destination is as promised and a second run completes it."""
    out = root / "out"
    calls = count(root, old=old)
    for n in range(1, len(calls) + 1):
        if old:
            save(out, OLD)
        files = FaultyFiles(n, fault, lasting=lasting)
        try:
            reshard(files, root, overwrite=old)
            assert load(out) == CONTENT, (n, calls[n - 1])
        except (MegtoolError, Killed) as e:
            where = (n, calls[n - 1], e)
            assert fault not in ("short", errno.EINTR), where
            assert load(out) in ((OLD, CONTENT) if old else (None, CONTENT)), where
        assert files.hit
        assert load(root / "source") == CONTENT
        again = FaultyFiles()
        if load(out) == CONTENT and not old:
            with raises(DestinationError, id="destination-exists"):
                reshard(again, root)
        else:
            stage = reshard(again, root, overwrite=old)
            finished = again.calls.count("copy_file_range")
            assert finished == 4 - len(stage.resumed), (n, calls[n - 1])
        assert load(out) == CONTENT, (n, calls[n - 1])
        assert sorted(os.listdir(root)) == ["out", "source"], (n, calls[n - 1])
        Files().remove(out)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "fault",
    [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR, "short", "kill", "torn"],
)
def test_one_fault_at_every_call(root: Path, fault: int | str, old: bool) -> None:
    check_faults(root, fault, old=old)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_lasting_fault_from_every_call_on(root: Path, code: int) -> None:
    check_faults(root, code, old=False, lasting=True)


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.8, 0.9, 0.97])
def test_a_real_kill(root: Path, share: float) -> None:
    n = int(len(count(root, old=False)) * share)
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.staging.test_stage import FaultyFiles, reshard\n"
        f"reshard(FaultyFiles({n}, 'SIGKILL'), Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root)], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert load(root / "out") in (None, CONTENT)
    if load(root / "out") is None:
        stage = reshard(Files(), root)
        assert stage.resumed or share < 0.6
    assert load(root / "out") == CONTENT


# ---- resuming


def stop_after(root: Path, units: int, **changes: str) -> Stage:
    stage = open_stage(root / "out", files=Files(), fingerprint=changes.get("fingerprint", "f"))

    def work() -> None:
        with stage:
            stage.create("a.bin", 10)
            for unit in range(units):
                stage.finish(unit, f"note {unit}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    return stage


def test_a_stopped_run_says_how_to_resume(root: Path) -> None:
    stage = stop_after(root, 3)
    assert f"3 finished parts are kept in {root / '.out.megtool'}" in stage.messages[-1]
    with open_stage(root / "out", files=Files(), fingerprint="f") as again:
        assert again.resumed == {0, 1, 2}
        assert again.place.notes[2] == "note 2"
        assert again.messages == ["resuming: 3 parts are finished already"]


def test_a_run_that_finished_nothing_leaves_nothing(root: Path) -> None:
    stage = open_stage(root / "new" / "er" / "out", files=Files(), fingerprint="f")
    with raises(StorageError, id="no-space"), stage:
        stage.require_space(1 << 60)
    assert os.listdir(root) == ["source"]


def test_another_job_starts_anew(root: Path) -> None:
    stop_after(root, 3, fingerprint="another")
    with open_stage(root / "out", files=Files(), fingerprint="f") as stage:
        assert not stage.resumed
        assert "discarded 3 finished parts" in stage.messages[0]
        assert load(stage.tree) == {}


def test_what_a_restart_of_the_machine_may_have_lost_is_done_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_stage(root / "out", files=Files(), fingerprint="f") as stage:
        stage.write("a.bin", b"a")
        stage.finish(0)
        stage.place.flush(threads=2)
        stage.finish(1)
    monkeypatch.setattr("megtool.staging.folder.journal.boot_id", lambda _: "another")
    with open_stage(root / "out", files=Files(), fingerprint="f") as stage:
        assert stage.resumed == {0}
        assert "1 parts may not have reached the disk" in stage.messages[0]


def test_discard_leaves_nothing(root: Path) -> None:
    stop_after(root, 3)
    with open_stage(root / "out", files=Files(), fingerprint="f") as stage:
        stage.discard()
    assert os.listdir(root) == ["source"]


# ---- committing


def test_everything_is_flushed_before_and_after_the_rename(root: Path) -> None:
    flushed: list[str] = []

    class Watching(Files):
        def fsync(self, path: Path) -> None:
            flushed.append(path.relative_to(root).as_posix())
            super().fsync(path)

        def rename(self, source: Path, target: Path, *, replace: bool = True) -> None:
            flushed.append("rename")
            super().rename(source, target, replace=replace)

    reshard(Watching(), root)
    before, after = flushed[: flushed.index("rename")], flushed[flushed.index("rename") + 1 :]
    tree = ".out.megtool/tree"
    expected = [f"{tree}/{name}" for name in CONTENT]
    expected += [tree, f"{tree}/deep", ".out.megtool/journal", ".out.megtool"]
    assert sorted(before) == sorted(expected)
    assert after == [".", ".out.megtool"]


def test_without_fsync_nothing_is_flushed(root: Path) -> None:
    files = FaultyFiles()
    with open_stage(root / "out", files=files, fingerprint="f") as stage:
        stage.write("a", b"a")
        stage.commit(fsync=False)
    assert "fsync" not in files.calls
    assert load(root / "out") == {"a": b"a"}


def test_new_folders_above_are_flushed_as_well(root: Path) -> None:
    files = FaultyFiles()
    with open_stage(root / "x" / "y" / "out", files=files, fingerprint="f") as stage:
        stage.commit()
    assert files.calls.count("fsync") == 1 + 2 + 3 + 1  # tree; journal, stage; y, x, root; stage
    assert load(root / "x" / "y" / "out") == {}


class NoExchange(FaultyFiles):
    """A file system that cannot exchange names."""

    def exchange(self, one: Path, two: Path) -> bool:
        return False


def test_overwriting_without_exchange_puts_the_old_back(root: Path) -> None:
    out = root / "out"
    save(out, OLD)
    files = NoExchange()
    reshard(files, root, overwrite=True)
    assert load(out) == CONTENT
    calls = files.calls
    absent = 0
    for fault in ("kill", errno.EIO):
        for n in range(1, len(calls) + 1):
            Files().remove(out)
            save(out, OLD)
            with Quiet():
                reshard(NoExchange(n, fault), root, overwrite=True)
            absent += load(out) is None
            assert load(out) in (None, OLD, CONTENT)
            reshard(NoExchange(), root, overwrite=True)
            assert load(out) == CONTENT
            assert sorted(os.listdir(root)) == ["out", "source"]
    assert absent <= 3


class Quiet:
    """Lets a fault pass that may or may not surface."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, MegtoolError | Killed)


def test_a_single_file_is_a_checkpoint_too(root: Path) -> None:
    out = root / "out.safetensors"
    for text in (b"first", b"second"):
        stage = open_stage(out, files=Files(), fingerprint="f", is_file=True, overwrite=True)
        with stage:
            stage.create("", 10)
            stage.write("", text)
            stage.finish(0)
            stage.commit()
        assert out.read_bytes() == text
    assert sorted(os.listdir(root)) == ["out.safetensors", "source"]


def test_what_appears_meanwhile_is_not_replaced(root: Path) -> None:
    out = root / "out"
    with open_stage(out, files=Files(), fingerprint="f") as stage:
        stage.write("a", b"a")
        stage.finish(0)
        save(out, OLD)
        with raises(DestinationError, id="destination-exists"):
            stage.commit()
    assert load(out) == OLD


def test_modes_respect_the_umask(root: Path) -> None:
    old = os.umask(0o027)
    try:
        reshard(Files(), root)
    finally:
        os.umask(old)
    modes = {p.name: oct(p.stat().st_mode)[-3:] for p in (root / "out").rglob("*")}
    assert modes == {
        "deep": "750",
        **dict.fromkeys(["a.bin", "b.bin", "config.json"], "640"),
    }


def test_a_linked_destination_is_followed(root: Path) -> None:
    (root / "out").symlink_to("disk/real")
    reshard(Files(), root)
    assert (root / "out").is_symlink()
    assert load(root / "disk" / "real") == CONTENT
    save(root / "disk" / "real", {"stale": b""})
    with raises(DestinationError, id="destination-exists"):
        reshard(Files(), root)
    reshard(Files(), root, overwrite=True)
    assert load(root / "out") == CONTENT
    assert os.listdir(root / "disk") == ["real"]


@pytest.mark.parametrize("name", ["", "..", "../x", "a/../../x", "/etc/x", "a\0b"])
def test_no_path_leads_out(root: Path, name: str) -> None:
    with (
        open_stage(root / "out", files=Files(), fingerprint="f") as stage,
        raises(FormatError, id="unsafe-path"),
    ):
        stage.path(name)


def test_left_overs_that_cannot_be_removed_are_told_only(root: Path) -> None:
    save(root / "out", OLD)
    files = FaultyFiles()
    reshard(files, root, overwrite=True)
    removal = len(files.calls) - files.calls[::-1].index("unlink")
    Files().remove(root / "out")
    save(root / "out", OLD)
    stage = reshard(FaultyFiles(removal, errno.EIO), root, overwrite=True)
    assert load(root / "out") == CONTENT
    assert "left-overs remain" in stage.messages[-1]
