"""Loading a checkpoint into tensors that are there: megtool, safetensors, and torch DCP's reader.

python examples/benchmarks/load_speed.py [--gib 1.11] [--dir DIR] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from bench.synthetic import SMALL, llama
from bench.table import Table, mib, parser, show, times, verdict, workplace

from megtool import reshard

READER_LIMIT, FILE_LIMIT, MEMORY_LIMIT = 10.0, 1.0, 256
NOTE = (
    "bfloat16 tensors, files in the page cache; every job is a fresh process that times the load "
    "alone, into a state dict of empty tensors; the fastest of the rounds, which alternate. CPU "
    "seconds are those of all threads, the least of the rounds: other work delays them less. "
    "Memory is the largest anonymous memory over that of the process before the load, less the "
    "tensors."
)

CHILD = """
import json, sys, threading, time
import torch
from safetensors import safe_open
job, folder, source = sys.argv[1:]
torch.set_num_threads(2)
state, files = {}, sorted(__import__("pathlib").Path(folder).glob("*.safetensors"))
for file in files:
    with safe_open(file, "pt") as f:
        for name in f.keys():
            state[name] = torch.empty(f.get_slice(name).get_shape(), dtype=torch.bfloat16)
def megtool_load():
    import megtool
    megtool.load_state_dict(state, source)
def megtool_dcp():
    import megtool.dcp
    dcp.load(state, storage_reader=megtool.dcp.Reader(source), no_dist=True)
def reader():
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    dcp.load(state, storage_reader=HuggingFaceStorageReader(source), no_dist=True)
def load_file():
    from safetensors.torch import load_file
    for file in files:
        for name, tensor in load_file(file).items():
            state[name].copy_(tensor)
import torch.distributed.checkpoint as dcp
import megtool.access.state_dict, megtool.dcp, safetensors.torch
def anonymous():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) << 10
before, peak, stopped = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not stopped.wait(0.005):
        peak = max(peak, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
began, used = time.perf_counter(), time.process_time()
globals()[job]()
seconds, used = time.perf_counter() - began, time.process_time() - used
peak = max(peak, anonymous())
stopped.set()
watcher.join()
checked = sum(int(t.view(torch.int16)[..., -1].sum()) for t in state.values())
num_bytes = sum(t.nbytes for t in state.values())
print(json.dumps({"s": seconds, "cpu": used, "more": peak - before - num_bytes, "sum": checked}))
"""


def run(job: str, folder: Path, source: Path) -> dict[str, float]:
    """One load in its own process: seconds, memory beside the tensors, and a sum to compare."""
    command = [sys.executable, "-c", CHILD, job, str(folder), str(source)]
    # Byte code is kept, as that of an installed package is.
    keeping = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=keeping)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(given: argparse.Namespace, root: Path) -> Table:
    """All jobs in turn."""
    folder = llama(root / "hf", given.gib, shape=SMALL).folder
    reshard(folder, root / "torch_dist", to="torch_dist", tp=2, pp=2)
    jobs = {
        "torch's HuggingFaceStorageReader": ("reader", folder),
        "safetensors.torch.load_file, copied": ("load_file", folder),
        "megtool.load_state_dict": ("megtool_load", folder),
        "dcp.load with megtool.dcp.Reader": ("megtool_dcp", folder),
        "megtool.load_state_dict of torch_dist TP2 PP2": ("megtool_load", root / "torch_dist"),
    }
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    for _ in range(given.rounds):
        for name, (job, source) in jobs.items():
            answers[name].append(run(job, folder, source))
    if len({a["sum"] for of_job in answers.values() for a in of_job}) != 1:
        raise RuntimeError("the jobs loaded different values")
    ratios = ("x faster than the reader", "limit", "x load_file", "limit")
    head = ("job", "s", "CPU s", *ratios, "MiB", "limit")
    table = Table(title=f"Loading {given.gib:g} GiB", head=head)
    best = {name: min(a["s"] for a in of_job) for name, of_job in answers.items()}
    reader, file = list(best.values())[:2]
    for number, (name, seconds) in enumerate(best.items()):
        memory = max(a["more"] for a in answers[name])
        faster, share, is_ours = reader / seconds, seconds / file, number > 1
        table.add(
            name,
            f"{seconds:.2f}",
            f"{min(a['cpu'] for a in answers[name]):.2f}",
            times(faster),
            f"≥ 10 {'✓' if faster >= READER_LIMIT else '✗'}" if is_ours else "",
            times(share),
            verdict(share, FILE_LIMIT) if is_ours else "",
            mib(max(memory, 0)),
            verdict(memory / 2**20, MEMORY_LIMIT) if is_ours else "",
            job=name,
            answers=answers[name],
        )
    return table


def main() -> None:
    """Measure and print."""
    given = parser(__doc__ or "", gib=1.11).parse_args()
    with workplace(given) as folder:
        show(given, Path(folder), [measure(given, Path(folder))], NOTE)


if __name__ == "__main__":
    main()
