"""Synchronization of the ranks of a calibration, including errors."""

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
    """Exchanges Python objects and errors between the ranks of a calibration."""

    groups: ProcessGroups

    def all_gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks."""
        world = self.groups.world
        if world.size == 1:
            return [value]
        out: list[Any] = [None] * world.size
        dist.all_gather_object(out, value, group=world.handle)
        return out

    @contextlib.contextmanager
    def raise_together(self) -> Iterator[None]:
        """Run the body on every rank; if any fails, raise the first error on all of them.

        Also a barrier, which keeps ranks from waiting too long in a later collective.
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
        """Gather the values of the ranks of this pipeline stage, in the same order on all."""
        out = [value]
        for group in (self.groups.tp, self.groups.replicas):
            if group.size > 1:
                parts: list[Any] = [None] * group.size
                dist.all_gather_object(parts, out, group=group.handle)
                out = [v for part in parts for v in part]
        return out
