"""One engine that trains a decoder on the processes that `torchrun` started: the memory of a rank.

    torchrun --nproc-per-node 2 sharding.py OPTIONS-AS-JSON

Rank 0 prints one line of JSON: bytes between steps by kind, and the peak, of the rank with most.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.training import ADAM, CLIP, DECAY, LR, LossOf, batch, decayed, fill
from megtool.convert.families.detection import family
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.fully_shard import FullyShard, sharded_modules
from megtool.optim.config import OptimizerConfig
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.fully_sharded import FullyShardedOptimizer
from megtool.optim.optimizer import Optimizer
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.options.layout import ParallelConfig
from megtool.parallel.collectives import all_max, all_sum
from megtool.parallel.process_groups import ProcessGroups
from megtool.tensors.dtensor_shards import local_shard

KINDS = ("parameters", "gradients", "state")
Engine = tuple[Callable[[Tensor, Tensor], None], Callable[[], list[int]]]


class Peak:
    """The most anonymous memory of this process beyond what it had, sampled by a thread."""

    def __init__(self) -> None:
        self.first = self.most = anonymous_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ends.wait(0.001):
            self.most = max(self.most, anonymous_bytes())

    def stop(self) -> int:
        """Bytes."""
        self._ends.set()
        self._thread.join()
        return self.most - self.first


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    with open("/proc/self/status") as lines:
        line = next(x for x in lines if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def decoder(sizes: dict[str, int]) -> Decoder:
    """The same on every rank."""
    from transformers import LlamaConfig

    config = LlamaConfig(**sizes, tie_word_embeddings=True)
    made = Decoder(family("llama").read_config(config.to_dict()), device="cpu")
    fill(made)
    return made


def megtool(strategy: str, passes: int, sizes: dict[str, int], groups: ProcessGroups) -> Engine:
    """A sharding strategy of `megtool finetune`."""
    made = decoder(sizes)
    settings = OptimizerConfig(lr=LR, weight_decay=DECAY, clip_grad=CLIP)
    optimizer: Optimizer
    if strategy.startswith("optim_grads"):
        sharder = FullyShard(groups=groups, reshard_after_forward=strategy == "optim_grads_params")
        sharder.shard_layers(made)
        sharder.shard_rest(made)
        named = list(made.named_parameters())
        optimizer = FullyShardedOptimizer(named, settings, groups, modules=sharded_modules([made]))
    elif strategy == "optim":
        optimizer = DistributedOptimizer(made.named_parameters(), settings, groups, chunks=[made])
    else:
        optimizer = ReplicatedOptimizer(made.named_parameters(), settings, groups)

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> None:
        optimizer.zero_grad()
        optimizer.begin(passes)
        total = torch.zeros(1)
        for text, wanted in zip(tokens_BS.chunk(passes), labels_BS.chunk(passes), strict=True):
            loss, count = made.loss(Batch(tokens_BS=text), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            total += count
        optimizer.finish(all_sum(total, groups.dp))
        optimizer.step(LR, DECAY)

    def held() -> list[int]:
        optimizer.wait_for_parameters()
        buffers = getattr(optimizer, "buffers", ())
        grads = [b.grads for b in buffers] or own(p.grad for p in made.parameters())
        state = [t for s in optimizer.segments for t in s.states.values()]
        return [sum(t.nbytes for t in x) for x in (own(made.parameters()), grads, state)]

    return step, held


def peer(wrap: Callable[[Decoder], nn.Module], passes: int, sizes: dict[str, int]) -> Engine:
    """torch's fused AdamW on the decoder, wrapped."""
    module = wrap(decoder(sizes))
    optimizer = torch.optim.AdamW(decayed(module), **ADAM)

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> None:
        optimizer.zero_grad()
        for text, wanted in zip(tokens_BS.chunk(passes), labels_BS.chunk(passes), strict=True):
            (module(text, wanted) / passes).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()

    def held() -> list[int]:
        if hasattr(module, "reshard"):
            module.reshard()
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        tensors = own(module.parameters()), own(p.grad for p in module.parameters()), own(state)
        return [sum(t.nbytes for t in kind) for kind in tensors]

    return step, held


def own(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """What this rank has of tensors that may be sharded."""
    return [local_shard(t) for t in tensors if t is not None]


def data_parallel(made: Decoder) -> nn.Module:
    """torch DistributedDataParallel, gradients as views of its buckets."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(LossOf(made), gradient_as_bucket_view=True)


def fully_sharded(made: Decoder) -> nn.Module:
    """torch FSDP2, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = LossOf(made)
    for layer in made.decoder.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


PEERS = {"torch DDP": data_parallel, "torch FSDP2": fully_sharded}


def main() -> None:
    """Three steps of an engine."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    groups = ProcessGroups.start(ParallelConfig())
    name, passes, sizes = given["engine"], given["passes"], given["sizes"]
    peak = Peak()
    if name in PEERS:
        step, held = peer(PEERS[name], passes, sizes)
    else:
        step, held = megtool(name, passes, sizes, groups)
    for number in range(3):
        texts = [batch(number * passes + n, groups.dp.rank, given["tokens"]) for n in range(passes)]
        tokens_BS, labels_BS = (
            torch.cat(rows) % sizes["vocab_size"] for rows in zip(*texts, strict=True)
        )
        step(tokens_BS, labels_BS)
    most = peak.stop()
    figures = torch.tensor([*held(), most], dtype=torch.float64)
    figures = all_max(figures, groups.world)
    if groups.rank == 0:
        names = (*KINDS, "peak")
        print(json.dumps(dict(zip(names, map(int, figures.tolist()), strict=True))), flush=True)
    groups.stop()


if __name__ == "__main__":
    main()
