"""Ranks: what the processes of a calibration tell each other, and how they fail together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megtool.errors import MegtoolError
from megtool.parallel.process_groups import ProcessGroups


@dataclass(slots=True, kw_only=True)
class RankSync:
    """What the ranks of a calibration tell each other."""

    groups: ProcessGroups

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        world = self.groups.world
        if world.size == 1:
            return [value]
        out: list[Any] = [None] * world.size
        dist.all_gather_object(out, value, group=world.handle)
        return out

    @contextlib.contextmanager
    def raise_together(self) -> Iterator[None]:
        """Every rank has done this without an error, or every rank has the first of the errors.

        It is also where ranks wait for each other, so that none waits long at once.
        """
        fault: MegtoolError | None = None
        try:
            yield
        except MegtoolError as error:
            if self.groups.world.size == 1:
                raise
            fault = error
        for error_ in self.all_gather(fault):
            if error_ is not None:
                raise error_

    def gather_stage(self, value: Any) -> list[Any]:
        """The values of the ranks that have the same layers, in one order on all of them."""
        out = [value]
        for group in (self.groups.tp, self.groups.dp):
            if group.size > 1:
                parts: list[Any] = [None] * group.size
                dist.all_gather_object(parts, out, group=group.handle)
                out = [v for part in parts for v in part]
        return out
