"""Triton's kernels become machine code of a Hopper GPU, also where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megtool.kernels.elementwise import activation_triton as activation
from megtool.kernels.elementwise import dropout_add_triton as dropout
from megtool.kernels.elementwise import norm_triton as norm
from megtool.kernels.elementwise import rotary_triton as rotary
from megtool.kernels.attention import softmax_triton as softmax
from megtool.kernels.launch import compiled, tile

FLOATS = {"eps", "limit", "offset", "p", "factor", "scale", "softcap"}
WIDE = {"mean_ptr", "inverse_ptr", "parts_ptr", "shifts_ptr", "cos_ptr", "sin_ptr", "share_ptr",
        "rows_ptr"}

def build(body, num_warps=4, **constants):
    def kind(name):
        if name in constants:
            return "constexpr"
        if name in FLOATS:
            return "fp32"
        if name.endswith("_ptr"):
            other = {"mask_ptr": "*i1", "seed_ptr": "*i64"}
            return "*fp32" if name in WIDE else other.get(name, "*bf16")
        return "i32"
    kernel = compiled(body)
    source = ASTSource(kernel, {n: kind(n) for n in kernel.arg_names}, constants)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": num_warps})
    print(body.__module__, body.__name__, len(made.asm["cubin"]))

fp32 = {"ACC": tl.float32}
for centered in (True, False):
    flags = {"ADD": not centered, "WEIGHT": True, "BIAS": centered, "PLUS_ONE": centered}
    for size in (128, 4096):
        for body in (norm._forward, norm._backward):
            build(body, CENTERED=centered, **flags, **fp32, **tile(size))
    build(rotary._kernel, INTERLEAVED=centered, BACK=centered, PASS=centered, ROWS=16, BLOCK=64,
          BLOCK_PASS=64, **fp32)
    build(dropout._forward, BIAS=True, DROP=centered, BLOCK=1024, **fp32)
    build(dropout._backward, DROP=centered, BLOCK=1024, **fp32)
    build(softmax._forward, MASK=centered, CAP=centered, SINKS=centered, BLOCK=4096, **fp32)
    build(softmax._backward, CAP=centered, SINKS=centered, BLOCK=4096, **fp32)
for kind in ("silu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2"):
    flags = {"KIND": kind, "GATED": kind != "gelu", "BIAS": True, "LIMIT": True, "BLOCK": 2048}
    build(activation._forward, **flags, **fp32)
    build(activation._backward, **flags, **fp32)
"""


@pytest.mark.slow
def test_every_kernel_becomes_machine_code(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "PYTHONPATH": str(checkout), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        env={**env, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    assert len(done.stdout.splitlines()) == 30
