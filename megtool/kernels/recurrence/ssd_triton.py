"""Triton kernels of the recurrence of Mamba-2: a program goes through the chunks of one head."""

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


def fits(x_BSND: Tensor, b_BSGZ: Tensor) -> bool:
    """Whether a program can keep a state, and multiplies in fp32."""
    return num_cuts(x_BSND.shape[3], b_BSGZ.shape[3]) > 0 and x_BSND.dtype != torch.float64


def ssd_scan(
    x_BSND: Tensor,
    dt_BSN: Tensor,
    a_N: Tensor,
    b_BSGZ: Tensor,
    c_BSGZ: Tensor,
    d_N: Tensor,
    state_BNDZ: Tensor | None,
    runs_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `ssd.ssd_scan`."""
    rows, tokens, heads, size = x_BSND.shape
    cuts, state_size = num_cuts(size, b_BSGZ.shape[3]), b_BSGZ.shape[3]
    parts = (heads * cuts, size // cuts)
    y, last = _scan(
        x_BSND.reshape(rows, tokens, *parts),
        dt_BSN.repeat_interleave(cuts, 2) if cuts > 1 else dt_BSN,
        a_N.repeat_interleave(cuts),
        b_BSGZ,
        c_BSGZ,
        d_N.repeat_interleave(cuts),
        None if state_BNDZ is None else state_BNDZ.reshape(rows, *parts, state_size),
        runs_BS,
    )
    return y.view(x_BSND.shape), last.view(rows, heads, size, state_size)


def _scan(*values: Tensor | None) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _Scan.apply(*values)  # type: ignore[no-untyped-call]
    return out


class _Scan(torch.autograd.Function):
    """It keeps its inputs, and the state at the begin of every chunk."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> tuple[Tensor, Tensor]:
        *given, state, runs = values
        tensors = [t.contiguous() for t in given]
        runs = None if runs is None else runs.contiguous()
        x, b = tensors[0], tensors[3]
        (rows, tokens, heads, size), state_size = x.shape, b.shape[3]
        y = torch.empty_like(x)
        numbers = {"dtype": torch.float32, "device": x.device}
        last = torch.empty(rows, heads, size, state_size, **numbers)
        chunks = cdiv(tokens, CHUNK)
        begins = torch.empty(rows, heads, chunks, size, state_size, **numbers)
        launch(
            _forward,
            rows * heads,
            x.device,
            *tensors,
            x if state is None else state.float().contiguous(),
            x if runs is None else runs,
            y,
            begins,
            last,
            *_extents(x, b),
            STATE=state is not None,
            RUNS=runs is not None,
            **_sizes(x, b),
        )
        ctx.save_for_backward(*tensors, runs, begins)
        ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, runs, begins = ctx.saved_tensors
        x, dt, a, b, c, d = tensors
        rows, tokens, heads, _ = x.shape
        groups, state_size = b.shape[2:]
        numbers = {"dtype": torch.float32, "device": x.device}
        dx, ddt = torch.empty_like(x), torch.empty(dt.shape, **numbers)
        db, dc = (torch.empty(rows, tokens, heads, state_size, **numbers) for _ in range(2))
        da, dd = (torch.empty(rows, heads, **numbers) for _ in range(2))
        launch(
            _backward,
            rows * heads,
            x.device,
            *tensors,
            x if runs is None else runs,
            begins,
            grads[0].contiguous(),
            dx,
            ddt,
            db,
            dc,
            da,
            dd,
            *_extents(x, b),
            RUNS=runs is not None,
            **_sizes(x, b),
        )
        db, dc = (t.view(rows, tokens, groups, -1, state_size).sum(3) for t in (db, dc))
        return (
            dx,
            ddt.to(dt.dtype),
            da.sum(0).to(a.dtype),
            db.to(b.dtype),
            dc.to(c.dtype),
            dd.sum(0).to(d.dtype),
            None,
            None,
        )


def _extents(x: Tensor, b: Tensor) -> tuple[int, ...]:
    """Tokens, heads, groups, sizes of heads and of states."""
    return x.shape[1], x.shape[2], b.shape[2], x.shape[3], b.shape[3]


def _sizes(x: Tensor, b: Tensor) -> dict[str, Any]:
    return {
        "CHUNK": CHUNK,
        "BLOCK_D": max(16, power(x.shape[3])),
        "BLOCK_Z": max(16, power(b.shape[3])),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": 8,
    }


def _forward(
    x_ptr: Any,
    dt_ptr: Any,
    a_ptr: Any,
    b_ptr: Any,
    c_ptr: Any,
    d_ptr: Any,
    state_ptr: Any,
    runs_ptr: Any,
    y_ptr: Any,
    begins_ptr: Any,
    last_ptr: Any,
    num_tokens: Any,
    num_heads: Any,
    num_groups: Any,
    head_size: Any,
    state_size: Any,
    STATE: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One head of one row."""
    program = tl.cast(tl.program_id(0), tl.int64)
    row, head = program // num_heads, program % num_heads
    group = head // (num_heads // num_groups)
    a = tl.load(a_ptr + head).to(tl.float32)
    d = tl.load(d_ptr + head).to(tl.float32)
    place_d, place_z = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_Z)
    places = place_d[:, None] * state_size + place_z[None, :]
    inside = (place_d < head_size)[:, None] & (place_z < state_size)[None, :]
    elements = head_size * state_size
    state = tl.zeros([BLOCK_D, BLOCK_Z], dtype=tl.float32)
    if STATE:
        state = tl.load(state_ptr + program * elements + places, mask=inside, other=0.0)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    for start in range(0, num_tokens, CHUNK):
        dt = load_column(dt_ptr, row, head, start, num_tokens, num_heads, CHUNK)
        inner, since, until, whole = chunk_decays(
            dt * a, runs_ptr, row, start, num_tokens, RUNS, CHUNK
        )
        x = load_rows(x_ptr, row, head, start, num_tokens, num_heads, head_size, CHUNK, BLOCK_D)
        b = load_rows(b_ptr, row, group, start, num_tokens, num_groups, state_size, CHUNK, BLOCK_Z)
        c = load_rows(c_ptr, row, group, start, num_tokens, num_groups, state_size, CHUNK, BLOCK_Z)
        chunk = program * num_chunks + start // CHUNK
        tl.store(begins_ptr + chunk * elements + places, state, mask=inside)
        weights = tl.dot(c, tl.trans(b), input_precision=PRECISION) * inner * dt[None, :]
        y = tl.dot(weights, x, input_precision=PRECISION) + d * x
        y += tl.dot(c, tl.trans(state), input_precision=PRECISION) * since[:, None]
        store_rows(y_ptr, y, row, head, start, num_tokens, num_heads, head_size, CHUNK, BLOCK_D)
        fed = x * (until * dt)[:, None]
        state = state * whole + tl.dot(tl.trans(fed), b, input_precision=PRECISION)
    tl.store(last_ptr + program * elements + places, state, mask=inside)


def _backward(
    x_ptr: Any,
    dt_ptr: Any,
    a_ptr: Any,
    b_ptr: Any,
    c_ptr: Any,
    d_ptr: Any,
    runs_ptr: Any,
    begins_ptr: Any,
    grad_ptr: Any,
    dx_ptr: Any,
    ddt_ptr: Any,
    db_ptr: Any,
    dc_ptr: Any,
    da_ptr: Any,
    dd_ptr: Any,
    num_tokens: Any,
    num_heads: Any,
    num_groups: Any,
    head_size: Any,
    state_size: Any,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One head of one row, from the last chunk to the first; each head has gradients of b and c of
    its own, which are added up afterwards."""
    program = tl.cast(tl.program_id(0), tl.int64)
    row, head = program // num_heads, program % num_heads
    group = head // (num_heads // num_groups)
    a = tl.load(a_ptr + head).to(tl.float32)
    d = tl.load(d_ptr + head).to(tl.float32)
    place, place_d, place_z = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_Z)
    places = place_d[:, None] * state_size + place_z[None, :]
    inside = (place_d < head_size)[:, None] & (place_z < state_size)[None, :]
    elements = head_size * state_size
    later = tl.zeros([BLOCK_D, BLOCK_Z], dtype=tl.float32)
    da = tl.zeros([CHUNK], dtype=tl.float32)
    dd = tl.zeros([CHUNK], dtype=tl.float32)
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    for number in range(num_chunks):
        start = (num_chunks - 1 - number) * CHUNK
        dt = load_column(dt_ptr, row, head, start, num_tokens, num_heads, CHUNK)
        inner, since, until, whole = chunk_decays(
            dt * a, runs_ptr, row, start, num_tokens, RUNS, CHUNK
        )
        x = load_rows(x_ptr, row, head, start, num_tokens, num_heads, head_size, CHUNK, BLOCK_D)
        b = load_rows(b_ptr, row, group, start, num_tokens, num_groups, state_size, CHUNK, BLOCK_Z)
        c = load_rows(c_ptr, row, group, start, num_tokens, num_groups, state_size, CHUNK, BLOCK_Z)
        grad = load_rows(
            grad_ptr, row, head, start, num_tokens, num_heads, head_size, CHUNK, BLOCK_D
        )
        chunk = program * num_chunks + start // CHUNK
        begin = tl.load(begins_ptr + chunk * elements + places, mask=inside, other=0.0)
        dd += tl.sum(grad * x, 1)
        # Within the chunk.
        weights = tl.dot(c, tl.trans(b), input_precision=PRECISION) * inner
        dweights = tl.dot(grad, tl.trans(x), input_precision=PRECISION)
        dscores = dweights * inner * dt[None, :]
        shares = dweights * weights
        dx = tl.dot(tl.trans(weights), grad, input_precision=PRECISION) * dt[:, None] + grad * d
        ddt = tl.sum(shares, 0)
        dsums = tl.sum(shares * dt[None, :], 1) - ddt * dt
        db = tl.dot(tl.trans(dscores), c, input_precision=PRECISION)
        dc = tl.dot(dscores, b, input_precision=PRECISION)
        # What tokens see of the state at the begin.
        seen = tl.dot(c, tl.trans(begin), input_precision=PRECISION)
        pulled = grad * since[:, None]
        dsums += tl.sum(pulled * seen, 1)
        dc += tl.dot(pulled, begin, input_precision=PRECISION)
        # What tokens add to the state at the end.
        moved = tl.dot(b, tl.trans(later), input_precision=PRECISION)
        fed = until * dt
        dx += moved * fed[:, None]
        dfed = tl.sum(x * moved, 1) * until
        ddt += dfed
        dsums -= dfed * dt
        at_end = tl.sum(dfed * dt, 0) + tl.sum(tl.sum(begin * later, 1), 0) * whole
        dsums += tl.where(place == CHUNK - 1, at_end, 0.0)
        db += tl.dot(x * fed[:, None], later, input_precision=PRECISION)
        later = later * whole + tl.dot(tl.trans(pulled), c, input_precision=PRECISION)
        # A sum of logarithms has in it those of all tokens before.
        dlogs = tl.sum(dsums, 0) - tl.cumsum(dsums, 0) + dsums
        ddt += dlogs * a
        da += dlogs * dt
        store_rows(dx_ptr, dx, row, head, start, num_tokens, num_heads, head_size, CHUNK, BLOCK_D)
        store_rows(db_ptr, db, row, head, start, num_tokens, num_heads, state_size, CHUNK, BLOCK_Z)
        store_rows(dc_ptr, dc, row, head, start, num_tokens, num_heads, state_size, CHUNK, BLOCK_Z)
        store_column(ddt_ptr, ddt, row, head, start, num_tokens, num_heads, CHUNK)
    tl.store(da_ptr + program, tl.sum(da, 0))
    tl.store(dd_ptr + program, tl.sum(dd, 0))
