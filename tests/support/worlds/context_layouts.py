"""A rank's part in comparing context parallelism with one process: logits, loss, every gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megtool.errors import LayoutError
from megtool.inference.forward import Forward
from megtool.model.batch import Batch
from megtool.model.layers.param_attributes import finish_gradients, sum_over_replicas
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule, build_stages, forward_stages
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.worlds import moe_layouts
from tests.support.worlds.moe_layouts import DENSE, SIZES, rank_part

ROWS, LENGTH = 4, 16
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 10,
    "factor": 2.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": DENSE | dict(qkv_bias=True, qk_norm=True),
    "windows and sinks": DENSE | dict(attn_sinks=True, window_size=5, window_skip_freq=2),
    "softcap": DENSE | dict(attn_softcap=2.0, logit_softcap=5.0, window_size=6, post_norms=True),
    "chunks": DENSE
    | dict(
        attn_chunk_size=6,
        no_rope_layers=(0, 1),
        attn_temperature_floor=4,
        attn_temperature_scale=0.2,
    ),
    "learned": DENSE
    | dict(
        position_embedding="learned",
        max_positions=LENGTH,
        norm="layernorm",
        tied_embeddings=True,
        gated=False,
        activation="gelu",
        mlp_bias=True,
    ),
    "slopes": DENSE | dict(position_embedding="alibi", embedding_norm=True),
    "by length": DENSE | dict(rope_scaling=LONG, max_positions=20),
    "latent": SIZES | moe_layouts.MODELS["latent"],
    "sparse": SIZES | moe_layouts.MODELS["sparse"],
    "experts": SIZES | moe_layouts.MODELS["shared and gated"],
    "delta nets": SIZES
    | dict(
        layer_kinds=("GE", "*-"),
        attn_output_gate=True,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=4,
        linear_value_head_dim=6,
    ),
    "Kimi deltas": DENSE
    | dict(
        position_embedding="none",
        layer_kinds=("K-", "*-"),
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=6,
    ),
    "short convolutions": DENSE
    | dict(layer_kinds=("c-", "*-"), short_conv_taps=3, short_conv_bias=True),
    "biased experts": SIZES | moe_layouts.MODELS["biases"],
}
MAMBA = DENSE | dict(
    layer_kinds=("M", "*-"),
    mamba_num_heads=8,
    mamba_head_dim=3,
    mamba_state_dim=5,
    mamba_num_groups=4,
)
MODELS |= {
    "mamba": MAMBA,
    "mamba beside attention": MAMBA
    | dict(
        layer_kinds=("M*-", "M*-"),
        mamba_norm_first=True,
        mamba_in_scales=(0.9, 1.2, 0.7, 1.4, 1.1),
        mamba_out_scale=0.7,
        attn_in_scale=0.8,
        attn_out_scale=1.3,
        mlp_gate_scale=1.2,
        mlp_out_scale=0.6,
    ),
    "mamba, one group": MAMBA | dict(mamba_num_groups=1, layer_kinds=("M", "-"), gated=False),
}
BATCHES = ("plain", "documents", "padded left", "padded right")


def whole(name: str) -> Decoder:
    """All of a model in one process, with the same random weights everywhere."""
    decoder = Decoder(ModelConfig.from_fields(**MODELS[name]), device="cpu", vocab_multiple=64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in decoder.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if "norm" in key else noise * 0.3)
    return decoder


def batch_of(kind: str) -> tuple[Batch, torch.Tensor]:
    """Random tokens and labels, of which some count for nothing."""
    generator = torch.Generator().manual_seed(3)
    line = torch.randint(0, 61, (ROWS, LENGTH + 1), generator=generator)
    tokens, labels = line[:, :-1], line[:, 1:].clone()
    labels[0, :3] = -100
    labels[2, 9] = -100
    if kind == "documents":
        starts = torch.rand(ROWS, LENGTH, generator=generator) < 0.2
        return Batch(tokens_BS=tokens, documents_BS=starts.long().cumsum(1)), labels
    if kind == "plain":
        return Batch(tokens_BS=tokens), labels
    sizes_B1 = torch.tensor([[16], [3], [9], [13]])
    valid = torch.arange(LENGTH) < sizes_B1
    valid = valid.flip(1) if kind == "padded left" else valid
    return Batch(tokens_BS=tokens, valid_BS=valid), labels.masked_fill(~valid, -100)


def rows(batch: Batch, groups: ProcessGroups) -> Batch:
    """This replica's rows."""
    names = ("tokens_BS", "valid_BS", "documents_BS")
    found = {name: getattr(batch, name) for name in names}
    n, size = groups.dp.rank, groups.dp.size
    return Batch(**{k: None if v is None else v.chunk(size)[n] for k, v in found.items()})


