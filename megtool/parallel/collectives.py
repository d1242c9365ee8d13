"""Differentiable sums, gathers and exchanges over a process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megtool.errors import LayoutError
from megtool.parallel.process_groups import Group

# The names of torch 2.13 and later, and those of before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to(x: Tensor, group: Group) -> Tensor:
    """`x`, which every rank has, into a computation of which each rank does a part.

    Gradient: the sum over ranks.
    """
    return _apply(_Copy, x, group)


def reduce_from(x: Tensor, group: Group, *, in_place: bool = False) -> Tensor:
    """The sum of `x` over ranks, equal on all of them. The gradient passes through unchanged.

    `in_place` overwrites `x`, which has to be a fresh result that nothing else will read.
    """
    if _alone(group):
        return x
    return _call(_Reduce, x, group, in_place)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """All ranks' rows, in rank order: `[T, ...]` each becomes `[size * T, ...]`.

    For a computation of which each rank does a part. Gradient: summed, and this rank's rows of it.
    """
    return _apply(_GatherRows, x, group)


def scatter_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's rows of `x`, which every rank has. Gradient: all ranks' rows.

    Raises:
        LayoutError: the group does not divide the number of rows.
    """
    if _alone(group):
        return x
    group.part(x.shape[0], "rows")
    return _call(_ScatterRows, x, group)


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum over ranks. Gradient: all ranks' rows.

    Raises:
        LayoutError: the group does not divide the number of rows.
    """
    if _alone(group):
        return x
    group.part(x.shape[0], "rows")
    return _call(_ReduceScatterRows, x, group)


def gather_columns(x: Tensor, group: Group) -> Tensor:
    """All ranks' columns, in rank order: `[..., C]` each becomes `[..., size * C]`.

    For a computation that every rank does alike. Gradient: this rank's columns of it.
    """
    return _apply(_GatherColumns, x, group)


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Rows exchanged: the first `send[0]` rows go to rank 0, the next `send[1]` to rank 1, ...

    Returns `[sum(receive), ...]`, what rank 0 sent first. Gradient: the same way back.

    Raises:
        LayoutError: `send` does not add up to the rows of `x`, or has not one number per rank.
    """
    if len(send) != group.size or len(receive) != group.size or sum(send) != x.shape[0]:
        raise LayoutError(
            f"{group.size} ranks exchange {x.shape[0]} rows as {list(send)} for {list(receive)}",
            hint="one number of rows for each rank, and those to send add up to all rows",
        )
    if _alone(group):
        return x
    return _call(_AllToAll, x, list(send), list(receive), group)


