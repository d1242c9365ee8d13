"""Muon takes every matrix for itself: each expert's, and queries, keys and values in one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megtool.optim.replicated import ReplicatedOptimizer
from megtool.parallel.process_groups import ProcessGroups
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.moe_layouts import rank_part
from tests.support.worlds.optimizer_layouts import MODELS, PLAIN, named, stages_of, start, training

MUON = replace(PLAIN, optimizer="muon")
QKV, DENSE = "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"


def matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices that a stored tensor holds, written out by hand for the models of `MODELS`."""
    if tensor.dim() == 3:
        return list(tensor)
    if not name.endswith(QKV):
        return [tensor]
    config = MODELS["experts"]
    d, each = config.attention.head_dim, config.attention.num_heads // config.attention.num_kv_heads
    rows: tuple[list[int], list[int], list[int]] = ([], [], [])
    for group in range(config.attention.num_kv_heads):
        first = group * (each + 2) * d
        rows[0].extend(range(first, first + each * d))
        rows[1].extend(range(first + each * d, first + (each + 1) * d))
        rows[2].extend(range(first + (each + 1) * d, first + (each + 2) * d))
    return [tensor[list(one)] for one in rows]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_experts_and_queries_keys_values_are_turned_apart_as_torch_turns_matrices() -> None:
    stages = stages_of("experts", ProcessGroups.alone())
    optimizer = ReplicatedOptimizer(named(stages), MUON, ProcessGroups.alone())
    turned = {n for n, g in optimizer.group_of.items() if g.update == "muon"}
    assert {n.rpartition("layers.")[2] for n in turned} >= {
        f"0.{QKV}",
        f"1.{DENSE}",
        "1.mlp.experts.experts.linear_fc1.weight",
        "1.mlp.experts.experts.linear_fc2.weight",
    }
    generator = torch.Generator().manual_seed(3)
    theirs: dict[str, list[nn.Parameter]] = {}
    for name, p in named(stages):
        if name in turned:
            theirs[name] = [nn.Parameter(m.detach().clone()) for m in matrices(name, p)]
    every = [p for held in theirs.values() for p in held]
    real = torch.optim.Muon(every, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.begin(1)
        for name, p in named(stages):
            p.grad = torch.randn(p.shape, generator=generator)
            for q, grad in zip(theirs.get(name, ()), matrices(name, p.grad), strict=False):
                q.grad = grad.clone()
        optimizer.finish(torch.tensor(1.0))
        assert optimizer.step(1e-2, 0.1).ok
        real.step()
    for name, p in named(stages):
        if name in turned:
            for mine, q in zip(matrices(name, p), theirs[name], strict=True):
                torch.testing.assert_close(mine, q, rtol=1e-5, atol=1e-7, msg=name)


def test_biases_of_stacked_experts_are_no_matrices() -> None:
    weight, bias = nn.Parameter(torch.zeros(4, 8, 8)), nn.Parameter(torch.zeros(4, 8))
    for p in (weight, bias):
        p.allreduce = False  # type: ignore[attr-defined]
    held = [("mlp.experts.linear_fc1.weight", weight), ("mlp.experts.linear_fc1.bias", bias)]
    groups = ReplicatedOptimizer(held, MUON, ProcessGroups.alone()).group_of
    assert [groups[name].update for name, _ in held] == ["muon", "adam"]


def on_a_layout(rank: int, size: int, sizes: dict[str, int]) -> None:
    alone, _ = training("experts", ProcessGroups.alone(), steps=2, settings=MUON)
    groups = start(**sizes)
    got, _ = training("experts", groups, steps=2, settings=MUON)
    for key, value in got.parameters.items():
        want = rank_part(key, alone.parameters[key], MODELS["experts"], groups)
        torch.testing.assert_close(value, want, rtol=0, atol=2e-4, msg=key)


@pytest.mark.parametrize("sizes", [{"tp": 2, "etp": 2}, {"dp": 2, "ep": 2}, {"dp": 2}], ids=str)
def test_layouts_turn_the_same_matrices(sizes: dict[str, int]) -> None:
    run_world(on_a_layout, 2, sizes)


def turn_whole_gradients(rank: int, size: int, sizes: dict[str, int]) -> None:
    groups, config = start(**sizes), MODELS["experts"]
    generator = torch.Generator().manual_seed(4)
    alone = stages_of("experts", ProcessGroups.alone())
    gradients = {name: torch.randn(p.shape, generator=generator) for name, p in named(alone)}
    parts = stages_of("experts", groups)
    for stages, held in ((alone, ProcessGroups.alone()), (parts, groups)):
        optimizer = ReplicatedOptimizer(named(stages), replace(MUON, clip_grad=0.0), held)
        optimizer.zero_grad()
        optimizer.begin(1)
        for name, p in named(stages):
            p.grad = rank_part(name, gradients[name], config, held).clone()
        optimizer.finish(torch.tensor(1.0))
        assert optimizer.step(1e-2, 0.1).ok
    want = dict(named(alone))
    for name, p in named(parts):
        torch.testing.assert_close(
            p, rank_part(name, want[name], config, groups), rtol=0, atol=0, msg=name
        )


def test_ranks_turn_a_matrix_as_one_does_to_the_last_bit() -> None:
    """Of the same gradients: the router, which each tp rank has whole, is turned once."""
    run_world(turn_whole_gradients, 2, {"tp": 2, "etp": 2})
