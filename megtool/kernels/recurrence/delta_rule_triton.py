"""Triton kernels of the gated delta rule: a program goes through the chunks of one value head.

The columns of a value have nothing to do with each other, so that heads whose states are too large
are cut into parts, each a program of its own. See `delta_rule._Chunks` for the formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.kernels.launch import cdiv, launch, power
from megtool.kernels.recurrence.chunked_triton import (
    CHUNK,
    chunk_decays,
    load_column,
    load_rows,
    num_cuts,
    store_column,
    store_rows,
)

if TYPE_CHECKING:
    import triton.language as tl


def fits(key_BSKD: Tensor, value_BSNP: Tensor) -> bool:
    """Whether a program can keep a state, and multiplies in fp32."""
    cuts = num_cuts(value_BSNP.shape[3], key_BSKD.shape[3])
    return cuts > 0 and value_BSNP.dtype != torch.float64


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
    (b, s, n, p), d = value_BSNP.shape, key_BSKD.shape[3]
    cuts = num_cuts(p, d)
    if cuts > 1:
        decay_BSN, beta_BSN = (x.repeat_interleave(cuts, 2) for x in (decay_BSN, beta_BSN))
        if state_BNDP is not None:
            parts = state_BNDP.reshape(b, n, d, cuts, p // cuts)
            state_BNDP = parts.transpose(2, 3).flatten(1, 2)
    out, last = _rule(
        query_BSKD,
        key_BSKD,
        value_BSNP.reshape(b, s, n * cuts, p // cuts),
        decay_BSN,
        beta_BSN,
        state_BNDP,
        runs_BS,
    )
    last = last.view(b, n, cuts, d, p // cuts).transpose(2, 3).reshape(b, n, d, p)
    return out.view(value_BSNP.shape), last


def _rule(*values: Tensor | None) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _Rule.apply(*values)  # type: ignore[no-untyped-call]
    return out


class _Rule(torch.autograd.Function):
    """It keeps its inputs, and of every chunk the state before it and the inverse of its system."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> tuple[Tensor, Tensor]:
        *given, state, runs = values
        tensors = [t.contiguous() for t in given]
        runs = None if runs is None else runs.contiguous()
        key, value = tensors[1], tensors[2]
        (rows, tokens, heads, size), key_size = value.shape, key.shape[3]
        numbers = {"dtype": torch.float32, "device": value.device}
        chunks = cdiv(tokens, CHUNK)
        out = torch.empty_like(value)
        last = torch.empty(rows, heads, key_size, size, **numbers)
        begins = torch.empty(rows, heads, chunks, key_size, size, **numbers)
        inverses = torch.empty(rows, heads, chunks, CHUNK, CHUNK, **numbers)
        launch(
            _forward,
            rows * heads,
            value.device,
            *tensors,
            value if state is None else state.float().contiguous(),
            value if runs is None else runs,
            out,
            inverses,
            begins,
            last,
            *_extents(key, value),
            STATE=state is not None,
            RUNS=runs is not None,
            **_sizes(key, value),
        )
        ctx.save_for_backward(*tensors, runs, inverses, begins)
        ctx.state_type = None if state is None else state.dtype
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, runs, inverses, begins = ctx.saved_tensors
        query, key, value, decay, beta = tensors
        rows, tokens, heads, _ = value.shape
        numbers = {"dtype": torch.float32, "device": value.device}
        shape = (rows, tokens, heads, key.shape[3])
        dquery, dkey = (torch.empty(shape, **numbers) for _ in range(2))
        ddecay, dbeta = (torch.empty(decay.shape, **numbers) for _ in range(2))
        dvalue, dstate = torch.empty_like(value), torch.empty_like(grads[1], **numbers)
        launch(
            _backward,
            rows * heads,
            value.device,
            *tensors,
            value if runs is None else runs,
            inverses,
            begins,
            grads[0].contiguous(),
            grads[1].contiguous(),
            dquery,
            dkey,
            dvalue,
            ddecay,
            dbeta,
            dstate,
            *_extents(key, value),
            RUNS=runs is not None,
            **_sizes(key, value),
        )
        by_key = (rows, tokens, key.shape[2], -1, key.shape[3])
        dquery, dkey = (x.view(by_key).sum(3) for x in (dquery, dkey))
        return (
            dquery.to(query.dtype),
            dkey.to(key.dtype),
            dvalue,
            ddecay.to(decay.dtype),
            dbeta.to(beta.dtype),
            None if ctx.state_type is None else dstate.to(ctx.state_type),
            None,
        )


def _extents(key: Tensor, value: Tensor) -> tuple[int | float, ...]:
    """Tokens, heads of keys and of values, their sizes, and the scale of queries."""
    size = key.shape[3]
    return key.shape[1], key.shape[2], value.shape[2], size, value.shape[3], size**-0.5


def _sizes(key: Tensor, value: Tensor) -> dict[str, Any]:
    return {
        "CHUNK": CHUNK,
        "BLOCK_D": max(16, power(key.shape[3])),
        "BLOCK_P": max(16, power(value.shape[3])),
        "PRECISION": "ieee" if value.dtype == torch.float32 else "tf32",
        "num_warps": 8,
    }


