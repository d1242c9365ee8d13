"""The gated delta net: transformers' module, its caches, padding, documents, and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.config import ParallelConfig
from megtool.errors import LayoutError
from megtool.inference.batching import GenerateRequest
from megtool.inference.forward import Forward
from megtool.inference.generate import DecodingOptions, generate
from megtool.kernels.causal_conv import runs_of
from megtool.model.batch import Batch
from megtool.model.cache import ContiguousCache, KeySpan, KVCache
from megtool.model.decoder import Decoder
from megtool.model.delta_net import GatedDeltaNet
from megtool.model.forward_context import ForwardContext
from megtool.model.hook_locations import places
from megtool.model.lora import LoraSettings, adapters_of, add_adapters, merge
from megtool.model.paged_cache import PagedCache
from megtool.model.recompute import recompute
from megtool.model_config import ModelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.features.adapter_tensors import canonical_modules
from megtool.train.memory_estimate import meta_groups
from tests.support.checkpoints.arrays import carry
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
    zero_centered_norm=True,
    layer_kinds=("G-", "*-"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
)
CONFIG = ModelConfig(**SIZES)
TOKENS = 70  # more than a chunk
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


def run(made: GatedDeltaNet, x_BSH: Tensor, *args: Any, **more: Any) -> Tensor:
    shape = (x_BSH.shape[0], x_BSH.shape[1])
    out: Tensor = made(x_BSH.flatten(0, 1), frame_of(shape, *args, **more))
    return out.view(x_BSH.shape)


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
        for part in (then[:, :9], then[:, 9:]):
            outs.append(run(made, part, cache))
            cache.advance()
        for row in range(2):
            alone = run(made, torch.cat((first[row][real[row]], then[row]))[None])[0]
            size = int(real[row].sum())
            torch.testing.assert_close(without[row][real[row]], alone[:size], **CLOSE)
            got = torch.cat((outs[0][row][real[row]], outs[1][row], outs[2][row]))
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


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 2, "cp": 2}, {"cp": 3}], ids=str)
def test_heads_that_do_not_go_evenly_are_refused_with_sizes_that_do(layout: Any) -> None:
    with pytest.raises(LayoutError, match="2 key heads and 4 value heads") as e:
        GatedDeltaNet(CONFIG, 0, meta_groups(ParallelConfig(**layout), 0))
    assert "divides both: 1, 2" in str(e.value)


# ---- whole models: Qwen3-Next


def random_text(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(seed))


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
    for slots, graphed, chunk in ((5, False, 99), (5, True, 99), (2, True, 99), (3, False, 4)):
        options = DecodingOptions(num_slots=slots, graphed=graphed, prefill_tokens=chunk)
        got = generate(Forward(decoder), requests, options, new_detokenizer=Silent)
        assert [list(c.ids) for c in got] == wanted, (slots, graphed, chunk)


class Silent:
    """A detokenizer of nothing."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}], ids=str)
def test_ranks_have_the_numbers_of_one_process(layout: dict[str, int]) -> None:
    jobs = [("delta nets", kind, layout, "tp" in layout) for kind in ("plain", "documents")]
    jobs += [("delta nets", "padded left", layout, False)]
    for differences in run_world(context_layouts.compare_all, 2, jobs):
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
