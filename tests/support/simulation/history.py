"""What histories of all kinds have in common: what is drawn from a seed first, and the trace."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

from tests.support.simulation.disk import SimulatedDisk
from tests.support.simulation.plans import NUM_PLANS, TinyPlan, Tree
from tests.support.simulation.scheduler import Scheduler


class SeededHistory:
    """One history, drawn from a seed. `events` says what happened, and `trace` is a hash of it.

    `possible` is what a reader may see while no run is under way, and `running` are the plans of
    the runs that are.
    """

    disk: SimulatedDisk
    plan: TinyPlan
    other: TinyPlan

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.events: list[str] = []
        self.scheduler = Scheduler(self.rng)
        self.overwrite = False
        self.possible: list[Tree | None] = [None]
        self.running: list[TinyPlan] = []

    @property
    def trace(self) -> str:
        """A hash of all events, and of the time, which every call takes."""
        text = "\n".join([*self.events, repr(self.scheduler.seconds), repr(self.rng.random())])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def draw_plans(self, planned: Callable[[int], TinyPlan]) -> None:
        """Draw the plan, and another one of the same kind; their sources are on the disk."""
        first = self.rng.randrange(NUM_PLANS)
        self.plan = planned(first)
        others = [n for n in range(NUM_PLANS) if (n % 6 == 5) == self.plan.is_file and n != first]
        self.other = planned(self.rng.choice(others))
        for tiny in (self.plan, self.other):
            for path, data in tiny.source.items():
                self.disk.put(path, data)

    def draw_former(
        self, share: float, old: Tree, out: str, put: Callable[[str, bytes], object]
    ) -> None:
        """Let a `share` of runs overwrite; most of them find a former checkpoint at `out`."""
        self.overwrite = self.rng.random() < share
        if self.overwrite and self.rng.random() < 0.8:
            old = {"": b"former" * 30} if self.plan.is_file else old
            for path, data in old.items():
                put(f"{out}/{path}".rstrip("/"), data)
            self.possible = [old]


def describe(tree: Tree | None) -> str:
    """A tree in a few words."""
    if tree is None:
        return "nothing"
    return ", ".join(f"{name} ({len(data)})" for name, data in sorted(tree.items())) or "no files"