def _lengths(rows: Any) -> Any:
    """What rows are multiplied by to be of length 1, but for an epsilon."""
    return 1 / tl.sqrt(tl.sum(rows * rows, 1) + 1e-6)


def _inverse(lower: Any, CHUNK: tl.constexpr) -> Any:
    """The inverse of 1 + `lower`, which is zero on and above the diagonal, row by row."""
    place = tl.arange(0, CHUNK)
    inverse = -lower
    for number in range(1, CHUNK):
        here = place[:, None] == number
        own = tl.sum(tl.where(here, inverse, 0.0), 0)
        own += tl.sum(own[:, None] * inverse, 0)
        inverse = tl.where(here, own[None, :], inverse)
    return inverse + tl.where(place[:, None] == place[None, :], 1.0, 0.0)


def _forward(
    query_ptr: Any,
    key_ptr: Any,
    value_ptr: Any,
    decay_ptr: Any,
    beta_ptr: Any,
    state_ptr: Any,
    runs_ptr: Any,
    out_ptr: Any,
    inverses_ptr: Any,
    begins_ptr: Any,
    last_ptr: Any,
    num_tokens: Any,
    num_keys: Any,
    num_heads: Any,
    key_size: Any,
    value_size: Any,
    scale: Any,
    STATE: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One value head of one row."""
    program = tl.cast(tl.program_id(0), tl.int64)
    row, head = program // num_heads, program % num_heads
    group = head // (num_heads // num_keys)
    place, place_d, place_p = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    square = place[:, None] * CHUNK + place[None, :]
    places = place_d[:, None] * value_size + place_p[None, :]
    inside = (place_d < key_size)[:, None] & (place_p < value_size)[None, :]
    elements = key_size * value_size
    state = tl.zeros([BLOCK_D, BLOCK_P], dtype=tl.float32)
    if STATE:
        state = tl.load(state_ptr + program * elements + places, mask=inside, other=0.0)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    for start in range(0, num_tokens, CHUNK):
        logs = load_column(decay_ptr, row, head, start, num_tokens, num_heads, CHUNK)
        beta = load_column(beta_ptr, row, head, start, num_tokens, num_heads, CHUNK)
        inner, since, until, whole = chunk_decays(
            logs, runs_ptr, row, start, num_tokens, RUNS, CHUNK
        )
        q = load_rows(query_ptr, row, group, start, num_tokens, num_keys, key_size, CHUNK, BLOCK_D)
        k = load_rows(key_ptr, row, group, start, num_tokens, num_keys, key_size, CHUNK, BLOCK_D)
        v = load_rows(
            value_ptr, row, head, start, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
        )
        q = q * (_lengths(q) * scale)[:, None]
        k = k * _lengths(k)[:, None]
        chunk = program * num_chunks + start // CHUNK
        tl.store(begins_ptr + chunk * elements + places, state, mask=inside)
        alike = tl.dot(k, tl.trans(k), input_precision=PRECISION) * inner * beta[:, None]
        lower = tl.where(place[:, None] > place[None, :], alike, 0.0)
        inverse = _inverse(lower, CHUNK)
        tl.store(inverses_ptr + chunk * CHUNK * CHUNK + square, inverse)
        read = k * (beta * since)[:, None]
        target = v * beta[:, None] - tl.dot(read, state, input_precision=PRECISION)
        change = tl.dot(inverse, target, input_precision=PRECISION)
        within = tl.dot(q, tl.trans(k), input_precision=PRECISION) * inner
        out = tl.dot(within, change, input_precision=PRECISION)
        out += tl.dot(q * since[:, None], state, input_precision=PRECISION)
        store_rows(
            out_ptr, out, row, head, start, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
        )
        write = tl.trans(k * until[:, None])
        state = state * whole + tl.dot(write, change, input_precision=PRECISION)
    tl.store(last_ptr + program * elements + places, state, mask=inside)


def _backward(
    query_ptr: Any,
    key_ptr: Any,
    value_ptr: Any,
    decay_ptr: Any,
    beta_ptr: Any,
    runs_ptr: Any,
    inverses_ptr: Any,
    begins_ptr: Any,
    grad_ptr: Any,
    grad_last_ptr: Any,
    dquery_ptr: Any,
    dkey_ptr: Any,
    dvalue_ptr: Any,
    ddecay_ptr: Any,
    dbeta_ptr: Any,
    dstate_ptr: Any,
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
    PRECISION: tl.constexpr,
) -> None:
    """One value head of one row, from the last chunk to the first; each has gradients of queries
    and keys of its own, which are added up afterwards."""
    program = tl.cast(tl.program_id(0), tl.int64)
    row, head = program // num_heads, program % num_heads
    group = head // (num_heads // num_keys)
    place, place_d, place_p = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    square = place[:, None] * CHUNK + place[None, :]
    places = place_d[:, None] * value_size + place_p[None, :]
    inside = (place_d < key_size)[:, None] & (place_p < value_size)[None, :]
    elements = key_size * value_size
    later = tl.load(grad_last_ptr + program * elements + places, mask=inside, other=0.0)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    for number in range(num_chunks):
        start = (num_chunks - 1 - number) * CHUNK
        logs = load_column(decay_ptr, row, head, start, num_tokens, num_heads, CHUNK)
        beta = load_column(beta_ptr, row, head, start, num_tokens, num_heads, CHUNK)
        inner, since, until, whole = chunk_decays(
            logs, runs_ptr, row, start, num_tokens, RUNS, CHUNK
        )
        q = load_rows(query_ptr, row, group, start, num_tokens, num_keys, key_size, CHUNK, BLOCK_D)
        k = load_rows(key_ptr, row, group, start, num_tokens, num_keys, key_size, CHUNK, BLOCK_D)
        v = load_rows(
            value_ptr, row, head, start, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
        )
        grad = load_rows(
            grad_ptr, row, head, start, num_tokens, num_heads, value_size, CHUNK, BLOCK_P
        )
        q_length, k_length = _lengths(q), _lengths(k)
        q = q * (q_length * scale)[:, None]
        k = k * k_length[:, None]
        chunk = program * num_chunks + start // CHUNK
        begin = tl.load(begins_ptr + chunk * elements + places, mask=inside, other=0.0)
        inverse = tl.load(inverses_ptr + chunk * CHUNK * CHUNK + square)
        # What the forward pass computed.
        read = k * (beta * since)[:, None]
        target = v * beta[:, None] - tl.dot(read, begin, input_precision=PRECISION)
        change = tl.dot(inverse, target, input_precision=PRECISION)
        alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        within = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        # What tokens add, and the states before and behind.
        dchange = tl.dot(tl.trans(within * inner), grad, input_precision=PRECISION)
        dchange += tl.dot(k * until[:, None], later, input_precision=PRECISION)
        dtarget = tl.dot(tl.trans(inverse), dchange, input_precision=PRECISION)
        dlookup = tl.dot(grad, tl.trans(begin), input_precision=PRECISION)
        dread = -tl.dot(dtarget, tl.trans(begin), input_precision=PRECISION)
        dwrite = tl.dot(change, tl.trans(later), input_precision=PRECISION)
        dwithin = tl.dot(grad, tl.trans(change), input_precision=PRECISION) * inner
        dalike = -tl.dot(dtarget, tl.trans(change), input_precision=PRECISION) * inner
        dalike = tl.where(place[:, None] > place[None, :], dalike, 0.0)
        carried = tl.sum(tl.sum(begin * later, 1), 0) * whole
        later = later * whole - tl.dot(tl.trans(read), dtarget, input_precision=PRECISION)
        later += tl.dot(tl.trans(q * since[:, None]), grad, input_precision=PRECISION)
        # Betas and decays, by what they scale.
        times_read, times_write = tl.sum(dread * k, 1), tl.sum(dwrite * k, 1) * until
        dbeta = tl.sum(dalike * alike, 1) + tl.sum(dtarget * v, 1) + times_read * since
        dalike = dalike * beta[:, None]
        pairs = dalike * alike + dwithin * within
        dsums = tl.sum(pairs, 1) - tl.sum(pairs, 0) - times_write
        dsums += (tl.sum(dlookup * q, 1) + times_read * beta) * since
        at_end = tl.sum(times_write, 0) + carried
        dsums += tl.where(place == CHUNK - 1, at_end, 0.0)
        # A sum of logarithms has in it those of all tokens before.
        dlogs = tl.sum(dsums, 0) - tl.cumsum(dsums, 0) + dsums
        dq = dlookup * since[:, None] + tl.dot(dwithin, k, input_precision=PRECISION)
        dk = dread * (beta * since)[:, None] + dwrite * until[:, None]
        dk += tl.dot(tl.trans(dwithin), q, input_precision=PRECISION)
        dk += tl.dot(dalike + tl.trans(dalike), k, input_precision=PRECISION)
        # Queries and keys before they had length 1.
        unit = q / scale
        dq = (dq - unit * tl.sum(dq * unit, 1)[:, None]) * (q_length * scale)[:, None]
        dk = (dk - k * tl.sum(dk * k, 1)[:, None]) * k_length[:, None]
        store_rows(
            dquery_ptr, dq, row, head, start, num_tokens, num_heads, key_size, CHUNK, BLOCK_D
        )
        store_rows(dkey_ptr, dk, row, head, start, num_tokens, num_heads, key_size, CHUNK, BLOCK_D)
        store_rows(
            dvalue_ptr,
            dtarget * beta[:, None],
            row,
            head,
            start,
            num_tokens,
            num_heads,
            value_size,
            CHUNK,
            BLOCK_P,
        )
        store_column(ddecay_ptr, dlogs, row, head, start, num_tokens, num_heads, CHUNK)
        store_column(dbeta_ptr, dbeta, row, head, start, num_tokens, num_heads, CHUNK)
    tl.store(dstate_ptr + program * elements + places, later, mask=inside)
