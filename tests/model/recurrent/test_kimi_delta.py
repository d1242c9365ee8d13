"""Kimi delta attention: transformers' module, its caches, padding, documents, and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megtool.errors import LayoutError, MappingError
from megtool.inference.generation.generate import Decoding
from megtool.model.batch import Batch
from megtool.model.recurrent.kimi_delta import KimiDeltaAttention
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import places
from megtool.model.stacks.lora import LoraSettings, adapters_of, add_adapters, merge
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from megtool.train.features.adapter_tensors import canonical_modules
from megtool.train.model.memory_estimate import meta_groups
from tests.support.checkpoints.arrays import carry
from tests.support.errors import raises
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
    layer_kinds=("K-", "*-"),
    linear_num_key_heads=4,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
CONFIG = ModelConfig.from_fields(**SIZES)
STORED = {
    "dt_bias": "forget_gate.dt_bias",
    "f_a_proj.weight": "forget_gate.f_a_proj.weight",
    "f_b_proj.weight": "forget_gate.f_b_proj.weight",
    "g_a_proj.weight": "g_a_proj.weight",
    "g_b_proj.weight": "g_b_proj.weight",
    "beta_proj.weight": "b_proj.weight",
    "conv1d.weight": "conv1d.weight",
    "out_norm.weight": "o_norm.weight",
    "out_proj.weight": "o_proj.weight",
}


def theirs() -> Any:
    """transformers' module, with weights that differ from element to element."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = modeling.KimiLinearConfig(
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        rms_norm_eps=1e-6,
        linear_num_heads=4,
        linear_head_dim=8,
        vocab_size=50,
    )
    module = modeling.KimiLinearDeltaAttention(config, 0)
    with torch.no_grad():
        for seed, p in enumerate(module.parameters()):
            p.copy_(noise(*p.shape, seed=seed) * 0.3 + (p.ndim == 1))
    return module


def ours(module: Any) -> KimiDeltaAttention:
    """The same weights by the names and rows of Megatron's development branch."""
    made = KimiDeltaAttention(CONFIG, 0, ProcessGroups.alone(), device="cpu")
    weights = module.state_dict()
    values = {name: weights[stored] for name, stored in STORED.items()}
    values["A_log"] = weights["forget_gate.A_log"].flatten()
    values["in_proj.weight"] = torch.cat([weights[f"{x}_proj.weight"] for x in "qkv"])
    made.load_state_dict(values)
    return made


def test_names_and_shapes_are_megatrons_in_its_order() -> None:
    made = KimiDeltaAttention(CONFIG, 0, ProcessGroups.alone())
    assert [(n, tuple(p.shape)) for n, p in made.named_parameters()] == [
        ("dt_bias", (32,)),
        ("A_log", (4,)),
        ("in_proj.weight", (96, 32)),
        ("conv1d.weight", (96, 1, 4)),
        ("out_norm.weight", (8,)),
        ("out_proj.weight", (32, 32)),
        ("beta_proj.weight", (4, 32)),
        ("f_a_proj.weight", (8, 32)),
        ("f_b_proj.weight", (32, 8)),
        ("g_a_proj.weight", (8, 32)),
        ("g_b_proj.weight", (32, 8)),
    ]
    assert made.in_proj.weight.row_parts == (32, 32, 32)


def test_output_and_gradients_are_transformers() -> None:
    module = theirs()
    made = ours(module)
    x, pull = noise(2, TOKENS, 32), noise(2, TOKENS, 32, seed=1)
    want, got = module(x), run(made, x)
    torch.testing.assert_close(got, want, **CLOSE)
    (got * pull).sum().backward()
    (want * pull).sum().backward()
    grads = {n: p.grad for n, p in module.named_parameters()}
    found = {n: p.grad for n, p in made.named_parameters()}
    wanted = {name: grads[stored] for name, stored in STORED.items()}
    wanted["A_log"] = grads["forget_gate.A_log"].flatten()
    wanted["in_proj.weight"] = torch.cat([grads[f"{x}_proj.weight"] for x in "qkv"])
    assert wanted.keys() == found.keys()
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


@pytest.mark.parametrize("layout", [{"tp": 3}, {"tp": 4, "cp": 2}], ids=str)
def test_heads_that_do_not_go_evenly_are_refused(layout: Any) -> None:
    with raises(LayoutError, "4 heads of Kimi delta attention cannot be split over tp="):
        KimiDeltaAttention(CONFIG, 0, meta_groups(ParallelConfig(**layout), 0))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"linear_num_key_heads": 2}, "2 heads of keys and 4 of values"),
        ({"layer_kinds": ("K-", "G-")}, "gated delta nets and Kimi delta attention"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict[str, Any], told: str) -> None:
    with raises(MappingError, told):
        ModelConfig.from_fields(**(SIZES | changes))


# ---- whole models: Kimi Linear


def models(**changes: Any) -> tuple[Any, Decoder]:
    model = moe_models.transformers_model("kimi_linear", **changes)
    return model, moe_models.ours("kimi_linear", model, carry)


def test_generation_is_transformers_token_for_token() -> None:
    """All at once, recorded, and more prompts than slots: sequences leave, and others enter."""
    ways = [
        Decoding(num_slots=slots, graphed=graphed, eos_ids=frozenset())
        for slots, graphed in ((4, False), (4, True), (2, False))
    ]
    check_generation(*models(), ways)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}], ids=str)
def test_ranks_have_the_numbers_of_one_process(layout: dict[str, int]) -> None:
    jobs = [("Kimi deltas", kind, layout, "tp" in layout) for kind in ("plain", "documents")]
    jobs += [("Kimi deltas", "padded left", layout, False)]
    for differences in run_world(context_layouts.verify_master_weights, 2, jobs):
        assert {k: v for k, v in differences.items() if not v < 1e-5} == {}


@torch.no_grad()
def test_adapters_of_projections_merge_into_them() -> None:
    _, decoder = models()
    add_adapters([decoder], LoraSettings(rank=4, alpha=8, roles=("qkv", "proj")))
    named = {name: adapter for name, _, adapter in adapters_of(decoder)}
    inner = "decoder.layers.0.self_attention."
    assert canonical_modules(inner + "in_proj", decoder.config) == tuple(
        f"layers.0.kda.{part}" for part in "qkv"
    )
    assert canonical_modules(inner + "out_proj", decoder.config) == ("layers.0.kda.o",)
    assert {inner + "in_proj", inner + "out_proj"} <= named.keys()
    for seed, adapter in enumerate(named.values()):
        adapter.lora_B.copy_(noise(*adapter.lora_B.shape, seed=seed) * 0.02)
    batch = Batch(tokens_BS=random_text(2, 20))
    want = decoder(batch)
    merge([decoder])
    torch.testing.assert_close(decoder(batch), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qkv", "b", "f_down", "f_up", "g_down", "g_up", "o"])
def test_every_projection_has_a_tap_of_its_own(name: str) -> None:
    _, decoder = models()
    batch = Batch(tokens_BS=random_text(2, 9))
    want, seen = decoder(batch), []
    (place,) = places(decoder, f"layers.0.kda.{name}")
    place.set(lambda x: seen.append(tuple(x.shape)) or x * 0)
    assert not torch.equal(decoder(batch), want)
    assert seen == [(18, {"f_up": 8, "g_up": 8}.get(name, 32))]
