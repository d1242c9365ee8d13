"""On a GPU: graphs against eager passes, training against other engines, memory of 8 B.

python examples/benchmarks/gpu_speed.py [--part forward,train,memory] [--models S,M] [--rounds 5]

Models have random weights: S is 12 layers of 512, M 22 of 2048, L 32 of 4096 (Llama-3 8B's shape).
All is bfloat16; times are of CUDA's events, rivals take turns, and ratios are of medians. Without a
CUDA device it says so, and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from bench import megatron
from bench.gpu import decoder, race, seconds, tokens_of
from bench.gpu_training import megatron_core, optimizer_of, our_step, ours, trainer
from bench.table import Table, parser, show, times
from torch import Tensor

from megtool.errors import MegtoolError
from megtool.inference.cuda_graph import SPARE_SLOTS, GraphedHidden, GraphedStep
from megtool.inference.forward import Forward
from megtool.model.batch import Batch

Engine = Callable[[], float] | str
# Settings of the optimizer whose peak memory is told, by what they are called.
KEPT: dict[str, dict[str, Any]] = {
    "float32 masters, moments and gradients": {},
    "bfloat16 gradients": {"grad_reduce_in_bf16": True},
    "and bfloat16 moments": {"grad_reduce_in_bf16": True, "exp_avg_dtype": "bf16"},
    "and masters as remainders": {
        "grad_reduce_in_bf16": True,
        "exp_avg_dtype": "bf16",
        "store_param_remainders": True,
    },
    "bfloat16 gradients, half of the state on the host": {
        "grad_reduce_in_bf16": True,
        "optimizer_offload_fraction": 0.5,
    },
}
TARGETS = {"S": 2.5, "M": 1.15}


@torch.inference_mode()
def forward(name: str, given: argparse.Namespace) -> Table:
    """Whole passes and steps of decoding, eager and graphed, at some batch sizes."""
    table = Table(
        title=f"Graphed and eager, {name}: passes of {given.tokens} tokens, and steps behind them",
        head=("what", "rows", "eager ms", "graphed ms", "compiled ms", "eager / graphed"),
    )
    model = Forward(decoder(name).eval())
    hidden = GraphedHidden(model)
    compiled = torch.compile(model.decoder.hidden) if given.compile else None
    for rows in (1, 2, 4, 8):
        tokens = tokens_of(name, rows, given.tokens)
        batch = Batch(tokens_BS=tokens)
        works: dict[str, Callable[[], object]] = {
            "eager": lambda batch=batch: model.hidden(batch),
            "graphed": lambda batch=batch: hidden(batch),
        }
        if compiled is not None:
            works["compiled"] = lambda batch=batch: compiled(batch)
        _add(table, "pass", rows, race(works, given))
        # A step's work does not depend on how far it is: every slot is attended to, under a mask.
        new = tokens[:, -1:].contiguous()
        most = given.tokens + 4 * (given.calls * given.rounds + SPARE_SLOTS)
        caches = [
            model.rows_cache(num_rows=rows, max_tokens=most, graphable=True) for _ in range(2)
        ]
        for cache in caches:
            model.last_logits(batch, cache)
        step = GraphedStep(model, caches[1])
        single = Batch(tokens_BS=new)
        works = {
            "eager": lambda b=single, c=caches[0]: model.last_logits(b, c),
            "graphed": lambda new=new, step=step: step(new),
        }
        _add(table, "step", rows, race(works, given))
    return table


def _add(table: Table, what: str, rows: int, found: dict[str, float]) -> None:
    eager, graphed = found["eager"], found["graphed"]
    compiled = found.get("compiled")
    shown = [f"{1e3 * t:.3f}" if t is not None else "-" for t in (eager, graphed, compiled)]
    table.add(
        what, str(rows), *shown, times(eager / graphed), what=what, rows=rows, ratio=eager / graphed
    )


def engines_of(name: str, tokens: Tensor, given: argparse.Namespace) -> dict[str, Engine]:
    """Who trains, ours first: what measures a step, or why it cannot run here."""
    out: dict[str, Engine] = {
        "megtool": lambda: ours(name, tokens, given),
        "megtool, graphed": lambda: ours(name, tokens, given, graphed=True),
        "Trainer": lambda: trainer(name, tokens, given),
    }
    if given.compile:
        out["Trainer, compiled"] = lambda: trainer(name, tokens, given, compiled=True)
    if find_spec("liger_kernel") is not None:
        out["Trainer + liger"] = lambda: trainer(name, tokens, given, liger=True)
        if given.compile:
            out["Trainer + liger, compiled"] = lambda: trainer(
                name, tokens, given, liger=True, compiled=True
            )
    else:
        out["Trainer + liger"] = "liger-kernel is not installed"
    for engine, te in (("megatron-core", False), ("megatron-core + Transformer Engine", True)):
        out[engine] = megatron.why_not(te=te) or (
            lambda te=te: megatron_core(name, tokens, given, te=te)
        )
    return out


def train(name: str, given: argparse.Namespace) -> Table:
    """A step of training: megtool, transformers' Trainer (plain, compiled, liger), megatron-core.

    Ratios are to the faster one of ours.
    """
    table = Table(
        title=f"Training, {name}: steps of {given.rows} x {given.tokens} tokens",
        head=("engine", "ms a step", "tokens/s", "peak GiB", "megtool is", "target"),
    )
    tokens = tokens_of(name, given.rows, given.tokens + 1)
    found: list[tuple[str, float, float]] = []
    missing: dict[str, str] = {}
    for engine, run in engines_of(name, tokens, given).items():
        if isinstance(run, str):
            missing[engine] = run
            continue
        clean()
        try:
            took = run()
        except torch.OutOfMemoryError:
            missing[engine] = "does not fit"
            continue
        found.append((engine, took, torch.cuda.max_memory_allocated() / 2**30))
    mine = [took for engine, took, _ in found if engine.startswith("megtool")]
    own = min(mine) if mine else math.nan
    for engine, took, peak in found:
        table.add(
            engine,
            f"{1e3 * took:.2f}",
            f"{given.rows * given.tokens / took:.0f}",
            f"{peak:.2f}",
            times(took / own),
            times(TARGETS[name]) if engine == "Trainer" and name in TARGETS else "-",
            engine=engine,
            seconds=took,
            peak_gib=peak,
            ratio=took / own,
        )
    for engine, why in missing.items():
        table.add(f"{engine}: {why}", *"-----", engine=engine, why=why)
    return table


def memory(name: str, given: argparse.Namespace) -> Table:
    """The most memory that two steps take, by what the optimizer keeps, and where."""
    table = Table(
        title=f"Memory of a step, {name}: {given.rows} x {given.tokens} tokens",
        head=("kept", "parameters", "peak GiB", "on the host GiB", "s a step"),
    )
    for kept, how in KEPT.items():
        clean()
        held: dict[str, Any] = {}
        cells = ["-", "does not fit", "-", "-"]
        try:
            model = decoder(name)
            optimizer = optimizer_of(model, **how)
            step = our_step(model, optimizer, tokens_of(name, given.rows, given.tokens + 1))
            taken = [seconds(step, 1) for _ in range(2)]
            numel = sum(p.numel() for p in model.parameters())
            peak = torch.cuda.max_memory_allocated() / 2**30
            host = getattr(optimizer, "host_bytes", 0) / 2**30
            cells = [f"{numel / 1e9:.2f} B", f"{peak:.1f}", f"{host:.1f}", f"{taken[-1]:.2f}"]
            held = {"parameters": numel, "peak_gib": peak, "host_gib": host, "seconds": taken}
        except torch.OutOfMemoryError:
            pass
        model = optimizer = step = None  # type: ignore[assignment]
        table.add(kept, *cells, kept=kept, fits=bool(held), **held)
    return table


def clean() -> None:
    """Give all memory back, and count its peak anew."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def tables(given: argparse.Namespace) -> Iterator[Table]:
    """What was asked for, part by part."""
    parts, models = given.part.split(","), given.models.split(",")
    for part, measure in {"forward": forward, "train": train}.items():
        for name in models if part in parts else ():
            clean()
            yield measure(name, given)
    if "memory" in parts:
        yield memory(given.large, given)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--part", default="forward,train,memory", help="which, with commas")
    options.add_argument("--models", default="S,M", help="which of S, M and L, with commas")
    options.add_argument("--large", default="L", help="the model of the part about memory")
    options.add_argument("--tokens", type=int, default=2048, help="tokens of a row")
    options.add_argument("--rows", type=int, default=1, help="rows of a step of training")
    options.add_argument("--calls", type=int, default=20, help="calls that are timed together")
    options.add_argument("--no-compile", dest="compile", action="store_false")
    given = options.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device: nothing is measured.")
        return
    found: list[Table] = []
    for table in tables(given):
        found.append(table)
        show(given, Path(tempfile.gettempdir()), found)


if __name__ == "__main__":
    try:
        main()
    except MegtoolError as error:
        raise SystemExit(error.message) from error
