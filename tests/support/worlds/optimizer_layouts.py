"""Tiny decoders trained on the ranks of a layout, and by torch's own AdamW in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule, build_stages
from megtool.optim.config import OptimizerConfig
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.optimizer import Optimizer
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.worlds.moe_layouts import DENSE, rank_part

ROWS, TOKENS = 8, 6
VOCAB: int = DENSE["vocab_size"]
MODELS: dict[str, ModelConfig] = {
    "tied": ModelConfig.from_fields(**DENSE, tied_embeddings=True, qk_norm=True),
    "biases": ModelConfig.from_fields(**DENSE, qkv_bias=True, attn_out_bias=True, mlp_bias=True),
    "experts": ModelConfig.from_fields(
        **DENSE,
        num_experts=8,
        num_experts_per_token=2,
        moe_ffn_hidden_size=8,
        shared_ffn_hidden_size=12,
        moe_layer_freq=(0, 1),
    ),
}
MODELS["deep"] = MODELS["tied"].with_fields(num_layers=4)
LR, DECAY = 1e-3, 0.1
PLAIN = OptimizerConfig(lr=LR, weight_decay=DECAY, clip_grad=0.0)
CLIPPED = OptimizerConfig(lr=LR, weight_decay=DECAY, clip_grad=0.5, log_num_zeros_in_grad=True)


def whole(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """All of a model in one process, with the same random weights everywhere."""
    decoder = Decoder(MODELS[name], device="cpu", vocab_multiple=64, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in decoder.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            wide = 1.0 if key.endswith("router.weight") else 0.3
            p.copy_(1 + 0.2 * noise if "norm" in key else noise * wide)
    return decoder


def data(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Tokens and labels of all replicas in a step; a few labels do not count."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens_BS = torch.randint(0, VOCAB, (rows, TOKENS), generator=generator)
    labels_BS = torch.randint(0, VOCAB, (rows, TOKENS), generator=generator)
    labels_BS[step % rows, : step % TOKENS] = -100
    return tokens_BS, labels_BS


@dataclass
class Curve:
    """What training gave: the loss and the gradient's norm of every step, and the parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    zeros: list[int] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def torch_training(
    name: str, *, steps: int, passes: int, clip: float, dtype: torch.dtype = torch.float32
) -> Curve:
    """`torch.optim.AdamW(fused=True)` on the whole model, the rows of a step in `passes` parts."""
    one, curve = whole(name, dtype), Curve()
    named = dict(one.named_parameters())
    decayed = [p for key, p in named.items() if p.dim() > 1 and not key.endswith("bias")]
    others = [p for key, p in named.items() if p.dim() == 1 or key.endswith("bias")]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=LR, weight_decay=DECAY, betas=(0.9, 0.999), eps=1e-8, fused=True
    )
    for step in range(steps):
        optimizer.zero_grad()
        tokens_BS, labels_BS = data(step)
        total, labels = torch.zeros(()), int((labels_BS != -100).sum())
        for text, wanted in zip(tokens_BS.chunk(passes), labels_BS.chunk(passes), strict=True):
            loss, _ = one.loss(Batch(tokens_BS=text), wanted)
            loss.backward()
            total += loss.detach()
        grads = [p.grad for p in named.values() if p.grad is not None]
        torch._foreach_mul_(grads, 1.0 / labels)
        norm = nn.utils.clip_grad_norm_(named.values(), clip if clip else float("inf"))
        optimizer.step()
        curve.losses.append(float(total) / labels)
        curve.norms.append(float(norm))
        curve.zeros.append(
            sum(int((p.grad == 0).sum()) for p in named.values() if p.grad is not None)
        )
    curve.parameters = {key: p.detach().clone() for key, p in named.items()}
    return curve


def stages_of(
    name: str,
    groups: ProcessGroups,
    *,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[Decoder]:
    """This rank's parts of the model."""
    one = whole(name, dtype)
    multiple = 64 // groups.tp.size
    how: dict[str, Any] = dict(device="cpu", vocab_multiple=multiple, dtype=dtype)
    stages = build_stages(MODELS[name], groups, sequence_parallel=sequence_parallel, **how)
    values = one.state_dict()
    for stage in stages:
        stage.load_state_dict(
            {
                key: rank_part(key, values[key], MODELS[name], groups).clone()
                for key in stage.state_dict()
            }
        )
    return stages


def named(stages: list[Decoder]) -> list[tuple[str, nn.Parameter]]:
    """All parameters of a rank."""
    return [item for stage in stages for item in stage.named_parameters()]


def training(
    name: str,
    groups: ProcessGroups,
    *,
    steps: int,
    first: int = 0,
    microbatches: int = 1,
    settings: OptimizerConfig = PLAIN,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    prepared: Callable[[list[Decoder]], None] | None = None,
    made: Callable[[list[Decoder], DistributedOptimizer], None] | None = None,
) -> tuple[Curve, DistributedOptimizer]:
    """The same as `torch_training` with the optimizer under test, on the ranks of a layout.

    `first` is the number of the first step; `prepared` and `made` are called with the stages before
    the optimizer is there, and after.
    """
    stages = stages_of(name, groups, sequence_parallel=sequence_parallel, dtype=dtype)
    if prepared is not None:
        prepared(stages)
    optimizer = DistributedOptimizer(named(stages), settings, groups, chunks=stages)
    if made is not None:
        made(stages, optimizer)
    curve = take_steps(stages, optimizer, groups, range(first, first + steps), microbatches)
    curve.parameters = {key: p.detach().clone() for key, p in named(stages)}
    return curve, optimizer


def take_steps(
    stages: list[Decoder],
    optimizer: Optimizer,
    groups: ProcessGroups,
    steps: range,
    microbatches: int,
) -> Curve:
    """Losses and norms of some steps; parameters are all there behind them."""
    schedule = PipelineSchedule(
        stages, num_microbatches=microbatches, before_pass=optimizer.begin_pass
    )
    curve, dp = Curve(), groups.dp
    for step in steps:
        tokens_BS, labels_BS = data(step)
        labels = (labels_BS != -100).sum()
        text = tokens_BS.chunk(dp.size)[dp.rank]
        wanted = labels_BS.chunk(dp.size)[dp.rank]
        optimizer.zero_grad()
        optimizer.begin(microbatches)
        total, _ = schedule.step(Batch(tokens_BS=text), wanted)
        optimizer.finish(labels)
        result = optimizer.step(LR, DECAY)
        assert result.ok
        if dp.handle is not None:
            torch.distributed.all_reduce(total, group=dp.handle)
        curve.losses.append(float(total) / int(labels))
        curve.norms.append(result.grad_norm)
        curve.zeros.append(result.num_zeros or 0)
    optimizer.wait_for_parameters()
    return curve


def start(num_instances: int = 1, **sizes: int) -> ProcessGroups:
    """Groups of a layout, in a forked process."""
    return ProcessGroups.start(ParallelConfig(**sizes), num_instances=num_instances)
