"""How the part of one worker in a run of several ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megtool.console import several
from megtool.errors import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """How a worker's part in a run ended.

    `published`: it was the last, and has committed the checkpoint. `waiting`: workers `missing` are
    not complete. `publishing`: all are, and another one commits: `publisher`, if that is known.
    `complete`: the checkpoint was there already, from the same plan. `num_bytes` are those of its
    own share. `origin` says what gave `index` and `count`, such as a launcher.
    """

    index: int
    count: int
    state: Literal["published", "waiting", "publishing", "complete"]
    missing: tuple[int, ...] = ()
    publisher: int | None = None
    num_bytes: int = 0
    origin: str = ""

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint is at its destination."""
        return self.state in ("published", "complete")

    def describe(self) -> str:
        """The state as a sentence."""
        who = f"worker {self.index} of {self.count}"
        if self.state == "published":
            return f"{who} was the last: all are complete, and it has published the checkpoint"
        if self.state == "complete":
            return f"{who} had nothing to do: the destination is complete, from the same plan"
        if self.state == "publishing":
            other = "one of them" if self.publisher is None else f"worker {self.publisher}"
            again = "" if self.publisher is None else "; if it was killed, start it again"
            return f"{who} is complete, and so are the others: {other} publishes now{again}"
        done = self.count - len(self.missing)
        origin = f" ({self.origin})" if self.origin else ""
        return (
            f"{who}{origin} is complete: {done} of {several(self.count, 'worker')} are complete; "
            f"missing: {listed([str(n) for n in self.missing], 20)}; the last worker to be "
            "complete publishes, and nothing is at the destination yet"
        )

    def to_json(self) -> dict[str, Any]:
        """The status as plain data."""
        return {
            "index": self.index,
            "count": self.count,
            "state": self.state,
            "missing": list(self.missing),
            "publisher": self.publisher,
            "num_bytes": self.num_bytes,
        }
