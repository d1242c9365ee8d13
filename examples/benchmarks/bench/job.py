"""One job in a process of its own: `python job.py KIND JSON` does it and prints what it saw.

Nothing is measured inside but the clock and /proc/self/io around the job; memory is watched from
outside, so that watching costs the job nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Options = dict[str, Any]


class Phases:
    """When parts of the job began and ended (monotonic seconds), and the bytes they moved."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Note one part."""
        before, began = transferred(), time.monotonic()
        yield
        ended, after = time.monotonic(), transferred()
        moved = {k: after[k] - before[k] for k in after}
        self.seen[name] = {"began": began, "ended": ended, **moved}


def transferred() -> dict[str, int]:
    """Bytes this process read and wrote, by any call: `rchar` and `wchar` of /proc/self/io.

    The kernel counts read, write, sendfile and copy_file_range alike, in and out of the page cache.
    """
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return {"read": int(counts["rchar"]), "written": int(counts["wchar"])}


def reshard(options: Options, phase: Phases) -> Options:
    """Run `megtool.commands.reshard.reshard` with the options given."""
    from megtool.commands.reshard import reshard

    with phase("job"):
        report = reshard(**options)
    return {"num_bytes": report.num_bytes, "kernel_bytes": report.kernel_bytes}


def quantize(options: Options, phase: Phases) -> Options:
    """Write the source by a recipe that needs no data; amax of inputs are made up."""
    from megtool.commands.decided import decide
    from megtool.commands.quantizing.write import write
    from megtool.quant.treatment import Settlement, Treatment

    decided = decide(options["source"], options["recipe"])
    settlement = Settlement()
    for d in decided.matched.decisions:
        if d.format is not None:
            name = d.module.name
            settlement.treatments[name] = Treatment(module=name, format=d.format, input_amax=1.0)
    with phase("job"):
        report = write(
            decided.opened,
            decided.matched.decisions,
            settlement,
            Path(options["destination"]),
            threads=options["threads"],
            fsync=False,
        )
    return {"num_bytes": report.num_bytes}


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
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with phase("job"):
        model = AutoModelForCausalLM.from_pretrained(options["source"], dtype="auto")
        model.save_pretrained(options["destination"], max_shard_size=options["max_shard_size"])
    return {}


def forward(options: Options, phase: Phases) -> Options:
    """Load a decoder, whole or on demand, and run one forward pass over so many tokens."""
    import torch

    from megtool.commands.opened import open_model
    from megtool.inference.load import Source, load
    from megtool.model.batch import Batch

    torch.set_num_threads(options["threads"])
    with phase("load"):
        opened = open_model(Path(options["source"]), optimizer=False)
        source = Source(catalogue=opened.catalogue, side=opened.side, config=opened.side.config)
        decoder = load(source, on_demand=options["on_demand"], threads=options["threads"])
    tokens = torch.arange(options["tokens"]).unsqueeze(0)
    with phase("forward"), torch.inference_mode():
        decoder(Batch(tokens_BS=tokens), last_only=True)
    return {"num_bytes": opened.catalogue.num_bytes}


def peer_forward(options: Options, phase: Phases) -> Options:
    """The same by transformers, whose weights stay mapped from the files, or `copied` from them."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    with phase("load"):
        model = LlamaForCausalLM.from_pretrained(options["source"], dtype="auto")
        for parameter in model.parameters() if options["copied"] else ():
            parameter.data = parameter.data.clone()
    tokens = torch.arange(options["tokens"]).unsqueeze(0)
    with phase("forward"), torch.inference_mode():
        model(tokens, logits_to_keep=1)
    return {}


def calibrate(options: Options, phase: Phases) -> Options:
    """Show a model random tokens, layer by layer, and settle what becomes of it."""
    import torch

    from megtool.commands.decided import decide
    from megtool.inference.load import Source
    from megtool.model.batch import Batch
    from megtool.quant.calibration.calibrate import calibrate
    from megtool.quant.calibration.fingerprint import Fingerprint
    from megtool.quant.calibration.points import list_points

    torch.set_num_threads(options["threads"])
    with phase("load"):
        decided = decide(options["source"], options["recipe"])
        side, config = decided.opened.side, decided.opened.side.config
        if config is None:
            raise SystemExit("no model")
        source = Source(catalogue=decided.opened.catalogue, side=side, config=config)
        points = list_points(decided.modules.modules, config)
    batches = [Batch(tokens_BS=t) for t in rows_of_tokens(options, config.vocab_size)]
    with phase("calibrate"):
        found = calibrate(
            source,
            decided.matched.decisions,
            decided.recipe,
            points,
            batches,
            fingerprint=Fingerprint(model="", recipe="", data=""),
            dtype=options["dtype"],
            threads=options["threads"],
        )
    amax = {
        name: float(s.amax.max())
        for name, s in found.statistics.items()
        if name.startswith("layers.0.") and not name.endswith(".kv")
    }
    return {"num_tokens": found.num_tokens, "amax": amax}


def peer_calibrate(options: Options, phase: Phases) -> Options:
    """The same by NVIDIA ModelOpt on transformers' model, its scales of FP8."""
    import warnings

    warnings.simplefilter("ignore")
    import modelopt.torch.quantization as mtq
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    with phase("load"):
        kind = getattr(torch, options["dtype"])
        model = LlamaForCausalLM.from_pretrained(options["source"], dtype=kind)
    batches = rows_of_tokens(options, model.config.vocab_size)

    def show(model: torch.nn.Module) -> None:
        with torch.inference_mode():
            for tokens in batches:
                model(tokens, use_cache=False)

    with phase("calibrate"):
        mtq.quantize(model, mtq.FP8_DEFAULT_CFG, show)
    layer = model.model.layers[0]
    named = {
        "layers.0.attn.qkv": layer.self_attn.q_proj,
        "layers.0.attn.o": layer.self_attn.o_proj,
        "layers.0.mlp.fc1": layer.mlp.gate_proj,
        "layers.0.mlp.down": layer.mlp.down_proj,
    }
    amax = {name: float(module.input_quantizer.amax) for name, module in named.items()}
    return {"num_tokens": sum(t.numel() for t in batches), "amax": amax}


