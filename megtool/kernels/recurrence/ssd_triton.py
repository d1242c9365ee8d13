"""Triton kernels of the recurrence of Mamba-2: all chunks at once, and a scan over their states.

The state that each chunk adds (`_add_states`), the states that chunks begin with (`_scan_states`),
and the outputs of each tile of tokens (`_outputs`); backward the same of gradients
(`ssd_gradients_triton`). These are the steps of state-space duality (Dao and Gu,
arXiv 2405.21060, section 6).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.kernels.launch import cdiv, has_wide_products, launch, power
from megtool.kernels.recurrence import ssd_gradients_triton
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

CHUNK = 256  # tokens between states that are stored
_STATE = 64 * 128  # elements of a part of a state that a program keeps
_ELEMENTS = 1024  # of a state, which a program of the scan takes through all chunks


def fits(x_BSND: Tensor, b_BSGZ: Tensor) -> bool:
    """Whether tiles of heads and states fit, in a dtype that is computed in fp32."""
    is_small = max(16, power(x_BSND.shape[3])) + max(16, power(b_BSGZ.shape[3])) <= 384
    return is_small and x_BSND.dtype != torch.float64


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
    values = (x_BSND, dt_BSN, a_N, b_BSGZ, c_BSGZ, d_N, state_BNDZ, runs_BS)
    out: tuple[Tensor, Tensor] = _Scan.apply(*values)  # type: ignore[no-untyped-call]
    return out


class _Scan(torch.autograd.Function):
    """It keeps its inputs, sums of logarithms, and the state at the begin of every chunk."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> tuple[Tensor, Tensor]:
        *given, state, runs = values
        x, dt, a, b, c, d = (t.contiguous() for t in given)
        runs = None if runs is None else runs.contiguous()
        (rows, tokens, heads, size), state_size = x.shape, b.shape[3]
        sums = column_sums(dt.float() * a.float(), CHUNK)
        shape = (rows, heads, cdiv(tokens, CHUNK), size, state_size)
        added = _added_states(x, b, sums, dt, runs, is_back=False)
        begins = torch.empty(shape, dtype=dot_type(x.dtype), device=x.device)
        last = torch.empty(rows, heads, size, state_size, dtype=torch.float32, device=x.device)
        elements = size * state_size
        launch(
            _scan_states,
            rows * heads * cdiv(elements, _ELEMENTS),
            x.device,
            added,
            added if state is None else state.float().contiguous(),
            sums,
            x if runs is None else runs,
            begins,
            last,
            tokens,
            heads,
            elements,
            STATE=state is not None,
            RUNS=runs is not None,
            CHUNK=CHUNK,
            BLOCK=_ELEMENTS,
            num_warps=4,
        )
        del added
        y = torch.empty_like(x)
        sizes = _sizes(x, b)
        sizes["BLOCK_D"] = block(size, 64)
        launch(
            _outputs,
            rows * heads * cdiv(tokens, sizes["TILE"]) * cdiv(size, sizes["BLOCK_D"]),
            x.device,
            x,
            dt,
            sums,
            b,
            c,
            d,
            x if runs is None else runs,
            begins,
            y,
            *_extents(x, b),
            RUNS=runs is not None,
            **sizes,
        )
        ctx.save_for_backward(x, dt, a, b, c, d, runs, sums, begins)
        ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, dt, a, b, c, d, runs, sums, begins = ctx.saved_tensors
        grad = grads[0].contiguous()
        (rows, tokens, heads, _), (groups, state_size) = x.shape, b.shape[2:]
        numbers = {"dtype": torch.float32, "device": x.device}
        laters, carried = _scan_back(
            _added_states(grad, c, sums, dt, runs, is_back=True), begins, sums, runs
        )
        sizes = _sizes(x, b)
        programs = rows * heads * cdiv(tokens, sizes["TILE"])
        db, dc = (torch.empty(rows, tokens, heads, state_size, **numbers) for _ in range(2))
        ddt, d_sums, fed, dd = (torch.empty(dt.shape, **numbers) for _ in range(4))
        dx = torch.empty_like(x)
        inputs = (x, dt, sums, b, c, d, x if runs is None else runs)
        more = {"RUNS": runs is not None, **sizes}
        launch(
            ssd_gradients_triton.query_gradients,
            programs,
            x.device,
            *inputs,
            begins,
            grad,
            dc,
            d_sums,
            *_extents(x, b),
            **more,
        )
        launch(
            ssd_gradients_triton.key_gradients,
            programs,
            x.device,
            *inputs,
            laters,
            grad,
            dx,
            db,
            ddt,
            d_sums,
            fed,
            dd,
            *_extents(x, b),
            **more,
        )
        d_logs = log_gradients(d_sums, fed, carried, CHUNK)
        ddt += d_logs * a.float()
        da = (d_logs * dt).sum((0, 1))
        db, dc = (t.view(rows, tokens, groups, -1, state_size).sum(3) for t in (db, dc))
        return (
            dx,
            ddt.to(dt.dtype),
            da.to(a.dtype),
            db.to(b.dtype),
            dc.to(c.dtype),
            dd.sum((0, 1)).to(d.dtype),
            None,
            None,
        )


