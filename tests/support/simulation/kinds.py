"""The kinds of histories, and the bugs that can be planted under each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tests.support.simulation.planted_local import LOCAL_PLANTS
from tests.support.simulation.planted_store import STORE_PLANTS
from tests.support.simulation.planted_workers import STORE_WORKER_PLANTS, WORKER_PLANTS
from tests.support.simulation.staging_history import StagingHistory
from tests.support.simulation.store_history import StoreHistory
from tests.support.simulation.worker_history import LocalWorkersHistory, StoreWorkersHistory


class History(Protocol):
    """One history, drawn from a seed."""

    kind: str
    events: list[str]

    @property
    def trace(self) -> str:
        """A hash of all that happened."""

    def run(self) -> None:
        """Run it.

        Raises:
            Violation: something that must hold does not.
        """


KINDS: Mapping[str, Callable[[int], History]] = {
    history.kind: history
    for history in (StagingHistory, StoreHistory, LocalWorkersHistory, StoreWorkersHistory)
}
"""Histories by name; without a name, a seed has the kind of its remainder."""

PLANTS: Mapping[str, Mapping[str, Callable[[], AbstractContextManager[Any]]]] = {
    "staging": LOCAL_PLANTS,
    "store": STORE_PLANTS,
    "workers": WORKER_PLANTS,
    "store-workers": STORE_WORKER_PLANTS,
}
"""Planted bugs by the kind of history that finds them."""


def make_history(seed: int, kind: str = "") -> History:
    """The history of a seed."""
    names = list(KINDS)
    return KINDS[kind or names[seed % len(names)]](seed)


def find_plant(name: str) -> Callable[[], AbstractContextManager[Any]]:
    """The patch of a planted bug; none for an empty name.

    Raises:
        KeyError: there is no such bug.
    """
    if not name:
        return contextlib.nullcontext
    return next(plants[name] for plants in PLANTS.values() if name in plants)
