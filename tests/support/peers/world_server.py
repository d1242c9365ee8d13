"""A process that has imported a megatron-core once, and forks every world that is asked of it.

    python world_server.py [hybrid]

Reads requests, one JSON line each: `script` (a file of this folder), `words` (its arguments), `out`
and `err` (files for what it prints), `timeout_s`. Answers a line with the exit status, 124 where
the time is up. Importing a release takes far longer than what most worlds do with it. `hybrid`:
kernels are stubbed first, as hybrid_world.py does, and HybridModel's modules imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODULES = (
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.validation",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer.transformer_config",
)
HYBRID = (
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.transformer.experimental_attention_variant.absorbed_mla",
    "megatron.core.transformer.experimental_attention_variant.dsa",
)


def main() -> None:
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print is no answer
    modules = MODULES
    if "hybrid" in sys.argv[1:]:
        from hybrid_layers import stub_kernels

        stub_kernels()
        modules += HYBRID
    for name in modules:
        with contextlib.suppress(ModuleNotFoundError):  # older releases have fewer
            importlib.import_module(name)
    for line in sys.stdin:
        answers.write(f"{serve(json.loads(line))}\n")


def serve(request: dict[str, Any]) -> int:
    """Run one world in a process group of its own: its exit status."""
    child = os.fork()
    if child == 0:
        os._exit(run(request))
    ends = time.monotonic() + request["timeout_s"]
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > ends:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 124
        time.sleep(0.02)


def run(request: dict[str, Any]) -> int:
    """Be the script, from the process that was forked for it."""
    os.setpgid(0, 0)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.argv = [request["script"], *request["words"]]
    status = 0
    try:
        runpy.run_path(str(HERE / request["script"]), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
