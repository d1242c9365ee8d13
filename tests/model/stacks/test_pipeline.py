"""Stages on real gloo processes against the whole model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megtool.errors import LayoutError
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.layers.param_attributes import finish_gradients, is_marked, sum_over_replicas
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import (
    PipelineSchedule,
    build_stages,
    forward_stages,
    stream_hidden,
)
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.errors import raises
from tests.support.worlds.gloo_world import run_world

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
}
MODELS = {
    "tied": ModelConfig.from_fields(**SMALL, tied_embeddings=True, qk_norm=True),
    "learned": ModelConfig.from_fields(
        **SMALL,
        norm="layernorm",
        gated=False,
        activation="gelu",
        position_embedding="learned",
        qkv_bias=True,
        attn_out_bias=True,
        mlp_bias=True,
    ),
}
HOW: dict[str, Any] = {"device": "cpu", "vocab_multiple": 4}


def whole(config: ModelConfig) -> Decoder:
    torch.manual_seed(4)
    decoder = Decoder(config, **HOW)
    for p in decoder.parameters():
        nn.init.normal_(p, std=0.2)
    return decoder


def fill(stages: list[Decoder], one: Decoder) -> None:
    """A rank's parts of the whole model's parameters."""
    for _, p, value in pairs(stages, one):
        p.data.copy_(value)


def pairs(
    stages: list[Decoder], one: Decoder, *, gradients: bool = False
) -> list[tuple[str, nn.Parameter, Tensor]]:
    """Every parameter of a rank, and its part of the whole one (or of its gradient)."""
    wanted = dict(one.named_parameters())
    out = []
    for decoder in stages:
        tp = decoder.groups.tp
        for name, p in decoder.named_parameters():
            value = wanted[name].grad if gradients else wanted[name].data
            assert value is not None, name
            if "linear_fc1" in name and decoder.config.mlp.gated and value.shape[0] > p.shape[0]:
                halves = [half.chunk(tp.size)[tp.rank] for half in value.chunk(2)]
                value = torch.cat(halves)  # each rank has a part of the gate, and of the other
            elif is_marked(p, "tensor_model_parallel"):
                size, dim = tp.size, p.partition_dim  # type: ignore[attr-defined]
                if value.shape[dim] < p.shape[dim] * size:  # the padding of this layout
                    width = [0] * (2 * value.dim())
                    width[-1 - 2 * dim] = p.shape[dim] * size - value.shape[dim]
                    value = nn.functional.pad(value, width)
                value = value.chunk(size, dim)[tp.rank]
            out.append((name, p, value))
    return out


def data(rows: int = 8, tokens: int = 6) -> tuple[Batch, Tensor]:
    random = torch.Generator().manual_seed(5)
    tokens_BS = torch.randint(0, 100, (rows, tokens), generator=random)
    valid_BS = torch.ones(rows, tokens, dtype=torch.bool)
    valid_BS[3, :2] = False
    labels_BS = tokens_BS.roll(-1, 1).masked_fill(~valid_BS, -100)
    return Batch(tokens_BS=tokens_BS, valid_BS=valid_BS), labels_BS


def infer(rank: int, size: int, layouts: list[dict[str, Any]]) -> float:
    worst = 0.0
    for config in MODELS.values():
        one = whole(config)
        batch, _ = data()
        with torch.no_grad():
            wanted, wanted_last = one(batch), one(batch, last_only=True)
        keep = batch.valid_BS
        for layout in layouts:
            how = dict(layout)
            sequence_parallel = how.pop("sequence_parallel", False)
            groups = ProcessGroups.start(ParallelConfig(**how))
            stages = build_stages(config, groups, sequence_parallel=sequence_parallel, **HOW)
            fill(stages, one)
            logits = forward_stages(stages, batch)
            assert (logits is None) == (not groups.pp.is_last)
            everywhere = forward_stages(stages, batch, everywhere=True)
            last = forward_stages(stages, batch, everywhere=True, last_only=True)
            assert everywhere is not None
            assert last is not None
            worst = max(worst, float((everywhere - wanted)[keep].abs().max()))
            worst = max(worst, float((last - wanted_last).abs().max()))
            halves = [
                Batch(tokens_BS=batch.tokens_BS[n : n + 4], valid_BS=keep[n : n + 4])  # type: ignore[index]
                for n in (0, 4)
            ]
            for n, x_TH in enumerate(stream_hidden(stages, halves)):
                assert (x_TH is None) == (not groups.pp.is_last)
                if x_TH is not None:
                    own = stages[-1].head(x_TH, halves[n])
                    rows = slice(4 * n, 4 * n + 4)
                    off = (own - wanted[rows])[keep[rows]]  # type: ignore[index]
                    worst = max(worst, float(off.abs().max()))
            if not sequence_parallel:
                worst = max(
                    worst, float((decoded(stages, config, batch) - wanted[:, -1]).abs().max())
                )
    return worst


@torch.no_grad()
def decoded(stages: list[Decoder], config: ModelConfig, batch: Batch) -> Tensor:
    """The last token's logits, the tokens given one by one behind the first three."""
    rows, tokens = batch.shape
    layers = [n for decoder in stages for n in decoder.stage.layers]
    tp = stages[0].groups.tp.size
    cache = ContiguousCache(config, num_rows=rows, max_tokens=tokens, layers=layers, tp=tp)
    cuts = [slice(0, 3), *(slice(n, n + 1) for n in range(3, tokens))]
    for cut in cuts:
        valid = None if batch.valid_BS is None else batch.valid_BS[:, cut]
        part = Batch(tokens_BS=batch.tokens_BS[:, cut], valid_BS=valid)
        logits = forward_stages(stages, part, cache, everywhere=True)
    assert logits is not None
    return logits[:, -1]