class Exchange:
    """An `all_to_all` under way; work between its start and `wait` overlaps with it.

    The way back of the gradient is under way during the backward pass of the same work.
    """

    def __init__(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> None:
        self.send, self.receive, self.group = list(send), list(receive), group
        self._pending: tuple[Tensor, dist.Work | None, Tensor] | None = None
        self._received: Tensor | None = _call(_StartExchange, x, self)

    def wait(self) -> Tensor:
        """The rows of all ranks, as `all_to_all` returns them; to be called once."""
        received, self._received = self._received, None  # whose graph refers to this object
        return _call(_EndExchange, received, self)

    def start(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send rows; what is received must not be read before `finish`."""
        x = x.contiguous()
        out = x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(out, x, receive, send, group=self.group.handle, async_op=True)
        self._pending = out, work, x  # which stays in memory until it is sent
        return out

    def finish(self) -> Tensor | None:
        """Wait for what was started last; returns it."""
        if self._pending is None:
            return None
        (out, work, _), self._pending = self._pending, None
        if work is not None:
            work.wait()
        return out


def all_sum(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, without a gradient; `x` is unchanged."""
    return x if _alone(group) else _all_reduce(x.detach(), group)


def all_max(x: Tensor, group: Group) -> Tensor:
    """The maximum over ranks, without a gradient; `x` is unchanged."""
    if _alone(group):
        return x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=dist.ReduceOp.MAX, group=group.handle)
    return out


def start_gather(x: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    """All ranks' rows, under way: read the result after `wait()` of the second. No gradient."""
    x = x.contiguous()
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    return out, _gather(out, x, group=group.handle, async_op=True)


def gather_in_parts(x: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """All ranks' rows as they arrive, beginning with this rank's own: rank, and rows. No gradient.

    Every rank sends its rows to one other at a time, at growing distances; what the caller does
    with rows overlaps with the messages behind them.
    """
    x = x.contiguous()
    under_way: list[tuple[int, Tensor, list[dist.Work]]] = []
    for step in range(1, group.size):
        ahead, behind = (group.rank + step) % group.size, (group.rank - step) % group.size
        rows = torch.empty_like(x)
        messages = [
            dist.P2POp(dist.isend, x, group.ranks[ahead], group.handle),
            dist.P2POp(dist.irecv, rows, group.ranks[behind], group.handle),
        ]
        under_way.append((behind, rows, dist.batch_isend_irecv(messages)))
    yield group.rank, x
    for rank, rows, works in under_way:
        for work in works:
            work.wait()
        yield rank, rows


def start_reduce_scatter(x: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    """This rank's rows of the sum, under way; `x` must not change before `wait()`. No gradient."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return out, _reduce_scatter(out, x, group=group.handle, async_op=True)


def start_shift(x: Tensor, group: Group) -> tuple[Tensor, list[dist.Work]]:
    """What the rank before has, while `x` goes to the rank behind, under way: as `start_gather`.
    All ranks have tensors of one shape. No gradient."""
    x = x.contiguous()
    out = torch.empty_like(x)
    before, behind = (group.ranks[(group.rank + n) % group.size] for n in (-1, 1))
    works: list[dist.Work] = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, behind, group=group.handle),
            dist.P2POp(dist.irecv, out, before, group=group.handle),
        ]
    )
    return out, works


def start_sum(x: Tensor, group: Group) -> dist.Work:
    """The sum over ranks in place of `x`, which has to be contiguous, under way. No gradient."""
    work: dist.Work = dist.all_reduce(x, group=group.handle, async_op=True)
    return work


def _alone(group: Group) -> bool:
    """Nobody else is in the group, so that there is nothing to do.

    Raises:
        LayoutError: there are others, and no connection to them (any more).
    """
    if group.size > 1 and group.handle is None:
        raise LayoutError(
            f"there is no connection to ranks {list(group.ranks)}",
            hint="ProcessGroups.start makes it, and ProcessGroups.stop ends it",
        )
    return group.size == 1


def _all_reduce(x: Tensor, group: Group, *, in_place: bool = False) -> Tensor:
    fresh = x.contiguous()
    if not in_place and fresh.data_ptr() == x.data_ptr():
        fresh = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(fresh, group=group.handle)
    return fresh


def _all_gather(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    _gather(out, x, group=group.handle)
    return out


def _sum_and_scatter(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    _reduce_scatter(out, x, group=group.handle)
    return out


def _exchange(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    x = x.contiguous()
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x, receive, send, group=group.handle)
    return out


def _own_rows(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size, 0)[group.rank].contiguous()


def _call(function: type[torch.autograd.Function], *values: Any) -> Tensor:
    out: Tensor = function.apply(*values)  # type: ignore[no-untyped-call]
    return out


def _apply(function: type[torch.autograd.Function], x: Tensor, group: Group) -> Tensor:
    return x if _alone(group) else _call(function, x, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(g, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, in_place: bool) -> Tensor:
        if in_place and x.is_contiguous():
            ctx.mark_dirty(x)
            dist.all_reduce(x, group=group.handle)
            return x
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return g, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _sum_and_scatter(g, ctx.group), None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own_rows(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _all_gather(g, ctx.group), None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sum_and_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _all_gather(g, ctx.group), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        stacked = _all_gather(x.unsqueeze(0), group)  # [size, ..., C]
        return stacked.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g.chunk(ctx.group.size, -1)[ctx.group.rank].contiguous(), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return _exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(g, ctx.receive, ctx.send, ctx.group), None, None, None


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(x, exchange.send, exchange.receive)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None]:
        return ctx.exchange.finish(), None


class _EndExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.start(g, exchange.receive, exchange.send)
        return g, None
