"""Dropout in the model: how much, where, when, and the same wherever rows are the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megtool.model.layers.dropout as model_dropout
import megtool.model.stacks.layer as model_layer
from megtool.errors import UsageError
from megtool.kernels.attention.mask import Mask
from megtool.model.attention.grouped_query import attend
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.layers.dropout import Draws, Dropout, DropoutSpec
from megtool.model.layers.linear import RowLinear
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule, build_stages
from megtool.model.stacks.recompute import recompute
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ALONE, ProcessGroups
from tests.support.models.dropout_inputs import BATCH, LABELS, PLAIN
from tests.support.worlds.gloo_world import run_world

MODELS = {
    "plain": PLAIN,
    "eager": PLAIN.with_fields(attn_softcap=20.0, attn_sinks=True, post_norms=True),
    "parallel": PLAIN.with_fields(parallel_residual=True, residual_scale=0.5),
    "latent": PLAIN.with_fields(
        num_kv_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        num_experts=4,
        num_experts_per_token=2,
        moe_ffn_hidden_size=16,
    ),
}
BOTH = Dropout(hidden=0.2, attention=0.3)


def made(name: str = "plain", dropout: Dropout = BOTH, **how: Any) -> Decoder:
    """A whole model in one process."""
    decoder = Decoder(MODELS[name], device="cpu", vocab_multiple=4, **how)
    torch.manual_seed(4)
    for p in decoder.parameters():
        nn.init.normal_(p, std=0.2)
    decoder.dropout = dropout
    return decoder


def step(decoder: Decoder, seed: int = 9) -> tuple[Tensor, list[Tensor]]:
    """The loss of a pass and its gradients."""
    decoder.zero_grad()
    torch.manual_seed(seed)
    loss, _ = decoder.loss(BATCH, LABELS)
    loss.backward()
    return loss.detach(), [p.grad for p in decoder.parameters() if p.grad is not None]


def is_equal(one: tuple[Tensor, list[Tensor]], two: tuple[Tensor, list[Tensor]]) -> bool:
    return torch.equal(one[0], two[0]) and all(
        torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True)
    )


@pytest.mark.parametrize("name", list(MODELS))
def test_a_seed_decides_and_recompute_draws_the_same(name: str) -> None:
    first = step(made(name))
    assert is_equal(step(made(name)), first)
    assert not torch.equal(step(made(name), seed=10)[0], first[0])
    for granularity in ("full", "selective"):
        decoder = made(name)
        assert recompute(decoder, granularity) == 4
        assert is_equal(step(decoder), first)


@pytest.mark.parametrize("name", list(MODELS))
def test_nothing_is_left_out_of_evaluation_nor_with_a_cache(name: str) -> None:
    decoder, usual = made(name).eval(), made(name, Dropout())
    assert torch.equal(decoder(BATCH), usual.eval()(BATCH))
    decoder.train()
    if name == "plain":
        with torch.no_grad():
            caches = [ContiguousCache(PLAIN, num_rows=2, max_tokens=16) for _ in range(2)]
            assert torch.equal(decoder(BATCH, caches[0]), usual(BATCH, caches[1]))
    assert not torch.equal(decoder(BATCH), usual(BATCH))


def test_without_dropout_no_number_is_drawn() -> None:
    decoder = made(dropout=Dropout())
    before = torch.get_rng_state()
    assert decoder.frame(BATCH).draws is None
    assert Draws.of(Dropout(), ALONE, False) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shares", [Dropout(hidden=0.25), Dropout(attention=0.25)])
def test_each_kind_alone(shares: Dropout) -> None:
    draws = Draws.of(shares, ALONE, False)
    assert draws is not None
    first, second = draws.branches(0)
    assert (first is None) == (second is None) == (draws.attention(0, 0) is not None)
    usual = step(made(dropout=Dropout()))
    assert not torch.equal(step(made(dropout=shares))[0], usual[0])


def test_every_place_draws_for_itself() -> None:
    draws = Draws(shares=BOTH, seed=5)
    chances = [*draws.branches(0), *draws.branches(1), draws.attention(0, 0), draws.attention(0, 1)]
    others = [replace(draws, rows=1).branches(0)[0], replace(draws, heads=1).attention(0, 0)]
    seeds = {c.seed for c in (*chances, *others) if c is not None}
    assert len(seeds) == 8
    assert replace(draws, heads=1).branches(0) == draws.branches(0)


def test_the_mean_stays_and_the_share_is_kept() -> None:
    draws = Draws(shares=BOTH, seed=5)
    out = draws.embedded(torch.ones(500, 64))
    assert (out == 0).float().mean().item() == pytest.approx(0.2, abs=0.01)
    assert out[out != 0].unique().tolist() == pytest.approx([1 / 0.8])


@pytest.mark.parametrize("softcap", [0.0, 1e4], ids=["sdpa", "eager"])
def test_weights_of_attention_are_left_out(softcap: float) -> None:
    """Values are unit vectors, so that what comes out are the weights."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 64, 8), torch.randn(2, 2, 64, 8)
    value = torch.eye(64).expand(2, 2, 64, 64)
    state = torch.get_rng_state()

    def weights(chance: DropoutSpec | None) -> Tensor:
        return attend(query, key, value, Mask(), scale=0.1, softcap=softcap, chance=chance)

    whole, some = weights(None), weights(DropoutSpec(0.3, 11))
    kept = some != 0
    torch.testing.assert_close(some[kept], whole[kept] / 0.7)
    assert (~kept).float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert torch.equal(some, weights(DropoutSpec(0.3, 11)))
    assert not torch.equal(some, weights(DropoutSpec(0.3, 12)))
    assert torch.equal(torch.get_rng_state(), state)


