"""Run scripts of this folder in processes forked from one that has imported megatron-core."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support.paths import PEERS
from tests.support.worlds.gloo_world import WorldError


def run_forked(
    script: str, *words: str, core: Path | None = None, timeout_s: float = 1200.0
) -> str:
    """Run a script, of the megatron-core in the folder `core` (a release that has HybridModel) or
    of the one that is installed; returns what it printed.

    The server that worlds are forked from is started once for each `core`.

    Raises:
        WorldError: the script failed, or it took longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        request = {"script": script, "words": words, "out": str(out), "err": str(err)}
        server = _start_server(core)
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request | {"timeout_s": timeout_s}) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise WorldError(f"the server of worlds ended: {server.wait()}")
        if int(answer):
            raise WorldError(f"exit status {answer.strip()}: {err.read_text()[-6000:]}")
        return out.read_text()


@cache
def _start_server(core: Path | None) -> subprocess.Popen[str]:
    elsewhere = {"PYTHONPATH": str(core)} if core else {}
    server = subprocess.Popen(
        [sys.executable, str(PEERS / "world_server.py"), *(["hybrid"] if core else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | elsewhere,
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[str]) -> None:
    if server.stdin is not None:
        server.stdin.close()
    server.terminate()
    server.wait()
