"""Simulated processes, of which one runs at a time, and a clock: all drawn from one seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Killed(BaseException):
    """The process is gone: nothing that it would still do reaches the system."""


class Process:
    """A simulated process: a call that runs until it ends, fails, or is killed.

    `calls` counts its system calls and requests. It dies at number `dies_at`, if not 0, and stops
    for a long time at number `stalls_at`. `memory` is what is global in a process.
    """

    def __init__(self, scheduler: Scheduler, number: int, work: Callable[[Process], Any]) -> None:
        self.number = number
        self.calls = 0
        self.dies_at = self.stalls_at = self.intruded_at = 0
        self.memory: dict[str, Any] = {}
        self.slowness = 1.0
        self.is_dead = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.is_done = False
        self.wakes_at = 0.0
        self.on_death: list[Callable[[], None]] = []
        self._scheduler, self._work = scheduler, work
        self._baton = threading.Lock()
        self._baton.acquire()
        self._thread: threading.Thread | None = None

    def step(self) -> None:
        """Begin a system call or a request: others may run first, and the process may die.

        Raises:
            Killed: it has died.
        """
        if self.is_dead:
            raise Killed
        self.calls += 1
        if self.calls == self.dies_at:
            self.die()
        if self.calls == self.stalls_at:
            self._scheduler.sleep(300.0)
        self._scheduler.pause(self)
        if self.is_dead:
            raise Killed

    def die(self) -> None:
        """End at once.

        Raises:
            Killed: always.
        """
        self.kill()
        raise Killed

    def kill(self) -> None:
        """End at its next call; what it has open is closed now."""
        if not self.is_dead and not self.is_done:
            self.is_dead = True
            for act in self.on_death:
                act()

    def run(self) -> None:
        """Do the work in this thread."""
        try:
            self.result = self._work(self)
        except BaseException as e:
            self.error = e
        self.is_done = True

    def resume(self) -> None:
        """Run in the process's own thread until it pauses or ends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._enter, daemon=True)
            self._thread.start()
        else:
            self._baton.release()
        self._scheduler.baton.acquire()

    def _enter(self) -> None:
        self._scheduler.local.process = self
        self.run()
        self._scheduler.baton.release()

    def give_way(self) -> None:
        """Let the scheduler choose again."""
        self._scheduler.baton.release()
        self._baton.acquire()


class Scheduler:
    """Runs processes, one at a time, in an order drawn from a seed, against a simulated clock.

    The wall clock may jump; the monotonic one only goes on.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.seconds = 1000.0
        self.wall_offset = 0.0
        self.baton = threading.Lock()
        self.baton.acquire()
        self.local = threading.local()
        self.current: Process | None = None
        self.switches = 0.3
        self.jumps = 0.0
        self.alive: list[Process] = []
        self._is_alone = True
        self._numbers = 1000
        self.time = SimpleNamespace(
            sleep=self.sleep,
            monotonic=lambda: self.seconds,
            time_ns=self.time_ns,
            time=lambda: self.time_ns() / 1e9,
        )

    def time_ns(self) -> int:
        """The wall clock."""
        return int((self.seconds + self.wall_offset) * 1e9) + 10**18

    def process(self, work: Callable[[Process], Any]) -> Process:
        """A new process, which `run` runs."""
        self._numbers += 1
        return Process(self, self._numbers, work)

    def run(self, *processes: Process) -> None:
        """Run processes until all have ended."""
        self._is_alone = len(processes) == 1
        self.alive = waiting = list(processes)
        if self._is_alone:
            self.current = processes[0]
            processes[0].run()
            self.alive, self.current = [], None
            return
        while waiting:
            ready = [p for p in waiting if p.wakes_at <= self.seconds]
            if not ready:
                self.seconds = min(p.wakes_at for p in waiting)
                continue
            weights = [1 / p.slowness for p in ready]
            (self.current,) = self.rng.choices(ready, weights)
            self.current.resume()
            if self.current.is_done:
                waiting.remove(self.current)
        self.current = None

    def pause(self, process: Process) -> None:
        """Time passes; another process may run."""
        self.seconds += 0.001
        if self.jumps and self.rng.random() < self.jumps:
            self.wall_offset += self.rng.choice((-3600.0, -1.0, 1.0, 86400.0))
        if not self._is_alone and self.rng.random() < self.switches:
            process.give_way()

    def sleep(self, seconds: float) -> None:
        """Let time pass in the current process."""
        if self._is_alone or self.current is None:
            self.seconds += seconds
            return
        process = self.current
        process.wakes_at = self.seconds + seconds
        process.give_way()
        if process.is_dead:
            raise Killed