def rows_of_tokens(options: Options, vocab: int) -> list[Any]:
    """Random tokens, about 2048 at a time."""
    import torch

    made = torch.Generator().manual_seed(0)
    samples, length = options["samples"], options["length"]
    tokens = torch.randint(0, vocab, (samples, length), generator=made)
    return list(tokens.split(max(1, 2048 // length)))


def plan(options: Options, phase: Phases) -> Options:
    """Open a checkpoint and plan a reshard of it, in two phases, by the functions reshard uses."""
    from megtool.checkpoint.plan import Source
    from megtool.checkpoint.planner import build
    from megtool.commands.opened import open_model
    from megtool.commands.target import Request, make_target

    with phase("open"):
        opened = open_model(Path(options["source"]))
    with phase("plan"):
        target = make_target(opened, Request(destination=Path("unused"), layout=options["layout"]))
        placements = {
            n: p for n, p in opened.side.placements.items() if n in target.side.placements
        }
        made = build(
            [Source(catalogue=opened.catalogue, placements=placements)],
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


def cross_entropy(options: Options, phase: Phases) -> Options:
    """The mean loss of a linear head with its gradients, some times over, by `options["way"]`."""
    import torch
    import torch.nn.functional as F

    from megtool.kernels.cross_entropy import linear_cross_entropy

    torch.set_num_threads(options["threads"])
    torch.manual_seed(0)
    device, size = torch.device(options["device"]), options["vocab"]
    made = {"dtype": getattr(torch, options["dtype"]), "device": device}
    x = torch.randn(options["tokens"], options["hidden"], **made).requires_grad_()
    weight = torch.randn(size, options["hidden"], **made).mul_(0.02).requires_grad_()
    labels = torch.randint(0, size, (options["tokens"],), device=device)

    def loss() -> torch.Tensor:
        if options["way"] == "megtool":
            return linear_cross_entropy(x, weight, labels, vocab_size=size).mean()
        if options["way"] == "torch in chunks":
            chunked = torch.nn.LinearCrossEntropyOptions()
            return F.linear_cross_entropy(x, weight, labels, options=chunked)
        return F.cross_entropy(F.linear(x, weight).float(), labels)

    # On a CPU its own time: a busy machine would be measured otherwise.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds = []
    with phase("job"):
        for _ in range(options["repeat"]):
            x.grad = weight.grad = None
            began = clock()
            found = loss()
            found.backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - began)
    on_device = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    norms = [float(t.grad.float().norm()) for t in (x, weight) if t.grad is not None]
    facts = {"loss": float(found), "norms": norms, "seconds": min(seconds), "on_device": on_device}
    return facts


def metadata(options: Options, phase: Phases) -> Options:
    """Write a large checkpoint's headers; a job as well, because it takes memory."""
    from moe_metadata import write

    with phase("job"):
        write(Path(options["folder"]), options["layers"], options["experts"])
    return {}


JOBS: dict[str, Callable[[Options, Phases], Options]] = {
    "reshard": reshard,
    "quantize": quantize,
    "dcp": dcp,
    "transformers": transformers,
    "forward": forward,
    "peer_forward": peer_forward,
    "calibrate": calibrate,
    "peer_calibrate": peer_calibrate,
    "plan": plan,
    "cross_entropy": cross_entropy,
    "through_buffer": through_buffer,
    "metadata": metadata,
}

if __name__ == "__main__":
    phases = Phases()
    facts = JOBS[sys.argv[1]](json.loads(sys.argv[2]), phases)
    print(json.dumps({"phases": phases.seen, "facts": facts}))
