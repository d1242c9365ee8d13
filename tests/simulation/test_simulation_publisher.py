"""A worker that stalls while it publishes into a store, so that another one takes over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.simulation.object_store import StoreFaults
from tests.support.simulation.plans import CurrentDisk
from tests.support.simulation.scheduler import Process
from tests.support.simulation.store_history import EXPIRED_S, OUT, in_store
from tests.support.simulation.worker_history import StoreWorkersHistory, check_workers

TAKEN_OVER_S = 200.0
"""A lease has expired by then, and the one that has stalled still sleeps."""


class StalledPublisher(StoreWorkersHistory):
    """Worker 0 is complete; worker 1 stalls at a request, and worker 0 is started again meanwhile.

    `removals` are the numbers of the requests of worker 1 that remove what it replaces.
    """

    def __init__(self, seed: int, stalls_at: int) -> None:
        super().__init__(seed)
        self.count, self.stalls_at = 2, stalls_at
        self.scheduler.switches = 0.0
        self.running = [self.plan]
        self.removals: set[int] = set()

    def begin(self, number: int, *, stalls_at: int = 0, delay: float = 0.0) -> Process:
        """A worker without faults."""

        def work(process: Process) -> object:
            if delay:
                self.scheduler.sleep(delay)
            return self.work(process, number)

        process = self.scheduler.process(work)
        process.stalls_at = stalls_at
        self.store.faults[process] = StoreFaults(self.rng)
        return process

    def run(self) -> None:
        """Run it; `removals` are known then.

        Raises:
            Violation: something that must hold does not.
        """
        CurrentDisk.disk = self.disk
        delete = self.store.delete
        with in_store(self.scheduler, self.store):
            first = self.begin(0)
            self.scheduler.run(first)
            assert first.error is None
            stalled, other = (
                self.begin(1, stalls_at=self.stalls_at),
                self.begin(0, delay=TAKEN_OVER_S),
            )

            def note(keys: Sequence[str]) -> None:
                if any(key == OUT or key.startswith(f"{OUT}/") for key in keys):
                    self.removals.add(stalled.calls + 1)
                delete(keys)

            self.store.delete = note  # type: ignore[method-assign]
            self.scheduler.run(stalled, other)
            self.calls = stalled.calls
            check_workers(self, {1: stalled, 0: other})
            self.scheduler.seconds += EXPIRED_S
            late = self.begin(1)
            self.scheduler.run(late)
            check_workers(self, {1: late})
        assert self.current() == self.plan.tree, late.error
        assert not self.left_over()


@pytest.mark.parametrize("seed", [8, 18])  # a single file, and a folder
def test_one_that_stalls_removes_nothing_that_another_published(seed: int) -> None:
    whole = StalledPublisher(seed, 0)
    assert whole.overwrite
    whole.run()
    assert whole.removals
    for stalls_at in range(1, whole.calls + 1):
        if stalls_at not in whole.removals:  # a request that is under way cannot be taken back
            StalledPublisher(seed, stalls_at).run()
