"""The gated delta rule by transformers' PyTorch path and by megtool.

python examples/benchmarks/delta_rule_speed.py [--device cuda] [--tokens 1024] [--rounds 5]

Both get the same fp32 numbers, in alternation in one process. Besides the time that passes, the
time of processors (of all threads) is shown, which other work on the machine disturbs less.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.table import Table, parser, show, times
from torch import Tensor

from megtool.kernels.recurrence.delta_rule import gated_delta_rule

SIZE = 128  # of Qwen3-Next's keys and values
HEADS = ((4, 8), (4, 4))  # of keys and of values: a quarter of Qwen3-Next's, and as many of both


def ways(tokens: int, heads: tuple[int, int], device: str) -> dict[str, dict[str, Any]]:
    """A forward pass, and one with its backward, by both."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    keys, values = heads
    leaves = [
        numbers(1, tokens, keys, SIZE),
        numbers(1, tokens, keys, SIZE),
        numbers(1, tokens, values, SIZE),
        -numbers(1, tokens, values).exp(),
        numbers(1, tokens, values).sigmoid(),
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    pull = numbers(1, tokens, values, SIZE)

    def megtool() -> Tensor:
        return gated_delta_rule(*leaves)[0]

    def peer() -> Tensor:
        out: Tensor = theirs.torch_chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)[0]
        return out

    def both(run: Callable[[], Tensor]) -> dict[str, Any]:
        return {
            "forward": torch.no_grad()(run),
            "forward and backward": lambda: torch.autograd.grad(run(), leaves, pull),
        }

    torch.testing.assert_close(megtool(), peer(), rtol=1e-4, atol=1e-4)
    return {"megtool": both(megtool), "transformers": both(peer)}


def measure(run: Callable[[], Any], device: str) -> tuple[float, float]:
    """Wall time and processor time of a call, in seconds."""
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter(), time.process_time()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def main() -> None:
    """Command line."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--device", default="cpu")
    options.add_argument("--tokens", type=int, default=1024)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    table = Table(
        title=f"Gated delta rule on {given.device}, {given.tokens} tokens, {given.threads} threads",
        head=(
            "key and value heads",
            "megtool s",
            "transformers s",
            "x transformers",
            "processor time: megtool s",
            "transformers s",
            "x transformers",
        ),
    )
    for heads in HEADS:
        runs = ways(given.tokens, heads, given.device)
        for kind in runs["megtool"]:
            seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in runs}
            for _ in range(given.rounds + 1):
                for way in runs:
                    seconds[way].append(measure(runs[way][kind], given.device))
            medians = [
                statistics.median([s[n] for s in seconds[way][1:]])
                for n in range(2)
                for way in runs
            ]
            ours, peer, our_cpu, peer_cpu = medians
            table.add(
                f"{heads[0]} and {heads[1]}, {kind}",
                f"{ours:.4f}",
                f"{peer:.4f}",
                times(ours / peer),
                f"{our_cpu:.4f}",
                f"{peer_cpu:.4f}",
                times(our_cpu / peer_cpu),
                heads=heads,
                kind=kind,
                seconds={way: list(map(list, s[1:])) for way, s in seconds.items()},
                ratio=our_cpu / peer_cpu,
            )
    show(given, Path(tempfile.gettempdir()), [table])


if __name__ == "__main__":
    main()
