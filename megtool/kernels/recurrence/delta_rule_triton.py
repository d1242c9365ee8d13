"""Triton kernels of the gated delta rule: all chunks at once, and a scan over their states.

Forward, the system of each chunk is inverted (`_prepare`), which turns what its tokens add one by
one into a product with the state that the chunk begins with; `_scan` takes states through chunks,
and `_outputs` reads them. These are the steps of the WY form of the delta rule (Yang et al., arXiv
2406.06484 and 2412.06464). See `delta_rule._Chunks` for the formulas.

Queries and keys are multiplied as they are stored. The factors that make their length 1 scale rows
and columns of products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megtool.kernels.launch import cdiv, launch, power
from megtool.kernels.recurrence import delta_rule_gradients_triton
from megtool.kernels.recurrence.chunked_triton import (
    block,
    column_sums,
    decay_across,
    decays_between,
    decays_since,
    decays_until,
    dot_sizes,
    dot_type,
    load_block,
    load_column,
    load_rows,
    load_runs,
    log_gradients,
    product,
    store_block,
    store_rows,
)

if TYPE_CHECKING:
    import triton.language as tl

CHUNK = 64  # tokens of a chunk in 16 bits; half as many in fp32, whose tiles are twice as large
_STATE = 64 * 128  # elements of a part of a state that a program keeps


def fits(key_BSKD: Tensor, value_BSNP: Tensor) -> bool:
    """Whether tiles of keys fit, in a dtype that is computed in fp32."""
    return key_BSKD.shape[3] <= 256 and value_BSNP.dtype != torch.float64


def gated_delta_rule(
    query_BSKD: Tensor,
    key_BSKD: Tensor,
    value_BSNP: Tensor,
    decay_BSN: Tensor,
    beta_BSN: Tensor,
    state_BNDP: Tensor | None,
    runs_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `delta_rule.gated_delta_rule`."""
    values = (query_BSKD, key_BSKD, value_BSNP, decay_BSN, beta_BSN, state_BNDP, runs_BS)
    out: tuple[Tensor, Tensor] = _Rule.apply(*values)  # type: ignore[no-untyped-call]
    return out


class _Rule(torch.autograd.Function):
    """It keeps its inputs, and of every chunk the state before it, the inverse of its system, and
    what its tokens add."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> tuple[Tensor, Tensor]:
        *given, state, runs = values
        query, key, value, decay, beta = (t.contiguous() for t in given)
        runs = None if runs is None else runs.contiguous()
        (rows, tokens, heads, size), key_size = value.shape, key.shape[3]
        sizes = chunk_sizes(key, value)
        chunk = sizes["CHUNK"]
        chunks = cdiv(tokens, chunk)
        numbers = {"dtype": dot_type(value.dtype), "device": value.device}
        sums = column_sums(decay, chunk)
        lengths = (inverse_lengths(query, key_size**-0.5), inverse_lengths(key, 1.0))
        flags = {"RUNS": runs is not None, **sizes}
        given_runs = value if runs is None else runs
        inverses = torch.empty(rows, heads, chunks, chunk, chunk, **numbers)
        reads = torch.empty(rows, tokens, heads, key_size, **numbers)
        changes = torch.empty(rows, tokens, heads, size, **numbers)
        extents = chunk_extents(key, value)
        columns = (lengths[1], sums, beta, given_runs)
        launch(
            _prepare,
            rows * heads * chunks,
            value.device,
            key,
            value,
            *columns,
            inverses,
            reads,
            changes,
            *extents,
            **{**flags, "BLOCK_D": block(key_size, 64)},
        )
        last = torch.empty(rows, heads, key_size, size, dtype=torch.float32, device=value.device)
        begins = torch.empty(rows, heads, chunks, key_size, size, **numbers)
        launch(
            _scan,
            rows * heads * cdiv(size, sizes["BLOCK_P"]),
            value.device,
            key,
            *columns,
            reads,
            changes,
            value if state is None else state.float().contiguous(),
            begins,
            last,
            *extents,
            STATE=state is not None,
            **flags,
        )
        del reads
        out = torch.empty_like(value)
        launch(
            _outputs,
            rows * heads * chunks * cdiv(size, block(size, 64)),
            value.device,
            query,
            key,
            *lengths,
            sums,
            given_runs,
            changes,
            begins,
            out,
            *extents,
            **{**flags, "BLOCK_D": block(key_size, 64), "BLOCK_P": block(size, 64)},
        )
        saved = (query, key, value, decay, beta, runs, *lengths, sums, inverses, changes, begins)
        ctx.save_for_backward(*saved)
        ctx.state_type = None if state is None else state.dtype
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, decay, beta, *rest = ctx.saved_tensors
        saved = _Saved(query, key, value, beta, *rest)
        dquery, dkey, dvalue, ddecay, dbeta, dstate = _gradients(
            saved, grads[0].contiguous(), grads[1].float().contiguous(), chunk_sizes(key, value)
        )
        return (
            dquery.to(query.dtype),
            dkey.to(key.dtype),
            dvalue,
            ddecay.to(decay.dtype),
            dbeta.to(beta.dtype),
            None if ctx.state_type is None else dstate.to(ctx.state_type),
            None,
        )


class _Saved(NamedTuple):
    """Inputs of the forward pass and what it keeps: factors of queries' and keys' lengths, sums of
    logarithms, inverses of the chunks' systems, what tokens add, and states before chunks."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    runs: Tensor | None
    query_lengths: Tensor
    key_lengths: Tensor
    sums: Tensor
    inverses: Tensor
    changes: Tensor
    begins: Tensor


