"""Commands run by torchrun on several processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys


def torchrun(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`megtool` as so many gloo processes."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={processes}", "-m", "megtool", *words),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
