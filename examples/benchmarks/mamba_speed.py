"""The recurrence of Mamba-2 and its convolution by transformers' PyTorch path and by megtool.

python examples/benchmarks/mamba_speed.py [--device cuda] [--tokens 512] [--rounds 5]

Both get the same fp32 numbers, in alternation in one process. Besides the time that passes, the
time of processors (of all threads) is shown, which other work on the machine disturbs less.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.table import Table, parser, show, times
from torch import Tensor

from megtool.kernels.recurrence.causal_conv import causal_conv
from megtool.kernels.recurrence.ssd import ScanInputs, ssd_scan

# Sizes of Nemotron-H 8B are 128 heads of 64 in 8 groups; these are a quarter of the heads.
HEADS, SIZE, GROUPS, STATE, TAPS = 32, 64, 8, 128, 4
CHUNK = 128  # the chunk_size of its configuration


class Clock:
    """Wall time and processor time of calls, in seconds."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Time one call."""
        self.wait()
        began = time.perf_counter(), time.process_time()
        run()
        self.wait()
        return time.perf_counter() - began[0], time.process_time() - began[1]

    def wait(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()


def passes(run: Callable[..., Tensor], leaves: Sequence[Tensor], pull: Tensor) -> dict[str, Any]:
    """A forward pass, and one with its backward."""

    def forward() -> None:
        with torch.no_grad():
            run(*leaves)

    return {
        "forward": forward,
        "forward and backward": lambda: torch.autograd.grad(run(*leaves), leaves, pull),
    }


def scans(tokens: int, device: str) -> tuple[list[Tensor], dict[str, Callable[..., Tensor]]]:
    """The recurrence, of one row."""
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    dt = torch.nn.functional.softplus(numbers(1, tokens, HEADS) - 1)
    decay = -torch.arange(1.0, HEADS + 1, device=device)
    b, c = (numbers(1, tokens, GROUPS, STATE) for _ in range(2))
    leaves = [numbers(1, tokens, HEADS, SIZE), dt, decay, b, c, numbers(HEADS)]

    def peer(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        out: Tensor = theirs.mamba2_chunk_scan(x, dt, a, b, c, CHUNK, D=d)
        return out

    return leaves, {
        "megtool": lambda *given: ssd_scan(ScanInputs(*given))[0],
        "transformers": peer,
    }


def convolutions(tokens: int, device: str) -> tuple[list[Tensor], dict[str, Callable[..., Tensor]]]:
    """The convolution with its activation, of one row."""
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    channels = HEADS * SIZE + 2 * GROUPS * STATE
    shapes = ((1, tokens, channels), (channels, TAPS), (channels,))

    def peer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = theirs.causal_conv1d_fn(x.mT, weight, bias, activation="silu")
        return out.mT

    leaves = [torch.randn(shape, device=device) for shape in shapes]
    return leaves, {"megtool": causal_conv, "transformers": peer}


def main() -> None:
    """Command line."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--device", default="cpu")
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    clock = Clock(given.device)
    table = Table(
        title=f"Mamba-2 on {given.device}, {given.tokens} tokens, {given.threads} threads",
        head=(
            "operation",
            "megtool s",
            "transformers s",
            "x transformers",
            "processor time: megtool s",
            "transformers s",
            "x transformers",
        ),
    )
    for name, make in (("recurrence", scans), ("convolution", convolutions)):
        leaves, ways = make(given.tokens, given.device)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        with torch.no_grad():
            results = [run(*leaves) for run in ways.values()]
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
        pull = torch.randn_like(results[0])
        kinds = {way: passes(run, leaves, pull) for way, run in ways.items()}
        for kind in kinds["megtool"]:
            seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for _ in range(given.rounds + 1):
                for way in ways:
                    seconds[way].append(clock(kinds[way][kind]))
            rows = [_median([s[n] for s in seconds[way][1:]]) for n in range(2) for way in ways]
            ours, peer, our_cpu, peer_cpu = rows
            table.add(
                f"{name}, {kind}",
                f"{ours:.4f}",
                f"{peer:.4f}",
                times(ours / peer),
                f"{our_cpu:.4f}",
                f"{peer_cpu:.4f}",
                times(our_cpu / peer_cpu),
                operation=name,
                kind=kind,
                seconds={way: list(map(list, s[1:])) for way, s in seconds.items()},
                ratio=our_cpu / peer_cpu,
            )
    show(given, Path(tempfile.gettempdir()), [table])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
