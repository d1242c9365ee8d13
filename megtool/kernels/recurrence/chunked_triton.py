"""Pieces of the Triton kernels of recurrences: rows, decays and sums of logarithms of a chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.kernels.launch import cdiv, is_interpreted, launch, power

if TYPE_CHECKING:
    import triton.language as tl


def dot_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype of factors of matrix products, whose sums are in fp32.

    bf16 for bf16. Numbers in fp16 are multiplied as fp32 (TF32 on a GPU): decays times gradients
    leave its range.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def dot_sizes(dtype: torch.dtype) -> dict[str, Any]:
    """DOT (Triton's dtype) and PRECISION of `product`, of inputs in `dtype`."""
    import triton.language as tl

    if dtype == torch.bfloat16:
        return {"DOT": tl.bfloat16, "PRECISION": "widened" if is_interpreted() else "tf32"}
    return {"DOT": tl.float32, "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32"}


def column_sums(x_BSN: Tensor, chunk: int) -> Tensor:
    """Sums of each chunk's tokens up to each token (fp32)."""
    out = torch.empty(x_BSN.shape, dtype=torch.float32, device=x_BSN.device)
    rows, tokens, heads = x_BSN.shape
    programs = rows * heads * cdiv(tokens, chunk)
    sizes = {"CHUNK": chunk, "num_warps": 1}
    launch(_sum_columns, programs, x_BSN.device, x_BSN.contiguous(), out, tokens, heads, **sizes)
    return out


def log_gradients(d_sums_BSN: Tensor, fed_BSN: Tensor, carried_BNZ: Tensor, chunk: int) -> Tensor:
    """Gradients of logarithms of decays, from those of what they scale.

    The sum of logarithms up to a token scales what the token reads (`d_sums`), and the sum of those
    after a token what it adds to the state at the end of its chunk (`fed`); all of a chunk's scale
    the state that it begins with (`carried`, [B, N, Z] of Z chunks).
    """
    out = torch.empty_like(d_sums_BSN)
    rows, tokens, heads = out.shape
    launch(
        _log_gradients,
        rows * heads * cdiv(tokens, chunk),
        out.device,
        d_sums_BSN,
        fed_BSN,
        carried_BNZ,
        out,
        tokens,
        heads,
        CHUNK=chunk,
        num_warps=1,
    )
    return out


def block(size: int, most: int) -> int:
    """A tile's columns: a power of two from 16 to `most`."""
    return min(max(16, power(size)), most)


def _sum_columns(
    x_ptr: Any, out_ptr: Any, num_tokens: Any, num_heads: Any, CHUNK: tl.constexpr
) -> None:
    """One chunk of one head."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    head, start = program // num_chunks, (program % num_chunks) * CHUNK
    row, head = head // num_heads, head % num_heads
    x = load_column(x_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    store_column(out_ptr, tl.cumsum(x, 0), row, head, start, num_tokens, num_heads, CHUNK)


def _log_gradients(
    d_sums_ptr: Any,
    fed_ptr: Any,
    carried_ptr: Any,
    out_ptr: Any,
    num_tokens: Any,
    num_heads: Any,
    CHUNK: tl.constexpr,
) -> None:
    """One chunk of one head."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    head, start = program // num_chunks, (program % num_chunks) * CHUNK
    row, head = head // num_heads, head % num_heads
    sums = load_column(d_sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    fed = load_column(fed_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    after = tl.cumsum(sums, 0, reverse=True)
    before = tl.cumsum(fed, 0) - fed
    out = after + before + tl.load(carried_ptr + program)
    store_column(out_ptr, out, row, head, start, num_tokens, num_heads, CHUNK)


def product(a: Any, b: Any, DOT: tl.constexpr, PRECISION: tl.constexpr) -> Any:
    """A matrix product in fp32 of factors that are rounded to DOT."""
    a, b = a.to(DOT), b.to(DOT)
    if PRECISION == "widened":  # the interpreter would multiply the bits of bf16
        out = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        out = tl.dot(a, b, input_precision=PRECISION)
    return out


def load_column(
    ptr: Any,
    row: Any,
    head: Any,
    start: Any,
    num_tokens: Any,
    num_heads: Any,
    TILE: tl.constexpr,
) -> Any:
    """The numbers of one head, one for each token of a tile, in fp32; zeros beyond the last."""
    place = tl.arange(0, TILE)
    ptr += (row * num_tokens + start) * num_heads + head
    inside = place < num_tokens - start
    return tl.load(ptr + place * num_heads, mask=inside, other=0.0).to(tl.float32)


def store_column(
    ptr: Any,
    values: Any,
    row: Any,
    head: Any,
    start: Any,
    num_tokens: Any,
    num_heads: Any,
    TILE: tl.constexpr,
) -> None:
    """The way back of `load_column`."""
    place = tl.arange(0, TILE)
    ptr += (row * num_tokens + start) * num_heads + head
    values = values.to(ptr.dtype.element_ty)
    tl.store(ptr + place * num_heads, values, mask=place < num_tokens - start)


def load_rows(
    ptr: Any,
    row: Any,
    part: Any,
    start: Any,
    first: Any,
    num_tokens: Any,
    num_parts: Any,
    size: Any,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Elements from `first` on of one head or group, for the tokens of a tile, as stored.

    The tile's first element is found in 64 bits, the others from it in 32, which spares registers.
    """
    place, col = tl.arange(0, TILE), tl.arange(0, BLOCK)
    ptr += ((row * num_tokens + start) * num_parts + part) * size + first
    inside = (place < num_tokens - start)[:, None] & (col < size - first)[None, :]
    return tl.load(ptr + place[:, None] * (num_parts * size) + col[None, :], mask=inside, other=0.0)


def store_rows(
    ptr: Any,
    values: Any,
    row: Any,
    part: Any,
    start: Any,
    first: Any,
    num_tokens: Any,
    num_parts: Any,
    size: Any,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The way back of `load_rows`."""
    place, col = tl.arange(0, TILE), tl.arange(0, BLOCK)
    ptr += ((row * num_tokens + start) * num_parts + part) * size + first
    inside = (place < num_tokens - start)[:, None] & (col < size - first)[None, :]
    values = values.to(ptr.dtype.element_ty)
    tl.store(ptr + place[:, None] * (num_parts * size) + col[None, :], values, mask=inside)


def load_block(
    ptr: Any,
    number: Any,
    first_row: Any,
    first_col: Any,
    num_rows: Any,
    num_cols: Any,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> Any:
    """A block of matrix `number`, as stored; zeros beyond its last row and column."""
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    ptr += (number * num_rows + first_row) * num_cols + first_col
    inside = (row < num_rows - first_row)[:, None] & (col < num_cols - first_col)[None, :]
    return tl.load(ptr + row[:, None] * num_cols + col[None, :], mask=inside, other=0.0)


def store_block(
    ptr: Any,
    values: Any,
    number: Any,
    first_row: Any,
    first_col: Any,
    num_rows: Any,
    num_cols: Any,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """The way back of `load_block`."""
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    ptr += (number * num_rows + first_row) * num_cols + first_col
    inside = (row < num_rows - first_row)[:, None] & (col < num_cols - first_col)[None, :]
    values = values.to(ptr.dtype.element_ty)
    tl.store(ptr + row[:, None] * num_cols + col[None, :], values, mask=inside)


def load_runs(
    ptr: Any,
    row: Any,
    start: Any,
    num_tokens: Any,
    RUNS: tl.constexpr,
    TILE: tl.constexpr,
) -> Any:
    """The run of each token of a tile; the last token's beyond it."""
    place = tl.minimum(tl.arange(0, TILE), num_tokens - 1 - start)
    runs = place
    if RUNS:
        runs = tl.load(ptr + row * num_tokens + start + place)
    return runs


def decays_between(
    sums: Any,
    sums_before: Any,
    token: Any,
    token_before: Any,
    run: Any,
    run_before: Any,
    num_tokens: Any,
    RUNS: tl.constexpr,
) -> Any:
    """What is left at a token of what an earlier one, or itself, added; zero if it is not earlier.

    Sums of logarithms up to each, their places and runs, of shapes that broadcast to a matrix.
    """
    live = (token >= token_before) & (token < num_tokens)
    if RUNS:
        live = live & (run == run_before)
    return tl.exp(tl.where(live, sums - sums_before, float("-inf")))


def decays_since(
    sums: Any,
    run: Any,
    runs_ptr: Any,
    row: Any,
    chunk_start: Any,
    num_tokens: Any,
    RUNS: tl.constexpr,
) -> Any:
    """What is left at each token of the state that its chunk begins with."""
    since = tl.exp(sums)
    if RUNS:
        before = tl.load(runs_ptr + row * num_tokens + tl.maximum(chunk_start - 1, 0))
        since = tl.where(run == before, since, 0.0)
    return since


def decays_until(
    sums: Any,
    run: Any,
    total: Any,
    runs_ptr: Any,
    row: Any,
    last: Any,
    num_tokens: Any,
    RUNS: tl.constexpr,
) -> Any:
    """What is left at the chunk's last token of what each token added. `total` are all logs."""
    until = tl.exp(total - sums)
    if RUNS:
        until = tl.where(run == tl.load(runs_ptr + row * num_tokens + last), until, 0.0)
    return until


def decay_across(
    total: Any,
    runs_ptr: Any,
    row: Any,
    chunk_start: Any,
    last: Any,
    num_tokens: Any,
    RUNS: tl.constexpr,
) -> Any:
    """What is left at the end of a chunk of the state that it begins with."""
    across = tl.exp(total)
    if RUNS:
        before = tl.load(runs_ptr + row * num_tokens + tl.maximum(chunk_start - 1, 0))
        at_end = tl.load(runs_ptr + row * num_tokens + last)
        across = tl.where(before == at_end, across, 0.0)
    return across
