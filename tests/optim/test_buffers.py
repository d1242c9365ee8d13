"""Buffers: Megatron's layout, of which parameters are views, in parts that cover all of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megtool.errors import UsageError
from megtool.model.layers.param_attributes import mark
from megtool.model.stacks.decoder import Decoder
from megtool.optim.buffers import BufferKey, ParamAndGradBuffer, in_registration_order, make_buffer
from megtool.optim.config import OptimizerConfig
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.param_groups import ParamInfo, collect_param_infos
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import Group, ProcessGroups
from tests.support.errors import raises
from tests.support.paths import PEERS
from tests.support.worlds.optimizer_layouts import MODELS, named, stages_of, whole

BUCKET_WORLD = PEERS / "bucket_world.py"
FLAT = BufferKey(chunk=0, is_expert=False, dtype=torch.float32, grad_dtype=torch.float32)


def of_rank(rank: int, size: int) -> Group:
    """A group that nothing is sent over."""
    return Group(ranks=tuple(range(size)), rank=rank)


def parameters(sizes: list[int], tied: list[bool]) -> list[ParamInfo]:
    made = [
        (f"p{i}", mark(nn.Parameter(torch.randn(size)), tied=shared))
        for i, (size, shared) in enumerate(zip(sizes, tied, strict=True))
    ]
    return collect_param_infos(made)


@given(
    found=st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=8),
    bucket_size=st.none() | st.integers(1, 900),
    size=st.integers(1, 5),
)
def test_shards_hold_every_element_once(
    found: list[tuple[int, bool]], bucket_size: int | None, size: int
) -> None:
    sizes, tied = [n for n, _ in found], [t for _, t in found]
    facts = parameters(sizes, tied)
    before = [f.parameter.detach().clone() for f in facts]
    covered = {f.name: torch.zeros(f.parameter.numel()) for f in facts}
    for rank in range(size):
        buffer = make_buffer(FLAT, facts, of_rank(rank, size), bucket_size)
        for bucket in buffer.buckets:
            assert bucket.params.numel() % math.lcm(128, size) == 0
            for span in bucket.spans():
                covered[span.param_info.name][span.start : span.stop] += 1
                held = bucket.param_shard[span.offset : span.end]
                assert torch.equal(
                    held, span.param_info.parameter.flatten()[span.start : span.stop]
                )
    assert all(bool((seen == 1).all()) for seen in covered.values())
    for f, value in zip(facts, before, strict=True):
        assert torch.equal(f.parameter, value)
        f.parameter.data.fill_(3.0)
    assert int((buffer.params == 3.0).sum()) == sum(sizes)
    assert int((buffer.params == 0.0).sum()) == buffer.params.numel() - sum(sizes)


def places(buffer: ParamAndGradBuffer) -> list[tuple[str, int, int]]:
    return [(m.param_info.name, b.index, m.start) for b in buffer.buckets for m in b.members]


def test_parameters_lie_in_the_reverse_of_megatrons_order() -> None:
    """Transformer Engine registers the norm it fuses behind attention's output projection."""
    decoder = whole("tied")
    # As our modules register them, the norm comes first.
    names = [name for name, _ in decoder.named_parameters()]
    shuffled = [dict(decoder.named_parameters())[n] for n in sorted(names)]
    facts = collect_param_infos(zip(sorted(names), shuffled, strict=True))
    layer = "decoder.layers.0.self_attention"
    got = [f.name for f in in_registration_order(facts)]
    assert got[:7] == [
        "embedding.word_embeddings.weight",
        f"{layer}.linear_proj.weight",
        f"{layer}.linear_qkv.layer_norm_weight",
        f"{layer}.linear_qkv.weight",
        f"{layer}.q_layernorm.weight",
        f"{layer}.k_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    ]
    assert got[-1] == "decoder.final_layernorm.weight"
    buffer = make_buffer(FLAT, in_registration_order(facts), Group(), None)
    assert [name for name, _, _ in places(buffer)] == got[::-1]
    other = collect_param_infos(
        [("b", nn.Parameter(torch.ones(2))), ("a", nn.Parameter(torch.ones(2)))]
    )
    assert [f.name for f in in_registration_order(other)] == ["b", "a"]


def test_dense_and_expert_parameters_and_types_lie_apart() -> None:
    decoder = whole("experts", torch.bfloat16)
    router = dict(decoder.named_parameters())["decoder.layers.1.mlp.router.weight"]
    router.data = router.data.float()
    settings = OptimizerConfig(ddp_bucket_size=4000, overlap_grad_reduce=True)
    optimizer = DistributedOptimizer(decoder.named_parameters(), settings, ProcessGroups.alone())
    kinds = [(b.kind.is_expert, b.kind.dtype, b.kind.grad_dtype) for b in optimizer.buffers]
    assert kinds == [
        (False, torch.bfloat16, torch.float32),
        (False, torch.float32, torch.float32),
        (True, torch.bfloat16, torch.float32),
    ]
    assert [name for name, _, _ in places(optimizer.buffers[1])] == [
        "decoder.layers.1.mlp.router.weight"
    ]
    assert len(optimizer.buffers[0].buckets) == 2
    assert all(".experts." in name for name, _, _ in places(optimizer.buffers[2]))


def test_only_the_first_stage_and_chunk_have_several_buckets() -> None:
    settings = OptimizerConfig(ddp_bucket_size=500, overlap_grad_reduce=True)
    chunks = [whole("biases"), whole("tied")]
    pairs = [(f"{i}.{n}", p) for i, c in enumerate(chunks) for n, p in c.named_parameters()]
    first, second = DistributedOptimizer(
        pairs, settings, ProcessGroups.alone(), chunks=chunks
    ).buffers
    assert (first.kind.chunk, second.kind.chunk) == (0, 1)
    assert len(first.buckets) > 2
    assert len(second.buckets) == 1
    later = ProcessGroups(parallel=ParallelConfig(), pp=of_rank(1, 2))
    stage = whole("tied")
    (only,) = DistributedOptimizer(stage.named_parameters(), settings, later).buffers
    assert len(only.buckets) == 1


def test_a_model_without_weights_is_refused() -> None:
    decoder = Decoder(MODELS["tied"])
    with raises(UsageError, "embedding.word_embeddings.weight", "[128, 16]", hint=True):
        DistributedOptimizer(decoder.named_parameters(), OptimizerConfig(), ProcessGroups.alone())


@pytest.mark.peers
@pytest.mark.slow
def test_places_and_shards_are_those_of_megatrons_own_buffers() -> None:
    pytest.importorskip("megatron.core")
    cases: list[dict[str, Any]] = []
    ours = []
    for name in ("tied", "biases"):
        for dp in (1, 2, 3, 4):
            for bucket_size in (None, 300, 2000):
                (stage,) = stages_of(name, ProcessGroups.alone())
                facts = collect_param_infos(named([stage]))
                if name == "tied":  # as on the first of several stages
                    words = stage.embedding.word_embeddings.weight  # type: ignore[union-attr]
                    mark(words, split_dim=0, tied=True)
                    facts = collect_param_infos(named([stage]))
                facts = in_registration_order(facts)
                number = {f.name: i for i, f in enumerate(facts)}
                made = [make_buffer(FLAT, facts, of_rank(r, dp), bucket_size) for r in range(dp)]
                ours.append((number, made))
                cases.append(
                    {
                        "numels": [f.parameter.numel() for f in facts],
                        "shared": [f.is_tied for f in facts],
                        "bucket_size": bucket_size,
                        "dp": dp,
                    }
                )
    done = subprocess.run(
        [sys.executable, str(BUCKET_WORLD), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for (number, made), theirs in zip(ours, lines, strict=True):
        shards = [
            [
                [[number[s.param_info.name], s.start, s.stop, s.offset] for s in b.spans()]
                for b in x.buckets
            ]
            for x in made
        ]
        assert [[sorted(b) for b in x] for x in shards] == [
            [sorted(b) for b in x] for x in theirs["shards"]
        ]
        buffer = made[0]
        slots = [[b.index, m.start, m.param.numel()] for b in buffer.buckets for m in b.members]
        assert slots[::-1] == theirs["slots"]
        assert [b.numel for b in buffer.buckets] == theirs["unpadded"]
        assert [b.params.numel() for b in buffer.buckets] == theirs["padded"]
