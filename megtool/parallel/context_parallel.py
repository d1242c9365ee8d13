"""Context parallelism: which tokens of every row a rank has, and how rows are reassembled.

Rows are cut into `2 * cp` equal chunks, of which rank r has number r and number `2 * cp - 1 - r`,
in this order (megatron-core 0.16, `get_batch_on_this_cp_rank`): under a causal mask the work of all
ranks is then the same. Tensors here have rows first and tokens second, `[B, S, ...]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megtool.errors import LayoutError
from megtool.parallel.collectives import all_to_all, gather_columns, gather_rows
from megtool.parallel.process_groups import Group


def chunk_size(tokens: int, cp: int) -> int:
    """The tokens of each of the `2 * cp` chunks of a row.

    Raises:
        LayoutError: they do not go evenly; the hint says which numbers of tokens do.
    """
    unit = 2 * cp
    if tokens % unit:
        below = tokens // unit * unit
        fits = f"{below} or {below + unit}" if below else f"{unit}"
        raise LayoutError(
            f"cp={cp} cuts rows into {unit} equal parts, and {tokens} tokens are not divisible",
            hint=f"rows of a multiple of {unit} tokens: {fits}",
        )
    return tokens // unit


def chunks_of(cp: Group) -> tuple[int, int]:
    """The numbers of a rank's chunks."""
    return cp.rank, 2 * cp.size - 1 - cp.rank


def own_tokens(x_BS: Tensor, cp: Group) -> Tensor:
    """This rank's tokens of full rows: `[B, S / cp, ...]`; batch may be 1.

    Raises:
        LayoutError: rows do not go evenly over the ranks.
    """
    if cp.size == 1:
        return x_BS
    chunk_size(x_BS.shape[1], cp.size)
    parts = x_BS.chunk(2 * cp.size, 1)
    return torch.cat([parts[n] for n in chunks_of(cp)], 1)


def gather_tokens(xs: Sequence[Tensor], cp: Group) -> list[Tensor]:
    """Full rows from every rank's part, by one collective for all of `xs`.

    For a computation of which each rank does a part: gradients are summed over the ranks, each of
    which gets those of its own tokens.
    """
    if cp.size == 1:
        return list(xs)
    rows, tokens = xs[0].shape[:2]
    flat_SBX = torch.cat([x.flatten(2) for x in xs], 2).transpose(0, 1)
    whole_BSX = _in_order(gather_rows(flat_SBX, cp), cp).transpose(0, 1)
    sizes = [x[0, 0].numel() for x in xs]
    parts = torch.split(whole_BSX, sizes, 2)
    return [
        part.reshape(rows, tokens * cp.size, *x.shape[2:])
        for part, x in zip(parts, xs, strict=True)
    ]


def whole_tokens(x_BSX: Tensor, cp: Group) -> Tensor:
    """Full rows from every rank's part, `[B, S / cp, X]`.

    For a computation that every rank does alike: the gradient of each is taken from its own.
    """
    if cp.size == 1:
        return x_BSX
    rows, _, size = x_BSX.shape
    flat = x_BSX.transpose(0, 1).reshape(1, -1)
    return _in_order(gather_columns(flat, cp).view(-1, rows, size), cp).transpose(0, 1)


def share_columns(x_BSX: Tensor, cp: Group) -> Tensor:
    """Full rows of this rank's columns, `[B, S, X / cp]`, from its tokens with all columns.

    For a computation over whole rows that goes by columns, as recurrences do by heads: rank r gets
    the r-th of cp equal runs of columns. `share_tokens` is the way back, and its gradient.
    """
    if cp.size == 1:
        return x_BSX
    rows, tokens, size = x_BSX.shape
    parts = x_BSX.view(rows, tokens, cp.size, size // cp.size).permute(2, 1, 0, 3)
    equal = [tokens] * cp.size
    whole = all_to_all(parts.flatten(0, 1).contiguous(), equal, equal, cp)
    return _in_order(whole, cp).transpose(0, 1)


def share_tokens(x_BSX: Tensor, cp: Group) -> Tensor:
    """This rank's tokens with the columns of all ranks, `[B, S / cp, X * cp]`."""
    if cp.size == 1:
        return x_BSX
    rows, tokens, size = x_BSX.shape
    chunks = x_BSX.transpose(0, 1).chunk(2 * cp.size, 0)
    by_rank = [chunks[n] for r in range(cp.size) for n in (r, 2 * cp.size - 1 - r)]
    equal = [tokens // cp.size] * cp.size
    own = all_to_all(torch.cat(by_rank), equal, equal, cp)
    return own.view(cp.size, -1, rows, size).permute(2, 1, 0, 3).reshape(rows, -1, cp.size * size)


def _in_order(x_S: Tensor, cp: Group) -> Tensor:
    """Tokens (dim 0) of all ranks, one rank's after the other's, in the order of the row."""
    chunks = x_S.chunk(2 * cp.size, 0)
    last = 2 * cp.size - 1
    return torch.cat(
        [chunks[2 * n if n < cp.size else 2 * (last - n) + 1] for n in range(2 * cp.size)]
    )
