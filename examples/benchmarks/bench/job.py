"""One job in a process of its own: `python job.py KIND JSON` does it and prints what it saw.

Nothing is measured inside but the clock and /proc/self/io around the job; memory is watched from
outside, so that watching costs the job nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import attention
import models
import post_training
from phases import Options, Phases


def reshard(options: Options, phase: Phases) -> Options:
    """Run `megtool.reshard` with the options given; what peers import too is imported before."""
    from megtool import reshard

    if "adapter" in options:
        import torch  # noqa: F401

        import megtool.adapters.read  # noqa: F401

    with phase("job"):
        report = reshard(**options)
    return {"num_bytes": report.num_bytes, "kernel_bytes": report.kernel_bytes}


def quantize(options: Options, phase: Phases) -> Options:
    """Write the source by a recipe that needs no data; amax of inputs are made up."""
    from megtool.options.execution import DigestMode, ExecutionOptions
    from megtool.options.target import TargetOptions
    from megtool.quant.qparams import QParams, WeightQParams
    from megtool.quant.resolve import resolve_recipe
    from megtool.quantize.layout.write import write

    decided = resolve_recipe(options["source"], options["recipe"])
    settlement = QParams()
    for d in decided.matched.decisions:
        if d.format is not None:
            name = d.module.name
            settlement.weights[name] = WeightQParams(module=name, format=d.format, input_amax=1.0)
    with phase("job"):
        report = write(
            decided.source,
            decided.matched.decisions,
            settlement,
            TargetOptions(to="hf", destination=Path(options["destination"])),
            ExecutionOptions(threads=options["threads"], digest=DigestMode.ALL, fsync=False),
        )
    return {"num_bytes": report.num_bytes}


def export(options: Options, phase: Phases) -> Options:
    """Run `megtool.export` with the options given."""
    from megtool import export

    with phase("job"):
        export(**options, fsync=False)
    return {}


def dcp(options: Options, phase: Phases) -> Options:
    """Load a checkpoint with torch.distributed.checkpoint and save it again, as one process."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(options["source"])
    writer = dcp.FileSystemWriter(
        options["destination"],
        sync_files=options["fsync"],
        thread_count=options["threads"],
    )
    with phase("job"):
        import torch

        found = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(held.size, dtype=held.properties.dtype)
            for name, held in found.items()
            if isinstance(held, TensorStorageMetadata)
        }
        dcp.load(state, storage_reader=reader, no_dist=True)
        dcp.save(state, storage_writer=writer, no_dist=True)
    return {}


def transformers(options: Options, phase: Phases) -> Options:
    """Load a folder with `from_pretrained` and write it again with `save_pretrained`."""
    from transformers import AutoModelForCausalLM

    models.silence_transformers()
    with phase("job"):
        model = AutoModelForCausalLM.from_pretrained(options["source"], dtype="auto")
        model.save_pretrained(options["destination"], max_shard_size=options["max_shard_size"])
    return {}


def peft(options: Options, phase: Phases) -> Options:
    """Load a folder, merge an adapter into it with PEFT, and write it with `save_pretrained`."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    models.silence_transformers()
    with phase("job"):
        model = AutoModelForCausalLM.from_pretrained(options["source"], dtype="auto")
        merged = PeftModel.from_pretrained(model, options["adapter"]).merge_and_unload()
        merged.save_pretrained(options["destination"])
    return {}


def plan(options: Options, phase: Phases) -> Options:
    """Open a checkpoint and plan a reshard of it, in two phases, by the functions reshard uses."""
    from megtool.options.layout import LayoutOptions
    from megtool.options.target import TargetOptions
    from megtool.plan.copies import PlanSource
    from megtool.plan.planner import build_plan
    from megtool.reshard.target import make_target
    from megtool.source.open import open_source

    with phase("open"):
        opened = open_source(Path(options["source"]))
    with phase("plan"):
        target = make_target(
            opened,
            TargetOptions(destination=Path("unused"), layout=LayoutOptions(**options["layout"])),
        )
        placements = {
            n: p for n, p in opened.view.placements.items() if n in target.side.placements
        }
        made = build_plan(
            [PlanSource(catalogue=opened.catalogue, placements=placements)],
            target.destination,
            target.side.placements,
            fills=target.fills,
            dropped=target.dropped,
        )
    return {
        "source_shards": len(opened.catalogue.shards),
        "target_shards": len(made.target.catalogue.shards),
        "steps": len(made.steps.entry),
        "num_bytes": opened.catalogue.num_bytes,
    }


def through_buffer(options: Options, phase: Phases) -> Options:
    """Copy a folder by reading and writing 256 KiB at a time: what any tool that has to see the
    bytes pays at least, on so many threads."""
    import os
    from concurrent.futures import ThreadPoolExecutor

    source, target, size = Path(options["source"]), Path(options["destination"]), 256 << 10
    pieces, unit = [], 64 << 20

    def move(piece: tuple[Path, Path, int, int]) -> None:
        here, there, start, end = piece
        buffer = memoryview(bytearray(size))
        a, b = os.open(here, os.O_RDONLY), os.open(there, os.O_WRONLY)
        while start < end:
            count = os.preadv(a, [buffer[: end - start]], start)
            os.pwrite(b, buffer[:count], start)
            start += count
        os.close(a)
        os.close(b)

    with phase("job"):
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            there, length = target / path.relative_to(source), path.stat().st_size
            there.parent.mkdir(parents=True, exist_ok=True)
            with there.open("wb") as out:
                out.truncate(length)
            pieces += [(path, there, at, min(at + unit, length)) for at in range(0, length, unit)]
        with ThreadPoolExecutor(options["threads"]) as pool:
            list(pool.map(move, pieces))
        if options["fsync"]:
            for path in target.rglob("*"):
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
    return {}


def metadata(options: Options, phase: Phases) -> Options:
    """Write a large checkpoint's headers; a job as well, because it takes memory."""
    from moe_metadata import write

    with phase("job"):
        write(Path(options["folder"]), options["layers"], options["experts"])
    return {}


JOBS: dict[str, Callable[[Options, Phases], Options]] = {
    "reshard": reshard,
    "quantize": quantize,
    "export": export,
    "dcp": dcp,
    "transformers": transformers,
    "peft": peft,
    "forward": models.forward,
    "peer_forward": models.peer_forward,
    "calibrate": models.calibrate,
    "peer_calibrate": models.peer_calibrate,
    "plan": plan,
    "attention": attention.run,
    "cross_entropy": models.cross_entropy,
    "gradient_accumulation": models.gradient_accumulation,
    "through_buffer": through_buffer,
    "metadata": metadata,
    "quantize_megatron": post_training.quantize_megatron,
    "quantize_folder": post_training.quantize_folder,
    "peer_quantize_megatron": post_training.peer_quantize_megatron,
    "peer_quantize_folder": post_training.peer_quantize_folder,
    "finetune": post_training.finetune,
    "peer_draft_head": post_training.peer_draft_head,
    "peer_distillation": post_training.peer_distillation,
}

if __name__ == "__main__":
    phases = Phases()
    facts = JOBS[sys.argv[1]](json.loads(sys.argv[2]), phases)
    print(json.dumps({"phases": phases.seen, "facts": facts}))
