"""Collectives on real gloo processes against one process that holds every rank's tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig
from megtool.parallel.collectives import (
    all_max,
    all_sum,
    all_to_all,
    copy_to,
    gather_columns,
    gather_rows,
    reduce_from,
    reduce_scatter_rows,
    scatter_rows,
)
from megtool.parallel.process_groups import ALONE, ProcessGroups
from tests.support.worlds.gloo_world import run_world

Whole = Callable[[list[Tensor]], list[Tensor]]


def exchanged(xs: list[Tensor]) -> list[Tensor]:
    """What each rank gets if rank s sends `rows(s, r)` rows to rank r."""
    size = len(xs)
    parts = [x.split([rows(s, r) for r in range(size)]) for s, x in enumerate(xs)]
    return [torch.cat([parts[s][r] for s in range(size)]) for r in range(size)]


def rows(sender: int, receiver: int) -> int:
    return (sender * 2 + receiver * 3) % 4  # unequal, and none between some


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


# What a collective means in one process: every rank's tensors in, every rank's tensors out.
# `shared` ones take a tensor that all ranks have, `alike` ones give such a tensor.
MEANING: dict[str, Whole] = {
    "copy_to": lambda xs: xs,
    "reduce_from": lambda xs: [total(xs)] * len(xs),
    "gather_rows": lambda xs: [torch.cat(xs)] * len(xs),
    "scatter_rows": lambda xs: [x.chunk(len(xs))[r] for r, x in enumerate(xs)],
    "reduce_scatter_rows": lambda xs: list(total(xs).chunk(len(xs))),
    "gather_columns": lambda xs: [torch.cat(xs, -1)] * len(xs),
    "all_to_all": exchanged,
}
SHARED = {"copy_to", "scatter_rows"}
ALIKE = {"reduce_from", "gather_columns"}
OWN = {
    f.__name__: f for f in (copy_to, gather_rows, scatter_rows, reduce_scatter_rows, gather_columns)
} | {"reduce_from": lambda x, group: reduce_from(x * 1, group, in_place=True)}


def one(name: str, dtype: torch.dtype, contiguous: bool, groups: ProcessGroups) -> None:
    """One collective, forward and backward, against its meaning."""
    group, size = groups.tp, groups.tp.size
    torch.manual_seed(1)
    num = [size * 2] * size
    if name == "all_to_all":
        num = [sum(rows(s, r) for r in range(size)) for s in range(size)]
    every = [torch.randn(n, 3, dtype=dtype).requires_grad_() for n in num]
    if name in SHARED:
        every = [every[0]] * size
    meant = MEANING[name](every)
    weights = [torch.randn_like(y) for y in meant]
    if name in ALIKE:
        weights = [weights[0]] * size
    parts = [(w * y).sum() for w, y in zip(weights, meant, strict=True)]
    (parts[0] if name in ALIKE else torch.stack(parts).sum()).backward()

    x = every[group.rank].detach().clone()
    if not contiguous:
        x = torch.stack([x, x], -1)[..., 0]
    x.requires_grad_()
    weight = weights[group.rank]
    if name == "all_to_all":
        send = [rows(group.rank, r) for r in range(size)]
        receive = [rows(s, group.rank) for s in range(size)]
        y = all_to_all(x, send, receive, group)
    else:
        y = OWN[name](x, group)
    (weight * y).sum().backward()
    # bfloat16 has 8 bits, and sums round in an order of their own
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 0.1}
    torch.testing.assert_close(y, meant[group.rank], **tolerance)
    torch.testing.assert_close(x.grad, every[group.rank].grad, **tolerance)


def everything(rank: int, size: int) -> None:
    groups = ProcessGroups.start(ParallelConfig(tp=size))
    for name in MEANING:
        for dtype in (torch.float32, torch.bfloat16):
            for contiguous in (True, False):
                one(name, dtype, contiguous, groups)
    x = torch.tensor([float(rank), -float(rank)], requires_grad=True)
    assert all_max(x, groups.tp).tolist() == [size - 1, 0]
    assert all_sum(x, groups.tp).tolist() == [sum(range(size)), -sum(range(size))]
    assert all_sum(torch.tensor([rank]), groups.tp).tolist() == [sum(range(size))]
    assert x.tolist() == [rank, -rank]  # kept
    kept = torch.ones(2, requires_grad=True)
    assert reduce_from(kept, groups.tp).tolist() == [size, size]
    assert kept.tolist() == [1, 1]
    for cut in (scatter_rows, reduce_scatter_rows):
        with pytest.raises(LayoutError, match=f"group of {size} does not divide rows=7"):
            cut(torch.zeros(7, 2), groups.tp)
    with pytest.raises(LayoutError, match="exchange 7 rows"):
        all_to_all(torch.zeros(7, 2), [1] * size, [1] * size, groups.tp)


@pytest.mark.parametrize("size", [2, 4])
def test_values_and_gradients_equal_one_process(size: int) -> None:
    run_world(everything, size)


def test_a_group_of_one_is_the_identity() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for name in MEANING:
        if name != "all_to_all":
            assert (OWN[name](x, ALONE) is x) == (name != "reduce_from")
    assert reduce_from(x, ALONE) is all_to_all(x, [3], [3], ALONE) is x
    assert all_sum(x, ALONE) is all_max(x, ALONE) is x