def _gradients(
    saved: _Saved, grad: Tensor, grad_last: Tensor, sizes: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Gradients of queries and keys (fp32), values, logarithms of decays, betas, the first state.

    `grad` and `grad_last` are those of the outputs and of the last state (fp32).
    """
    query, key, value, beta, runs, q_lengths, k_lengths, sums, inverses, changes, begins = saved
    (rows, tokens, heads, size), (keys, key_size) = value.shape, key.shape[2:]
    chunk, device = sizes["CHUNK"], value.device
    chunks = cdiv(tokens, chunk)
    extents = (tokens, keys, heads, key_size, size)
    given_runs = value if runs is None else runs
    flags = {"RUNS": runs is not None, **sizes}
    tiles = {**flags, "BLOCK_D": block(key_size, 64), "BLOCK_P": block(size, 64)}
    columns = (q_lengths, k_lengths, sums, beta, given_runs)
    programs = rows * heads * chunks

    reads = torch.empty(rows, tokens, heads, key_size, dtype=begins.dtype, device=device)
    d_changes = torch.empty_like(changes)
    inputs = (query, key, *columns, inverses, grad)
    launch(
        delta_rule_gradients_triton.local_gradients,
        programs,
        device,
        *inputs,
        reads,
        d_changes,
        *extents,
        **tiles,
    )

    laters, dstate = torch.empty_like(begins), torch.empty_like(grad_last)
    blocks = cdiv(size, sizes["BLOCK_P"])
    carried = torch.empty(rows, heads, chunks, blocks, dtype=torch.float32, device=device)
    launch(
        delta_rule_gradients_triton.scan_gradients,
        rows * heads * blocks,
        device,
        *(query, key, *columns, grad, grad_last, reads, begins),
        *(d_changes, laters, carried, dstate),
        *extents,
        **flags,
    )
    del reads

    d_within, d_alike = torch.empty_like(inverses), torch.empty_like(inverses)
    dvalue, dbeta = torch.empty_like(value), torch.empty_like(sums)
    d_sums, fed = torch.empty_like(sums), torch.empty_like(sums)
    launch(
        delta_rule_gradients_triton.pair_gradients,
        programs,
        device,
        *(query, key, value, *columns, inverses, changes, grad),
        *(d_changes, d_within, d_alike, dvalue, dbeta, d_sums),
        *extents,
        **{**tiles, "BLOCK_P": block(size, 32)},
    )

    by_value = (rows, tokens, heads, key_size)
    dquery, dkey = (torch.empty(by_value, dtype=torch.float32, device=device) for _ in range(2))
    flags["BLOCK_P"] = block(size, 32 if sizes["BLOCK_D"] > 128 else 64)
    launch(
        delta_rule_gradients_triton.query_gradients,
        programs,
        device,
        *(query, key, *columns, grad, begins, d_within, dquery, d_sums),
        *extents,
        key_size**-0.5,
        **flags,
    )
    launch(
        delta_rule_gradients_triton.key_gradients,
        programs,
        device,
        *(query, key, *columns, changes, d_changes, begins, laters, d_within, d_alike),
        *(dkey, dbeta, d_sums, fed),
        *extents,
        **flags,
    )
    ddecay = log_gradients(d_sums, fed, carried.sum(-1), chunk)
    by_key = (rows, tokens, keys, -1, key_size)
    dquery, dkey = (x.view(by_key).sum(3) for x in (dquery, dkey))
    return dquery, dkey, dvalue, ddecay, dbeta, dstate


def inverse_lengths(x_BSKD: Tensor, scale: float) -> Tensor:
    """Factors that make vectors `scale` long, but for an epsilon (fp32, [B, S, K])."""
    lengths = torch.linalg.vector_norm(x_BSKD, dim=-1, dtype=torch.float32)
    return torch.rsqrt(lengths.square_().add_(1e-6)).mul_(scale)


def chunk_extents(key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Tokens, heads of keys and of values, and their sizes."""
    return key.shape[1], key.shape[2], value.shape[2], key.shape[3], value.shape[3]


def chunk_sizes(key: Tensor, value: Tensor) -> dict[str, Any]:
    """Tile sizes of programs that hold whole keys and a part of values."""
    size_d = max(16, power(key.shape[3]))
    is_short = dot_type(value.dtype) == torch.float32
    return {
        "CHUNK": CHUNK // 2 if is_short else CHUNK,
        "BLOCK_D": size_d,
        "BLOCK_P": block(value.shape[3], _STATE // size_d),
        **dot_sizes(value.dtype),
        "num_warps": 8,
        "num_stages": 1,
    }


def _inverse(lower: Any, CHUNK: tl.constexpr, PRECISION: tl.constexpr) -> Any:
    """The inverse of 1 + `lower`, which is zero on and above the diagonal.

    Blocks of 16 on the diagonal are inverted row by row, all at once: their columns are apart. With
    D the inverse of the blocks and N = -D (the rest), the inverse is (1 + N + N^2 + N^3) D, whose
    powers are few, so that systems with large ones stay finite.
    """
    place = tl.arange(0, CHUNK)
    near = (place // 16)[:, None] == (place // 16)[None, :]
    inverse = tl.where(near, -lower, 0.0)
    for number in range(1, 16):
        here = (place % 16)[:, None] == number
        row = tl.sum(tl.where(here, inverse, 0.0), 0)
        row += tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(here & near, row[None, :], inverse)
    inverse += tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    rest = tl.where(near, 0.0, -lower)
    steps = product(inverse, rest, tl.float32, PRECISION)
    if CHUNK > 32:
        squares = product(steps, steps, tl.float32, PRECISION)
        inverse += product(squares, inverse, tl.float32, PRECISION)
    return inverse + product(steps, inverse, tl.float32, PRECISION)


def _prepare(
    key_ptr: Any,
    value_ptr: Any,
    lengths_ptr: Any,
    sums_ptr: Any,
    beta_ptr: Any,
    runs_ptr: Any,
    inverses_ptr: Any,
    reads_ptr: Any,
    changes_ptr: Any,
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
    """One chunk of one value head: the inverse of its system, and its products with what tokens
    read from a state and with what they add to one of zeros."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    number, start = program // num_chunks, (program % num_chunks) * CHUNK
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_keys)
    place = tl.arange(0, CHUNK)
    length = load_column(lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    beta = load_column(beta_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    run = load_runs(runs_ptr, row, start, num_tokens, RUNS, CHUNK)
    alike = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for first in range(0, key_size, BLOCK_D):
        k = load_rows(
            key_ptr, row, group, start, first, num_tokens, num_keys, key_size, CHUNK, BLOCK_D
        )
        alike += product(k, tl.trans(k), DOT, PRECISION)
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
    alike = alike * left * (beta * length)[:, None] * length[None, :]
    inverse = _inverse(tl.where(place[:, None] > place[None, :], alike, 0.0), CHUNK, PRECISION)
    store_block(inverses_ptr, inverse, program, 0, 0, CHUNK, CHUNK, CHUNK, CHUNK)
    since = decays_since(sums, run, runs_ptr, row, start, num_tokens, RUNS)
    scaled = inverse * (beta * since * length)[None, :]
    for first in range(0, key_size, BLOCK_D):
        k = load_rows(
            key_ptr, row, group, start, first, num_tokens, num_keys, key_size, CHUNK, BLOCK_D
        )
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
    scaled = inverse * beta[None, :]
    for first in range(0, value_size, BLOCK_P):
        v = load_rows(
            value_ptr, row, head, start, first, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
        )
        change = product(scaled, v, DOT, PRECISION)
        store_rows(
            changes_ptr,
            change,
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


def _scan(
    key_ptr: Any,
    lengths_ptr: Any,
    sums_ptr: Any,
    beta_ptr: Any,
    runs_ptr: Any,
    reads_ptr: Any,
    changes_ptr: Any,
    state_ptr: Any,
    begins_ptr: Any,
    last_ptr: Any,
    num_tokens: Any,
    num_keys: Any,
    num_heads: Any,
    key_size: Any,
    value_size: Any,
    STATE: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """BLOCK_P columns of the states of one value head, from the first chunk to the last. What
    tokens add to a state of zeros becomes what they add to theirs, in place."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_blocks = (value_size + BLOCK_P - 1) // BLOCK_P
    first, number = (program % num_blocks) * BLOCK_P, program // num_blocks
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_keys)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    state = tl.zeros([BLOCK_D, BLOCK_P], dtype=tl.float32)
    if STATE:
        state = load_block(state_ptr, number, 0, first, key_size, value_size, BLOCK_D, BLOCK_P)
    for chunk in range(num_chunks):
        start = chunk * CHUNK
        last = tl.minimum(start + CHUNK, num_tokens) - 1
        rounded = state.to(DOT)
        here = number * num_chunks + chunk
        store_block(begins_ptr, rounded, here, 0, first, key_size, value_size, BLOCK_D, BLOCK_P)
        read = load_rows(
            reads_ptr, row, head, start, 0, num_tokens, num_heads, key_size, CHUNK, BLOCK_D
        )
        change = load_rows(
            changes_ptr,
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
        change -= product(read, rounded, DOT, PRECISION)
        store_rows(
            changes_ptr,
            change,
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
        length = load_column(lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
        sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
        run = load_runs(runs_ptr, row, start, num_tokens, RUNS, CHUNK)
        total = tl.load(sums_ptr + (row * num_tokens + last) * num_heads + head)
        until = decays_until(sums, run, total, runs_ptr, row, last, num_tokens, RUNS)
        across = decay_across(total, runs_ptr, row, start, last, num_tokens, RUNS)
        k = load_rows(key_ptr, row, group, start, 0, num_tokens, num_keys, key_size, CHUNK, BLOCK_D)
        added = change * (until * length)[:, None]
        state = state * across + product(tl.trans(k), added, DOT, PRECISION)
    store_block(last_ptr, state, number, 0, first, key_size, value_size, BLOCK_D, BLOCK_P)


def _outputs(
    query_ptr: Any,
    key_ptr: Any,
    query_lengths_ptr: Any,
    key_lengths_ptr: Any,
    sums_ptr: Any,
    runs_ptr: Any,
    changes_ptr: Any,
    begins_ptr: Any,
    out_ptr: Any,
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
    """BLOCK_P columns of one chunk of one value head."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_blocks = (value_size + BLOCK_P - 1) // BLOCK_P
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    first, chunk = (program % num_blocks) * BLOCK_P, program // num_blocks
    number, start = chunk // num_chunks, (chunk % num_chunks) * CHUNK
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_keys)
    place = tl.arange(0, CHUNK)
    alike = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    out = tl.zeros([CHUNK, BLOCK_P], dtype=tl.float32)
    for first_d in range(0, key_size, BLOCK_D):
        q = load_rows(
            query_ptr, row, group, start, first_d, num_tokens, num_keys, key_size, CHUNK, BLOCK_D
        )
        k = load_rows(
            key_ptr, row, group, start, first_d, num_tokens, num_keys, key_size, CHUNK, BLOCK_D
        )
        begin = load_block(
            begins_ptr, chunk, first_d, first, key_size, value_size, BLOCK_D, BLOCK_P
        )
        alike += product(q, tl.trans(k), DOT, PRECISION)
        out += product(q, begin, DOT, PRECISION)
    sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, CHUNK)
    run = load_runs(runs_ptr, row, start, num_tokens, RUNS, CHUNK)
    q_length = load_column(query_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    k_length = load_column(key_lengths_ptr, row, group, start, num_tokens, num_keys, CHUNK)
    since = decays_since(sums, run, runs_ptr, row, start, num_tokens, RUNS)
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
    change = load_rows(
        changes_ptr, row, head, start, first, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
    )
    within = alike * left * k_length[None, :]
    out = out * since[:, None] + product(within, change, DOT, PRECISION)
    out = out * q_length[:, None]
    store_rows(
        out_ptr, out, row, head, start, first, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
    )
