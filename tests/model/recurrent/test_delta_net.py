"""The gated delta net: transformers' module, its caches, padding, documents, and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.errors import LayoutError
from megtool.inference.generation.generate import Decoding
from megtool.model.batch import Batch
from megtool.model.recurrent.delta_net import GatedDeltaNet
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import places
from megtool.model.stacks.lora import LoraSettings, adapters_of, add_adapters, merge
from megtool.model.stacks.recompute import recompute
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from megtool.train.features.adapter_tensors import canonical_modules
from megtool.train.model.memory_estimate import meta_groups
from tests.support.checkpoints.arrays import carry
from tests.support.models import moe_models
from tests.support.models.delta_cases import (
    CLOSE,
    TOKENS,
    check_decoding,
    check_generation,
    check_packed_documents,
    check_padding,
    noise,
    random_text,
    run,
)
from tests.support.worlds import context_layouts
from tests.support.worlds.gloo_world import run_world

SIZES: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    norm_eps=1e-6,
    zero_centered_norm=True,
    layer_kinds=("G-", "*-"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
)
CONFIG = ModelConfig.from_fields(**SIZES)


def theirs() -> Any:
    """transformers' module, with weights that differ from element to element."""
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        Qwen3NextConfig,
        Qwen3NextGatedDeltaNet,
    )

    config = Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        rms_norm_eps=1e-6,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        vocab_size=50,
    )
    torch.manual_seed(0)
    module = Qwen3NextGatedDeltaNet(config, 0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return module


def ours(module: Any, **more: Any) -> GatedDeltaNet:
    """The same weights by Megatron's names and rows."""
    made = GatedDeltaNet(CONFIG, 0, ProcessGroups.alone(), device="cpu", **more)
    qkvz = module.in_proj_qkvz.weight.detach().view(2, -1, 32).split((8, 8, 12, 12), 1)
    ba = module.in_proj_ba.weight.detach().view(2, -1, 32).split((2, 2), 1)
    values = {
        "dt_bias": module.dt_bias,
        "A_log": module.A_log,
        "in_proj.layer_norm_weight": noise(32, seed=2) * 0.2,
        "in_proj.weight": torch.cat([x.reshape(-1, 32) for x in (*qkvz, *ba)]),
        "conv1d.weight": module.conv1d.weight,
        "out_norm.weight": module.norm.weight - 1,
        "out_proj.weight": module.out_proj.weight,
    }
    made.load_state_dict(values)
    return made


def normed(made: GatedDeltaNet, x: Tensor) -> Tensor:
    return made.in_proj.normalize(x)


def test_names_and_shapes_are_megatrons_in_its_order() -> None:
    made = GatedDeltaNet(CONFIG, 0, ProcessGroups.alone())
    assert [(n, tuple(p.shape)) for n, p in made.named_parameters()] == [
        ("dt_bias", (4,)),
        ("A_log", (4,)),
        ("in_proj.layer_norm_weight", (32,)),
        ("in_proj.weight", (2 * 16 + 2 * 24 + 2 * 4, 32)),
        ("conv1d.weight", (2 * 16 + 24, 1, 4)),
        ("out_norm.weight", (6,)),
        ("out_proj.weight", (32, 24)),
    ]
    assert made.in_proj.weight.row_parts == (16, 16, 24, 24, 4, 4)


def test_output_and_gradients_are_transformers() -> None:
    module = theirs()
    made = ours(module)
    x, pull = noise(2, TOKENS, 32), noise(2, TOKENS, 32, seed=1)
    want, got = module(normed(made, x)), run(made, x)
    torch.testing.assert_close(got, want, **CLOSE)
    (got * pull).sum().backward()
    (want * pull).sum().backward()
    grads = {n: p.grad for n, p in module.named_parameters()}
    qkvz = grads["in_proj_qkvz.weight"].view(2, -1, 32).split((8, 8, 12, 12), 1)
    ba = grads["in_proj_ba.weight"].view(2, -1, 32).split((2, 2), 1)
    found = {n: p.grad for n, p in made.named_parameters()}
    wanted = {
        "in_proj.weight": torch.cat([g.reshape(-1, 32) for g in (*qkvz, *ba)]),
        "out_norm.weight": grads["norm.weight"],
    }
    wanted |= {n: grads[n] for n in ("dt_bias", "A_log", "conv1d.weight", "out_proj.weight")}
    for name, grad in wanted.items():
        torch.testing.assert_close(
            found[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max())
        )


@pytest.mark.parametrize("kind", ["contiguous", "graphable", "paged"])
def test_decoding_is_the_whole_pass(kind: str) -> None:
    check_decoding(ours(theirs()), CONFIG, kind)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_as_if_it_were_not_there(side: str) -> None:
    """Neither in a pass without a cache, nor for the tokens after it."""
    check_padding(ours(theirs()), CONFIG, side)


def test_packed_documents_are_as_each_alone() -> None:
    check_packed_documents(ours(theirs()))


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 2, "cp": 2}, {"cp": 3}], ids=str)
def test_heads_that_do_not_go_evenly_are_refused_with_sizes_that_do(layout: Any) -> None:
    with pytest.raises(LayoutError, match="2 key heads and 4 value heads") as e:
        GatedDeltaNet(CONFIG, 0, meta_groups(ParallelConfig(**layout), 0))
    assert "divides both: 1, 2" in str(e.value)


