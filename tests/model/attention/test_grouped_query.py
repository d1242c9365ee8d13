"""Attention against its definition, and its heads over ranks against one process."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megtool.errors import LayoutError
from megtool.model.attention.grouped_query import attend
from megtool.model.batch import Batch
from megtool.model.cache.key_span import KeySpan
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.layers.param_attributes import finish_gradients
from megtool.model.masks import Masks
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.errors import raises
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.moe_layouts import rank_part

SIZES: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=101,
    max_positions=32,
)


def defined(q: Any, k: Any, v: Any, allowed: Any, scale: float, cap: float, sinks: Any) -> Any:
    """Attention of every query head on its own, in float64."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            scores = scale * q[b, n].double() @ k[b, n // share].double().T
            if cap:
                scores = cap * torch.tanh(scores / cap)
            powers = scores.exp() * allowed[b, 0]
            total = powers.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + sinks[n].double().exp()
            out[b, n] = powers / total @ v[b, n // share].double()
    return out.transpose(1, 2)


@pytest.mark.parametrize("masked", ["causal", "window", "padding"])
@pytest.mark.parametrize(("cap", "sinks"), [(0.0, False), (1.5, False), (0.0, True), (1.5, True)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_every_head_by_itself(heads: tuple[int, int], cap: float, sinks: bool, masked: str) -> None:
    n, k = heads
    b, s, d = 2, 9, 8
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(b, h, s, size, generator=generator, requires_grad=True)
        for h, size in ((n, d), (k, d), (k, 5))
    )
    offsets = torch.randn(n, generator=generator, requires_grad=True) if sinks else None
    config = ModelConfig.from_fields(**SIZES, window_size=4 if masked == "window" else 0)
    valid = torch.ones(b, s, dtype=torch.bool)
    valid[1, :4] = False
    batch = Batch(
        tokens_BS=torch.ones(b, s, dtype=torch.int64),
        valid_BS=valid if masked == "padding" else None,
    )
    mask = Masks(config, KeySpan.fresh(batch)).of(0)
    allowed = mask.square(s, s, query.device).expand(b, 1, s, s)
    got = attend(query, key, value, mask, scale=0.3, softcap=cap, sinks_N=offsets)
    want = defined(query, key, value, allowed, 0.3, cap, offsets)
    assert got.shape == (b, s, n, 5)
    assert (got - want).abs().max() < 1e-5
    leaves = [query, key, value, *([offsets] if sinks else [])]
    weight = torch.randn(got.shape, generator=generator)
    ours = torch.autograd.grad((got * weight).sum(), leaves)
    theirs = torch.autograd.grad((want * weight).sum(), leaves)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-5


def fill(decoder: Decoder) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if "norm" in name and "weight" in name else 0.3 * noise)
    return decoder


def test_a_layer_by_hand() -> None:
    """Gates, norms of queries and keys, their lengths, temperatures and chunks, written out."""
    config = ModelConfig.from_fields(
        **SIZES,
        attn_output_gate=True,
        qk_l2_norm=True,
        attn_chunk_size=4,
        no_rope_layers=(0, 1, 1, 1),
        attn_temperature_floor=3,
        attn_temperature_scale=0.2,
        qkv_bias=True,
    )
    decoder, d = fill(Decoder(config, device="cpu")), 8
    x = torch.randn(11, 32, generator=torch.Generator().manual_seed(3))
    frame = decoder.frame(Batch(tokens_BS=torch.ones(1, 11, dtype=torch.int64)))
    places = torch.arange(11)
    for layer in (0, 1):
        attention = decoder.decoder.layers[str(layer)].self_attention
        lin = attention.linear_qkv
        normed = torch.nn.functional.rms_norm(
            x, (32,), lin.layer_norm_weight, config.norms.norm_eps
        )
        rows = (normed @ lin.weight.T + lin.bias).view(11, 2, 10, d)
        query, gate, key, value = rows.split((4, 4, 1, 1), 2)
        query, gate = query.reshape(11, 8, d), gate.reshape(11, 8, d)
        key, value = key.repeat_interleave(4, 2), value.repeat_interleave(4, 2)
        key, value = key.reshape(11, 8, d), value.reshape(11, 8, d)
        seen = places[:, None] >= places
        if layer == 0:
            angle = places[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
            turn = torch.polar(torch.ones_like(angle), angle)[:, None]

            def turned(t: Any, turn: Any = turn) -> Any:
                pairs = torch.complex(t[..., : d // 2], t[..., d // 2 :]) * turn
                t = torch.cat((pairs.real, pairs.imag), -1)
                return t / (t.square().mean(-1, keepdim=True) + config.norms.norm_eps).sqrt()

            query, key = turned(query), turned(key)
            seen = seen & (places[:, None] // 4 == places // 4)
        else:
            query = query * (1 + 0.2 * torch.log(1 + ((places + 1) // 3)))[:, None, None]
        scores = torch.einsum("snd,tnd->nst", query, key) / math.sqrt(d)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("nst,tnd->snd", weights, value) * gate.sigmoid()
        want = out.reshape(11, -1) @ attention.linear_proj.weight.T
        assert (attention(x, frame) - want).abs().max() < 1e-5


LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "norms, gates, biases": dict(
        qk_norm=True,
        attn_output_gate=True,
        qkv_bias=True,
        attn_out_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
    ),
    "layer norms, learned positions": dict(
        norm="layernorm",
        position_embedding="learned",
        gated=False,
        activation="gelu",
        qkv_bias=True,
        attn_out_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
    ),
    "parallel, partial": dict(
        norm="layernorm", parallel_residual=True, rotary_percent=0.5, num_kv_heads=8, gated=False
    ),
    "caps, windows, post norms, scales": dict(
        attn_softcap=2.0,
        logit_softcap=3.0,
        window_size=5,
        window_skip_freq=2,
        post_norms=True,
        zero_centered_norm=True,
        embedding_scale=3.0,
        residual_scale=0.5,
        logit_scale=0.7,
        attn_sinks=True,
    ),
    "norms over all heads": dict(pre_norms=False, post_norms=True, qk_norm=True, qk_norm_of="all"),
    "one norm for both": dict(
        norm="layernorm",
        norm_bias=False,
        zero_centered_norm=True,
        shared_norm=True,
        parallel_residual=True,
        qk_norm=True,
        qk_norm_of="each",
    ),
}


def over_ranks(rank: int, size: int, names: Collection[str]) -> dict[tuple[str, bool], float]:
    """The largest difference of loss, logits, cached logits and gradients, for each model."""
    groups = ProcessGroups.start(ParallelConfig(tp=size))
    out: dict[tuple[str, bool], float] = {}
    for (name, more), sequence_parallel in product(LAYOUTS.items(), (False, True)):
        if name not in names:
            continue
        config = ModelConfig.from_fields(**SIZES | more)
        one = fill(Decoder(config, device="cpu"))
        made = Decoder(
            config,
            groups,
            device="cpu",
            vocab_multiple=128 // size,
            sequence_parallel=sequence_parallel,
        )
        held = {n: rank_part(n, p, config, groups).clone() for n, p in one.state_dict().items()}
        made.load_state_dict(held, strict=True)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 101, (2, 12), generator=generator)
        labels = torch.randint(0, 101, (2, 12), generator=generator)
        batch = Batch(tokens_BS=tokens)
        losses = [decoder.loss(batch, labels)[0] for decoder in (one, made)]
        for loss in losses:
            loss.backward()
        finish_gradients(made, groups)
        found = [float((losses[0] - losses[1]).detach().abs()) / 100]
        grads = {n: p.grad for n, p in one.named_parameters()}
        for key, p in made.named_parameters():
            want = rank_part(key, grads[key], config, groups)
            found.append(float((p.grad - want).abs().max() / max(1.0, want.abs().max())))
        with torch.no_grad():
            want = one(batch)
            found.append(float((made(batch) - want).abs().max()))
            last = made(batch, last_only=True)
            found.append(float((last - want[:, -1:]).abs().max()))
            if not sequence_parallel:
                cache = ContiguousCache(config, num_rows=2, max_tokens=12, tp=size)
                got = [made(Batch(tokens_BS=t), cache) for t in tokens.split((5, 1, 6), 1)]
                found.append(float((torch.cat(got, 1) - want).abs().max()))
        out[name, sequence_parallel] = max(found)
    return out


slow = pytest.mark.slow
WORLDS = [
    (4, ("llama", "norms over all heads", "one norm for both")),
    pytest.param(2, LAYOUTS, marks=slow),
    pytest.param(4, LAYOUTS, marks=slow),
]


@pytest.mark.parametrize(("size", "names"), WORLDS)
def test_heads_over_ranks(size: int, names: Collection[str]) -> None:
    """With two key and value heads, four ranks hold each of them twice."""
    for found in run_world(over_ranks, size, tuple(names)):
        assert max(found.values()) < 5e-5, found


def test_heads_that_do_not_go_over_the_ranks() -> None:
    config = ModelConfig.from_fields(**SIZES | {"num_heads": 6, "num_kv_heads": 3})
    first = replace(ProcessGroups.alone(), tp=Group(ranks=(0, 1), rank=0))
    with raises(LayoutError, "6 query", "3", "tp=2"):
        Decoder(config, first)
