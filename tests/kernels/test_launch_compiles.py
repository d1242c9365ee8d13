"""Triton's kernels compile for a GPU, also where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megtool.kernels import launch
from tests.support.paths import SUPPORT


@pytest.mark.slow
@pytest.mark.skipif(not launch.is_installed(), reason="no Triton")
def test_kernels_compile_for_a_gpu(checkout: Path, tmp_path: Path) -> None:
    script = SUPPORT / "emulated" / "compile_for_gpu.py"
    env = {**os.environ, "PYTHONPATH": str(checkout), "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    assert len(done.stdout.splitlines()) == 32
