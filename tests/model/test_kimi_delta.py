"""Kimi delta attention: transformers' module, its caches, padding, documents, and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.config import ParallelConfig
from megtool.errors import LayoutError, MappingError
from megtool.inference.batching import GenerateRequest
from megtool.inference.forward import Forward
from megtool.inference.generate import DecodingOptions, generate
from megtool.kernels.causal_conv import runs_of
from megtool.model.batch import Batch
from megtool.model.cache import ContiguousCache, KeySpan, KVCache
from megtool.model.decoder import Decoder
from megtool.model.forward_context import ForwardContext
from megtool.model.hook_locations import places
from megtool.model.kimi_delta import KimiDeltaAttention
from megtool.model.lora import LoraSettings, adapters_of, add_adapters, merge
from megtool.model.paged_cache import PagedCache
from megtool.model_config import ModelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.features.adapter_tensors import canonical_modules
from megtool.train.memory_estimate import meta_groups
from tests.support.checkpoints.arrays import carry
from tests.support.errors import raises
from tests.support.models import moe_models
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
CONFIG = ModelConfig(**SIZES)
TOKENS = 70  # more than a chunk
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
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


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


def frame_of(
    shape: tuple[int, int],
    cache: KVCache | None = None,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
) -> ForwardContext:
    batch = Batch(tokens_BS=torch.zeros(shape, dtype=torch.int64), valid_BS=valid)
    span = KeySpan.fresh(batch) if cache is None else cache.begin(batch)
    return ForwardContext(
        num_rows=shape[0],
        num_tokens=shape[1],
        positions_BS=span.positions_BS,
        rotary=None,  # type: ignore[arg-type]
        masks=(),
        cache=cache,
        real_BS=span.real_BS,
        runs_BS=None if documents is None else runs_of(documents),
    )


def run(made: KimiDeltaAttention, x_BSH: Tensor, *args: Any, **more: Any) -> Tensor:
    shape = (x_BSH.shape[0], x_BSH.shape[1])
    out: Tensor = made(x_BSH.flatten(0, 1), frame_of(shape, *args, **more))
    return out.view(x_BSH.shape)


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
    made = ours(theirs())
    cache: KVCache
    if kind == "paged":
        cache = PagedCache(CONFIG, num_blocks=60, block_size=4)
    else:
        cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=80, graphable=kind == "graphable")
    x = noise(2, TOKENS, 32)
    outs = []
    with torch.no_grad():
        want = run(made, x)
        for part in (x[:, :20], x[:, 20:23], *x[:, 23:].split(1, 1)):
            if isinstance(cache, PagedCache):
                cache.choose([(n, part.shape[1]) for n in range(2)])
            outs.append(run(made, part, cache))
            cache.advance()
    torch.testing.assert_close(torch.cat(outs, 1), want, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_as_if_it_were_not_there(side: str) -> None:
    """Neither in a pass without a cache, nor for the tokens after it."""
    made = ours(theirs())
    x = noise(2, 30, 32)
    real = torch.arange(20) < torch.tensor([[13], [20]])
    real = real.flip(1) if side == "left" else real
    first, then = x[:, :20], x[:, 20:]
    cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=40)
    with torch.no_grad():
        without = run(made, first, valid=real)
        outs = [run(made, first, cache, real)]
        cache.advance()
        outs.append(run(made, then, cache))
        for row in range(2):
            alone = run(made, torch.cat((first[row][real[row]], then[row]))[None])[0]
            size = int(real[row].sum())
            torch.testing.assert_close(without[row][real[row]], alone[:size], **CLOSE)
            got = torch.cat((outs[0][row][real[row]], outs[1][row]))
            torch.testing.assert_close(got, alone, **CLOSE)


def test_packed_documents_are_as_each_alone() -> None:
    made = ours(theirs())
    x = noise(1, TOKENS, 32)
    sizes = [13, 53, 1, 3]
    documents = torch.repeat_interleave(torch.tensor([4, 2, 7, 1]), torch.tensor(sizes))[None]
    with torch.no_grad():
        got = run(made, x, documents=documents).split(sizes, 1)
        for part, out in zip(x.split(sizes, 1), got, strict=True):
            torch.testing.assert_close(out, run(made, part), **CLOSE)


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
        ModelConfig(**(SIZES | changes))


# ---- whole models: Kimi Linear


def random_text(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(seed))


def models(**changes: Any) -> tuple[Any, Decoder]:
    model = moe_models.transformers_model("kimi_linear", **changes)
    return model, moe_models.ours("kimi_linear", model, carry)


@torch.inference_mode()
def test_generation_is_transformers_token_for_token() -> None:
    """All at once, recorded, and more prompts than slots: sequences leave, and others enter."""
    model, decoder = models()
    prompts = [random_text(1, n, seed=n) for n in (5, 2, 9, 70)]
    requests, wanted = [], []
    for number, prompt in enumerate(prompts):
        whole = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        wanted.append(whole[0, prompt.shape[1] :].tolist())
        ids = tuple(prompt[0].tolist())
        requests.append(GenerateRequest(number=number, prompt=ids, max_new_tokens=8))
    for slots, graphed in ((4, False), (4, True), (2, False)):
        options = DecodingOptions(num_slots=slots, graphed=graphed, eos_ids=frozenset())
        got = generate(Forward(decoder), requests, options, new_detokenizer=Silent)
        assert [[t.id for t in c.tokens] for c in got] == wanted, (slots, graphed)


class Silent:
    """A detokenizer of nothing."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}], ids=str)
def test_ranks_have_the_numbers_of_one_process(layout: dict[str, int]) -> None:
    jobs = [("Kimi deltas", kind, layout, "tp" in layout) for kind in ("plain", "documents")]
    jobs += [("Kimi deltas", "padded left", layout, False)]
    for differences in run_world(context_layouts.compare_all, 2, jobs):
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
