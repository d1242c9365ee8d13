"""Kernels of recurrences beside those of mamba-ssm, flash-linear-attention and causal-conv1d."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megtool.kernels.recurrence.causal_conv import causal_conv
from megtool.kernels.recurrence.delta_rule import gated_delta_rule
from megtool.kernels.recurrence.ssd import ScanInputs, ssd_scan

Figures = list[dict[str, Any]]
Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]


def seconds(work: Callable[[], object], device: str, *, rounds: int = 10) -> float:
    """Return the median time of a call, after two that compile and warm up."""
    taken = []
    for _ in range(rounds + 2):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


def wait(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def error_of(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over that of the exact values."""
    difference = (found.double() - exact.double()).norm()
    return float(difference / exact.double().norm())


def beside(name: str, given: argparse.Namespace) -> Figures:
    """Ours and the field's own kernel on the same numbers: the difference, and both times."""
    made = {"device": given.device, "dtype": torch.bfloat16}
    tokens = 64 if given.tiny else 8192
    ours, theirs = PAIRS[name](tokens, made)
    with torch.no_grad():
        difference = error_of(ours(), theirs())
        mine, peer = seconds(ours, given.device), seconds(theirs, given.device)
    times = {"ours ms": 1e3 * mine, "theirs ms": 1e3 * peer, "theirs / ours": peer / mine}
    return [{"tokens": tokens, **times, "difference": difference}]


def _mamba(tokens: int, made: dict[str, Any]) -> Pair:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, b, c = (torch.randn(1, tokens, *s, **made) for s in ((32, 64), (8, 128), (8, 128)))
    dt = torch.nn.functional.softplus(torch.randn(1, tokens, 32, device=made["device"]) - 1)
    decay = -torch.arange(1.0, 33, device=made["device"])
    skip = torch.ones(32, device=made["device"])
    return (
        lambda: ssd_scan(ScanInputs(x, dt, decay, b, c, skip))[0],
        lambda: mamba_chunk_scan_combined(x, dt, decay, b, c, 128, D=skip),
    )


def _delta(tokens: int, made: dict[str, Any]) -> Pair:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = (torch.randn(1, tokens, 8, 128, **made) for _ in range(3))
    decay = -torch.rand(1, tokens, 8, device=made["device"])
    beta = torch.rand(1, tokens, 8, **made)
    return (
        lambda: gated_delta_rule(q, k, v, decay, beta)[0],
        lambda: chunk_gated_delta_rule(q, k, v, decay, beta, use_qk_l2norm_in_kernel=True)[0],
    )


def _convolution(tokens: int, made: dict[str, Any]) -> Pair:
    from causal_conv1d import causal_conv1d_fn

    x, weight, bias = (torch.randn(s, **made) for s in ((1, tokens, 4096), (4096, 4), (4096,)))
    rows = x.transpose(1, 2)
    return (
        lambda: causal_conv(x, weight, bias),
        lambda: causal_conv1d_fn(rows, weight, bias, activation="silu").transpose(1, 2),
    )


PAIRS: dict[str, Callable[[int, dict[str, Any]], Pair]] = {
    "mamba": _mamba,
    "delta": _delta,
    "conv": _convolution,
}
"""What runs ours and theirs, for so many tokens."""
