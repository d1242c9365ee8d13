"""Reduce-scatter and all-gather of a flat tensor, of which each rank owns an equal part."""

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

# The names in torch 2.13 and later, and in earlier releases.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def new_tag() -> int:
    """A tag that distinguishes concurrent communications of the same group.

    Every rank has to request its tags in the same order.
    """
    return next(_tags)


@dataclass(slots=True, eq=False)
class Pending:
    """A communication under way: its works, and what to do when they are complete."""

    works: list[dist.Work]
    then: Callable[[], Tensor]
    done: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the result; a second call returns it again."""
        if self.done is None:
            while self.works:
                self.works.pop(0).wait()
            self.done = self.then()
        return self.done


def start_reduce_scatter(
    flat: Tensor, group: Group, *, in_fp32: bool, tag: int, by_messages: bool | None = None
) -> Pending:
    """Start to sum this rank's part over all ranks, in place.

    The result is `flat`'s part, or with `in_fp32` an fp32 tensor if `flat` is not fp32: parts are
    sent as they are, and summed in fp32. `flat` must not change before `wait()`, and has undefined
    values outside of the part afterwards. `tag` comes from `new_tag`.

    `by_messages` (the default for gloo, whose own collective takes twice as long) sends each part
    to its owner, which sums them in the order of ranks, as a single process would. Otherwise,
    without `in_fp32`, the backend decides the order.
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
    """Start to gather all ranks' parts in `flat`, which has this rank's part.

    The result is `flat`, which must not be used before `wait()`. With `by_messages` (the default
    for gloo, whose own gather copies everything and takes three times as long) each rank sends its
    part to all others.
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
    """A view of a rank's part of a flat tensor; by default of this rank's."""
    each = flat.numel() // group.size
    first = (group.rank if rank is None else rank) * each
    return flat[first : first + each]


def _sum_in_rank_order(parts: list[Tensor], rank: int, *, wide: bool) -> Tensor:
    """The sum in the order of ranks; in place of this rank's own part unless `wide`."""
    if wide:
        total = parts[0].float()
        for addend in parts[1:]:
            total.add_(addend)
        return total
    # The running sum is in a received part until this rank's own part is added.
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
    # torch returns None on ranks outside of the group.
    work: Any = dist.irecv(into, group.ranks[behind], group=group.handle, tag=tag)
    return cast(dist.Work, work)


def _send(values: Tensor, ahead: int, group: Group, tag: int) -> dist.Work:
    work: Any = dist.isend(values, group.ranks[ahead], group=group.handle, tag=tag)
    return cast(dist.Work, work)
