"""Triton kernels of the causal convolution, forward and backward, with its activation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megtool.kernels.launch import accumulator, cdiv, launch, power, warps

if TYPE_CHECKING:
    import triton.language as tl


def causal_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    past_BPC: Tensor | None,
    runs_BS: Tensor | None,
    silu: bool,
) -> Tensor:
    """See `causal_conv.causal_conv`."""
    values = (x_BSC, weight_CK, bias_C, past_BPC, runs_BS, silu)
    out: Tensor = _CausalConv.apply(*values)  # type: ignore[no-untyped-call]
    return out


class _CausalConv(torch.autograd.Function):
    """It keeps its input, and convolves it again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BSC: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        past_BPC: Tensor | None,
        runs_BS: Tensor | None,
        silu: bool,
    ) -> Tensor:
        x, weight_CK = _rows(x_BSC), weight_CK.contiguous()
        past = None if past_BPC is None else past_BPC.contiguous()
        runs = None if runs_BS is None else runs_BS.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        programs, sizes = _grid(x)
        launch(
            _forward,
            programs,
            x.device,
            *_inputs(x, weight_CK, bias_C, past, runs),
            out,
            *_extents(x),
            SILU=silu,
            **_facts(x, weight_CK, bias_C, past, runs),
            **sizes,
        )
        ctx.save_for_backward(x, weight_CK, bias_C, past, runs)
        ctx.silu = silu
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight_CK, bias_C, past, runs = ctx.saved_tensors
        grad = grads[0].contiguous()
        taps, size = weight_CK.shape[1], x.shape[2]
        programs, sizes = _grid(x)
        kind = torch.promote_types(x.dtype, torch.float32)
        inner = torch.empty(x.shape, dtype=kind, device=x.device)
        tiles = x.shape[0] * cdiv(x.shape[1], sizes["ROWS"])
        parts = torch.empty((tiles, taps + 1, size), dtype=kind, device=x.device)
        facts = _facts(x, weight_CK, bias_C, past, runs)
        launch(
            _backward,
            programs,
            x.device,
            *_inputs(x, weight_CK, bias_C, past, runs),
            grad,
            inner,
            parts,
            *_extents(x),
            SILU=ctx.silu,
            **facts,
            **sizes,
        )
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch(
            _transposed,
            programs,
            x.device,
            inner,
            weight_CK,
            x if runs is None else runs,
            dx,
            x.shape[1],
            size,
            KERNEL=taps,
            RUNS=runs is not None,
            ACC=facts["ACC"],
            **sizes,
        )
        sums = parts.sum(0)
        bias = None if bias_C is None else sums[taps].to(bias_C.dtype)
        return dx, sums[:taps].T.to(weight_CK.dtype), bias, None, None, None


def _rows(x_BSC: Tensor) -> Tensor:
    """With channels next to each other, wherever rows and tokens lie."""
    return x_BSC if x_BSC.stride(2) == 1 else x_BSC.contiguous()


def _grid(x_BSC: Tensor) -> tuple[int, dict[str, int]]:
    """The number of programs, and the tile of tokens and channels of each."""
    rows, tokens, size = x_BSC.shape
    block = min(128, power(size))
    count = min(32, power(tokens))
    programs = rows * cdiv(tokens, count) * cdiv(size, block)
    return programs, {"ROWS": count, "BLOCK": block, "num_warps": warps(count * block)}


def _inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, runs: Tensor | None
) -> tuple[Tensor, ...]:
    return x, weight, *(x if t is None else t for t in (bias, past, runs))


def _extents(x: Tensor) -> tuple[int, ...]:
    return x.shape[1], x.shape[2], x.stride(0), x.stride(1)


def _facts(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, runs: Tensor | None
) -> dict[str, Any]:
    return {
        "KERNEL": weight.shape[1],
        "BIAS": bias is not None,
        "PAST": past is not None,
        "RUNS": runs is not None,
        "ACC": accumulator(x),
    }


def _loaded(
    x_ptr: Any,
    past_ptr: Any,
    runs_ptr: Any,
    row: Any,
    token: Any,
    col: Any,
    back: Any,
    num_tokens: Any,
    size: Any,
    row_stride: Any,
    token_stride: Any,
    KERNEL: tl.constexpr,
    PAST: tl.constexpr,
    RUNS: tl.constexpr,
    ACC: tl.constexpr,
) -> Any:
    """The inputs `back` tokens before those of a tile; zeros where a token takes none in."""
    source = token - back
    live = (token < num_tokens) & (source >= 0)
    if RUNS:
        own = tl.load(runs_ptr + row * num_tokens + token, mask=token < num_tokens, other=0)
        live = live & (tl.load(runs_ptr + row * num_tokens + source, mask=live, other=-1) == own)
    columns = col < size
    offsets = row * row_stride + source[:, None] * token_stride + col[None, :]
    x = tl.load(x_ptr + offsets, mask=live[:, None] & columns[None, :], other=0.0).to(ACC)
    if PAST:
        early = (token < num_tokens) & (source < 0)
        places = (row * (KERNEL - 1) + source + KERNEL - 1)[:, None] * size + col[None, :]
        head = tl.load(past_ptr + places, mask=early[:, None] & columns[None, :], other=0.0)
        x += head.to(ACC)
    return x