@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (1, [{}]),
        (2, [{"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2, "pipeline_layout": "E|ttt||tL"}]),
        (4, [{"pp": 2, "tp": 2}, {"pp": 2, "tp": 2, "sequence_parallel": True}, {"pp": 4}]),
    ],
)
def test_logits_equal_one_process(size: int, layouts: list[dict[str, Any]]) -> None:
    assert max(run_world(infer, size, layouts)) < 1e-5


def train(rank: int, size: int, layouts: list[dict[str, Any]]) -> float:
    worst = 0.0
    for config in MODELS.values():
        one = whole(config)
        batch, labels_BS = data()
        loss, count = one.loss(batch, labels_BS)
        loss.backward()
        for layout in layouts:
            how = dict(layout)
            sequence_parallel = how.pop("sequence_parallel", False)
            groups = ProcessGroups.start(ParallelConfig(**how))
            stages = build_stages(config, groups, sequence_parallel=sequence_parallel, **HOW)
            fill(stages, one)
            schedule = PipelineSchedule(stages, num_microbatches=4)
            for _ in range(2):  # gradients of two steps add up
                own, own_count = schedule.step(batch, labels_BS)
                assert abs(float(own - loss)) / float(loss) < 1e-6
                assert own_count == count
            for decoder in stages:
                finish_gradients(decoder, groups)
            for name, p, grad in pairs(stages, one, gradients=True):
                assert p.grad is not None, name
                off = float((p.grad - 2 * grad).abs().max() / grad.abs().max())
                assert off < 1e-5, (layout, name, off)
                worst = max(worst, off)
    return worst


@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (1, [{}]),
        (2, [{"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2, "pipeline_layout": "E|ttt||tL"}]),
        (4, [{"pp": 2, "tp": 2, "vpp": 2, "sequence_parallel": True}, {"pp": 4}]),
    ],
)
def test_schedules_give_the_gradients_of_one_process(
    size: int, layouts: list[dict[str, Any]]
) -> None:
    run_world(train, size, layouts)


def replicas(rank: int, size: int) -> None:
    config = MODELS["tied"]
    one = whole(config)
    batch, labels_BS = data()
    one.loss(batch, labels_BS)[0].backward()
    groups = ProcessGroups.start(ParallelConfig(pp=2))
    assert groups.dp.size == 2
    stages = build_stages(config, groups, **HOW)
    fill(stages, one)
    rows = slice(4 * groups.dp.rank, 4 * groups.dp.rank + 4)
    assert batch.valid_BS is not None
    half = Batch(tokens_BS=batch.tokens_BS[rows], valid_BS=batch.valid_BS[rows])
    PipelineSchedule(stages, num_microbatches=2).step(half, labels_BS[rows])
    for decoder in stages:
        finish_gradients(decoder, groups)
        sum_over_replicas(decoder, groups)
    for name, p, grad in pairs(stages, one, gradients=True):
        assert p.grad is not None
        assert float((p.grad - grad).abs().max() / grad.abs().max()) < 1e-5, name


def test_replicas_with_half_of_the_rows_each_add_up() -> None:
    run_world(replicas, 4)


def refuse(rank: int, size: int) -> None:
    groups = ProcessGroups.start(ParallelConfig(pp=2, vpp=2))
    stages = build_stages(MODELS["tied"], groups, **HOW)
    with raises(LayoutError, "5 microbatches", "pp=2", "4", "6"):
        PipelineSchedule(stages, num_microbatches=5)
    with raises(LayoutError, "1 microbatches", "pp=2", "2"):
        PipelineSchedule(stages[:1], num_microbatches=1)
    batch, labels_BS = data(rows=6)
    with raises(LayoutError, "4 microbatches", "6 rows", "1, 2, 3, 6"):
        PipelineSchedule(stages, num_microbatches=4).step(batch, labels_BS)


def test_numbers_of_microbatches_that_do_not_fit_are_named() -> None:
    run_world(refuse, 2)
