"""One process in fp32 against torch's own optimizers, bit by bit; state saved and taken over."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megtool.errors import CheckpointError
from megtool.optim.config import OptimizerConfig
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.parallel.process_groups import ProcessGroups
from tests.support.errors import raises
from tests.support.models.small_models import Small, batches, sum_loss, train_step

STEPS = 20


def plain(model: nn.Module, **settings: Any) -> ReplicatedOptimizer:
    made = OptimizerConfig(**{"lr": 1e-2, **settings})
    return ReplicatedOptimizer(model.named_parameters(), made, ProcessGroups.alone())


def decayed_or_not(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": decay},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]


def same_bits(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("clip", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("labels", [1, 8])
@pytest.mark.parametrize("kind", ["adam", "sgd", "sgd without momentum"])
def test_twenty_steps_are_those_of_torch(kind: str, labels: int, clip: float) -> None:
    ours, theirs = Small(), Small()
    momentum = 0.0 if "without" in kind else 0.9
    name = "adam" if kind == "adam" else "sgd"
    optimizer = plain(ours, optimizer=name, sgd_momentum=momentum, clip_grad=clip)
    groups = decayed_or_not(theirs, 0.1)
    real: torch.optim.Optimizer
    if kind == "adam":
        real = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    else:
        real = torch.optim.SGD(groups, lr=1e-2, momentum=momentum, fused=True)
    for x, y in batches(STEPS):
        result = train_step(optimizer, ours, x, y, labels=labels)
        real.zero_grad()
        (sum_loss(theirs, x, y) / labels).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip or math.inf)
        real.step()
        assert result.ok
        assert result.grad_norm == norm.item()
        assert same_bits(ours, theirs)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_muon_is_that_of_torch_and_the_rest_goes_by_adam() -> None:
    ours, theirs = Small(), Small()
    optimizer = plain(ours, optimizer="muon", clip_grad=0.0)
    flat = [p for p in theirs.parameters() if p.dim() == 1]
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(
        matrices, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(flat, lr=1e-2, weight_decay=0.0, fused=True)
    for x, y in batches(STEPS):
        train_step(optimizer, ours, x, y)
        theirs.zero_grad()
        sum_loss(theirs, x, y).backward()
        muon.step()
        adam.step()
        assert same_bits(ours, theirs)


def test_embeddings_and_the_output_layer_go_by_adam_with_muon() -> None:
    module = nn.ModuleDict({n: nn.Linear(4, 4, bias=False) for n in ("output_layer", "fc1")})
    optimizer = plain(module, optimizer="muon")
    kinds = {name: g.update for name, g in optimizer.group_of.items()}
    assert kinds == {"output_layer.weight": "adam", "fc1.weight": "muon"}


def test_rules_give_groups_their_rates() -> None:
    ours, theirs = Small(), Small()
    factors: dict[str, Any] = {"lr_mult": ("fc1.*=0.5", "fc2.weight=5"), "wd_mult": ("fc1.*=1",)}
    optimizer = plain(ours, **factors, clip_grad=0.0)
    fc1, norm, fc2 = theirs.fc1, theirs.norm, theirs.fc2
    real = torch.optim.AdamW(
        [
            {"params": list(fc1.parameters()), "lr": 5e-3, "weight_decay": 0.1},
            {"params": [*norm.parameters(), fc2.bias], "lr": 1e-2, "weight_decay": 0.0},
            {"params": [fc2.weight], "lr": 5e-2, "weight_decay": 0.1},
        ],
        fused=True,
    )
    for x, y in batches(3):
        optimizer.zero_grad()
        optimizer.begin(1)
        sum_loss(ours, x, y).backward()
        optimizer.finish(torch.tensor(1))
        optimizer.step(1e-2, 0.1)
        real.zero_grad()
        sum_loss(theirs, x, y).backward()
        real.step()
    assert same_bits(ours, theirs)


def test_microbatches_are_added_up_and_divided_by_all_labels() -> None:
    one, four = Small(), Small()
    first, second = plain(one), plain(four)
    for x, y in batches(STEPS):
        a = train_step(first, one, x, y, labels=40)
        b = train_step(second, four, x, y, labels=40, microbatches=4)
        assert math.isclose(a.grad_norm, b.grad_norm, rel_tol=1e-5)
    for p, q in zip(one.parameters(), four.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4)


def test_parameters_without_a_gradient_get_zeros() -> None:
    model = Small()
    optimizer = plain(model, weight_decay=0.0)
    before = model.fc1.weight.detach().clone()
    optimizer.zero_grad()
    model.fc2.weight.sum().backward()
    optimizer.finish(torch.tensor(1))
    assert optimizer.step(1e-2, 0.0).ok
    assert torch.equal(model.fc1.weight, before)


def test_zeros_are_counted() -> None:
    model = Small()
    optimizer = plain(model, log_num_zeros_in_grad=True)
    optimizer.zero_grad()
    model.fc2.weight.sum().backward()
    optimizer.finish(torch.tensor(1))
    numel = sum(p.numel() for p in model.parameters())
    assert optimizer.step(1e-2, 0.0).num_zeros == numel - 60


def test_a_nan_is_named_and_nothing_changes() -> None:
    model = Small()
    optimizer = plain(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    sum_loss(model, *next(batches(1))).backward()
    grad = model.norm.bias.grad
    assert grad is not None
    grad[3] = math.nan
    optimizer.finish(torch.tensor(1))
    result = optimizer.step(1e-2, 0.1)
    assert not result.ok
    assert result.first_nonfinite == "norm.bias"
    assert math.isnan(result.grad_norm)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not any(s.states["exp_avg"].any() for s in optimizer.segments)
    assert optimizer.num_steps == 0


def test_frozen_parameters_are_left_alone() -> None:
    model = Small()
    model.fc1.requires_grad_(False)
    optimizer = plain(model)
    assert {p.parameter for p in optimizer.pieces()} == {
        name for name, _ in model.named_parameters() if "fc1" not in name
    }
    before = model.fc1.weight.clone()
    train_step(optimizer, model, *next(batches(1)))
    assert torch.equal(model.fc1.weight, before)


@pytest.mark.parametrize("kind", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_a_run_goes_on_from_its_pieces(
    kind: str, dtype: torch.dtype, remainders: bool, moments: str
) -> None:
    chosen: dict[str, Any] = {"optimizer": kind, "exp_avg_dtype": moments}
    chosen["store_param_remainders"] = remainders
    model = Small(dtype)
    optimizer = plain(model, **chosen)
    data = list(batches(8))
    for x, y in data[:4]:
        train_step(optimizer, model, x, y)
    held = {(p.state, p.parameter): p.tensor.clone() for p in optimizer.pieces()}
    small = optimizer.small_state()
    again_model = Small(dtype)
    again = plain(again_model, **chosen)
    again.load(lambda state, name: held[state, name].float())
    again.load_small_state(small)
    assert same_bits(model, again_model)
    for x, y in data[4:]:
        train_step(optimizer, model, x, y)
        train_step(again, again_model, x, y)
    assert same_bits(model, again_model)
    assert again.small_state() == optimizer.small_state()


def test_a_state_of_another_size_is_refused_by_name() -> None:
    optimizer = plain(Small())

    def read(state: str, name: str) -> Tensor:
        return torch.zeros(3)

    with raises(CheckpointError, match="3 elements", tensor="fc1.weight"):
        optimizer.load(read)


def test_small_state_has_what_megatron_saves() -> None:
    model = Small()
    optimizer = plain(model, weight_decay=0.3, min_lr=1e-3)
    train_step(optimizer, model, *next(batches(1)), lr=7e-3, weight_decay=0.3)
    decayed, not_decayed = optimizer.small_state()["optimizer"]["param_groups"]
    assert decayed == {
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": 1e-2,
        "min_lr": 1e-3,
        "lr": 7e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "bias_correction": True,
        "weight_decay": 0.3,
        "step": 1,
    }
    assert (not_decayed["wd_mult"], not_decayed["weight_decay"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "saved",
    [
        {"optimizer": {"param_groups": [{"step": 7}, {}]}},
        {"optimizer": {"param_groups": [{}], "state": {"common_step": torch.tensor(7.0)}}},
        {"param_groups": [{}], "state": {"common_step": 7}},
        [{"optimizer": {"param_groups": [{"step": torch.tensor(7)}]}, "grad_scaler": None}],
        {0: {"optimizer": {"param_groups": [{"step": 7}]}}, 1: {"optimizer": {"param_groups": []}}},
    ],
)
def test_the_number_of_steps_is_found_in_all_of_megatrons_forms(saved: Any) -> None:
    optimizer = plain(Small())
    optimizer.load_small_state(saved)
    assert optimizer.num_steps == 7


def test_a_saved_optimizer_without_groups_is_refused() -> None:
    with raises(CheckpointError, "['iteration']"):
        plain(Small()).load_small_state({"iteration": 3})
