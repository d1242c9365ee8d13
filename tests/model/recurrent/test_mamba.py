"""The Mamba-2 mixer against transformers' own, by its weights: padded, packed, and with a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megtool.errors import LayoutError, MappingError
from megtool.inference.forward import Forward
from megtool.inference.generation.batching import GenerateRequest
from megtool.inference.generation.generate import Decoding, generate
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.cache.paged import PagedCache
from megtool.model.recurrent.mamba import check_mamba_heads
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import places
from megtool.model.stacks.lora import LoraSettings, adapters_of, add_adapters, merge
from megtool.model.stacks.recompute import recompute
from megtool.spec.model_config import ModelConfig
from megtool.train.features.adapter_tensors import canonical_modules
from tests.support.emulated.graph_rules import check_graphs
from tests.support.errors import raises
from tests.support.models.hybrid_models import SIZES, nemotron_h, ours
from tests.support.worlds import context_layouts
from tests.support.worlds.gloo_world import run_world

TOLERANCE = 1e-4


def text(rows: int, length: int, seed: int = 1) -> Any:
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Decoder]:
    model = nemotron_h()
    return model, ours(model)


Pair = tuple[Any, Decoder]


def largest(a: Any, b: Any) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("length", [1, 14, 70])
def test_logits(pair: Pair, length: int) -> None:
    model, decoder = pair
    tokens = text(2, length)
    with torch.no_grad():
        want, got = model(tokens).logits, decoder(Batch(tokens_BS=tokens))
    assert want.std() > 0.1
    assert largest(want, got) < TOLERANCE


def test_steps_have_limits(pair: Pair) -> None:
    """Those of single tokens with a cache too, which transformers does not limit."""
    limit, tokens = (0.6, 0.8), text(2, 14)
    model, unlimited = copy.deepcopy(pair[0]), pair[1]
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = limit
    decoder = Decoder(
        unlimited.config.with_fields(mamba_step_limit=limit),
        device="cpu",
        vocab_multiple=1,
    )
    decoder.load_state_dict(unlimited.state_dict())
    want = model(tokens).logits
    assert largest(want, decoder(Batch(tokens_BS=tokens))) < TOLERANCE
    assert largest(want, unlimited(Batch(tokens_BS=tokens))) > 100 * TOLERANCE
    cache = ContiguousCache(decoder.config, num_rows=2, max_tokens=14)
    with torch.no_grad():
        got = [decoder(Batch(tokens_BS=part), cache) for part in tokens.split((11, 1, 1, 1), 1)]
    assert largest(want, torch.cat(got, 1)) < TOLERANCE


def test_padding_on_the_left(pair: Pair) -> None:
    model, decoder = pair
    tokens = text(3, 14)
    valid = torch.ones_like(tokens)
    valid[0, :6] = valid[2, :1] = 0
    with torch.no_grad():
        want = model(tokens, attention_mask=valid).logits
        got = decoder(Batch(tokens_BS=tokens, valid_BS=valid.bool()))
    assert largest(want[valid.bool()], got[valid.bool()]) < TOLERANCE


def test_packed_documents_are_rows_of_their_own(pair: Pair) -> None:
    _, decoder = pair
    tokens, sizes = text(1, 90), [3, 70, 1, 16]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))[None]
    with torch.no_grad():
        got = decoder(Batch(tokens_BS=tokens, documents_BS=documents))
        want = [decoder(Batch(tokens_BS=part)) for part in tokens.split(sizes, 1)]
    assert largest(torch.cat(want, 1), got) < TOLERANCE


@pytest.mark.parametrize("graphable", [False, True])
def test_decoding_with_a_cache(pair: Pair, graphable: bool) -> None:
    model, decoder = pair
    sizes, tokens = (9, 1, 1, 3, 1), text(3, 15)
    want = model(tokens).logits
    cache = ContiguousCache(decoder.config, num_rows=3, max_tokens=20, graphable=graphable)
    with torch.no_grad():
        got = [decoder(Batch(tokens_BS=part), cache) for part in tokens.split(sizes, 1)]
    assert largest(want, torch.cat(got, 1)) < TOLERANCE


def test_rows_of_unequal_length_and_more_tokens(pair: Pair) -> None:
    model, decoder = pair
    lengths, more = (3, 9, 7), (3, 1, 4)
    tokens, answers = text(3, max(lengths)), text(3, sum(more), seed=5)
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    cache = ContiguousCache(decoder.config, num_rows=3, max_tokens=20)
    with torch.no_grad():
        got = [decoder(Batch(tokens_BS=tokens, valid_BS=valid), cache)]
        got += [decoder(Batch(tokens_BS=part), cache) for part in answers.split(more, 1)]
        for row, length in enumerate(lengths):
            want = model(torch.cat((tokens[row, :length], answers[row]))[None]).logits[0]
            out = torch.cat([g[row] for g in got])
            assert largest(want, torch.cat((out[:length], out[max(lengths) :]))) < TOLERANCE


def test_sequences_in_blocks(pair: Pair) -> None:
    model, decoder = pair
    tokens = text(3, 12)
    want = model(tokens).logits
    cache = PagedCache(decoder.config, num_blocks=12, block_size=4, num_sequences=2)
    with torch.no_grad():
        cache.choose([(0, 7), (1, 3)])
        first = decoder(Batch(tokens_BS=tokens[:2, :7]), cache)
        cache.choose([(1, 1)])
        second = decoder(Batch(tokens_BS=tokens[1:2, 3:4]), cache)
        cache.release(1)
        cache.choose([(2, 5)])
        third = decoder(Batch(tokens_BS=tokens[2:, :5]), cache)
        cache.choose([(2, 1), (0, 1)])
        both = torch.stack((tokens[2, 5:6], tokens[0, 7:8]))
        fourth = decoder(Batch(tokens_BS=both), cache)
    assert largest(want[0, :7], first[0]) < TOLERANCE
    assert largest(want[1, :3], first[1, :3]) < TOLERANCE
    assert largest(want[1, 3:4], second[0]) < TOLERANCE
    assert largest(want[2, :5], third[0]) < TOLERANCE
    assert largest(torch.stack((want[2, 5:6], want[0, 7:8])), fourth) < TOLERANCE


@pytest.mark.parametrize("again", [None, "full", "selective"])
def test_gradients(pair: Pair, again: Any) -> None:
    model, _ = pair
    decoder = ours(model)
    if again:
        assert recompute(decoder, again) == len(SIZES["layers_block_type"])
    tokens = text(2, 14)
    labels = tokens[:, 1:].clone()
    labels[0, :4] = -100
    model.zero_grad()
    logits = model(tokens[:, :-1]).logits
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    want.backward()
    total, _ = decoder.train().loss(Batch(tokens_BS=tokens[:, :-1]), labels)
    total.backward()
    assert largest(want, total) < 1e-4 * want.item()
    theirs, mixer = model.model.layers[0].mixer, decoder.decoder.layers["0"].mixer
    names = ["A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight"]
    for name in (*names, "in_proj.weight", "out_proj.weight"):
        grad, own = theirs.get_parameter(name).grad, mixer.get_parameter(name).grad
        assert largest(grad, own) < 1e-4 * max(1.0, float(grad.abs().max())), name
    norm = model.model.layers[0].norm.weight.grad
    assert largest(norm, mixer.in_proj.layer_norm_weight.grad) < 1e-4 * max(1, norm.abs().max())


def test_steps_of_adamw_are_torchs(pair: Pair) -> None:
    """The weights of all parameters after three steps of both."""
    model = copy.deepcopy(pair[0])
    decoder = ours(model).train()
    how = {"lr": 1e-2, "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(m.parameters(), **how) for m in (model, decoder)]
    for step in range(3):
        tokens = text(2, 15, seed=step)
        logits = model(tokens[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        total, count = decoder.loss(Batch(tokens_BS=tokens[:, :-1]), tokens[:, 1:])
        (total / count).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    want = ours(model).state_dict()
    # Where a gradient is nothing but rounding, a step of Adam goes anywhere.
    apart = [(want[n] - t).abs().flatten() for n, t in decoder.state_dict().items()]
    assert (torch.cat(apart) < 1e-5).float().mean() > 0.999
    assert torch.cat(apart).max() < 1e-3


@torch.inference_mode()
def test_generation_with_slots_is_transformers(pair: Pair) -> None:
    """All at once, recorded, and more prompts than slots: sequences leave, and others enter."""
    model, decoder = pair
    prompts = [text(1, n, seed=n) for n in (5, 2, 9, 3, 7)]
    want = [
        model.generate(p, max_new_tokens=8, do_sample=False, use_cache=True, pad_token_id=0)
        for p in prompts
    ]
    wanted = [w[0, p.shape[1] :].tolist() for w, p in zip(want, prompts, strict=True)]
    requests = [
        GenerateRequest(number=n, prompt=tuple(p[0].tolist()), max_new_tokens=8)
        for n, p in enumerate(prompts)
    ]
    for slots, graphed, chunk in ((5, False, 99), (5, True, 99), (2, True, 99), (3, False, 4)):
        options = Decoding(num_slots=slots, graphed=graphed, prefill_tokens=chunk)
        with check_graphs():
            got = list(generate(Forward(decoder), requests, options, new_detokenizer=Silent))
        assert [list(c.ids) for c in got] == wanted, (slots, graphed, chunk)


class Silent:
    """A detokenizer of nothing."""

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_have_the_numbers_of_one_process(sequence_parallel: bool) -> None:
    jobs = [("mamba", kind, {"tp": 2}, sequence_parallel) for kind in ("plain", "documents")]
    jobs += [("mamba beside attention", "plain", {"tp": 2}, sequence_parallel)]
    jobs += [("mamba, one group", "padded left", {"pp": 2}, False)] * (not sequence_parallel)
    for found in run_world(context_layouts.verify_master_weights, 2, jobs):
        assert {k: v for k, v in found.items() if not v < 1e-5} == {}


def beside(**more: Any) -> ModelConfig:
    facts: dict[str, Any] = {"layer_kinds": ("M*-",), "ffn_hidden_size": 48}
    return config(mamba_num_groups=2).with_fields(**facts | more)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"mamba_in_scales": (1.0, 2.0)}, ["mamba_in_scales is (1.0, 2.0)", "z, x, B, C and dt"]),
        ({"mlp_out_scale": float("inf")}, ["mlp_out_scale is inf"]),
        ({"mamba_norm": 1}, ["mamba_norm is 1"]),
        ({"mamba_step_limit": (0.5, 0.1)}, ["mamba_step_limit is (0.5, 0.1)", "a larger one"]),
        ({"pre_norms": False}, ["attention and Mamba-2 side by side"]),
    ],
)
def test_mixers_side_by_side_that_cannot_be_run_are_refused(
    facts: dict[str, Any], words: list[str]
) -> None:
    with raises(MappingError, *words):
        Decoder(beside(**facts))


def test_hooks_and_adapters_of_mixers_beside_attention() -> None:
    decoder = Decoder(beside(), device="cpu", vocab_multiple=1)
    with torch.no_grad():
        for p in decoder.parameters():
            p.normal_(std=0.3)
    seen: dict[str, int] = {}
    for point in ("layers.0.mamba.in", "layers.0.mamba.out", "layers.0.attn.qkv"):
        (place,) = places(decoder, point)
        place.set(lambda x, point=point: seen.update({point: x.shape[1]}) or x)
    tokens = Batch(tokens_BS=text(1, 6))
    want = decoder(tokens)
    assert list(seen.values()) == [32, 48, 32]
    add_adapters([decoder], LoraSettings(rank=2, alpha=4))
    names = [name for name, _, _ in adapters_of(decoder)]
    assert {"decoder.layers.0.mamba_mixer.in_proj", "decoder.layers.0.mamba_mixer.out_proj"} <= set(
        names
    )
    assert torch.equal(decoder(tokens), want)
    assert canonical_modules("decoder.layers.0.mamba_mixer.out_proj", decoder.config) == (
        "layers.0.mamba.out",
    )


def config(**more: int) -> ModelConfig:
    facts = {"mamba_num_heads": 12, "mamba_num_groups": 4} | more
    return ModelConfig.from_fields(
        num_layers=1,
        hidden_size=32,
        ffn_hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=101,
        layer_kinds=("M",),
        mamba_head_dim=4,
        mamba_state_dim=8,
        **facts,
    )


@pytest.mark.parametrize(
    ("sizes", "tp", "cp", "words"),
    [
        ({"mamba_num_groups": 1}, 2, 1, ["12 heads", "1 groups", "tp=2", "1"]),
        ({}, 3, 1, ["12 heads", "4 groups", "tp=3", "1, 2, 4"]),
        ({}, 2, 4, ["6 heads", "2 groups", "cp=4", "1, 2, 6"]),
        ({"mamba_num_heads": 16}, 2, 8, []),
    ],
)
def test_layouts_that_do_not_go_evenly_are_refused(
    sizes: dict[str, int], tp: int, cp: int, words: list[str]
) -> None:
    if not words:
        check_mamba_heads(config(**sizes), tp, cp)
        return
    with raises(LayoutError, *words):
        check_mamba_heads(config(**sizes), tp, cp)


def test_adapters_and_hooks_are_at_the_projections(pair: Pair) -> None:
    decoder = ours(pair[0])
    tokens = Batch(tokens_BS=text(1, 6))
    want, seen = decoder(tokens), []
    for point in ("layers.0.mamba.in", "layers.0.mamba.out"):
        (place,) = places(decoder, point)
        place.set(lambda x: seen.append(x.shape[1]) or x)
        decoder(tokens)
        place.set(None)
    assert seen == [32, 24]
    add_adapters([decoder], LoraSettings(rank=2, alpha=4))
    names = [name for name, _, _ in adapters_of(decoder)]
    assert {"decoder.layers.0.mixer.in_proj", "decoder.layers.3.mixer.out_proj"} <= set(names)
    assert not any("conv1d" in name for name in names)
    assert torch.equal(decoder(tokens), want)
    for _, _, adapter in adapters_of(decoder):
        adapter.lora_B.data.normal_()
    got = decoder(tokens)
    assert largest(got, want) > 0.01
    merge([decoder])
    assert largest(decoder(tokens), got) < TOLERANCE
    assert canonical_modules("decoder.layers.3.mixer.in_proj", decoder.config) == tuple(
        f"layers.3.mamba.in_{part}" for part in ("z", "x", "B", "C", "dt")
    )
    assert canonical_modules("decoder.layers.3.mixer.out_proj", decoder.config) == (
        "layers.3.mamba.out",
    )
