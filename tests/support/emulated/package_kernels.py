"""Kernels of other packages beside megtool's references: the same inputs, outputs and gradients.

python -m tests.support.emulated.package_kernels NAME [FOLDER]

NAME is one of `megtool.kernels.peers`, FOLDER a source tree of mamba-ssm where it is not installed.
On a GPU the kernels run as they are, in bfloat16 and float32; elsewhere Triton's interpreter runs
them, in float32. It prints a line of JSON for each comparison: the largest difference of each
output and each gradient, as a share of the largest value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

IS_ON_GPU = torch.cuda.is_available()
if not IS_ON_GPU:
    from tests.support.emulated import interpreted_packages

    interpreted_packages.start()

from torch import Tensor  # noqa: E402

from megtool.kernels import peers  # noqa: E402
from megtool.kernels.attention import flash_attention  # noqa: E402
from megtool.kernels.attention.dot_product import attention  # noqa: E402
from megtool.kernels.attention.mask import Mask, Segments  # noqa: E402
from megtool.kernels.attention.tiles import ScoreRule  # noqa: E402
from megtool.kernels.dispatch import Kernel, use  # noqa: E402
from megtool.kernels.elementwise.activation import gated  # noqa: E402
from megtool.kernels.elementwise.norm import add_rms_norm, layer_norm, rms_norm  # noqa: E402
from megtool.kernels.recurrence.causal_conv import causal_conv  # noqa: E402
from megtool.kernels.recurrence.delta_rule import gated_delta_rule  # noqa: E402
from megtool.kernels.recurrence.kimi_delta import kimi_delta_rule  # noqa: E402
from megtool.kernels.recurrence.ssd import ScanInputs, ssd_scan  # noqa: E402

DEVICE = "cuda" if IS_ON_GPU else "cpu"
DTYPES = (torch.bfloat16, torch.float32) if IS_ON_GPU else (torch.float32,)
ROWS, TOKENS = (2, 512) if IS_ON_GPU else (2, 70)

Run = Callable[..., Tensor | tuple[Tensor, ...]]
Case = tuple[str, Run, tuple[Tensor, ...]]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def runs() -> Tensor:
    """Numbers of documents: two in the first row, three in the second."""
    out = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    out[0, TOKENS // 2 + 2 :] = 1
    out[1, 5:] += 1
    out[1, TOKENS - 20 :] += 1
    return out


def norms() -> Iterator[Case]:
    x, weight, bias = randn(5, 3, 96), 1 + 0.1 * randn(96), randn(96)
    yield "rms_norm", lambda x, w: rms_norm(x, w, 1e-5), (x, weight)
    yield (
        "rms_norm, zero-centered",
        lambda x, w: rms_norm(x, w, 1e-5, zero_centered=True),
        (x, weight - 1),
    )
    yield "layer_norm", lambda x, w, b: layer_norm(x, w, b, 1e-5), (x, weight, bias)
    yield "add_rms_norm", lambda x, r, w: add_rms_norm(x, r, w, 1e-5), (x, randn(5, 3, 96), weight)
    for kind in ("silu", "gelu_pytorch_tanh"):
        yield f"gated {kind}", lambda x, kind=kind: gated(x, kind), (randn(7, 64),)


def delta_rules() -> Iterator[Case]:
    keys, heads, size, values = 2, 4, 32, 16
    query, key = randn(ROWS, TOKENS, keys, size), randn(ROWS, TOKENS, keys, size)
    value, beta = randn(ROWS, TOKENS, heads, values), torch.rand(ROWS, TOKENS, heads)
    decay = -torch.rand(ROWS, TOKENS, heads)
    state, numbers = randn(ROWS, heads, size, values).to(DEVICE), runs().to(DEVICE)
    inputs = (query, key, value, decay, beta)
    more: list[tuple[str, dict[str, Any]]] = [
        ("", {}),
        (", state", {"state_BNDP": state}),
        (", state and runs", {"state_BNDP": state, "runs_BS": numbers}),
    ]
    for text, options in more:
        yield (
            f"gated_delta_rule{text}",
            lambda *given, options=options: gated_delta_rule(*given, **options),
            inputs,
        )
    query, key = randn(ROWS, TOKENS, heads, size), randn(ROWS, TOKENS, heads, size)
    decay = -torch.rand(ROWS, TOKENS, heads, size)
    for text, options in more:
        yield (
            f"kimi_delta_rule{text}",
            lambda *given, options=options: kimi_delta_rule(*given, **options),
            (query, key, value, decay, beta),
        )


def scans() -> Iterator[Case]:
    heads, size, groups, states = 4, 16, 2, 16
    inputs = (
        randn(ROWS, TOKENS, heads, size),
        torch.rand(ROWS, TOKENS, heads),
        -torch.rand(heads) - 0.1,
        randn(ROWS, TOKENS, groups, states),
        randn(ROWS, TOKENS, groups, states),
        randn(heads),
    )
    state, numbers = randn(ROWS, heads, size, states).to(DEVICE), runs().to(DEVICE)
    for text, more in (("", ()), (", state", (state,)), (", state and runs", (state, numbers))):

        def run(*given: Tensor, more: tuple[Tensor, ...] = more) -> tuple[Tensor, ...]:
            return ssd_scan(ScanInputs(*given, *more))

        yield f"ssd_scan{text}", run, inputs


def convolutions() -> Iterator[Case]:
    x, weight, bias = randn(ROWS, TOKENS, 64), randn(64, 4), randn(64)
    numbers, past = runs().to(DEVICE), randn(ROWS, 3, 64).to(DEVICE)
    yield "causal_conv", lambda x, w, b: causal_conv(x, w, b), (x, weight, bias)
    yield (
        "causal_conv, runs",
        lambda x, w, b: causal_conv(x, w, b, runs_BS=numbers, silu=False),
        (x, weight, bias),
    )
    yield "causal_conv, past", lambda x, w: causal_conv(x, w, past_BPC=past), (x, weight)


def attentions() -> Iterator[Case]:
    states = tuple(randn(ROWS, heads, TOKENS, 64) for heads in (4, 2, 2))
    numbers, places = runs(), torch.arange(TOKENS)
    first = torch.stack([torch.searchsorted(row, row) for row in numbers])
    documents = Mask(
        first_BS=first.to(DEVICE),
        last_BS=places.expand(ROWS, -1).to(DEVICE),
        segments=Segments(TOKENS, (-1, 0), numbers.to(DEVICE)),
    )
    masks = {", causal": Mask(is_causal=True), ", all keys": Mask(), ", documents": documents}
    for text, mask in masks.items():

        def run(*given: Tensor, mask: Mask = mask) -> Tensor:
            return attention(*given, mask, ScoreRule(scale=0.125))

        yield f"attention{text}", run, states


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "liger": norms,
    "fla": delta_rules,
    "mamba-ssm": scans,
    "causal-conv1d": convolutions,
    "flash-attn": attentions,
    "flash-attn-3": attentions,
}


def compare(name: str, run: Run, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[float]:
    """The largest differences, as shares; in float64 by the reference."""
    results = []
    for by, kind in ((name, dtype), ("torch", torch.float64)):
        given = [x.to(dtype).to(DEVICE, kind).requires_grad_() for x in inputs]
        with use(by):  # type: ignore[arg-type]
            out = run(*given)
        outs = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(1)
        pulls = [torch.randn(o.shape).to(o) for o in outs if o.requires_grad]
        grads = torch.autograd.grad([o for o in outs if o.requires_grad], given, pulls)
        results.append([t.detach().double() for t in (*outs, *grads)])
    return [
        float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
        for a, b in zip(*results, strict=True)
    ]


def main() -> None:
    """All comparisons of a package; each must have been computed by it."""
    name = sys.argv[1]
    if len(sys.argv) > 2:
        interpreted_packages.mount_mamba(Path(sys.argv[2]))
    taken: list[str] = []
    on = Kernel.on

    def noted(kernel: Kernel[..., Any], device: torch.device, **more: Any) -> Any:
        way = on(kernel, device, **more)
        if way is kernel._ways.get(name):  # type: ignore[call-overload]
            taken.append(kernel.name)
        return way

    Kernel.on = noted  # type: ignore[method-assign]
    attend = flash_attention.attention

    def noted_attention(*args: Any) -> Tensor:
        taken.append("attention")
        return attend(*args)

    flash_attention.attention = noted_attention
    dtypes = DTYPES[:1] if CASES[name] is attentions else DTYPES  # it takes 16 bits alone
    torch.manual_seed(0)
    for text, run, inputs in CASES[name]():
        for dtype in dtypes:
            taken.clear()
            differences = compare(name, run, inputs, dtype)
            line = {"case": text, "dtype": str(dtype), "taken": len(taken)}
            print(json.dumps(line | {"differences": differences}), flush=True)
    print(json.dumps({"version": peers.installed_version(name)}))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
