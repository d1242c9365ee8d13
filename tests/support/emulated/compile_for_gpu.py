"""Compiles Triton kernels for a GPU that is not there: what the interpreter lets pass fails here.

Run in a process of its own, because a kernel is either interpreted or compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megtool.kernels import launch
from megtool.kernels.experts import grouped_gemm_triton
from megtool.kernels.fp8 import cast_triton as fp8_triton
from megtool.kernels.recurrence import causal_conv_triton, delta_rule_triton, ssd_triton
from megtool.kernels.vocabulary import lm_head_triton

HOPPER = GPUTarget("cuda", 90, 32)


def build(body: Callable[..., Any], types: str, **constants: Any) -> None:
    """Compile one kernel for arguments of these types (Triton's words) and constants."""
    kernel = launch.compiled(body)
    names, kinds = list(kernel.arg_names), types.split()
    signature = dict.fromkeys(names, "constexpr")
    signature.update(dict(zip([n for n in names if n not in constants], kinds, strict=True)))
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values)
    made = triton.compile(source, target=HOPPER, options={"num_warps": 8})
    assert ".target sm_90" in made.asm["ptx"]
    print(body.__module__, body.__name__)


for x in ("*bf16", "*fp32"):
    shared: dict[str, Any] = {"ACC": tl.float32, "BLOCK": 2048}
    kind: dict[str, Any] = {"BIAS": 7, "LARGEST": 448.0, "NAN": 0x7F, "BLOCK": 4096}
    build(fp8_triton._cast, f"{x} *fp32 *u8 *fp32 i32", MANTISSA=3, **kind)
    columns = "*i64 *fp32 *fp32"
    for more in ({"CAP": True, "BEST": True}, {"CAP": False, "BEST": False}):
        build(
            lm_head_triton._fold,
            f"{x} {columns} *fp32 *i64 i64 i32 i32 fp32 fp32",
            **more,
            **shared,
        )
        build(
            lm_head_triton._slope,
            f"{x} {columns} {x} i64 i64 i32 i32 i32 fp32 fp32",
            CAP=more["CAP"],
            **shared,
        )
    build(grouped_gemm_triton._copy, f"{x} *i64 {x} i32 i32 i32", BLOCK=2048)
    build(grouped_gemm_triton._spread, f"{x} {x} *i64 *fp32 {x} *fp32 i32", NUM=8, **shared)
    for weighted in (True, False):
        build(
            grouped_gemm_triton._sum,
            f"{x} *i64 *fp32 {x} i32 i32",
            NUM=8,
            WEIGHTED=weighted,
            **shared,
        )
    conv: dict[str, Any] = {"KERNEL": 4, "RUNS": True, "ACC": tl.float32, "ROWS": 32, "BLOCK": 128}
    more = {"BIAS": True, "PAST": True, "SILU": True, **conv}
    given, sizes = f"{x} {x} {x} {x} *i64", "i32 i32 i32 i32"
    build(causal_conv_triton._forward, f"{given} {x} {sizes}", **more)
    build(causal_conv_triton._backward, f"{given} {x} *fp32 *fp32 {sizes}", **more)
    build(causal_conv_triton._transposed, f"*fp32 {x} *i64 {x} i32 i32", **conv)
    precision = "ieee" if x == "*fp32" else "tf32"
    scan: dict[str, Any] = {"CHUNK": 32, "BLOCK_D": 64, "BLOCK_Z": 128, "PRECISION": precision}
    given, sizes = f"{x} *fp32 *fp32 {x} {x} {x}", "i32 i32 i32 i32 i32"
    build(
        ssd_triton._forward,
        f"{given} *fp32 *i64 {x} *fp32 *fp32 {sizes}",
        STATE=True,
        RUNS=True,
        **scan,
    )
    grads = f"{x} {x} *fp32 *fp32 *fp32 *fp32 *fp32"
    build(ssd_triton._backward, f"{given} *i64 *fp32 {grads} {sizes}", RUNS=True, **scan)
    rule: dict[str, Any] = {"CHUNK": 32, "BLOCK_D": 128, "BLOCK_P": 64, "PRECISION": precision}
    given, sizes = f"{x} {x} {x} *fp32 *fp32", "i32 i32 i32 i32 i32 fp32"
    build(
        delta_rule_triton._forward,
        f"{given} *fp32 *i64 {x} *fp32 *fp32 *fp32 {sizes}",
        STATE=True,
        RUNS=True,
        **rule,
    )
    grads = f"{x} *fp32 *fp32 *fp32 {x} *fp32 *fp32 *fp32"
    build(
        delta_rule_triton._backward,
        f"{given} *i64 *fp32 *fp32 {grads} {sizes}",
        RUNS=True,
        **rule,
    )