def _added_states(
    x: Tensor, b: Tensor, sums: Tensor, dt: Tensor, runs: Tensor | None, *, is_back: bool
) -> Tensor:
    """What each chunk adds to the state behind it, [B, N, chunks, D, Z] (fp32).

    Back, `x` are gradients of outputs and `b` is c: what they add to the gradient of the state
    before the chunk.
    """
    (rows, tokens, heads, size), state_size = x.shape, b.shape[3]
    chunks, sizes = cdiv(tokens, CHUNK), _sizes(x, b)
    sizes["BLOCK_D"] = block(size, _STATE // sizes["BLOCK_Z"])
    shape = (rows, heads, chunks, size, state_size)
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    launch(
        _add_states,
        rows * heads * chunks * cdiv(size, sizes["BLOCK_D"]),
        x.device,
        x,
        b,
        sums,
        dt,
        x if runs is None else runs,
        out,
        *_extents(x, b),
        BACK=is_back,
        RUNS=runs is not None,
        **sizes,
    )
    return out


def _scan_back(
    added: Tensor, begins: Tensor, sums: Tensor, runs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the state behind each chunk, and of the logarithm of its decay [B, N, chunks]"""
    rows, heads, chunks = begins.shape[:3]
    elements = begins[0, 0, 0].numel()
    blocks = cdiv(elements, _ELEMENTS)
    laters = torch.empty_like(begins)
    carried = torch.empty(rows, heads, chunks, blocks, dtype=torch.float32, device=begins.device)
    launch(
        ssd_gradients_triton.scan_gradients,
        rows * heads * blocks,
        begins.device,
        added,
        begins,
        sums,
        sums if runs is None else runs,
        laters,
        carried,
        sums.shape[1],
        heads,
        elements,
        RUNS=runs is not None,
        CHUNK=CHUNK,
        BLOCK=_ELEMENTS,
        num_warps=4,
    )
    return laters, carried.sum(-1)


def _extents(x: Tensor, b: Tensor) -> tuple[int, ...]:
    """Tokens, heads, groups, sizes of heads and of states."""
    return x.shape[1], x.shape[2], b.shape[2], x.shape[3], b.shape[3]


def _sizes(x: Tensor, b: Tensor) -> dict[str, Any]:
    size_d, size_z = max(16, power(x.shape[3])), max(16, power(b.shape[3]))
    is_wide = has_wide_products(x.device) and dot_type(x.dtype) != torch.float32
    is_short = not is_wide or size_d + size_z > 256
    return {
        "CHUNK": CHUNK,
        "TILE": min(CHUNK, 32 if is_short else 64),
        "BLOCK_D": size_d,
        "BLOCK_Z": size_z,
        **dot_sizes(x.dtype),
        "num_warps": 8,
        "num_stages": 1,
    }


def _add_states(
    x_ptr: Any,
    b_ptr: Any,
    sums_ptr: Any,
    dt_ptr: Any,
    runs_ptr: Any,
    out_ptr: Any,
    num_tokens: Any,
    num_heads: Any,
    num_groups: Any,
    head_size: Any,
    state_size: Any,
    BACK: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """BLOCK_D elements of one head, in one chunk."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_blocks = (head_size + BLOCK_D - 1) // BLOCK_D
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    first, chunk = (program % num_blocks) * BLOCK_D, program // num_blocks
    row, head = chunk // num_chunks // num_heads, chunk // num_chunks % num_heads
    group = head // (num_heads // num_groups)
    chunk_start = (chunk % num_chunks) * CHUNK
    end = tl.minimum(chunk_start + CHUNK, num_tokens)
    total = tl.load(sums_ptr + (row * num_tokens + end - 1) * num_heads + head)
    state = tl.zeros([BLOCK_D, BLOCK_Z], dtype=tl.float32)
    for start in range(chunk_start, end, TILE):
        sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, TILE)
        run = load_runs(runs_ptr, row, start, num_tokens, RUNS, TILE)
        if BACK:
            scale = decays_since(sums, run, runs_ptr, row, chunk_start, num_tokens, RUNS)
        else:
            scale = decays_until(sums, run, total, runs_ptr, row, end - 1, num_tokens, RUNS)
            scale *= load_column(dt_ptr, row, head, start, num_tokens, num_heads, TILE)
        x = load_rows(
            x_ptr, row, head, start, first, num_tokens, num_heads, head_size, TILE, BLOCK_D
        )
        b = load_rows(
            b_ptr, row, group, start, 0, num_tokens, num_groups, state_size, TILE, BLOCK_Z
        )
        fed = (x.to(tl.float32) * scale[:, None]).to(DOT)
        state += product(tl.trans(fed), b.to(DOT), DOT, PRECISION)
    store_block(out_ptr, state, chunk, first, 0, head_size, state_size, BLOCK_D, BLOCK_Z)


def _scan_states(
    added_ptr: Any,
    state_ptr: Any,
    sums_ptr: Any,
    runs_ptr: Any,
    begins_ptr: Any,
    last_ptr: Any,
    num_tokens: Any,
    num_heads: Any,
    num_elements: Any,
    STATE: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK elements of the states of one head, from the first chunk to the last."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_blocks = (num_elements + BLOCK - 1) // BLOCK
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    place, number = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK), program // num_blocks
    row, head = number // num_heads, number % num_heads
    inside = place < num_elements
    state = tl.zeros([BLOCK], dtype=tl.float32)
    if STATE:
        state = tl.load(state_ptr + number * num_elements + place, mask=inside, other=0.0)
    for chunk in range(num_chunks):
        start = chunk * CHUNK
        last = tl.minimum(start + CHUNK, num_tokens) - 1
        total = tl.load(sums_ptr + (row * num_tokens + last) * num_heads + head)
        across = decay_across(total, runs_ptr, row, start, last, num_tokens, RUNS)
        places = (number * num_chunks + chunk) * num_elements + place
        tl.store(begins_ptr + places, state.to(begins_ptr.dtype.element_ty), mask=inside)
        state = state * across + tl.load(added_ptr + places, mask=inside, other=0.0)
    tl.store(last_ptr + number * num_elements + place, state, mask=inside)


def _outputs(
    x_ptr: Any,
    dt_ptr: Any,
    sums_ptr: Any,
    b_ptr: Any,
    c_ptr: Any,
    d_ptr: Any,
    runs_ptr: Any,
    begins_ptr: Any,
    y_ptr: Any,
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
    """BLOCK_D elements of one head, for a tile of tokens: what they read from the state that their
    chunk begins with, and from the tokens of the chunk up to themselves."""
    program = tl.cast(tl.program_id(0), tl.int64)
    num_blocks = (head_size + BLOCK_D - 1) // BLOCK_D
    num_tiles = (num_tokens + TILE - 1) // TILE
    first, number = (program % num_blocks) * BLOCK_D, program // num_blocks
    start, number = (number % num_tiles) * TILE, number // num_tiles
    row, head = number // num_heads, number % num_heads
    group = head // (num_heads // num_groups)
    chunk_start = start // CHUNK * CHUNK
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    place = tl.arange(0, TILE)
    chunk = number * num_chunks + start // CHUNK
    sums = load_column(sums_ptr, row, head, start, num_tokens, num_heads, TILE)
    run = load_runs(runs_ptr, row, start, num_tokens, RUNS, TILE)
    since = decays_since(sums, run, runs_ptr, row, chunk_start, num_tokens, RUNS)
    c = load_rows(c_ptr, row, group, start, 0, num_tokens, num_groups, state_size, TILE, BLOCK_Z)
    c = c.to(DOT)
    begin = load_block(begins_ptr, chunk, first, 0, head_size, state_size, BLOCK_D, BLOCK_Z)
    y = product(c, tl.trans(begin), DOT, PRECISION) * since[:, None]
    for start_2 in range(chunk_start, start + 1, TILE):
        sums_2 = load_column(sums_ptr, row, head, start_2, num_tokens, num_heads, TILE)
        run_2 = load_runs(runs_ptr, row, start_2, num_tokens, RUNS, TILE)
        dt = load_column(dt_ptr, row, head, start_2, num_tokens, num_heads, TILE)
        b = load_rows(
            b_ptr, row, group, start_2, 0, num_tokens, num_groups, state_size, TILE, BLOCK_Z
        )
        x = load_rows(
            x_ptr, row, head, start_2, first, num_tokens, num_heads, head_size, TILE, BLOCK_D
        )
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
        weights = product(c, tl.trans(b.to(DOT)), DOT, PRECISION) * left * dt[None, :]
        y += product(weights.to(DOT), x.to(DOT), DOT, PRECISION)
    x = load_rows(x_ptr, row, head, start, first, num_tokens, num_heads, head_size, TILE, BLOCK_D)
    y += x.to(tl.float32) * tl.load(d_ptr + head).to(tl.float32)
    store_rows(y_ptr, y, row, head, start, first, num_tokens, num_heads, head_size, TILE, BLOCK_D)
