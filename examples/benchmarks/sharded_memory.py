"""Memory of a rank by what replicas share out, and of torch's DDP and FSDP2 on the same decoder.

python examples/benchmarks/sharded_memory.py [--processes 2,4] [--hidden 512] [--layers 12]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.table import Table, mib, parser, show, times, verdict

SCRIPT = Path(__file__).resolve().parent / "bench" / "sharding.py"
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
PEER_OF = {"no_shard": "torch DDP", "optim_grads_params": "torch FSDP2"}
MOST = 1.1
"""Our peak over the peer's that shares out the same."""


def run_engine(engine: str, processes: int, options: dict[str, Any]) -> dict[str, int]:
    """What rank 0 of `bench/sharding.py` says.

    Raises:
        RuntimeError: it failed; with what it wrote to stderr.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT), json.dumps({"engine": engine, **options})],
        capture_output=True,
        text=True,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "PYTHONPATH": str(SCRIPT.parents[1])},
    )
    if done.returncode:
        raise RuntimeError(f"{engine}, {processes} processes failed:\n{done.stderr[-4000:]}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--processes", default="2,4", help="numbers of processes, with commas")
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--vocab", type=int, default=8192)
    options.add_argument("--tokens", type=int, default=32, help="of a micro batch")
    options.add_argument("--passes", type=int, default=2, help="micro batches of a step")
    given = options.parse_args()
    sizes = {
        "hidden_size": given.hidden,
        "intermediate_size": 4 * given.hidden,
        "num_hidden_layers": given.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": given.vocab,
        "max_position_embeddings": 2048,
    }
    run = {"sizes": sizes, "tokens": given.tokens, "passes": given.passes}
    head = ("processes", "engine", "parameters MiB", "gradients MiB", "state MiB", "peak MiB")
    table = Table(title="Memory of a rank", head=(*head, "peak over the peer's", "limit"))
    for processes in map(int, given.processes.split(",")):
        figures = {
            name: run_engine(name, processes, run) for name in (*PEER_OF.values(), *STRATEGIES)
        }
        for name, bytes_of in figures.items():
            peer = figures.get(PEER_OF.get(name, ""))
            ratio = bytes_of["peak"] / peer["peak"] if peer else None
            table.add(
                str(processes),
                name if name in PEER_OF.values() else f"megtool, {name}",
                *(mib(bytes_of[kind]) for kind in ("parameters", "gradients", "state", "peak")),
                "-" if ratio is None else times(ratio),
                "-" if ratio is None else verdict(ratio, MOST),
                processes=processes,
                engine=name,
                ratio=ratio,
                **bytes_of,
            )
    note = (
        f"A Llama of {given.layers} layers, hidden size {given.hidden}, vocabulary {given.vocab}, "
        f"in float32 with AdamW: three steps of {given.passes} micro batches of {given.tokens} "
        "tokens, each engine in processes of its own. Parameters, gradients and state are counted "
        "between steps, of the rank with most; the peak is anonymous memory beyond what a rank has "
        "before it makes its model, which every rank first makes whole here."
    )
    show(given, Path(tempfile.gettempdir()), [table], note)


if __name__ == "__main__":
    main()