def _forward(
    x_ptr: Any,
    weight_ptr: Any,
    bias_ptr: Any,
    past_ptr: Any,
    runs_ptr: Any,
    out_ptr: Any,
    num_tokens: Any,
    size: Any,
    row_stride: Any,
    token_stride: Any,
    KERNEL: tl.constexpr,
    BIAS: tl.constexpr,
    PAST: tl.constexpr,
    RUNS: tl.constexpr,
    SILU: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A tile of ROWS tokens and BLOCK channels a program."""
    columns = (size + BLOCK - 1) // BLOCK
    tiles = (num_tokens + ROWS - 1) // ROWS
    tile = tl.program_id(0) // columns
    col = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)
    row = tl.cast(tile // tiles, tl.int64)
    token = (tile % tiles) * ROWS + tl.arange(0, ROWS)
    y = tl.zeros([ROWS, BLOCK], dtype=ACC)
    if BIAS:
        y += tl.load(bias_ptr + col, mask=col < size, other=0.0).to(ACC)[None, :]
    for back in tl.static_range(KERNEL):
        tap = tl.load(weight_ptr + col * KERNEL + KERNEL - 1 - back, mask=col < size, other=0.0)
        x = _loaded(
            x_ptr,
            past_ptr,
            runs_ptr,
            row,
            token,
            col,
            back,
            num_tokens,
            size,
            row_stride,
            token_stride,
            KERNEL,
            PAST,
            RUNS,
            ACC,
        )
        y += x * tap.to(ACC)[None, :]
    if SILU:
        y = y / (1 + tl.exp(-y))
    offsets = (row * num_tokens + token)[:, None] * size + col[None, :]
    inside = (token < num_tokens)[:, None] & (col < size)[None, :]
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)


def _backward(
    x_ptr: Any,
    weight_ptr: Any,
    bias_ptr: Any,
    past_ptr: Any,
    runs_ptr: Any,
    grad_ptr: Any,
    inner_ptr: Any,
    parts_ptr: Any,
    num_tokens: Any,
    size: Any,
    row_stride: Any,
    token_stride: Any,
    KERNEL: tl.constexpr,
    BIAS: tl.constexpr,
    PAST: tl.constexpr,
    RUNS: tl.constexpr,
    SILU: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The gradient before the activation, and each tile's own sums for taps and bias."""
    columns = (size + BLOCK - 1) // BLOCK
    tiles = (num_tokens + ROWS - 1) // ROWS
    tile = tl.program_id(0) // columns
    col = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)
    row = tl.cast(tile // tiles, tl.int64)
    token = (tile % tiles) * ROWS + tl.arange(0, ROWS)
    offsets = (row * num_tokens + token)[:, None] * size + col[None, :]
    inside = (token < num_tokens)[:, None] & (col < size)[None, :]
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(ACC)
    if SILU:
        y = tl.zeros([ROWS, BLOCK], dtype=ACC)
        if BIAS:
            y += tl.load(bias_ptr + col, mask=col < size, other=0.0).to(ACC)[None, :]
        for back in tl.static_range(KERNEL):
            tap = tl.load(weight_ptr + col * KERNEL + KERNEL - 1 - back, mask=col < size, other=0.0)
            x = _loaded(
                x_ptr,
                past_ptr,
                runs_ptr,
                row,
                token,
                col,
                back,
                num_tokens,
                size,
                row_stride,
                token_stride,
                KERNEL,
                PAST,
                RUNS,
                ACC,
            )
            y += x * tap.to(ACC)[None, :]
        share = 1 / (1 + tl.exp(-y))
        grad = grad * share * (1 + y * (1 - share))
    tl.store(inner_ptr + offsets, grad, mask=inside)
    base = tl.cast(tile, tl.int64) * (KERNEL + 1) * size
    for back in tl.static_range(KERNEL):
        x = _loaded(
            x_ptr,
            past_ptr,
            runs_ptr,
            row,
            token,
            col,
            back,
            num_tokens,
            size,
            row_stride,
            token_stride,
            KERNEL,
            PAST,
            RUNS,
            ACC,
        )
        place = base + (KERNEL - 1 - back) * size + col
        tl.store(parts_ptr + place, tl.sum(grad * x, 0), mask=col < size)
    tl.store(parts_ptr + base + KERNEL * size + col, tl.sum(grad, 0), mask=col < size)


def _transposed(
    inner_ptr: Any,
    weight_ptr: Any,
    runs_ptr: Any,
    dx_ptr: Any,
    num_tokens: Any,
    size: Any,
    KERNEL: tl.constexpr,
    RUNS: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The gradient of the input: the same taps, of the tokens that come after."""
    columns = (size + BLOCK - 1) // BLOCK
    tiles = (num_tokens + ROWS - 1) // ROWS
    tile = tl.program_id(0) // columns
    col = (tl.program_id(0) % columns) * BLOCK + tl.arange(0, BLOCK)
    row = tl.cast(tile // tiles, tl.int64)
    token = (tile % tiles) * ROWS + tl.arange(0, ROWS)
    dx = tl.zeros([ROWS, BLOCK], dtype=ACC)
    for back in tl.static_range(KERNEL):
        tap = tl.load(weight_ptr + col * KERNEL + KERNEL - 1 - back, mask=col < size, other=0.0)
        target = token + back
        live = target < num_tokens
        if RUNS:
            own = tl.load(runs_ptr + row * num_tokens + token, mask=token < num_tokens, other=0)
            other = tl.load(runs_ptr + row * num_tokens + target, mask=live, other=-1)
            live = live & (own == other)
        offsets = (row * num_tokens + target)[:, None] * size + col[None, :]
        inside = live[:, None] & (col < size)[None, :]
        grad = tl.load(inner_ptr + offsets, mask=inside, other=0.0)
        dx += grad * tap.to(ACC)[None, :]
    offsets = (row * num_tokens + token)[:, None] * size + col[None, :]
    inside = (token < num_tokens)[:, None] & (col < size)[None, :]
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
