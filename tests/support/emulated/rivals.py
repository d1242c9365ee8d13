"""Megatron-Core on the emulated GPU: the benchmark's rival learns what megtool learns.

python -m tests.support.emulated.rivals LIBRARY

It prints a line of JSON for each type: the losses of some steps from the same weights, by
megatron-core, by megtool, and by megtool with graphs.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from tests.support.emulated.device import start
from tests.support.paths import ROOT

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its fused functions, for which there is no compiler here
start(Path(sys.argv[1]))
warnings.filterwarnings("ignore")
sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench import gpu, gpu_training, megatron  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from megtool.kernels.dispatch import use  # noqa: E402

STEPS, ROWS, TOKENS = 4, 2, 16


def losses(dtype: torch.dtype) -> dict[str, list[float]]:
    """Of every step, by engine."""
    tokens = gpu.tokens_of("tiny", ROWS, TOKENS + 1)
    decoder = gpu.decoder("tiny", dtype)
    weights = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    config, made = megatron.model("tiny", te=False, dtype=dtype)
    megatron.copy_weights(made, weights)
    rates = {"lr": gpu_training.LR, "weight_decay": gpu_training.DECAY}
    steps = {
        "megatron-core": megatron.step_of(
            config, made, tokens, clip_grad=gpu_training.CLIP, **rates
        )
    }
    for engine, is_graphed in (("megtool", False), ("megtool, graphed", True)):
        decoder = gpu.decoder("tiny", dtype)
        decoder.load_state_dict(weights)
        optimizer = gpu_training.optimizer_of(decoder)
        steps[engine] = gpu_training.our_step(decoder, optimizer, tokens, graphed=is_graphed)
    return {engine: [float(step()) for _ in range(STEPS)] for engine, step in steps.items()}


def main() -> None:
    """Both types."""
    torch.set_num_threads(1)
    assert megatron.why_not() is None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    megatron.start()
    with use("torch"):
        for dtype in (torch.float32, torch.bfloat16):
            print(json.dumps({"dtype": str(dtype), "losses": losses(dtype)}), flush=True)


if __name__ == "__main__":
    main()
