"""How close each kernel comes to the speed of a copy; the same by torch, compiled and by liger.

python examples/benchmarks/kernel_speed.py [--device cuda] [--rounds 20] [--backward]

A kernel's bytes are those it cannot do without: every input read once, every output written once.
Divided by its time they are GB/s, and those divided by the GB/s of a copy of the same size, taken
in the same rounds, are what is shown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from bench.table import Table, parser, show, times
from torch import Tensor

from megtool.kernels.attention.softmax import masked_softmax
from megtool.kernels.dispatch import use
from megtool.kernels.elementwise.activation import activate, gated
from megtool.kernels.elementwise.dropout_add import bias_dropout_add
from megtool.kernels.elementwise.norm import add_rms_norm, layer_norm, rms_norm
from megtool.kernels.elementwise.rotary import rotate
from megtool.kernels.experts.grouped_gemm import permute, unpermute
from megtool.kernels.fp8.cast import cast_fp8
from megtool.kernels.vocabulary.cross_entropy import cross_entropy

# Fractions of the copy that Triton's kernels should reach on a GPU.
TARGET = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kernel with its inputs; `constants` are read too and take no gradient."""

    name: str
    run: Callable[..., Any]
    inputs: Sequence[Tensor]
    constants: Sequence[Tensor] = ()
    liger: Callable[..., Any] | None = None
    has_backward: bool = True


