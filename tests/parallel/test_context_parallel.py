"""Which tokens a context-parallel rank has: Megatron's, and all ranks' together are the row."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from megtool.errors import LayoutError
from megtool.options.layout import ParallelConfig
from megtool.parallel.context_parallel import (
    chunk_size,
    gather_tokens,
    own_tokens,
    share_columns,
    share_tokens,
    whole_tokens,
)
from megtool.parallel.process_groups import Group, ProcessGroups
from tests.support.worlds.gloo_world import run_world


def group(size: int, rank: int) -> Group:
    return Group(ranks=tuple(range(size)), rank=rank)


def test_a_rank_has_one_chunk_from_either_end() -> None:
    row = torch.arange(16)[None]
    assert [own_tokens(row, group(4, n)).tolist()[0] for n in range(4)] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]
    assert own_tokens(row, group(1, 0)) is row


def megatron(rank: int, size: int) -> tuple[list[Any], list[Any]]:
    """This rank's tokens, Megatron's and ours."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    groups = ProcessGroups.start(ParallelConfig(cp=size))
    tokens = torch.arange(3 * 24).view(3, 24)
    known = inspect.signature(get_batch_on_this_cp_rank).parameters
    more = {"is_hybrid_cp": False} if "is_hybrid_cp" in known else {}  # of 0.19
    theirs = get_batch_on_this_cp_rank({"tokens": tokens}, cp_group=groups.cp.handle, **more)
    theirs = theirs["tokens"]
    ours = own_tokens(tokens, groups.cp)
    groups.stop()
    return theirs.tolist(), ours.tolist()


@pytest.mark.peers
def test_the_tokens_are_those_that_megatron_gives() -> None:
    pytest.importorskip("megatron.core")
    for theirs, ours in run_world(megatron, 2):
        assert ours == theirs


@pytest.mark.parametrize(("tokens", "fits"), [(18, "16 or 20"), (3, "4")])
def test_rows_that_do_not_go_evenly_are_refused(tokens, fits) -> None:
    with pytest.raises(LayoutError, match=f"{tokens} tokens are not divisible") as e:
        chunk_size(tokens, 2)
    assert (e.value.hint or "").endswith(f": {fits}")


def together(rank: int, size: int) -> Any:
    """Rows put together from all ranks' parts, and the gradients of the parts."""
    groups = ProcessGroups.start(ParallelConfig(cp=size))
    rows = torch.arange(2 * 8 * 3.0).view(2, 8, 3)
    others = -rows[..., :1]
    mine = [own_tokens(x, groups.cp).requires_grad_() for x in (rows, others)]
    got = gather_tokens(mine, groups.cp)
    ((got[0] * rows).sum() + got[1].sum()).backward()
    same = whole_tokens(once := mine[0].detach().requires_grad_(), groups.cp)
    (same * rows).sum().backward()
    found = [t.detach() for t in (*got, same)]
    own = own_tokens(rows, groups.cp)
    sums = mine[0].grad.equal(own * size), mine[1].grad.eq(size).all(), once.grad.equal(own)
    groups.stop()
    return [t.tolist() for t in found], [bool(x) for x in sums]


def test_all_parts_together_are_the_rows() -> None:
    rows = torch.arange(2 * 8 * 3.0).view(2, 8, 3)
    for found, sums in run_world(together, 2):
        assert found == [rows.tolist(), (-rows[..., :1]).tolist(), rows.tolist()]
        assert sums == [True, True, True]


def shared(rank: int, size: int) -> Any:
    """Whole rows of this rank's columns, and its tokens again; gradients come back likewise."""
    groups = ProcessGroups.start(ParallelConfig(cp=size))
    rows = torch.arange(2 * 8 * 4.0).view(2, 8, 4)
    mine = own_tokens(rows, groups.cp).requires_grad_()
    columns = share_columns(mine, groups.cp)
    again = share_tokens(columns, groups.cp)
    (again * mine.detach()).sum().backward()
    groups.stop()
    return [columns.equal(rows.chunk(size, 2)[rank]), again.equal(mine), mine.grad.equal(mine)]


def test_columns_of_whole_rows_are_exchanged_for_tokens() -> None:
    assert run_world(shared, 2) == [[True] * 3] * 2
