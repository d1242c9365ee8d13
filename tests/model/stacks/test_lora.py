"""Adapters beside linear layers: where they go, what they compute, and what learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megtool.errors import UsageError
from megtool.model.batch import Batch
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.layers.param_attributes import finish_gradients
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.lora import (
    Adapter,
    LoraSettings,
    adapters_of,
    add_adapters,
    merge,
    merged_weight,
)
from megtool.model.stacks.recompute import recompute
from megtool.options.layout import ParallelConfig
from megtool.parallel.collectives import gather_rows, scatter_rows
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.worlds.gloo_world import run_world

CONFIG = ModelConfig.from_fields(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=100,
    max_positions=32,
)
TOKENS = torch.arange(24).view(2, 12) * 7 % 100
IN, OUT, ROWS = 16, 24, 8


def build(config: ModelConfig = CONFIG, **how: Any) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config, device="cpu", **how)
    for p in decoder.parameters():
        nn.init.normal_(p, std=0.2)
    return decoder


def fill(decoder: nn.Module) -> None:
    torch.manual_seed(5)
    for module in decoder.modules():
        if isinstance(module, Adapter):
            nn.init.normal_(module.lora_B, std=0.2)


def test_adapters_begin_as_nothing_and_alone_learn() -> None:
    decoder = build()
    plain = decoder(Batch(tokens_BS=TOKENS))
    added = add_adapters([decoder], LoraSettings(rank=4, alpha=8.0))
    assert torch.equal(decoder(Batch(tokens_BS=TOKENS)), plain)
    learning = {n: p for n, p in decoder.named_parameters() if p.requires_grad}
    assert len(learning) == 2 * 4 * 2
    assert all(".adapter.lora_" in n for n in learning)
    assert added == sum(p.numel() for p in learning.values())
    decoder.loss(Batch(tokens_BS=TOKENS), TOKENS.roll(-1, 1))[0].backward()
    for name, p in decoder.named_parameters():
        assert (p.grad is not None) is (name in learning)
        if name.endswith("lora_B"):
            assert p.grad.abs().max() > 0
    bound = 1 / 32**0.5  # as torch's own linear layers begin
    a = learning["decoder.layers.0.mlp.linear_fc1.adapter.lora_A"]
    assert 0.8 * bound < float(a.detach().abs().max()) <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_compute_the_same(dtype) -> None:
    decoder = build(dtype=dtype)
    add_adapters([decoder], LoraSettings(rank=4, alpha=2.0, roles=("qkv", "fc2")))
    fill(decoder)
    assert {n.rpartition(".")[2] for n, *_ in adapters_of(decoder)} == {"linear_qkv", "linear_fc2"}
    with torch.no_grad():
        ours = decoder(Batch(tokens_BS=TOKENS)).float()
        name, linear, adapter = next(adapters_of(decoder))
        expected = linear.weight.float() + 0.5 * adapter.lora_B.float() @ adapter.lora_A.float()
        assert torch.equal(merged_weight(linear, adapter), expected.to(dtype)), name
        merge([decoder])
        assert not list(adapters_of(decoder))
        merged = decoder(Batch(tokens_BS=TOKENS)).float()
    tolerance = 1e-6 if dtype == torch.float32 else 3e-2
    assert (merged - ours).abs().max() <= tolerance * ours.abs().max()


def test_what_is_left_out_is_left_out_again_when_layers_are_computed_twice() -> None:
    found = []
    for again in (False, True):
        decoder = build()
        add_adapters([decoder], LoraSettings(rank=4, alpha=8.0, dropout=0.3))
        fill(decoder)
        if again:
            recompute(decoder, "full")
        decoder.train()
        torch.manual_seed(1)
        decoder.loss(Batch(tokens_BS=TOKENS), TOKENS.roll(-1, 1))[0].backward()
        found.append({n: p.grad for n, p in decoder.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_dropout_keeps_the_mean_and_stands_still_in_evaluation() -> None:
    linear = ColumnLinear(IN, OUT, device="cpu")
    adapter = Adapter(linear, LoraSettings(rank=4, alpha=4.0, dropout=0.25))
    adapter.reset(0, "linear")
    nn.init.normal_(adapter.lora_B)
    x_TH = torch.randn(1, IN)
    adapter.eval()
    expected = x_TH @ adapter.lora_A.T @ adapter.lora_B.T
    assert torch.allclose(adapter(x_TH), expected, atol=1e-6)
    adapter.train()
    mean = adapter(x_TH.expand(20_000, IN)).mean(0, keepdim=True)
    assert torch.allclose(mean, expected, atol=0.05)


def pair(groups: ProcessGroups, sp: bool, dropout: float) -> tuple[dict[str, Tensor], Tensor]:
    """A column- and a row-parallel layer with adapters: their gradients, whole, and the output."""
    torch.set_num_threads(1)
    tp, settings = groups.tp, LoraSettings(rank=4, alpha=6.0, dropout=dropout)
    torch.manual_seed(3)
    up, down = torch.randn(OUT, IN), torch.randn(IN, OUT)
    b_up, b_down = torch.randn(OUT, 4), torch.randn(IN, 4)
    x_TH = torch.randn(ROWS, IN)
    one = ColumnLinear(IN, OUT, tp, sequence_parallel=sp, device="cpu")
    two = RowLinear(OUT, IN, tp, sequence_parallel=sp, device="cpu")
    with torch.no_grad():
        one.weight.copy_(up.chunk(tp.size)[tp.rank])
        two.weight.copy_(down.chunk(tp.size, 1)[tp.rank])
    for name, linear in (("one", one), ("two", two)):
        linear.requires_grad_(False)
        linear.adapter = adapter = Adapter(linear, settings)
        adapter.reset(7, name)
    with torch.no_grad():
        one.adapter.lora_B.copy_(b_up.chunk(tp.size)[tp.rank])
        two.adapter.lora_B.copy_(b_down)
    model = nn.ModuleList([one, two])
    x_TH.requires_grad_()
    rows = scatter_rows(x_TH, tp) if sp else x_TH
    torch.manual_seed(11)
    y_TH = two(torch.tanh(one(rows)))
    y_TH = gather_rows(y_TH, tp) if sp else y_TH
    weight = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1))
    # gather_rows adds up over ranks what each of them says, so each says its share.
    ((y_TH * weight).sum() / (tp.size if sp else 1)).backward()
    finish_gradients(model, groups)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {
        "x": x_TH.grad
    }, y_TH.detach()


def pair_on_ranks(rank: int, size: int, sp: bool, dropout: float) -> Any:
    return pair(ProcessGroups.start(ParallelConfig(tp=size)), sp, dropout)


@pytest.mark.parametrize(("sp", "dropout"), [(False, 0.0), (False, 0.3), (True, 0.3)])
def test_tensor_parallel_ranks_compute_the_same(sp, dropout) -> None:
    grads, y_TH = pair(ProcessGroups.alone(), False, dropout)
    for rank, (found, y) in enumerate(run_world(pair_on_ranks, 2, sp, dropout)):
        assert torch.allclose(y, y_TH, atol=1e-4)
        cut = {"0.adapter.lora_B": 0, "1.adapter.lora_A": 1}
        for name, g in grads.items():
            wanted = g.chunk(2, cut[name])[rank] if name in cut else g
            assert torch.allclose(found[name], wanted, atol=1e-3, rtol=1e-4), name


def test_what_takes_no_adapter_is_refused() -> None:
    experts = CONFIG.with_fields(
        num_experts=4,
        num_experts_per_token=2,
        moe_ffn_hidden_size=16,
        moe_layer_freq=(0, 1),
    )
    dropped = LoraSettings(rank=4, alpha=8.0, dropout=0.1)
    with pytest.raises(UsageError, match=r"dropout 0.1 for experts") as e:
        add_adapters([build(experts)], dropped)
    assert e.value.hint == "--lora-dropout 0, or --lora-target qkv,proj"
    add_adapters([build(experts)], replace(dropped, roles=("qkv", "proj")))
    for wrong in ({"rank": 0}, {"dropout": 1.0}, {"roles": ()}, {"roles": ("fc3",)}):
        with pytest.raises(UsageError):
            LoraSettings(**{"rank": 4, "alpha": 8.0} | wrong)