def jobs(tokens: int, hidden: int, device: str, dtype: torch.dtype) -> list[Job]:
    """Every kernel at the sizes of a transformer of `hidden`, on `tokens` tokens."""

    def numbers(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device, dtype=kind)

    heads, keys = max(1, hidden // 128), min(tokens, 2048)
    x, residual, weight = numbers(tokens, hidden), numbers(tokens, hidden), numbers(hidden)
    both, bias = numbers(tokens, 2 * hidden), numbers(2 * hidden)
    qk = numbers(1, tokens, heads, hidden // heads)
    cos, sin = (numbers(1, tokens, hidden // heads, kind=torch.float32) for _ in range(2))
    scores = numbers(1, max(1, tokens * hidden // keys**2), keys, keys)
    mask = torch.ones(keys, keys, dtype=torch.bool, device=device).tril()
    sinks = numbers(scores.shape[1])
    logits = numbers(tokens, 4 * hidden)
    labels = torch.randint(0, 4 * hidden, (tokens,), device=device)
    chosen = torch.rand(tokens, 8, device=device).topk(2).indices
    rows, row_ids, _ = permute(x, chosen, 8)
    probs = torch.rand(tokens, 2, device=device)
    unit = torch.ones((), device=device)
    liger = liger_functions()
    return [
        Job(
            name="rms_norm",
            run=lambda x, w: rms_norm(x, w, 1e-5),
            inputs=(x, weight),
            liger=liger.get("rms_norm"),
        ),
        Job(name="layer_norm", run=lambda x, w: layer_norm(x, w, w, 1e-5), inputs=(x, weight)),
        Job(
            name="add_rms_norm",
            run=lambda x, r, w: add_rms_norm(x, r, w, 1e-5),
            inputs=(x, residual, weight),
        ),
        Job(name="rotate", run=rotate, inputs=(qk,), constants=(cos, sin)),
        Job(
            name="swiglu",
            run=lambda y: gated(y, "silu"),
            inputs=(both,),
            liger=liger.get("swiglu"),
        ),
        Job(
            name="bias + geglu",
            run=lambda y, b: gated(y, "gelu_pytorch_tanh", bias=b),
            inputs=(both, bias),
        ),
        Job(name="squared relu", run=lambda x: activate(x, "relu2"), inputs=(x,)),
        Job(
            name="bias + dropout + add",
            run=lambda x, b, r: bias_dropout_add(x, b, r, 0.1, seed=1),
            inputs=(x, weight, residual),
        ),
        Job(
            name="softmax with cap and sinks",
            run=lambda s, k, m: masked_softmax(s, m, scale=0.1, softcap=30.0, sinks_N=k),
            inputs=(scores, sinks),
            constants=(mask,),
        ),
        Job(name="cross entropy", run=cross_entropy, inputs=(logits,), constants=(labels,)),
        Job(
            name="permute, with the sorting",
            run=lambda x, e: permute(x, e, 8)[0],
            inputs=(x,),
            constants=(chosen,),
        ),
        Job(
            name="unpermute",
            run=lambda r, p, ids: unpermute(r, ids, p),
            inputs=(rows, probs),
            constants=(row_ids,),
        ),
        Job(
            name="cast to FP8",
            run=lambda x, s: cast_fp8(x, s, "e4m3"),
            inputs=(x,),
            constants=(unit,),
            has_backward=False,
        ),
    ]


def liger_functions() -> dict[str, Callable[..., Any]]:
    """What liger-kernel has of the same, where it is installed and there is a GPU."""
    if find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return {}
    from liger_kernel.ops import swiglu
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Later releases take gate and up in one tensor, as ours do; those before need two copies.
    joint = getattr(swiglu, "LigerFusedGateUpSiLUMulFunction", None)
    parted = swiglu.LigerSiLUMulFunction
    return {
        "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", False),
        "swiglu": lambda y: (
            parted.apply(*(h.contiguous() for h in y.chunk(2, -1)))
            if joint is None
            else joint.apply(y)
        ),
    }


def seconds(work: Callable[[], object], device: str) -> float:
    """How long `work` takes: by CUDA's events, behind a queue that hides the launch."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    before.record()
    work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def forward(job: Job, run: Callable[..., Any]) -> tuple[Callable[[], object], int]:
    """The forward pass without gradients, and the bytes it cannot do without."""

    def work() -> Any:
        with torch.no_grad():
            return run(*job.inputs, *job.constants)

    out = work()
    outs = out if isinstance(out, tuple) else (out,)
    return work, sum(t.nbytes for t in (*job.inputs, *job.constants, *outs))


def backward(job: Job, run: Callable[..., Any]) -> tuple[Callable[[], object], int]:
    """The backward pass, and the bytes it cannot do without: gradients, and inputs once more."""
    inputs = [t.detach().requires_grad_() for t in job.inputs]
    out = run(*inputs, *job.constants)
    outs = out if isinstance(out, tuple) else (out,)
    pulls = [torch.ones_like(o) for o in outs]

    def work() -> Any:
        return torch.autograd.grad(outs, inputs, pulls, retain_graph=True)

    gradients = sum(t.nbytes for t in inputs)
    return work, sum(t.nbytes for t in (*pulls, *inputs, *job.constants)) + gradients


def ways(job: Job, given: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """The implementations to race."""

    def by(name: Any) -> Callable[..., Any]:
        def run(*tensors: Tensor) -> Any:
            with use(name):
                return job.run(*tensors)

        return run

    names = ["torch"]
    names += ["compile"] if given.device != "cpu" or given.compile else []
    names += ["triton"] if given.device != "cpu" else []
    names += ["te"] if given.device != "cpu" and find_spec("transformer_engine") else []
    found = {name: by(name) for name in names}
    return found | ({"liger": job.liger} if job.liger else {})


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.set_defaults(rounds=20)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--hidden", type=int, default=4096)
    options.add_argument("--backward", action="store_true", help="time backward passes too")
    options.add_argument("--compile", action="store_true", help="torch.compile on a CPU too")
    given = options.parse_args()
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    source = torch.empty(given.tokens * given.hidden, dtype=dtype, device=given.device)
    target = torch.empty_like(source)
    table = Table(
        title=f"Kernels: {given.tokens} tokens x {given.hidden}, {dtype}, on {given.device}",
        head=("kernel", "pass", "by", "MB", "µs", "GB/s", "copy GB/s", "x copy"),
    )
    for job in jobs(given.tokens, given.hidden, given.device, dtype):
        for kind, prepare in {"forward": forward, "backward": backward}.items():
            if kind == "backward" and not (given.backward and job.has_backward):
                continue
            works = {name: prepare(job, run) for name, run in ways(job, given).items()}
            taken: dict[str, list[float]] = {name: [] for name in works}
            copies = []
            for _ in range(given.rounds + 2):
                copies.append(seconds(lambda: target.copy_(source), given.device))
                for name, (work, _) in works.items():
                    taken[name].append(seconds(work, given.device))
            copy_rate = 2 * source.nbytes / statistics.median(copies[2:])
            for name, (_, num_bytes) in works.items():
                best = statistics.median(taken[name][2:])
                rate = num_bytes / best
                table.add(
                    job.name,
                    kind,
                    name,
                    f"{num_bytes / 1e6:.1f}",
                    f"{best * 1e6:.1f}",
                    f"{rate / 1e9:.0f}",
                    f"{copy_rate / 1e9:.0f}",
                    times(rate / copy_rate),
                    job=job.name,
                    direction=kind,
                    by=name,
                    num_bytes=num_bytes,
                    seconds=taken[name][2:],
                    share=rate / copy_rate,
                    target=TARGET if name == "triton" else None,
                )
    show(given, Path(tempfile.gettempdir()), [table])


if __name__ == "__main__":
    main()
