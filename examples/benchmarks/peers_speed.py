"""The same job done by megtool and by what its users have today, in turn: time and memory.

python examples/benchmarks/peers_speed.py [--gib 4] [--dir DIR] [--rounds 5] [--peer NAME]...
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from bench.race import Entrant, Result, race, run_job
from bench.synthetic import Synthetic, llama, shapes
from bench.table import Table, mib, parser, show, times, workplace

LEAST_SPEEDUP, MOST_MEMORY = 3.0, 0.1
RANKS = 4
LORA_RANK = 16


def duel(table: Table, peer: Result, ours: Result) -> None:
    """A row: the peer's best time and peak memory over ours."""
    speedup = min(peer.seconds) / min(ours.seconds)
    median = statistics.median(a / b for a, b in zip(peer.seconds, ours.seconds, strict=True))
    peaks = [r.peak_bytes for r in (peer, ours)]
    share = peaks[1] / peaks[0]
    table.add(
        peer.entrant.name,
        str(ours.entrant.options["threads"]),
        "yes" if ours.entrant.options["fsync"] else "no",
        f"{min(peer.seconds):.2f}",
        f"{min(ours.seconds):.2f}",
        f"{times(speedup)} {'✓' if speedup >= LEAST_SPEEDUP else '✗'}",
        times(median),
        f"{min(peer.process_seconds) / min(ours.process_seconds):.2f}",
        mib(peaks[0]),
        mib(peaks[1]),
        f"{times(share)} {'✓' if share <= MOST_MEMORY else '✗'}",
        job=peer.entrant.name,
        threads=ours.entrant.options["threads"],
        fsync=ours.entrant.options["fsync"],
        speedup=speedup,
        memory_share=share,
        peak_bytes=peaks[1],
    )


def against_dcp(table: Table, root: Path, given: argparse.Namespace) -> None:
    """The rows of four ranks become a file per thread: torch loads all tensors and saves them."""
    made = llama(root / "hf", given.gib)
    source = root / "ranks"
    places = {"source": str(made.folder), "destination": str(source)}
    run_job("reshard", {**places, "to": "dcp", "dp": RANKS})
    shutil.rmtree(made.folder)
    ideal = 2 * made.num_bytes
    for fsync in (True, False):
        entrants = []
        for threads in (1, 2):
            both = {"fsync": fsync, "threads": threads}
            name = f"torch DCP load + save, thread_count={threads}: {RANKS} files → {threads}"
            entrants.append(Entrant(name=name, kind="dcp", options=both, ideal_bytes=ideal))
            options = {**both, "to": "dcp", "dp": threads}
            entrants.append(Entrant(name="megtool", options=options, ideal_bytes=ideal))
        found = race(entrants, source, root / "scratch", rounds=given.rounds, fsync=fsync)
        for i in range(0, len(found), 2):
            duel(table, found[i], found[i + 1])
    shutil.rmtree(source)


def against_transformers(table: Table, root: Path, given: argparse.Namespace) -> None:
    """A folder is written again in other shards."""
    made = llama(root / "hf", given.gib)
    options = {"max_shard_size": f"{made.num_bytes // 4000}KB"}
    name = "transformers from_pretrained + save_pretrained: HF → HF"
    rewrite(table, made, {"name": name, "kind": "transformers", "options": options}, root, given)


def against_peft(table: Table, root: Path, given: argparse.Namespace) -> None:
    """An adapter of all linear modules is merged into a folder, which is written again."""
    made = llama(root / "hf", given.gib, finite=True)
    options = {"adapter": str(write_adapter(made, root / "adapter"))}
    name = f"PEFT merge_and_unload + save_pretrained, rank {LORA_RANK}: HF → HF"
    rewrite(table, made, {"name": name, "kind": "peft", "options": options}, root, given)


def rewrite(
    table: Table, made: Synthetic, peer: dict[str, Any], root: Path, given: argparse.Namespace
) -> None:
    """A peer writes a folder again, and so do we with its options; neither flushes to the disk."""
    ideal = 2 * made.num_bytes
    entrants = [Entrant(**peer, ideal_bytes=ideal)]
    for threads in (1, 2):
        options = {**peer["options"], "to": "hf", "threads": threads, "fsync": False}
        entrants.append(Entrant(name="megtool", options=options, ideal_bytes=ideal))
    first, *ours = race(entrants, made.folder, root / "scratch", rounds=given.rounds, fsync=False)
    for result in ours:
        duel(table, first, result)
    shutil.rmtree(made.folder)


def write_adapter(made: Synthetic, folder: Path) -> Path:
    """An adapter in PEFT's format, of random numbers, for the linear modules of layers."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(0)
    tensors, modules = {}, set()
    for name, shape in shapes(made.shape, made.num_layers):
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            modules.add(module.rpartition(".")[2])
            stored = f"base_model.model.{module}.lora_"
            tensors[f"{stored}A.weight"] = torch.randn(LORA_RANK, shape[1]) * 0.01
            tensors[f"{stored}B.weight"] = torch.randn(shape[0], LORA_RANK) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": 2 * LORA_RANK}
    settings |= {"target_modules": sorted(modules), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


PEERS = {"dcp": against_dcp, "transformers": against_transformers, "peft": against_peft}


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--peer", action="append", choices=list(PEERS), help="repeatable")
    given = options.parse_args()
    head = ("peer", "our threads", "fsync", "peer s", "our s", "x faster (min/min, limit 3)")
    head = (*head, "(median)", "whole process", "peer MiB", "our MiB", "our share (limit 0.1)")
    table = Table(title="Against peers", head=head)
    with workplace(given) as folder:
        root = Path(folder)
        for name in given.peer or PEERS:
            PEERS[name](table, root, given)
        note = (
            "Each job in a fresh process, in turn; `s` counts from the open checkpoint's path to "
            "the written one, without imports of the peer (and for merges, which take torch, of "
            "ours); MiB is the peak of anonymous memory of the whole process."
        )
        show(given, root, [table], note)


if __name__ == "__main__":
    main()
