"""Reduce-scatter and all-gather of a flat tensor, of which each rank owns an equal part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

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


class Waitable(Protocol):
    """What torch gives for a collective under way, or for several that were sent as one."""

    def wait(self) -> object:
        """Wait until it is complete."""


@dataclass(slots=True, eq=False)
class Pending:
    """A communication under way: its works, and what to do when they are complete."""

    works: list[Waitable]
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
    if sends_messages(group, by_messages):
        received = flat.new_empty((group.size - 1) * local_part.numel())
        rows = list(received.chunk(group.size - 1))
        works: list[Waitable] = []
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
    if not sends_messages(group, by_messages):
        work = _gather(flat, rank_part(flat, group), group=group.handle, async_op=True)
        return Pending([work], lambda: flat)
    works: list[Waitable] = []
    local_part = rank_part(flat, group)
    for step in range(1, group.size):
        ahead, behind = (group.rank + step) % group.size, (group.rank - step) % group.size
        works += (
            _receive(rank_part(flat, group, behind), behind, group, tag),
            _send(local_part, ahead, group, tag),
        )
    return Pending(works, lambda: flat)


def start_reduce_scatters(
    flats: Sequence[Tensor], group: Group, *, in_fp32: bool, tags: Sequence[int]
) -> list[Pending]:
    """`start_reduce_scatter` of several tensors, sent as one collective where the backend can."""
    wide = in_fp32 and any(flat.dtype != torch.float32 for flat in flats)
    if not can_coalesce(flats, group) or wide:
        return [
            start_reduce_scatter(flat, group, in_fp32=in_fp32, tag=tag)
            for flat, tag in zip(flats, tags, strict=True)
        ]
    with _coalescing_manager(group.handle, async_ops=True) as work:
        for flat in flats:
            _reduce_scatter(rank_part(flat, group), flat, group=group.handle, async_op=True)
    return [Pending([work], partial(rank_part, flat, group)) for flat in flats]


def start_all_gathers(
    flats: Sequence[Tensor], group: Group, *, tags: Sequence[int]
) -> list[Pending]:
    """`start_all_gather` of several tensors, sent as one collective where the backend can."""
    if not can_coalesce(flats, group):
        return [
            start_all_gather(flat, group, tag=tag) for flat, tag in zip(flats, tags, strict=True)
        ]
    with _coalescing_manager(group.handle, async_ops=True) as work:
        for flat in flats:
            _gather(flat, rank_part(flat, group), group=group.handle, async_op=True)
    return [Pending([work], partial(_same, flat)) for flat in flats]


def sum_in_place(flats: Sequence[Tensor], group: Group) -> None:
    """Sum several tensors over ranks in place, as one collective."""
    if group.handle is None or not flats:
        return
    with _coalescing_manager(group.handle, async_ops=True) as work:
        for flat in flats:
            dist.all_reduce(flat, group=group.handle, async_op=True)
    work.wait()


def can_coalesce(flats: Sequence[Tensor], group: Group) -> bool:
    """Whether several tensors can be sent as one collective."""
    is_uniform = len({flat.dtype for flat in flats}) == 1
    is_shared = group.handle is not None and not sends_messages(group)
    return len(flats) > 1 and is_uniform and is_shared


def _same(flat: Tensor) -> Tensor:
    return flat


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


def sends_messages(group: Group, by_messages: bool | None = None) -> bool:
    """Whether parts go to their ranks one by one: by default if the backend is gloo."""
    return dist.get_backend(group.handle) == "gloo" if by_messages is None else by_messages


def _receive(into: Tensor, behind: int, group: Group, tag: int) -> dist.Work:
    # torch returns None on ranks outside of the group.
    work: Any = dist.irecv(into, group.ranks[behind], group=group.handle, tag=tag)
    return cast(dist.Work, work)


def _send(values: Tensor, ahead: int, group: Group, tag: int) -> dist.Work:
    work: Any = dist.isend(values, group.ranks[ahead], group=group.handle, tag=tag)
    return cast(dist.Work, work)