def compare(
    name: str, kind: str, groups: ProcessGroups, sequence_parallel: bool
) -> dict[str, float]:
    """How far this rank is from one process; gradients as shares of their tensor's largest."""
    one, (batch, labels) = whole(name), batch_of(kind)
    full = dict(one.named_parameters())
    stages = build_stages(
        one.config,
        groups,
        device="cpu",
        vocab_multiple=64 // groups.tp.size,
        sequence_parallel=sequence_parallel,
    )
    mine = [(key, p) for stage in stages for key, p in stage.named_parameters()]
    with torch.no_grad():
        for key, p in mine:
            p.copy_(rank_part(key, full[key], one.config, groups))
        logits = one(batch)
        got = forward_stages(stages, rows(batch, groups), everywhere=True)
        last = forward_stages(stages, rows(batch, groups), last_only=True, everywhere=True)
    assert got is not None
    assert last is not None
    valid = torch.ones_like(labels, dtype=torch.bool) if batch.valid_BS is None else batch.valid_BS
    shares = [t.chunk(groups.dp.size)[groups.dp.rank] for t in (logits, labels, valid)]
    ends = (shares[2] * torch.arange(LENGTH)).argmax(1)
    out = {
        "logits": float((got - shares[0])[shares[2]].abs().max()),
        "last": float((last[:, 0] - shares[0][torch.arange(len(ends)), ends]).abs().max()),
    }
    loss, count = one.loss(batch, labels)
    loss.backward()
    micro = groups.pp.size
    total, number = PipelineSchedule(stages, num_microbatches=micro).step(
        rows(batch, groups), shares[1]
    )
    for stage in stages:
        finish_gradients(stage, groups)
        sum_over_replicas(stage, groups)
    sums = torch.stack([total, number.float()])
    if groups.replicas.handle is not None:
        dist.all_reduce(sums, group=groups.replicas.handle)
    assert int(sums[1]) == int(count)
    out["loss"] = abs(float(sums[0]) - float(loss)) / float(loss)
    least = 1e-3 * max(float(p.grad.abs().max()) for p in full.values() if p.grad is not None)
    for key, p in mine:
        want = full[key].grad
        if want is None:
            continue
        assert p.grad is not None, key
        part_of = rank_part(key, want, one.config, groups)
        out[key] = float((p.grad - part_of).abs().max()) / max(least, float(want.abs().max()))
    return out


Job = tuple[str, str, dict[str, int], bool]


def verify_master_weights(rank: int, size: int, jobs: list[Job]) -> dict[str, float]:
    """The largest difference of each job on this rank."""
    dist.init_process_group("gloo")
    made: dict[str, ProcessGroups] = {}
    out: dict[str, float] = {}
    for name, kind, layout, sequence_parallel in jobs:
        groups = made.get(str(layout)) or ProcessGroups.start(ParallelConfig(**layout))
        made[str(layout)] = groups
        found = compare(name, kind, groups, sequence_parallel)
        worst = max(found, key=lambda k: found[k])
        out[f"{name}, {kind}, {layout}, {sequence_parallel}: {worst}"] = found[worst]
    for groups in made.values():
        groups.stop()
    return out


def filled_up(rank: int, size: int, length: int) -> tuple[float, str]:
    """States of rows that do not go evenly, against one process; and how a cache is refused."""
    groups = ProcessGroups.start(ParallelConfig(cp=size))
    one = whole("learned")
    decoder = Decoder(one.config, groups, device="cpu", vocab_multiple=64)
    decoder.load_state_dict(one.state_dict())
    batch = Batch(tokens_BS=batch_of("plain")[0].tokens_BS[:, :length])
    forward = Forward(decoder, groups)
    with torch.no_grad():
        x_TH = forward.hidden(batch)
        assert x_TH is not None
        found = float((x_TH - one.hidden(batch)).abs().max())
    try:
        forward.rows_cache(num_rows=1, max_tokens=4, graphable=False)
    except LayoutError as e:
        refused = str(e)
    groups.stop()
    return found, refused
