"""Shards: sums come in fp32 where asked, in the order of ranks, and gathers in place."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megtool.optim import flat_shards
from megtool.optim.flat_shards import (
    new_tag,
    rank_part,
    start_all_gather,
    start_all_gathers,
    start_reduce_scatter,
    start_reduce_scatters,
    sum_in_place,
)
from megtool.parallel.process_groups import Group, ProcessGroups
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.optimizer_layouts import start


def of_rank(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(size * 50, generator=generator) * 10.0**rank).to(dtype)


def sums(rank: int, size: int) -> None:
    group = start().dp
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        everyone = [of_rank(r, size, dtype) for r in range(size)]
        mine = rank_part(everyone[0], group).clone(), rank_part(everyone[0], group).clone().float()
        for other in everyone[1:]:
            mine[0].add_(rank_part(other, group))
            mine[1].add_(rank_part(other, group))
        for in_fp32, by_messages in product((False, True), (None, True, False)):
            flat = everyone[rank].clone()
            how = {"in_fp32": in_fp32, "by_messages": by_messages}
            got = start_reduce_scatter(flat, group, tag=new_tag(), **how).wait()  # type: ignore[arg-type]
            assert got.dtype == (torch.float32 if in_fp32 else dtype)
            if by_messages is False and got.dtype == dtype:  # in the backend's own order
                largest = float(mine[1].abs().max())
                assert float((got - mine[1]).abs().max()) <= 4 * torch.finfo(dtype).eps * largest
            else:
                assert torch.equal(got, mine[in_fp32])
            if got.dtype == dtype:
                assert got.data_ptr() == rank_part(flat, group).data_ptr()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_go_in_the_order_of_ranks(size: int) -> None:
    run_world(sums, size)


def gathers(rank: int, size: int) -> None:
    group = start().dp
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        want = torch.arange(12).repeat_interleave(size).to(dtype)
        flat = torch.zeros_like(want)
        rank_part(flat, group).copy_(rank_part(want, group))
        others = [want.clone() for _ in range(5)]  # several are under way, in any order
        pending = [
            start_all_gather(x, group, tag=new_tag(), by_messages=way)
            for x, way in zip([flat, *others], (None, True, False) * 2, strict=True)
        ]
        for one in reversed(pending):
            assert torch.equal(one.wait(), want)
        assert pending[0].wait() is flat


@pytest.mark.parametrize("size", [2, 3])
def test_parts_come_from_everyone(size: int) -> None:
    run_world(gathers, size)


def coalesced(rank: int, size: int) -> list[set[str]]:
    """Several tensors as one collective, where the backend can: the operations that torch saw."""
    group = start().dp
    flat_shards.sends_messages = lambda *_: False  # type: ignore[assignment]
    everyone = [[of_rank(r + 10 * i, size, torch.float32) for i in range(3)] for r in range(size)]
    want = torch.stack([torch.stack(tensors) for tensors in everyone]).double().sum(0)
    seen = []
    for i, in_fp32 in enumerate((False, True)):
        flats = [x.clone() for x in everyone[rank]]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            pending = start_reduce_scatters(flats, group, in_fp32=in_fp32, tags=[i] * 3)
            parts = [p.wait() for p in pending]
            for part, total in zip(parts, want, strict=True):
                assert torch.allclose(part.double(), rank_part(total, group), rtol=1e-6)
            for p, flat in zip(start_all_gathers(flats, group, tags=[i] * 3), flats, strict=True):
                assert p.wait() is flat
            for flat, total in zip(flats, want, strict=True):
                assert torch.allclose(flat.double(), total, rtol=1e-6)
            sums = [x.clone() for x in everyone[rank]]
            sum_in_place(sums, group)
            assert all(torch.allclose(x.double(), w) for x, w in zip(sums, want, strict=True))
        seen.append({e.name for e in profiler.events() if e.name.startswith("c10d::")})
    return seen


def test_several_tensors_are_one_collective() -> None:
    whole = {
        "c10d::reduce_scatter_tensor_coalesced_",
        "c10d::allgather_into_tensor_coalesced_",
        "c10d::allreduce_coalesced_",
    }
    for seen in run_world(coalesced, 2):
        assert seen == [whole, whole]


def test_alone_nothing_moves() -> None:
    flat = torch.randn(8, dtype=torch.bfloat16)
    group: Group = ProcessGroups.alone().dp
    assert (
        start_reduce_scatter(flat, group, in_fp32=False, tag=0).wait().data_ptr() == flat.data_ptr()
    )
    assert torch.equal(start_reduce_scatter(flat, group, in_fp32=True, tag=0).wait(), flat.float())
    assert start_all_gather(flat, group, tag=0).wait() is flat
