"""Engines that train the same decoder in turn, in processes that `torchrun` started.

    torchrun --nproc-per-node 2 training.py OPTIONS-AS-JSON

Rank 0 prints one line of JSON: for each engine the times of its rounds, and its memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megtool.convert.families.detection import family
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.optim.config import OptimizerConfig
from megtool.optim.distributed import DistributedOptimizer
from megtool.options.layout import ParallelConfig
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import ProcessGroups

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
LR, DECAY, CLIP = 1e-4, 0.1, 1.0
ADAM: dict[str, Any] = dict(lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=True)

Step = Callable[[Tensor, Tensor], None]


class LossOf(nn.Module):
    """The mean loss of a decoder, as a module to be wrapped."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """A number."""
        total, count = self.decoder.loss(Batch(tokens_BS=tokens_BS), labels_BS)
        return total / count


def fill(module: nn.Module) -> None:
    """Small random weights, norms of one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)


def decoder() -> Decoder:
    """Ours, the same on every rank."""
    from transformers import LlamaConfig

    config = LlamaConfig(**SIZES)
    made = Decoder(family("llama").read_config(config.to_dict()), device="cpu")
    fill(made)
    return made


def decayed(module: nn.Module) -> list[dict[str, Any]]:
    """Parameters as Trainer and Megatron group them: no decay of norms."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the states on this rank."""
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                local = value.to_local() if hasattr(value, "to_local") else value
                total += local.numel() * local.element_size() if local.dim() else 0
    return total


def ours(groups: ProcessGroups, **how: Any) -> tuple[Step, Callable[[], int]]:
    """The distributed optimizer on the decoder."""
    made = decoder()
    settings = OptimizerConfig(lr=LR, weight_decay=DECAY, clip_grad=CLIP, **how)
    optimizer = DistributedOptimizer(made.named_parameters(), settings, groups, chunks=[made])

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> None:
        optimizer.zero_grad()
        optimizer.begin(1)
        loss, count = made.loss(Batch(tokens_BS=tokens_BS), labels_BS)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.finish(all_sum(count, groups.dp))
        optimizer.step(LR, DECAY)

    def memory() -> int:
        return sum(
            s.numel() * s.element_size() for x in optimizer.segments for s in x.states.values()
        )

    return step, memory


def plain_loop(module: nn.Module) -> tuple[Step, Callable[[], int]]:
    """torch's fused AdamW on a module that gives the mean loss."""
    optimizer = torch.optim.AdamW(decayed(module), **ADAM)

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> None:
        optimizer.zero_grad()
        module(tokens_BS, labels_BS).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()

    return step, lambda: held_bytes(optimizer)


def ddp() -> tuple[Step, Callable[[], int]]:
    """torch DistributedDataParallel on the decoder, gradients as views of its buckets."""
    from torch.nn.parallel import DistributedDataParallel

    return plain_loop(DistributedDataParallel(LossOf(decoder()), gradient_as_bucket_view=True))


def fsdp() -> tuple[Step, Callable[[], int]]:
    """FSDP2, layer by layer, on the decoder."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = LossOf(decoder())
    for layer in module.decoder.decoder.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return plain_loop(module)


def trainer(tokens: int, steps: int) -> Callable[[], tuple[float, float]]:
    """transformers' Trainer on its own Llama: trains so many steps, and says how long each took."""
    import tempfile

    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    fill(model)
    rows = [
        {"input_ids": text[0], "labels": text[0]}
        for text, _ in (batch(n, 0, tokens) for n in range(steps))
    ]

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Times of the steps of a run."""

        def __init__(self) -> None:
            self.cpu = self.wall = 0.0
            self.began = (0.0, 0.0)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """A step begins."""
            self.began = time.process_time(), time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """A step is over."""
            self.cpu += time.process_time() - self.began[0]
            self.wall += time.perf_counter() - self.began[1]

    def run() -> tuple[float, float]:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                max_steps=steps,
                learning_rate=LR,
                weight_decay=DECAY,
                max_grad_norm=CLIP,
                optim="adamw_torch_fused",
                lr_scheduler_type="constant",
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
            )
            Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[clock]).train()
        return clock.cpu / steps, clock.wall / steps

    return run


def batch(number: int, rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Random tokens of a step, and what follows each."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    text_BS = torch.randint(0, SIZES["vocab_size"], (1, tokens + 1), generator=generator)
    return text_BS[:, :-1].contiguous(), text_BS[:, 1:].contiguous()


def timed(step: Step, rank: int, steps: int, tokens: int) -> tuple[float, float]:
    """CPU and wall seconds of a step."""
    batches = [batch(n, rank, tokens) for n in range(steps)]
    if dist.is_initialized():
        dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for text_BS, labels_BS in batches:
        step(text_BS, labels_BS)
    return (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps


def main() -> None:
    """Every engine in turn, round after round."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    groups = ProcessGroups.start(ParallelConfig())
    rank, steps, tokens = groups.dp.rank, given["steps"], given["tokens"]
    overlapped = dict(
        overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=given["bucket"]
    )
    engines: dict[str, tuple[Step, Callable[[], int]]] = {"megtool": ours(groups)}
    runs: dict[str, Callable[[], tuple[float, float]]] = {}
    if groups.dp.size > 1:
        engines["megtool, overlapped"] = ours(groups, **overlapped)
        engines["torch DDP + fused AdamW"] = ddp()
        engines["torch FSDP2 + fused AdamW"] = fsdp()
    else:
        engines["torch's fused AdamW"] = plain_loop(LossOf(decoder()))
        runs["transformers Trainer"] = trainer(tokens, steps)
    for name, (step, _) in engines.items():
        runs[name] = lambda step=step: timed(step, rank, steps, tokens)  # type: ignore[misc]
    for run in runs.values():
        run()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(given["rounds"]):
        for name, run in runs.items():
            seconds = torch.tensor(run(), dtype=torch.float64)
            # The mean of the ranks' CPU time; a step has ended when it has on every rank.
            mean = all_sum(seconds, groups.dp) / groups.dp.size
            found[name].append((float(mean[0]), float(mean[1])))
    memory = {name: held() for name, (_, held) in engines.items()}
    if rank == 0:
        print(json.dumps({"seconds": found, "bytes": memory}), flush=True)
    groups.stop()


if __name__ == "__main__":
    main()