# ---- whole models: Qwen3-Next


def models(name: str = "qwen3_next", **changes: Any) -> tuple[Any, Decoder]:
    model = moe_models.transformers_model(name, **changes)
    return model, moe_models.ours(name, model, carry)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe_text"])
def test_five_steps_of_adamw_are_transformers(name: str) -> None:
    model, decoder = models(name, seed=2)  # with others rounding alone moves losses by 1e-4
    decoder.train()
    how: Any = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4}  # what is almost 0 goes nowhere
    optimizers = []
    for module in (model, decoder):
        matrices, vectors = (
            [p for p in module.parameters() if (p.dim() > 1) is m] for m in (True, False)
        )
        plain = {"params": vectors, "weight_decay": 0.0}
        optimizers.append(torch.optim.AdamW([{"params": matrices}, plain], **how))
    for step in range(5):
        tokens = random_text(4, 17, seed=step)
        logits = model(tokens[:, :-1]).logits
        want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        want.backward()
        total, count = decoder.loss(Batch(tokens_BS=tokens[:, :-1]), tokens[:, 1:])
        (total / count).backward()
        assert abs((total / count - want).item()) < 1e-5, step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_generation_is_transformers_token_for_token() -> None:
    """All at once, recorded, and more prompts than slots: sequences leave, and others enter."""
    ways = [
        Decoding(num_slots=slots, graphed=graphed, prefill_tokens=chunk)
        for slots, graphed, chunk in ((5, False, 99), (5, True, 99), (2, True, 99), (3, False, 4))
    ]
    check_generation(*models(), ways)


@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}], ids=str)
def test_ranks_have_the_numbers_of_one_process(layout: dict[str, int]) -> None:
    jobs = [("delta nets", kind, layout, "tp" in layout) for kind in ("plain", "documents")]
    jobs += [("delta nets", "padded left", layout, False)]
    for differences in run_world(context_layouts.verify_master_weights, 2, jobs):
        assert {k: v for k, v in differences.items() if not v < 1e-5} == {}


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputing_changes_no_gradient(granularity: Any) -> None:
    _, decoder = models()
    tokens = random_text(2, 80)
    decoder.train().loss(Batch(tokens_BS=tokens), tokens)[0].backward()
    want = {n: p.grad for n, p in decoder.named_parameters()}
    decoder.zero_grad()
    recompute(decoder, granularity)
    decoder.loss(Batch(tokens_BS=tokens), tokens)[0].backward()
    for name, p in decoder.named_parameters():
        assert want[name] is None if p.grad is None else torch.equal(p.grad, want[name]), name


@torch.no_grad()
def test_adapters_of_projections_merge_into_them() -> None:
    _, decoder = models()
    add_adapters([decoder], LoraSettings(rank=4, alpha=8, roles=("qkv", "proj")))
    named = {name: adapter for name, _, adapter in adapters_of(decoder)}
    inner = "decoder.layers.0.self_attention.in_proj"
    assert canonical_modules(inner, decoder.config) == tuple(
        f"layers.0.delta.{part}" for part in ("q", "k", "v", "z", "b", "a")
    )
    assert "decoder.layers.0.self_attention.out_proj" in named
    for seed, adapter in enumerate(named.values()):
        adapter.lora_B.copy_(noise(*adapter.lora_B.shape, seed=seed) * 0.02)
    batch = Batch(tokens_BS=random_text(2, 20))
    want = decoder(batch)
    places(decoder, "layers.0.delta.ba")[0].set(lambda x: x)  # the gates by themselves
    torch.testing.assert_close(decoder(batch), want, rtol=1e-4, atol=1e-4)
    places(decoder, "layers.0.delta.ba")[0].set(None)
    merge([decoder])
    torch.testing.assert_close(decoder(batch), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_gates_have_a_tap_of_their_own() -> None:
    made = ours(theirs())
    x = noise(1, 9, 32)
    want = run(made, x)
    made.in_proj.tap = lambda x: x * 0
    assert not torch.equal(run(made, x), want)
    made.in_proj.tap = None
    made.gate_tap = lambda x: x * 0
    without_gates = run(made, x)
    made.gate_tap = None
    made.in_proj.weight[-8:] = 0
    torch.testing.assert_close(run(made, x), without_gates)
    assert not torch.equal(without_gates, want)
