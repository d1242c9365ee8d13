"""Runs that a fault interrupts, once for every call that can fail."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool import reshard
from megtool.errors import (
    DestinationError,
    MegtoolError,
    StorageError,
)
from megtool.storage.files import Files
from tests.support.checkpoints.faulty_files import FaultyFiles, Killed
from tests.support.errors import raises
from tests.support.folders import contents, file_states

OLD = {"old.bin": b"old", "deep/older.bin": b"older"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A reshard in a folder of its own, and what it makes of a sound machine."""

    root: Path
    options: dict[str, Any]
    expected: dict[str, bytes]
    source: dict[str, tuple[bytes, int, int]]
    name: str = "out"

    @property
    def out(self) -> Path:
        return self.root / self.name

    def run(self, files: Files | None = None, **more: Any) -> Any:
        return reshard(self.root / "source", self.out, files=files, **self.options, **more)

    def put_old(self) -> dict[str, bytes]:
        """Put something at the destination that is to be replaced."""
        Files().remove(self.out)
        if "" in self.expected:
            self.out.write_bytes(b"old")
            return {"": b"old"}
        for name, data in OLD.items():
            (self.out / name).parent.mkdir(parents=True, exist_ok=True)
            (self.out / name).write_bytes(data)
        return OLD

    def check_end(self, where: object = None) -> None:
        assert contents(self.out) == self.expected, where
        assert sorted(p.name for p in self.root.iterdir()) == sorted([self.name, "source"]), where
        assert file_states(self.root / "source") == self.source, where


def strike(job: Job, fault: int | str, *, old: bool, every: int = 1, lasting: bool = False) -> None:
    """Strike at every n-th call; the destination is as promised, and a second run ends it."""
    before = job.put_old() if old else None
    calm = FaultyFiles()
    job.run(calm, overwrite=old)
    for n in range(1, len(calm.calls) + 1, every):
        where = (n, calm.calls[n - 1])
        if old:
            job.put_old()
        else:
            Files().remove(job.out)
        files = FaultyFiles(n, fault, lasting=lasting)
        try:
            job.run(files, overwrite=old)
            assert contents(job.out) == job.expected, where
        except (MegtoolError, Killed) as e:
            assert fault not in ("short", errno.EINTR), where
            assert isinstance(e, Killed | StorageError | DestinationError), (where, e)
            assert isinstance(e, Killed) or e.file, (where, e)
            assert contents(job.out) in (before, job.expected), where
        assert files.hit, where
        assert file_states(job.root / "source") == job.source, where
        if contents(job.out) == job.expected and not old:
            with raises(DestinationError, id="destination-exists"):
                job.run()
        else:
            job.run(overwrite=old, fsync=False)
        job.check_end(where)
