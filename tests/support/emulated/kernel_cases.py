"""Calls of every Triton kernel at the sizes of models that people train.

A case calls the product's own function on tensors without data (`meta`), forward and backward, so
that tile sizes, flags and numbers of warps are the ones that the product chooses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megtool.kernels.attention import softmax_triton
from megtool.kernels.elementwise import (
    activation_triton,
    dropout_add_triton,
    norm_triton,
    rotary_triton,
)
from megtool.kernels.experts import grouped_gemm_triton
from megtool.kernels.fp8 import cast_triton
from megtool.kernels.recurrence import causal_conv_triton, delta_rule_triton, ssd_triton
from megtool.kernels.vocabulary import lm_head_triton

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_I64 = torch.int64
TOKENS = 4096


class Case(NamedTuple):
    """Calls of kernels in one dtype, with a shape for people to read.

    The first case of each operation is part of the fast subset.
    """

    operation: str
    shape: str
    dtype: torch.dtype
    run: Callable[[], object]


def cases() -> Iterator[Case]:
    """Yield all calls, those in bf16 first."""
    for dtype in (BF16, FP16, FP32):
        for source in (_norms, _activations, _elementwise, _vocabulary, _experts, _recurrences):
            for operation, shape, run in source(dtype):
                yield Case(operation, shape, dtype, run)


_Calls = Iterator[tuple[str, str, Callable[[], object]]]


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return _empty(*shape, dtype=dtype).requires_grad_()


def _both_ways(run: Callable[[], Tensor | tuple[Tensor, ...]]) -> Callable[[], object]:
    """A forward and a backward pass."""

    def call() -> None:
        out = run()
        outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
        torch.autograd.backward(outs, [torch.empty_like(t) for t in outs])

    return call


def _norms(dtype: torch.dtype) -> _Calls:
    for size in (4096, 1024, 2048, 2880, 5120, 7168, 8192, 12288, 16384):

        def rms(size: int = size, *, plus_one: bool = False) -> Tensor:
            x, weight = _leaf(TOKENS, size, dtype=dtype), _leaf(size, dtype=dtype)
            return norm_triton.rms_norm(x, weight, 1e-6, plus_one)

        def add_rms(size: int = size) -> tuple[Tensor, Tensor]:
            x, residual = (_leaf(TOKENS, size, dtype=dtype) for _ in range(2))
            return norm_triton.add_rms_norm(x, residual, _leaf(size, dtype=dtype), 1e-6, False)

        def layer(size: int = size) -> tuple[Tensor, Tensor]:
            x, residual = (_leaf(TOKENS, size, dtype=dtype) for _ in range(2))
            weight, bias = (_leaf(size, dtype=dtype) for _ in range(2))
            return norm_triton.add_layer_norm(x, residual, weight, bias, 1e-6, True)

        yield "rms_norm", f"hidden {size}", _both_ways(rms)
        yield "add_rms_norm", f"hidden {size}", _both_ways(add_rms)
        yield "add_layer_norm", f"hidden {size}", _both_ways(layer)
    for head in (128, 64, 256):  # norms of queries and keys

        def of_heads(head: int = head) -> Tensor:
            x, weight = _leaf(TOKENS, 32, head, dtype=dtype), _leaf(head, dtype=dtype)
            return norm_triton.rms_norm(x, weight, 1e-6, True)

        yield "rms_norm", f"head {head}", _both_ways(of_heads)


def _activations(dtype: torch.dtype) -> _Calls:
    kinds = ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")
    for kind, size in ((kind, size) for size in (14336, 768, 1024) for kind in kinds):

        def gated(kind: str = kind, size: int = size) -> Tensor:
            x, bias = _leaf(TOKENS, 2 * size, dtype=dtype), _leaf(2 * size, dtype=dtype)
            return activation_triton.gated(x, kind, bias, 7.0, 1.0)

        def simple(kind: str = kind, size: int = size) -> Tensor:
            return activation_triton.gated(_leaf(TOKENS, 2 * size, dtype=dtype), kind, None, 0, 0)

        def plain(kind: str = kind, size: int = size) -> Tensor:
            x, bias = _leaf(TOKENS, size, dtype=dtype), _leaf(size, dtype=dtype)
            return activation_triton.activate(x, kind, bias)

        yield "gated activation", f"{kind} {size}", _both_ways(simple)
        yield "gated activation with limits", f"{kind} {size}", _both_ways(gated)
        yield "activation", f"{kind} {size}", _both_ways(plain)


def _elementwise(dtype: torch.dtype) -> _Calls:
    for size, residual in itertools.product((4096, 16384), (dtype, FP32)):

        def dropout(size: int = size, residual: torch.dtype = residual, p: float = 0.1) -> Tensor:
            x, bias = _leaf(TOKENS, size, dtype=dtype), _leaf(size, dtype=dtype)
            seed = torch.empty((), dtype=_I64, device="meta")
            rest = _leaf(TOKENS, size, dtype=residual)
            return dropout_add_triton.bias_dropout_add(x, bias, rest, p, seed, 0.5)

        shape = f"hidden {size}, residual {str(residual).removeprefix('torch.')}"
        yield "bias_dropout_add", shape, _both_ways(dropout)
        yield "bias_add", shape, _both_ways(partial(dropout, p=0.0))
    for interleaved, (head, rotary) in itertools.product(
        (False, True), ((128, 128), (64, 64), (256, 64), (192, 64), (128, 32))
    ):

        def rotate(
            head: int = head, rotary: int = rotary, interleaved: bool = interleaved
        ) -> Tensor:
            x = _leaf(1, TOKENS, 32, head, dtype=dtype)
            cos, sin = (_empty(1, TOKENS, rotary, dtype=FP32) for _ in range(2))
            return rotary_triton.rotate(x, cos, sin, interleaved)

        pairs = "neighbours" if interleaved else "halves"
        yield "rotary", f"head {head}, rotated {rotary}, {pairs}", _both_ways(rotate)
    for keys, cap in itertools.product((2048, 512, 8192, 32768), (0.0, 50.0)):

        def softmax(keys: int = keys, cap: float = cap) -> Tensor:
            mask = _empty(1, 1, 1024, keys, dtype=torch.bool)
            scores, sinks = _leaf(1, 32, 1024, keys, dtype=dtype), _leaf(32, dtype=dtype)
            return softmax_triton.masked_softmax(scores, mask, 0.1, cap, sinks)

        yield "masked_softmax", f"keys {keys}{', cap' if cap else ''}", _both_ways(softmax)


def _vocabulary(dtype: torch.dtype) -> _Calls:
    for width, cap in itertools.product((151936, 32000, 50257, 128256, 262144), (0.0, 30.0)):

        def fold(width: int = width, cap: float = cap) -> None:
            raw, columns = _empty(TOKENS, width, dtype=dtype), _empty(TOKENS, dtype=_I64)
            maximum, total, target = (_empty(TOKENS, dtype=FP32) for _ in range(3))
            for best in (None, _empty(TOKENS, dtype=_I64)):
                lm_head_triton.fold(raw, 0, columns, cap, 1.0, maximum, total, target, best)
            lm_head_triton.slope(raw, 0, columns, total, target, cap, 1.0, raw)

        yield "cross_entropy", f"vocabulary {width}{', cap' if cap else ''}", fold


def _experts(dtype: torch.dtype) -> _Calls:
    for hidden, num in itertools.product((4096, 2048, 7168), (8, 2, 4)):

        def permute(hidden: int = hidden, num: int = num) -> None:
            rows, ids = _empty(TOKENS * num, hidden, dtype=dtype), _empty(TOKENS * num, dtype=_I64)
            probs, x = _empty(TOKENS, num, dtype=FP32), _empty(TOKENS, hidden, dtype=dtype)
            grouped_gemm_triton.copy_rows(x, ids, num)
            grouped_gemm_triton.sum_rows(rows, ids, num, probs)
            grouped_gemm_triton.sum_rows(rows, ids, num, None)
            grouped_gemm_triton.spread_rows(x, rows, ids, probs)

        yield "expert permutation", f"hidden {hidden}, top {num}", permute
    for kind in ("e4m3", "e5m2"):

        def cast(kind: str = kind) -> None:
            scale = torch.empty((), dtype=FP32, device="meta")
            cast_triton.cast_fp8(_empty(TOKENS, 4096, dtype=dtype), scale, kind)

        yield "cast to FP8", kind, cast
        for rows, columns in ((TOKENS, 4096), (TOKENS, 14336)):
            x, shape = _empty(1, rows, columns, dtype=dtype), f"{rows} x {columns} {kind}"

            def both(x: Tensor = x, kind: str = kind) -> None:
                cast_triton.scale_of(x, kind, 0)
                cast_triton.cast_both(x, _empty(1, dtype=FP32), kind)
                _, _, parts = cast_triton.cast_both(x, _empty(x.shape[1], dtype=FP32), kind)
                one = torch.empty((), dtype=FP32, device="meta")
                cast_triton.record_amax(parts, one, one)
                cast_triton.record_amax(parts, one, None)

            def groups(x: Tensor = x, kind: str = kind) -> None:
                cast_triton.quantize_both(x, kind, 128)
                cast_triton.quantize_both(x, kind, 32)
                cast_triton.quantize_squares(x, kind, 128)

            yield "FP8 both ways", shape, both
            yield "FP8 groups both ways", shape, groups


def _recurrences(dtype: torch.dtype) -> _Calls:
    for channels, packed in itertools.product((8192, 1792), (True, False)):

        def conv(channels: int = channels, packed: bool = packed) -> Tensor:
            x, weight = _leaf(2, TOKENS, channels, dtype=dtype), _leaf(channels, 4, dtype=dtype)
            bias, past = _leaf(channels, dtype=dtype), _empty(2, 3, channels, dtype=dtype)
            runs = _empty(2, TOKENS, dtype=_I64)
            if packed:
                return causal_conv_triton.causal_conv(x, weight, bias, None, runs, True)
            return causal_conv_triton.causal_conv(x, weight, bias, past, None, True)

        rows = "packed" if packed else "after a state"
        yield "causal convolution", f"channels {channels}, {rows}", _both_ways(conv)
    for (head, state), packed in itertools.product(
        ((64, 128), (64, 64), (128, 128), (128, 64), (64, 256), (80, 128)), (True, False)
    ):

        def scan(head: int = head, state: int = state, packed: bool = packed) -> Tensor:
            x, dt = _leaf(2, TOKENS, 64, head, dtype=dtype), _leaf(2, TOKENS, 64, dtype=FP32)
            b, c = (_leaf(2, TOKENS, 8, state, dtype=dtype) for _ in range(2))
            a, d = _leaf(64, dtype=FP32), _leaf(64, dtype=FP32)
            before = None if packed else _empty(2, 64, head, state, dtype=FP32)
            runs = _empty(2, TOKENS, dtype=_I64) if packed else None
            return ssd_triton.ssd_scan(x, dt, a, b, c, d, before, runs)[0]

        rows = "packed" if packed else "after a state"
        yield "Mamba-2", f"head {head}, state {state}, {rows}", _both_ways(scan)
    for (key, value), packed in itertools.product(
        ((128, 128), (256, 256), (128, 256), (64, 64)), (True, False)
    ):

        def rule(
            key: int = key, value: int = value, packed: bool = packed
        ) -> tuple[Tensor, Tensor]:
            queries, keys = (_leaf(2, TOKENS, 16, key, dtype=dtype) for _ in range(2))
            values = _leaf(2, TOKENS, 32, value, dtype=dtype)
            decay, beta = (_leaf(2, TOKENS, 32, dtype=FP32) for _ in range(2))
            before = None if packed else _leaf(2, 32, key, value, dtype=FP32)
            runs = _empty(2, TOKENS, dtype=_I64) if packed else None
            return delta_rule_triton.gated_delta_rule(
                queries, keys, values, decay, beta, before, runs
            )

        rows = "packed" if packed else "after a state"
        yield "gated delta rule", f"key {key}, value {value}, {rows}", _both_ways(rule)
