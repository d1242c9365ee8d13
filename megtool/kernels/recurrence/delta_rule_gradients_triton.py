"""Triton kernels of the gradients of the gated delta rule, which `delta_rule_triton` launches.

What a chunk's outputs pull at what its tokens add (`local_gradients`), a scan over the gradients
of states (`scan_gradients`), and then each chunk alone: products between its tokens, betas and
values (`pair_gradients`), queries and keys.
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
    store_block,
    store_column,
    store_rows,
)

if TYPE_CHECKING:
    import triton.language as tl


def local_gradients(
    query_ptr: Any,
    key_ptr: Any,
    query_lengths_ptr: Any,
    key_lengths_ptr: Any,
    sums_ptr: Any,
    beta_ptr: Any,
    runs_ptr: Any,
    inverses_ptr: Any,
    grad_ptr: Any,
    reads_ptr: Any,
    d_changes_ptr: Any,
    num_tokens: Any,
    num_keys: Any,
    num_heads: Any,
    key_size: Any,
    value_size: Any,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One chunk of one value head: gradients, by its outputs alone, of what its tokens add; and the
    products of its inverse with what they read, which the forward pass did not keep."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    number, start = program // num_chunks, (program % num_chunks) * CHUNK
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_keys)
    place = tl.arange(0, CHUNK)
    sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    run = load_runs(runs_ptr, row, start, num_tokens, RUNS, CHUNK)
    beta = load_column(beta_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    q_length = load_column(query_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    k_length = load_column(key_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    since = decays_since(sums, run, runs_ptr, row, start, num_tokens, RUNS)
    scaled = (
        load_block(inverses_ptr, program, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK).to(tl.float32)
        * (beta * since * k_length)[None, :]
    )
    behind = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)  # rows are keys, columns queries
    for first in range(0, key_size, BLOCK_D):
        q = load_rows(
            query_ptr, row, group, start, first, num_tokens, num_keys, key_size, CHUNK, BLOCK_D
        )
        k = load_rows(
            key_ptr, row, group, start, first, num_tokens, num_keys, key_size, CHUNK, BLOCK_D
        )
        behind += product(k, tl.trans(q), DOT, PRECISION)
        read = product(scaled, k, DOT, PRECISION)
        store_rows(
            reads_ptr,
            read,
            row,
            head,
            start,
            first,
            num_tokens,
            num_heads,
            key_size,
            CHUNK,
            BLOCK_D,
        )
    left = decays_between(
        sums[None, :],
        sums[:, None],
        (start + place)[None, :],
        (start + place)[:, None],
        run[None, :],
        run[:, None],
        num_tokens,
        RUNS,
    )
    behind = behind * left * k_length[:, None] * q_length[None, :]
    for first in range(0, value_size, BLOCK_P):
        grad = load_rows(
            grad_ptr, row, head, start, first, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
        )
        d_change = product(behind, grad, DOT, PRECISION)
        store_rows(
            d_changes_ptr,
            d_change,
            row,
            head,
            start,
            first,
            num_tokens,
            num_heads,
            value_size,
            CHUNK,
            BLOCK_P,
        )


def scan_gradients(
    query_ptr: Any,
    key_ptr: Any,
    query_lengths_ptr: Any,
    key_lengths_ptr: Any,
    sums_ptr: Any,
    beta_ptr: Any,
    runs_ptr: Any,
    grad_ptr: Any,
    grad_last_ptr: Any,
    reads_ptr: Any,
    begins_ptr: Any,
    d_changes_ptr: Any,
    laters_ptr: Any,
    carried_ptr: Any,
    dstate_ptr: Any,
    num_tokens: Any,
    num_keys: Any,
    num_heads: Any,
    key_size: Any,
    value_size: Any,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """BLOCK_P columns of the gradients of one value head's states, from the last chunk to the
    first; gradients of what tokens add get their share of the state's, in place."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_blocks = (value_size + BLOCK_P - 1) // BLOCK_P
    part, number = program % num_blocks, program // num_blocks
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_keys)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    first = part * BLOCK_P
    later = load_block(grad_last_ptr, number, 0, first, key_size, value_size, BLOCK_D, BLOCK_P)
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step
        start = chunk * CHUNK
        last = tl.minimum(start + CHUNK, num_tokens) - 1
        sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
        run = load_runs(runs_ptr, row, start, num_tokens, RUNS, CHUNK)
        total = tl.load(sums_ptr + (row * num_tokens + last) * num_heads + head)
        until = decays_until(sums, run, total, runs_ptr, row, last, num_tokens, RUNS)
        since = decays_since(sums, run, runs_ptr, row, start, num_tokens, RUNS)
        across = decay_across(total, runs_ptr, row, start, last, num_tokens, RUNS)
        q_length = load_column(query_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
        k_length = load_column(key_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
        here = number * num_chunks + chunk
        store_block(laters_ptr, later, here, 0, first, key_size, value_size, BLOCK_D, BLOCK_P)
        begin = load_block(begins_ptr, here, 0, first, key_size, value_size, BLOCK_D, BLOCK_P)
        carried = tl.sum(tl.sum(begin.to(tl.float32) * later, 0), 0) * across
        tl.store(carried_ptr + here * num_blocks + part, carried)
        k = load_rows(key_ptr, row, group, start, 0, num_tokens, num_keys, key_size, CHUNK, BLOCK_D)
        d_change = product(k, later, DOT, PRECISION) * (until * k_length)[:, None]
        d_change += load_rows(
            d_changes_ptr,
            row,
            head,
            start,
            first,
            num_tokens,
            num_heads,
            value_size,
            CHUNK,
            BLOCK_P,
        ).to(tl.float32)
        store_rows(
            d_changes_ptr,
            d_change,
            row,
            head,
            start,
            first,
            num_tokens,
            num_heads,
            value_size,
            CHUNK,
            BLOCK_P,
        )
        read = load_rows(
            reads_ptr, row, head, start, 0, num_tokens, num_heads, key_size, CHUNK, BLOCK_D
        )
        # Added up apart from `later`: Triton 3.7 does not compile two products into it for sm_100.
        added = -product(tl.trans(read), d_change, DOT, PRECISION)
        q = load_rows(
            query_ptr, row, group, start, 0, num_tokens, num_keys, key_size, CHUNK, BLOCK_D
        )
        grad = load_rows(
            grad_ptr, row, head, start, first, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
        ).to(tl.float32)
        pulled = grad * (since * q_length)[:, None]
        added += product(tl.trans(q), pulled, DOT, PRECISION)
        later = later * across + added
    store_block(dstate_ptr, later, number, 0, first, key_size, value_size, BLOCK_D, BLOCK_P)


def pair_gradients(
    query_ptr: Any,
    key_ptr: Any,
    value_ptr: Any,
    query_lengths_ptr: Any,
    key_lengths_ptr: Any,
    sums_ptr: Any,
    beta_ptr: Any,
    runs_ptr: Any,
    inverses_ptr: Any,
    changes_ptr: Any,
    grad_ptr: Any,
    d_changes_ptr: Any,
    d_within_ptr: Any,
    d_alike_ptr: Any,
    dvalue_ptr: Any,
    dbeta_ptr: Any,
    d_sums_ptr: Any,
    num_tokens: Any,
    num_keys: Any,
    num_heads: Any,
    key_size: Any,
    value_size: Any,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One chunk of one value head: gradients of products of queries and keys, and of keys and keys
    (added to their transpose), of values, and those parts of betas' and sums' that come from them.

    The gradients of what tokens add become those of the right sides of the chunk's system.
    """
    program = tl.cast(tl.program_id(0), tl.int64)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    number, start = program // num_chunks, (program % num_chunks) * CHUNK
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_keys)
    place, width = tl.arange(0, CHUNK), value_size
    sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    run = load_runs(runs_ptr, row, start, num_tokens, RUNS, CHUNK)
    beta = load_column(beta_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    q_length = load_column(query_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    k_length = load_column(key_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    turned = tl.trans(load_block(inverses_ptr, program, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK))
    d_within = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    d_alike = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dbeta = tl.zeros([CHUNK], dtype=tl.float32)
    for first in range(0, width, BLOCK_P):
        d_change = load_rows(
            d_changes_ptr, row, head, start, first, num_tokens, num_heads, width, CHUNK, BLOCK_P
        )
        change = load_rows(
            changes_ptr, row, head, start, first, num_tokens, num_heads, width, CHUNK, BLOCK_P
        )
        grad = load_rows(
            grad_ptr, row, head, start, first, num_tokens, num_heads, width, CHUNK, BLOCK_P
        )
        v = load_rows(
            value_ptr, row, head, start, first, num_tokens, num_heads, width, CHUNK, BLOCK_P
        )
        target = product(turned, d_change, DOT, PRECISION)
        dbeta += tl.sum(target * v.to(tl.float32), 1)
        d_within += product(grad, tl.trans(change), DOT, PRECISION)
        d_alike -= product(target, tl.trans(change), DOT, PRECISION)
        dv = target * beta[:, None]
        store_rows(
            d_changes_ptr,
            target,
            row,
            head,
            start,
            first,
            num_tokens,
            num_heads,
            width,
            CHUNK,
            BLOCK_P,
        )
        store_rows(
            dvalue_ptr, dv, row, head, start, first, num_tokens, num_heads, width, CHUNK, BLOCK_P
        )
    left = decays_between(
        sums[:, None],
        sums[None, :],
        (start + place)[:, None],
        (start + place)[None, :],
        run[:, None],
        run[None, :],
        num_tokens,
        RUNS,
    )
    d_within = d_within * left
    store_block(d_within_ptr, d_within, program, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    d_alike = tl.where(place[:, None] > place[None, :], d_alike * left, 0.0)
    alike = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    within = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for first in range(0, key_size, BLOCK_D):
        q = load_rows(
            query_ptr, row, group, start, first, num_tokens, num_keys, key_size, CHUNK, BLOCK_D
        )
        k = load_rows(
            key_ptr, row, group, start, first, num_tokens, num_keys, key_size, CHUNK, BLOCK_D
        )
        alike += product(k, tl.trans(k), DOT, PRECISION)
        within += product(q, tl.trans(k), DOT, PRECISION)
    shares = d_alike * alike * k_length[:, None] * k_length[None, :]
    dbeta += tl.sum(shares, 1)
    shares = shares * beta[:, None]
    shares += d_within * within * q_length[:, None] * k_length[None, :]
    d_sums = tl.sum(shares, 1) - tl.sum(shares, 0)
    d_alike = d_alike * beta[:, None]
    d_alike += tl.trans(d_alike)
    store_block(d_alike_ptr, d_alike, program, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    store_column(dbeta_ptr, dbeta, row, head, start, num_tokens, num_heads, CHUNK)
    store_column(d_sums_ptr, d_sums, row, head, start, num_tokens, num_heads, CHUNK)


def query_gradients(
    query_ptr: Any,
    key_ptr: Any,
    query_lengths_ptr: Any,
    key_lengths_ptr: Any,
    sums_ptr: Any,
    beta_ptr: Any,
    runs_ptr: Any,
    grad_ptr: Any,
    begins_ptr: Any,
    d_within_ptr: Any,
    dquery_ptr: Any,
    d_sums_ptr: Any,
    num_tokens: Any,
    num_keys: Any,
    num_heads: Any,
    key_size: Any,
    value_size: Any,
    scale: Any,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One chunk of one value head: gradients of queries; those of the value heads that share them
    are added up afterwards."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    number, start = program // num_chunks, (program % num_chunks) * CHUNK
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_keys)
    d_unit = tl.zeros([CHUNK, BLOCK_D], dtype=tl.float32)
    for first in range(0, value_size, BLOCK_P):
        grad = load_rows(
            grad_ptr, row, head, start, first, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
        )
        begin = load_block(begins_ptr, program, 0, first, key_size, value_size, BLOCK_D, BLOCK_P)
        d_unit += product(grad, tl.trans(begin), DOT, PRECISION)
    sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    run = load_runs(runs_ptr, row, start, num_tokens, RUNS, CHUNK)
    q_length = load_column(query_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    k_length = load_column(key_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    since = decays_since(sums, run, runs_ptr, row, start, num_tokens, RUNS)
    d_unit = d_unit * since[:, None]
    q = load_rows(
        query_ptr, row, group, start, 0, num_tokens, num_keys, key_size, CHUNK, BLOCK_D
    ).to(tl.float32)
    d_sums = load_column(d_sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    d_sums += tl.sum(d_unit * q, 1) * q_length
    store_column(d_sums_ptr, d_sums, row, head, start, num_tokens, num_heads, CHUNK)
    d_within = (
        load_block(d_within_ptr, program, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK).to(tl.float32)
        * k_length[None, :]
    )
    k = load_rows(key_ptr, row, group, start, 0, num_tokens, num_keys, key_size, CHUNK, BLOCK_D)
    d_unit += product(d_within, k, DOT, PRECISION)
    # Of queries before they had length 1: what is left beside their direction.
    length = q_length / scale
    along = tl.sum(d_unit * q, 1) * length * length
    dq = (d_unit - q * along[:, None]) * q_length[:, None]
    store_rows(dquery_ptr, dq, row, head, start, 0, num_tokens, num_heads, key_size, CHUNK, BLOCK_D)


def key_gradients(
    query_ptr: Any,
    key_ptr: Any,
    query_lengths_ptr: Any,
    key_lengths_ptr: Any,
    sums_ptr: Any,
    beta_ptr: Any,
    runs_ptr: Any,
    changes_ptr: Any,
    targets_ptr: Any,
    begins_ptr: Any,
    laters_ptr: Any,
    d_within_ptr: Any,
    d_alike_ptr: Any,
    dkey_ptr: Any,
    dbeta_ptr: Any,
    d_sums_ptr: Any,
    fed_ptr: Any,
    num_tokens: Any,
    num_keys: Any,
    num_heads: Any,
    key_size: Any,
    value_size: Any,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One chunk of one value head: gradients of keys, as `query_gradients`, and what betas and
    sums of logarithms have from what keys read of states, and write into them (`fed`)."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    number, start = program // num_chunks, (program % num_chunks) * CHUNK
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_keys)
    end = tl.minimum(start + CHUNK, num_tokens)
    sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    run = load_runs(runs_ptr, row, start, num_tokens, RUNS, CHUNK)
    beta = load_column(beta_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    k_length = load_column(key_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    total = tl.load(sums_ptr + (row * num_tokens + end - 1) * num_heads + head)
    until = decays_until(sums, run, total, runs_ptr, row, end - 1, num_tokens, RUNS)
    since = decays_since(sums, run, runs_ptr, row, start, num_tokens, RUNS)
    read = tl.zeros([CHUNK, BLOCK_D], dtype=tl.float32)
    for first in range(0, value_size, BLOCK_P):
        target = load_rows(
            targets_ptr, row, head, start, first, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
        )
        begin = load_block(begins_ptr, program, 0, first, key_size, value_size, BLOCK_D, BLOCK_P)
        read += product(target, tl.trans(begin), DOT, PRECISION)
    k = load_rows(key_ptr, row, group, start, 0, num_tokens, num_keys, key_size, CHUNK, BLOCK_D)
    times_read = -tl.sum(read * k.to(tl.float32), 1) * k_length * since
    dbeta = load_column(dbeta_ptr, row, head, start, num_tokens, num_heads, CHUNK) + times_read
    store_column(dbeta_ptr, dbeta, row, head, start, num_tokens, num_heads, CHUNK)
    d_sums = load_column(d_sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    d_sums += times_read * beta
    store_column(d_sums_ptr, d_sums, row, head, start, num_tokens, num_heads, CHUNK)
    d_unit = tl.zeros([CHUNK, BLOCK_D], dtype=tl.float32)
    for first in range(0, value_size, BLOCK_P):
        change = load_rows(
            changes_ptr, row, head, start, first, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
        )
        later = load_block(laters_ptr, program, 0, first, key_size, value_size, BLOCK_D, BLOCK_P)
        d_unit += product(change, tl.trans(later), DOT, PRECISION)
    d_unit = d_unit * until[:, None]
    fed = tl.sum(d_unit * k.to(tl.float32), 1) * k_length
    store_column(fed_ptr, fed, row, head, start, num_tokens, num_heads, CHUNK)
    d_unit -= read * (beta * since)[:, None]
    q_length = load_column(query_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    d_within = (
        load_block(d_within_ptr, program, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK).to(tl.float32)
        * q_length[:, None]
    )
    q = load_rows(query_ptr, row, group, start, 0, num_tokens, num_keys, key_size, CHUNK, BLOCK_D)
    d_unit += product(tl.trans(d_within.to(DOT)), q, DOT, PRECISION)
    d_alike = (
        load_block(d_alike_ptr, program, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK).to(tl.float32)
        * k_length[None, :]
    )
    d_unit += product(d_alike, k, DOT, PRECISION)
    k = k.to(tl.float32)
    along = tl.sum(d_unit * k, 1) * k_length * k_length
    dk = (d_unit - k * along[:, None]) * k_length[:, None]
    store_rows(dkey_ptr, dk, row, head, start, 0, num_tokens, num_heads, key_size, CHUNK, BLOCK_D)
