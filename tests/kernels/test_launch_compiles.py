"""Triton's kernels become machine code of GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megtool.kernels import launch
from tests.support.emulated.compile_for_gpu import (
    FAST_ARCHS,
    SHARED_BYTES,
    fast,
    listed_kernels,
    record,
)
from tests.support.emulated.kernel_cases import cases

pytestmark = pytest.mark.skipif(not launch.is_installed(), reason="no Triton")


def compile_in_a_process(
    checkout: Path, folder: Path, *options: str
) -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, results, and what was said: the interpreter runs in this process."""
    command = [sys.executable, "-m", "tests.support.emulated.compile_for_gpu", "--json"]
    env = {**os.environ, "PYTHONPATH": str(checkout), "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [*command, "--jobs", "1", *options], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, [json.loads(x) for x in done.stdout.splitlines()], done.stderr


def test_a_case_calls_every_kernel() -> None:
    """A kernel that is new needs a case in `kernel_cases`, and is in the fast subset by it."""
    assert {x.name for x in record(fast(cases()))} == listed_kernels()
    sources = Path(launch.__file__).parent.rglob("*.py")
    assert [x.name for x in sources if "triton.jit(" in x.read_text()] == ["launch.py"]


def test_kernels_compile_for_two_gpus(checkout: Path, tmp_path: Path) -> None:
    """The one with the least shared memory, and the one with tensor memory."""
    status, results, said = compile_in_a_process(checkout, tmp_path, "--fast")
    assert not [x for x in results if x["problem"]]
    assert not status, said
    assert {x["kernel"] for x in results} == listed_kernels()
    assert {x["arch"] for x in results} == set(FAST_ARCHS)
    assert all(0 < x["registers"] <= 255 for x in results)
    assert any(x["shared_bytes"] for x in results)


@pytest.mark.slow
def test_kernels_compile_for_all_gpus(checkout: Path, tmp_path: Path) -> None:
    more = [x for arch in SHARED_BYTES for x in ("--arch", str(arch))]
    status, results, said = compile_in_a_process(checkout, tmp_path, "--fast", *more)
    assert not [x for x in results if x["problem"]]
    assert not status, said
    assert {x["arch"] for x in results} == set(SHARED_BYTES)


BROKEN = """
import sys
import triton.language as tl
from megtool.kernels.fp8 import cast_triton
from tests.support.emulated import compile_for_gpu

def _cast(x_ptr, scale_ptr, out_ptr, parts_ptr, size, MANTISSA, BIAS, LARGEST, NAN, BLOCK):
    tl.store(out_ptr, tl.no_such_function(size))

cast_triton._cast.__code__ = _cast.__code__
sys.exit(compile_for_gpu.main(["--fast", "--kernel", "cast_triton", "--arch", "90"]))
"""


def test_a_kernel_that_does_not_compile_is_named(checkout: Path, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    env = {**os.environ, "PYTHONPATH": str(checkout), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "cast_triton._cast" in done.stdout
    assert "does not compile" in done.stdout
