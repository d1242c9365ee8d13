"""A rank's part in comparing loaded models with one process: logits, loss, every gradient.

What a rank runs imports no transformers, which would take each of them seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.layers.param_attributes import finish_gradients, sum_over_replicas
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule, forward_stages
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from tests.support.runs.loading import source_of
from tests.support.worlds.moe_layouts import rank_part

ROWS, LENGTH, VOCABULARY = 4, 14, 101
PROMPT = 11
Differences = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model in one layout: where its checkpoint lies, and what one process made of it.

    `dtype` is that of all parameters and tokens' values, whatever the checkpoint has; rows have the
    first `length` tokens.
    """

    name: str
    checkpoint: Path
    answer: Path
    layout: dict[str, int]
    how: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    length: int = LENGTH

    def __str__(self) -> str:
        said = " ".join(f"{k}={v}" for k, v in (self.layout | self.how).items())
        return f"{self.name} at {said}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model says of `tokens_and_labels`: loss (a sum), and gradients by name.

    `decoded` are logits of the same rows padded on the left, through a cache: a prompt, then one
    token and another, or, of an encoder, in one pass without a cache. Those of padding are 0; None
    where sequence or context parallelism has no cache.
    """

    logits: Tensor
    decoded: Tensor | None
    loss: float
    gradients: dict[str, Tensor]


def tokens_and_labels() -> tuple[Tensor, Tensor]:
    """Random tokens and what follows them; some labels count for nothing."""
    generator = torch.Generator().manual_seed(1)
    line = torch.randint(1, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    labels = line[:, 1:].clone()
    labels[0, :4] = -100
    labels[3, 9] = -100
    return line[:, :-1], labels


def valid() -> Tensor:
    """Which tokens of the rows are not padding, which is on the left."""
    widths = torch.tensor([LENGTH - 5, LENGTH, LENGTH - 1, LENGTH - 8])
    return torch.arange(LENGTH) >= LENGTH - widths[:, None]


def decode_logits(decoder: Decoder, groups: ProcessGroups) -> Tensor:
    """Logits of this rank's rows with padding on the left, token by token at the end."""
    tokens, real = (
        t.chunk(groups.dp.size)[groups.dp.rank] for t in (tokens_and_labels()[0], valid())
    )
    if decoder.config.bidirectional:
        batch = Batch(tokens_BS=tokens, valid_BS=real)
        logits = forward_stages(decoder, batch, everywhere=True)
        assert logits is not None
        return logits * real[:, :, None]
    cache = ContiguousCache(
        decoder.config,
        num_rows=len(tokens),
        max_tokens=LENGTH,
        layers=decoder.stage.layers,
        tp=groups.tp.size,
        dtype=next(decoder.parameters()).dtype,
    )
    out = []
    for span in (slice(0, PROMPT), *(slice(n, n + 1) for n in range(PROMPT, LENGTH))):
        padding = real[:, span] if not span.start else None
        batch = Batch(tokens_BS=tokens[:, span], valid_BS=padding)
        logits = forward_stages(decoder, batch, cache, everywhere=True)
        assert logits is not None
        out.append(logits)
    return torch.cat(out, 1) * real[:, :, None]


def answer_of(decoder: Decoder, groups: ProcessGroups, length: int = LENGTH) -> Answer:
    """A loaded decoder's answer, of this rank's rows; loss and gradients are those of all rows."""
    for parameter in decoder.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    tokens, labels = (
        t[:, :length].chunk(groups.dp.size)[groups.dp.rank] for t in tokens_and_labels()
    )
    batch = Batch(tokens_BS=tokens)
    logits = forward_stages(decoder, batch, everywhere=True)
    assert logits is not None
    loss, _ = PipelineSchedule(decoder, num_microbatches=groups.pp.size).step(batch, labels)
    finish_gradients(decoder, groups)
    sum_over_replicas(decoder, groups)
    if groups.replicas.handle is not None:
        dist.all_reduce(loss, group=groups.replicas.handle)
    gradients = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    has_cache = not decoder.sequence_parallel and groups.cp.size == 1
    steps = decode_logits(decoder, groups) if has_cache else None
    return Answer(logits=logits, decoded=steps, loss=float(loss), gradients=gradients)


LAYER_WORDS = ("layer_embeddings.weight",)


def differences(job: Job, groups: ProcessGroups) -> Differences:
    """How far this rank is from one process; gradients as a share of their tensor's largest.

    Tensors whose gradients are nothing beside the others (a bias of keys moves no softmax) are
    compared with a thousandth of the model's largest.
    """
    decoder = load(source_of(job.checkpoint), groups=groups, dtype="float32", threads=1, **job.how)
    decoder = decoder.to(job.dtype)
    got = answer_of(decoder, groups, job.length)
    want: Answer = torch.load(job.answer, weights_only=False)
    mine = want.logits.chunk(groups.dp.size)[groups.dp.rank]
    found = {
        "logits": float((got.logits - mine).abs().max()),
        "loss": abs(got.loss - want.loss) / want.loss,
    }
    if got.decoded is not None:
        assert want.decoded is not None
        mine = want.decoded.chunk(groups.dp.size)[groups.dp.rank]
        found["decoded"] = float((got.decoded - mine).abs().max())
    least = 1e-3 * max(float(g.abs().max()) for g in want.gradients.values())
    for name, parameter in decoder.named_parameters():
        if (whole := want.gradients.get(name)) is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        # Each rank's padding is a part.
        if "output_layer" in name or name.endswith(("word_embeddings.weight", *LAYER_WORDS)):
            rows = decoder.padded_vocab - whole.shape[0]
            whole = functional.pad(whole, (0, 0, 0, rows) if whole.dim() > 1 else (0, rows))
        mine = rank_part(name, whole, decoder.config, groups)
        own = got.gradients[name]
        assert own.shape == mine.shape, name
        found[name] = float((own - mine).abs().max()) / max(least, float(whole.abs().max()))
    return found


def compare_logits(rank: int, size: int, jobs: list[Job]) -> dict[str, float]:
    """How far the logits of this rank's rows are from one process', of every job."""
    dist.init_process_group("gloo")
    out: dict[str, float] = {}
    for job in jobs:
        groups = ProcessGroups.start(ParallelConfig(**job.layout))
        decoder = load(source_of(job.checkpoint), groups=groups, dtype="float32", **job.how)
        want, tokens = (
            t.chunk(groups.dp.size)[groups.dp.rank]
            for t in (torch.load(job.answer), tokens_and_labels()[0][:, : job.length])
        )
        with torch.no_grad():
            got = forward_stages(decoder, Batch(tokens_BS=tokens), everywhere=True)
        assert got is not None
        out[str(job)] = float((got - want).abs().max())
        groups.stop()
    return out


def compare(rank: int, size: int, jobs: list[Job]) -> dict[str, Differences]:
    """All differences of all jobs on this rank."""
    dist.init_process_group("gloo")
    made: dict[str, ProcessGroups] = {}
    out: dict[str, Differences] = {}
    for job in jobs:
        key = str(sorted(job.layout.items()))
        groups = made.get(key) or ProcessGroups.start(ParallelConfig(**job.layout))
        made[key] = groups
        assert groups.parallel == ParallelConfig(**job.layout)  # no replica more than it needs
        try:
            out[str(job)] = differences(job, groups)
        except BaseException as e:
            e.add_note(f"rank {rank} of {size}, {job}")
            raise
    for groups in made.values():
        groups.stop()
    return out