def test_shares_out_of_range() -> None:
    for wrong in ({"hidden": 1.0}, {"attention": -0.1}):
        with pytest.raises(UsageError, match="dropout"):
            Dropout(**wrong)


# ---- On ranks


@contextmanager
def noted() -> Iterator[list[int]]:
    """The seeds that hidden states are left out by in the block."""
    seeds: list[int] = []
    places = ((model_layer, "bias_dropout_add"), (model_dropout, "drop"))
    before = [getattr(module, name) for module, name in places]

    def noting(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Tensor:
            seeds.append(more["seed"] if more else args[2])
            out: Tensor = real(*args, **more)
            return out

        return call

    for (module, name), real in zip(places, before, strict=True):
        setattr(module, name, noting(real))
    try:
        yield seeds
    finally:
        for (module, name), real in zip(places, before, strict=True):
            setattr(module, name, real)


def on_rank(
    rank: int, size: int, layout: dict[str, int], shares: Dropout, sp: bool, again: str = ""
) -> tuple[float, float, list[int]]:
    """The loss of two micro batches, the sum of a norm's gradient, and the seeds of the rank."""
    groups = ProcessGroups.start(ParallelConfig(**layout)) if size > 1 else ProcessGroups.alone()
    stages = build_stages(PLAIN, groups, device="cpu", vocab_multiple=4, sequence_parallel=sp)
    one = dict(made().named_parameters())
    tp = groups.tp
    for decoder in stages:
        decoder.dropout = shares
        modules = dict(decoder.named_modules())
        for name, p in decoder.named_parameters():
            value, module = one[name].data, modules[name.rpartition(".")[0]]
            if value.shape != p.shape:
                halves = value.chunk(2 if "fc1" in name else 1)  # of gate and up each
                along = int(isinstance(module, RowLinear))
                value = torch.cat([half.chunk(tp.size, along)[tp.rank] for half in halves])
            p.data.copy_(value)
    if again:
        recompute(stages, again)
    torch.manual_seed(100 + 10 * groups.replicas.rank + groups.pp.rank)
    with noted() as seeds:
        loss, _ = PipelineSchedule(stages, num_microbatches=2).step(BATCH, LABELS)
    grad = stages[0].decoder.layers[str(stages[0].stage.layers[0])].mlp.linear_fc1
    return float(loss), float(grad.layer_norm_weight.grad.sum()), seeds


def test_replicated_rows_lose_the_same_on_all_ranks() -> None:
    """Hidden dropout of two tensor-parallel ranks is that of one process, to rounding."""
    shares = Dropout(hidden=0.2)
    loss, grad, seeds = on_rank(0, 1, {}, shares, False)
    assert len(seeds) == len(set(seeds)) == 2 * 9  # embedding and two branches of four layers
    for found_loss, found_grad, found in run_world(on_rank, 2, {"tp": 2}, shares, False):
        assert found == seeds
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert found_grad == pytest.approx(grad, rel=1e-4)


@pytest.mark.parametrize(("layout", "sp"), [({"tp": 2}, True), ({"cp": 2}, False)], ids=str)
def test_ranks_with_other_rows_lose_others(layout: dict[str, int], sp: bool) -> None:
    first, second = run_world(on_rank, 2, layout, BOTH, sp)
    assert (first[0] == second[0]) is sp  # with context parallelism each has its own tokens' loss
    assert not set(first[2]) & set(second[2])


def test_a_pipeline_draws_the_same_twice_and_when_it_recomputes() -> None:
    first, *others = (
        run_world(on_rank, 2, {"pp": 2}, BOTH, False, again) for again in ("", "", "selective")
    )
    for other in others:
        assert [x[:2] for x in other] == [x[:2] for x in first]
        assert [set(x[2]) for x in other] == [set(x[2]) for x in first]
    assert len({seed for x in first for seed in x[2]}) == 2 * 9
