"""Shards: a flat tensor's equal parts, one for each rank: summed to their owners, and gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.parallel.process_groups import Group

_tags = count(1)

# The names of torch 2.13 and later, and those of before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def new_tag() -> int:
    """What tells one communication from others of the same group that are under way with it.

    Every rank has to ask for all of its tags in the same order.
    """
    return next(_tags)


@dataclass(slots=True, eq=False)
class Pending:
    """A communication under way: its works, and what is to be done when they have ended."""

    works: list[dist.Work]
    then: Callable[[], Tensor]
    done: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, when it is there; a second call gives it again."""
        if self.done is None:
            while self.works:
                self.works.pop(0).wait()
            self.done = self.then()
        return self.done


def start_reduce_scatter(
    flat: Tensor, group: Group, *, in_fp32: bool, tag: int, by_messages: bool | None = None
) -> Pending:
    """The sum of this rank's part over all ranks, in place of it, under way.

    The result is `flat`'s part, or with `in_fp32` an fp32 tensor where `flat` is none: parts go
    over the wire as they are, and are added in fp32. `flat` must not change before `wait()`, and
    holds undefined values outside of the part after. `tag` is one of `new_tag`.

    `by_messages` (gloo's default, whose own collective takes twice as long) sends each part to its
    owner, which adds them up in the order of ranks: the sum is the one that a single process would
    come to. Otherwise, without `in_fp32`, the order is the backend's.
    """
    local_part = rank_part(flat, group)
    wide = in_fp32 and flat.dtype != torch.float32
    if group.handle is None:
        return Pending([], lambda: local_part.float() if wide else local_part)
    if _sends_messages(group, by_messages):
        received = flat.new_empty((group.size - 1) * local_part.numel())
        rows = list(received.chunk(group.size - 1))
        works: list[dist.Work] = []
        for step in range(1, group.size):
            ahead, behind = (group.rank + step) % group.size, (group.rank - step) % group.size
            row = rows[behind - (behind > group.rank)]
            works += (
                _receive(row, behind, group, tag),
                _send(rank_part(flat, group, ahead), ahead, group, tag),
            )
        parts = [*rows[: group.rank], local_part, *rows[group.rank :]]
        return Pending(works, lambda: _sum_in_rank_order(parts, group.rank, wide=wide))
    if wide:
        gathered = torch.empty_like(flat)
        work = dist.all_to_all_single(gathered, flat, group=group.handle, async_op=True)
        parts = list(gathered.chunk(group.size))
        return Pending([work], lambda: _sum_in_rank_order(parts, group.rank, wide=True))
    work = _reduce_scatter(local_part, flat, group=group.handle, async_op=True)
    return Pending([work], lambda: local_part)


def start_all_gather(
    flat: Tensor, group: Group, *, tag: int, by_messages: bool | None = None
) -> Pending:
    """All ranks' parts, in place of `flat`, of which this rank has its own; under way.

    The result is `flat`, which nobody must touch before `wait()`. With `by_messages` (gloo's
    default, whose own gather passes everything through copies and takes three times as long) each
    rank sends its part to each other one.
    """
    if group.handle is None:
        return Pending([], lambda: flat)
    if not _sends_messages(group, by_messages):
        work = _gather(flat, rank_part(flat, group), group=group.handle, async_op=True)
        return Pending([work], lambda: flat)
    works: list[dist.Work] = []
    local_part = rank_part(flat, group)
    for step in range(1, group.size):
        ahead, behind = (group.rank + step) % group.size, (group.rank - step) % group.size
        works += (
            _receive(rank_part(flat, group, behind), behind, group, tag),
            _send(local_part, ahead, group, tag),
        )
    return Pending(works, lambda: flat)


def rank_part(flat: Tensor, group: Group, rank: int | None = None) -> Tensor:
    """A rank's part of a flat tensor, this one's without `rank`; a view."""
    each = flat.numel() // group.size
    first = (group.rank if rank is None else rank) * each
    return flat[first : first + each]


def _sum_in_rank_order(parts: list[Tensor], rank: int, *, wide: bool) -> Tensor:
    """The sum in the order of ranks; in place of this rank's own part where it is not `wide`."""
    if wide:
        total = parts[0].float()
        for addend in parts[1:]:
            total.add_(addend)
        return total
    # What is added up so far lies in a part that came, until this rank's own is among it.
    total = parts[rank] if rank < 2 else parts[0]
    torch.add(parts[0], parts[1], out=total)
    for i, addend in enumerate(parts[2:], 2):
        into = parts[rank] if i == rank else total
        torch.add(total, addend, out=into)
        total = into
    return total


def _sends_messages(group: Group, by_messages: bool | None) -> bool:
    return dist.get_backend(group.handle) == "gloo" if by_messages is None else by_messages


def _receive(into: Tensor, behind: int, group: Group, tag: int) -> dist.Work:
    # None is for ranks that are not in the group.
    work: Any = dist.irecv(into, group.ranks[behind], group=group.handle, tag=tag)
    return cast(dist.Work, work)


def _send(values: Tensor, ahead: int, group: Group, tag: int) -> dist.Work:
    work: Any = dist.isend(values, group.ranks[ahead], group=group.handle, tag=tag)
    return cast(dist.Work, work)
