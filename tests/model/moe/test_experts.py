"""Mixtures of experts: against a loop over tokens, and on several ranks against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import LayoutError
from megtool.kernels.elementwise.activation import activate, gated
from megtool.model.moe.experts import Experts, MoeMlp
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.moe_layouts import MODELS, SIZES, compare, config_of

ALONE = ProcessGroups.alone()


def mixture(config: ModelConfig, *, seed: int = 0) -> MoeMlp:
    made = MoeMlp(config, 1, ALONE, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return made


def looped(mlp: MoeMlp, x_TH: torch.Tensor) -> torch.Tensor:
    """The same, one token and one expert after the other."""
    config, fc1, fc2 = mlp.config, *mlp.experts["experts"].children()
    experts, probs = mlp.router(x_TH)
    rows = []
    for t, x in enumerate(x_TH):
        total = torch.zeros_like(x)
        for e, p in zip(experts[t].tolist(), probs[t], strict=True):
            inner = fc1.weight[e] @ (x * p if config.router.router_scales_input else x)
            inner = inner if fc1.bias is None else inner + fc1.bias[e]
            if config.mlp.gated:
                limit, offset = config.mlp.activation_limit, config.mlp.glu_offset
                inner = gated(inner, config.mlp.activation, limit=limit, offset=offset)
            else:
                inner = activate(inner, config.mlp.activation)
            out = fc2.weight[e] @ inner
            out = out if fc2.bias is None else out + fc2.bias[e]
            total = total + (out if config.router.router_scales_input else out * p)
        if mlp.shared_experts is not None:
            shared = mlp.shared_experts
            inner = gated(shared.linear_fc1.weight @ x, config.mlp.activation)
            out = shared.linear_fc2.weight @ inner
            if shared.gate_weight is not None:
                out = out * torch.sigmoid(shared.gate_weight @ x)
            total = total + out
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_a_loop_over_tokens(name: str) -> None:
    mlp = mixture(config_of(name))
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(3))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = torch.randn(9, 16, generator=torch.Generator().manual_seed(4))
    got = mlp(ours)
    (got * weight).sum().backward()
    grads = {n: p.grad.clone() for n, p in mlp.named_parameters() if p.grad is not None}
    mlp.zero_grad()
    want = looped(mlp, theirs)
    (want * weight).sum().backward()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    for key, p in mlp.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(grads[key], p.grad, atol=1e-5, rtol=1e-5)


@settings(max_examples=25)
@given(data=st.data())
def test_no_token_is_dropped_however_uneven_the_choice(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 6))
    chosen = data.draw(st.integers(1, num))
    tokens = data.draw(st.integers(0, 12))
    scale = data.draw(st.sampled_from([0.0, 1.0, 50.0]))  # all alike, even, nearly all to one
    mlp = mixture(
        ModelConfig.from_fields(**SIZES | dict(num_experts=num, num_experts_per_token=chosen))
    )
    x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens)) * scale
    with torch.no_grad():
        want = looped(mlp, x) if tokens else x
        largest = float(want.abs().max()) if tokens else 0.0
        torch.testing.assert_close(mlp(x), want, atol=1e-5 * max(1.0, largest), rtol=0)


def test_names_and_shapes_are_megatrons() -> None:
    made = MoeMlp(config_of("biases"), 1, ALONE)
    assert {n: tuple(p.shape) for n, p in made.named_parameters()} == {
        "router.weight": (8, 16),
        "router.bias": (8,),
        "experts.experts.linear_fc1.weight": (8, 16, 16),
        "experts.experts.linear_fc1.bias": (8, 16),
        "experts.experts.linear_fc2.weight": (8, 16, 8),
        "experts.experts.linear_fc2.bias": (8, 16),
    }
    assert all(p.is_meta for p in made.parameters())
    shared = MoeMlp(config_of("shared and gated"), 1, ALONE)
    assert {n for n, _ in shared.named_parameters() if n.startswith("shared")} == {
        "shared_experts.gate_weight",
        "shared_experts.linear_fc1.weight",
        "shared_experts.linear_fc2.weight",
    }


def test_bf16_stays_bf16() -> None:
    mlp = mixture(config_of("latent")).to(torch.bfloat16)
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    assert mlp(x).dtype == torch.bfloat16


@pytest.mark.parametrize("axis", ["ep", "etp"])
def test_ranks_that_do_not_divide_are_refused(axis: str) -> None:
    three: dict[str, Any] = {axis: Group(ranks=(0, 1, 2))}
    groups = ProcessGroups(parallel=ParallelConfig(), **three)
    with pytest.raises(LayoutError, match="a group of 3 does not divide"):
        Experts(config_of("biases"), groups)


# Layouts of 4 processes, and of 2: whatever is not said here is data parallel.
FOUR = [
    ParallelConfig(ep=2),
    ParallelConfig(ep=4),
    ParallelConfig(tp=2),
    ParallelConfig(tp=2, ep=2),
    ParallelConfig(tp=2, ep=2, etp=1),
    ParallelConfig(tp=2, ep=4, etp=1),
    ParallelConfig(tp=1, ep=2, etp=2),
    ParallelConfig(tp=4, ep=2, etp=2),
    ParallelConfig(tp=1, ep=1, etp=4),
]
TWO = [ParallelConfig(ep=2), ParallelConfig(tp=2), ParallelConfig(tp=2, etp=1, ep=2)]


def all_layouts(rank: int, size: int, layouts: list[ParallelConfig]) -> float:
    worst = 0.0
    for parallel in layouts:
        for name in MODELS:
            for sequence_parallel in (False, True) if parallel.tp > 1 else (False,):
                odd = not sequence_parallel
                worst = max(
                    worst,
                    compare(name, parallel, sequence_parallel=sequence_parallel, odd=odd),
                )
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_process_does(size: int) -> None:
    """Logits, cached logits and every gradient, with and without sequence parallelism."""
    worst = run_world(all_layouts, size, TWO if size == 2 else FOUR, timeout_s=300)
    assert max(worst) < 1e-5


def test_experts_on_two_ranks_compute_what_one_process_does() -> None:
    run_world(all_layouts, 2, [ParallelConfig(ep=2)])
