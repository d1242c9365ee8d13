"""Releases of peers that are installed apart from this environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def install_release(release: str, folder: Path, *how: str) -> Path:
    """Install a release, without what it depends on, into a folder; skip, with the reason, else."""
    words = ["install", "--quiet", "--no-deps", "--target", str(folder), *how, release]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"{release} cannot be installed here: {done.stderr[-200:]}")
    return folder
