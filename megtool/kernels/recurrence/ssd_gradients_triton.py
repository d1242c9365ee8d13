"""Triton kernels of the gradients of Mamba-2's recurrence, which `ssd_triton` launches.

A scan over the gradients of states, from the last chunk to the first, and then each tile of tokens
alone: what it reads from states and earlier tokens, and what later tokens read from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megtool.kernels.recurrence.chunked_triton import (
    decay_across,
    decays_between,
    decays_since,
    decays_until,
    load_block,
    load_column,
    load_rows,
    load_runs,
    product,
    store_column,
    store_rows,
)

if TYPE_CHECKING:
    import triton.language as tl


def scan_gradients(
    added_ptr: Any,
    begins_ptr: Any,
    sums_ptr: Any,
    runs_ptr: Any,
    laters_ptr: Any,
    carried_ptr: Any,
    num_tokens: Any,
    num_heads: Any,
    num_elements: Any,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK elements of the gradients of one head's states, from the last chunk to the first."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_blocks = (num_elements + BLOCK - 1) // BLOCK
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    part, number = program % num_blocks, program // num_blocks
    place = part * BLOCK + tl.arange(0, BLOCK)
    row, head = number // num_heads, number % num_heads
    inside = place < num_elements
    later = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step
        start = chunk * CHUNK
        last = tl.minimum(start + CHUNK, num_tokens) - 1
        total = tl.load(sums_ptr + (row * num_tokens + last) * num_heads + head)
        across = decay_across(total, runs_ptr, row, start, last, num_tokens, RUNS)
        places = (number * num_chunks + chunk) * num_elements + place
        tl.store(laters_ptr + places, later.to(laters_ptr.dtype.element_ty), mask=inside)
        begin = tl.load(begins_ptr + places, mask=inside, other=0.0).to(tl.float32)
        carried = tl.sum(begin * later, 0) * across
        tl.store(carried_ptr + (number * num_chunks + chunk) * num_blocks + part, carried)
        later = later * across + tl.load(added_ptr + places, mask=inside, other=0.0)


def query_gradients(
    x_ptr: Any,
    dt_ptr: Any,
    sums_ptr: Any,
    b_ptr: Any,
    c_ptr: Any,
    d_ptr: Any,
    runs_ptr: Any,
    begins_ptr: Any,
    grad_ptr: Any,
    dc_ptr: Any,
    d_sums_ptr: Any,
    num_tokens: Any,
    num_heads: Any,
    num_groups: Any,
    head_size: Any,
    state_size: Any,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Gradients of c, and of the sums of logarithms that scale what tokens read, for a tile of
    tokens of one head; those of the heads of a group are added up afterwards."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_tiles = (num_tokens + TILE - 1) // TILE
    start, number = (program % num_tiles) * TILE, program // num_tiles
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_groups)
    chunk_start = start // CHUNK * CHUNK
    chunk = number * ((num_tokens + CHUNK - 1) // CHUNK) + start // CHUNK
    place = tl.arange(0, TILE)
    sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, TILE)
    run = load_runs(runs_ptr, row, start, num_tokens, RUNS, TILE)
    since = decays_since(sums, run, runs_ptr, row, chunk_start, num_tokens, RUNS)
    c = load_rows(c_ptr, row, group, start, 0, num_tokens, num_groups, state_size, TILE, BLOCK_Z)
    grad = load_rows(
        grad_ptr, row, head, start, 0, num_tokens, num_heads, head_size, TILE, BLOCK_D
    ).to(DOT)
    begin = load_block(begins_ptr, chunk, 0, 0, head_size, state_size, BLOCK_D, BLOCK_Z)
    dc = product(grad, begin, DOT, PRECISION) * since[:, None]
    d_sums = tl.sum(dc * c.to(tl.float32), 1)
    c = c.to(DOT)
    for start_2 in range(chunk_start, start + 1, TILE):
        sums_2 = load_column(sums_ptr, row, head, start_2, num_tokens, num_heads, TILE)
        run_2 = load_runs(runs_ptr, row, start_2, num_tokens, RUNS, TILE)
        dt = load_column(dt_ptr, row, head, start_2, num_tokens, num_heads, TILE)
        b = load_rows(
            b_ptr, row, group, start_2, 0, num_tokens, num_groups, state_size, TILE, BLOCK_Z
        ).to(DOT)
        x = load_rows(
            x_ptr, row, head, start_2, 0, num_tokens, num_heads, head_size, TILE, BLOCK_D
        ).to(DOT)
        left = decays_between(
            sums[:, None],
            sums_2[None, :],
            (start + place)[:, None],
            (start_2 + place)[None, :],
            run[:, None],
            run_2[None, :],
            num_tokens,
            RUNS,
        )
        d_scores = product(grad, tl.trans(x), DOT, PRECISION) * left * dt[None, :]
        d_sums += tl.sum(d_scores * product(c, tl.trans(b), DOT, PRECISION), 1)
        dc += product(d_scores.to(DOT), b, DOT, PRECISION)
    store_rows(dc_ptr, dc, row, head, start, 0, num_tokens, num_heads, state_size, TILE, BLOCK_Z)
    store_column(d_sums_ptr, d_sums, row, head, start, num_tokens, num_heads, TILE)


def key_gradients(
    x_ptr: Any,
    dt_ptr: Any,
    sums_ptr: Any,
    b_ptr: Any,
    c_ptr: Any,
    d_ptr: Any,
    runs_ptr: Any,
    laters_ptr: Any,
    grad_ptr: Any,
    dx_ptr: Any,
    db_ptr: Any,
    ddt_ptr: Any,
    d_sums_ptr: Any,
    fed_ptr: Any,
    dd_ptr: Any,
    num_tokens: Any,
    num_heads: Any,
    num_groups: Any,
    head_size: Any,
    state_size: Any,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Gradients of x, b, dt and d for a tile of tokens of one head, from the tokens of the chunk
    that come after, and from the state behind the chunk. `fed` is that of the logarithms which
    scale what tokens add to that state."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_tiles = (num_tokens + TILE - 1) // TILE
    start, number = (program % num_tiles) * TILE, program // num_tiles
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_groups)
    chunk_start = start // CHUNK * CHUNK
    end = tl.minimum(chunk_start + CHUNK, num_tokens)
    chunk = number * ((num_tokens + CHUNK - 1) // CHUNK) + start // CHUNK
    place = tl.arange(0, TILE)
    sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, TILE)
    run = load_runs(runs_ptr, row, start, num_tokens, RUNS, TILE)
    dt = load_column(dt_ptr, row, head, start, num_tokens, num_heads, TILE)
    total = tl.load(sums_ptr + (row * num_tokens + end - 1) * num_heads + head)
    until = decays_until(sums, run, total, runs_ptr, row, end - 1, num_tokens, RUNS)
    x = load_rows(x_ptr, row, head, start, 0, num_tokens, num_heads, head_size, TILE, BLOCK_D)
    b = load_rows(b_ptr, row, group, start, 0, num_tokens, num_groups, state_size, TILE, BLOCK_Z)
    later = load_block(laters_ptr, chunk, 0, 0, head_size, state_size, BLOCK_D, BLOCK_Z)
    db = product(x.to(DOT), later, DOT, PRECISION) * until[:, None]
    dx = product(b.to(DOT), tl.trans(later), DOT, PRECISION) * until[:, None]
    ddt = tl.sum(db * b.to(tl.float32), 1)
    store_column(fed_ptr, ddt * dt, row, head, start, num_tokens, num_heads, TILE)
    d_sums = load_column(d_sums_ptr, row, head, start, num_tokens, num_heads, TILE)
    x, b = x.to(DOT), b.to(DOT)
    for start_2 in range(start, end, TILE):
        sums_2 = load_column(sums_ptr, row, head, start_2, num_tokens, num_heads, TILE)
        run_2 = load_runs(runs_ptr, row, start_2, num_tokens, RUNS, TILE)
        c = load_rows(
            c_ptr, row, group, start_2, 0, num_tokens, num_groups, state_size, TILE, BLOCK_Z
        ).to(DOT)
        grad = load_rows(
            grad_ptr, row, head, start_2, 0, num_tokens, num_heads, head_size, TILE, BLOCK_D
        ).to(DOT)
        left = decays_between(
            sums_2[None, :],
            sums[:, None],
            (start_2 + place)[None, :],
            (start + place)[:, None],
            run_2[None, :],
            run[:, None],
            num_tokens,
            RUNS,
        )
        weights = product(b, tl.trans(c), DOT, PRECISION) * left
        d_weights = product(x, tl.trans(grad), DOT, PRECISION)
        shares = tl.sum(d_weights * weights, 1)
        ddt += shares
        d_sums -= shares * dt
        dx += product(weights.to(DOT), grad, DOT, PRECISION)
        db += product((d_weights * left).to(DOT), c, DOT, PRECISION)
    grad = load_rows(
        grad_ptr, row, head, start, 0, num_tokens, num_heads, head_size, TILE, BLOCK_D
    ).to(tl.float32)
    dx = dx * dt[:, None] + grad * tl.load(d_ptr + head).to(tl.float32)
    dd = tl.sum(grad * x.to(tl.float32), 1)
    store_rows(dx_ptr, dx, row, head, start, 0, num_tokens, num_heads, head_size, TILE, BLOCK_D)
    db = db * dt[:, None]
    store_rows(db_ptr, db, row, head, start, 0, num_tokens, num_heads, state_size, TILE, BLOCK_Z)
    store_column(ddt_ptr, ddt, row, head, start, num_tokens, num_heads, TILE)
    store_column(d_sums_ptr, d_sums, row, head, start, num_tokens, num_heads, TILE)
    store_column(dd_ptr, dd, row, head, start, num_tokens, num_heads, TILE)
