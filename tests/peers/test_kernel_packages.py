"""Kernels of other packages compute what megtool's references do, forward and backward.

On a GPU they run as they are; without one Triton's interpreter runs the real code of those that are
written in Triton. Each needs its package: `pip install fla-core liger-kernel` works without CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megtool.kernels import launch, peers
from megtool.kernels.peers import Peer

pytestmark = [pytest.mark.peers, pytest.mark.slow]

ON_GPU = torch.cuda.is_available()
# Products on a GPU are of bfloat16 and TF32, and results are rounded to eight bits.
TOLERANCE = {"torch.float32": 5e-3 if ON_GPU else 5e-6, "torch.bfloat16": 4e-2}


@pytest.mark.parametrize("name", peers.NAMES)
def test_packages_compute_the_same(name: Peer, checkout: Path) -> None:
    package = peers.PACKAGES[name]
    if not peers.is_installed(name):
        pytest.skip(f"needs {package.distribution}: {package.install}")
    if not ON_GPU and not (package.is_triton and launch.is_installed()):
        pytest.skip(f"{package.distribution} needs a CUDA device")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.emulated.package_kernels", name],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    *lines, version = [json.loads(line) for line in done.stdout.splitlines()]
    assert version["version"] == peers.installed_version(name)
    assert len(lines) >= 3
    for line in lines:
        assert line["taken"] == 1, line
        assert max(line["differences"]) < TOLERANCE[line["dtype"]], line
