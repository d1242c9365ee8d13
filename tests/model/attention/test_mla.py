"""Latent attention: its formulas, its two ways of decoding, and its caches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megtool.errors import LayoutError
from megtool.model.attention.mla import LatentAttention, softmax_scale
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache, KVCache
from megtool.model.cache.paged import PagedCache
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.worlds.moe_layouts import config_of

SIZES: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=24,
    ffn_hidden_size=16,
    num_heads=4,
    num_kv_heads=4,
    head_dim=12,
    vocab_size=50,
    kv_lora_rank=10,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    qk_norm=True,
)


def decoder(*, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    made = Decoder(ModelConfig.from_fields(**SIZES | changes), device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in made.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.1 * noise if "norm" in key else noise * 0.3)
    return made


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 6}, {"kv_lora_rank": 3}])
def test_names_and_shapes_are_megatrons(changes: dict[str, Any]) -> None:
    config = ModelConfig.from_fields(**SIZES | changes)
    made = LatentAttention(config, 0, ProcessGroups.alone())
    c, q = config.latent.kv_lora_rank, config.latent.q_lora_rank
    queries = {
        "linear_q_down_proj.weight": (q, 24),
        "linear_q_up_proj.layer_norm_weight": (q,),
        "linear_q_up_proj.weight": (48, q),
    }
    assert {n: tuple(p.shape) for n, p in made.named_parameters()} == {
        **(queries if q else {"linear_q_proj.weight": (48, 24)}),
        "linear_kv_down_proj.weight": (c + 4, 24),
        "linear_kv_up_proj.layer_norm_weight": (c,),
        "linear_kv_up_proj.weight": (56, c),
        "linear_proj.weight": (24, 24),
    }


def test_a_layer_is_the_papers_formulas() -> None:
    """One token after the other, one head after the other; rotated as complex numbers."""
    config = ModelConfig.from_fields(**SIZES | {"q_lora_rank": 6})
    model = decoder(q_lora_rank=6)
    layer = model.decoder.layers["0"].self_attention
    x_TH = torch.randn(5, 24, generator=torch.Generator().manual_seed(2))
    frame = model.frame(Batch(tokens_BS=tokens(1, 5)))
    with torch.no_grad():
        got = layer(x_TH, frame)
        weights = dict(layer.named_parameters())

    def normed(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return v / (v.square().mean() + config.norms.norm_eps).sqrt() * weight

    def turned(v: torch.Tensor, position: int) -> torch.Tensor:
        angles = position / 10000.0 ** (torch.arange(0, 4, 2) / 4)
        out = torch.view_as_complex(v.reshape(2, 2)) * torch.polar(torch.ones(2), angles)
        return torch.view_as_real(out).flatten()

    keys, values, want = [], [], []
    for position, x in enumerate(x_TH):
        down = weights["linear_kv_down_proj.weight"] @ x
        latent = normed(down[:10], weights["linear_kv_up_proj.layer_norm_weight"])
        shared = turned(down[10:], position)
        up = (weights["linear_kv_up_proj.weight"] @ latent).view(4, 14)
        keys.append([torch.cat((up[n, :8], shared)) for n in range(4)])
        values.append([up[n, 8:] for n in range(4)])
        down = normed(
            weights["linear_q_down_proj.weight"] @ x,
            weights["linear_q_up_proj.layer_norm_weight"],
        )
        heads = (weights["linear_q_up_proj.weight"] @ down).view(4, 12)
        out = []
        for n in range(4):
            query = torch.cat((heads[n, :8], turned(heads[n, 8:], position)))
            scores = torch.stack([query @ k[n] for k in keys]) / math.sqrt(12)
            out.append(scores.softmax(0) @ torch.stack([v[n] for v in values]))
        want.append(weights["linear_proj.weight"] @ torch.cat(out))
    torch.testing.assert_close(got, torch.stack(want).detach(), atol=1e-5, rtol=1e-5)


def caches(config: ModelConfig) -> list[tuple[str, KVCache]]:
    return [
        ("contiguous", ContiguousCache(config, num_rows=2, max_tokens=40)),
        ("graphable", ContiguousCache(config, num_rows=2, max_tokens=40, graphable=True)),
        ("paged", PagedCache(config, num_blocks=32, block_size=4)),
    ]


@pytest.mark.parametrize("kind", ["contiguous", "graphable", "paged"])
@pytest.mark.parametrize("rank", [5, 10, 64])
def test_decoding_in_latent_space_is_the_whole_pass(kind: str, rank: int) -> None:
    """Prompts of 20 tokens, made keys for the widest latent, and then one token at a time."""
    model = decoder(kv_lora_rank=rank)
    cache = dict(caches(model.config))[kind]
    given = tokens(2, 30)
    with torch.no_grad():
        want = model(Batch(tokens_BS=given))
        parts = []
        for part in (given[:, :20], given[:, 20:23], *given[:, 23:].split(1, 1)):
            if isinstance(cache, PagedCache):
                cache.choose([(0, part.shape[1]), (1, part.shape[1])])
            parts.append(model(Batch(tokens_BS=part), cache))
    torch.testing.assert_close(torch.cat(parts, 1), want, atol=1e-5, rtol=1e-5)


def test_a_cache_keeps_the_latent_and_nothing_of_the_heads() -> None:
    model = decoder()
    cache = ContiguousCache(model.config, num_rows=2, max_tokens=8)
    assert cache.num_bytes == 2 * 2 * 8 * (10 + 4) * 4  # layers, rows, slots, numbers, bytes
    with torch.no_grad():
        model(Batch(tokens_BS=tokens(2, 5)), cache)
    assert cache.keys[0].shape == (2, 1, 8, 10)
    assert cache.keys[0][:, :, :5].all()
    assert not cache.keys[0][:, :, 5:].any()


def test_padding_on_the_left_decodes_as_each_row_alone() -> None:
    model = decoder()
    given = tokens(2, 12)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, :5] = False
    cache = ContiguousCache(model.config, num_rows=2, max_tokens=16)
    more = tokens(2, 14)[:, 12:]
    with torch.no_grad():
        first = model(Batch(tokens_BS=given, valid_BS=valid), cache, last_only=True)
        rest = [model(Batch(tokens_BS=t), cache) for t in more.split(1, 1)]
        for row, start in ((0, 5), (1, 0)):
            alone = torch.cat((given[row, start:], more[row]))[None]
            want = model(Batch(tokens_BS=alone))[0, -3:]
            got = torch.cat([t[row] for t in (first, *rest)])
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_both_ways_of_decoding_agree_in_bf16() -> None:
    model = decoder(dtype=torch.bfloat16, kv_lora_rank=64)
    given = tokens(1, 16)
    cache = ContiguousCache(model.config, num_rows=1, max_tokens=16, dtype=torch.bfloat16)
    with torch.no_grad():
        want = model(Batch(tokens_BS=given)).float()
        model(Batch(tokens_BS=given[:, :15]), cache)
        got = model(Batch(tokens_BS=given[:, 15:]), cache).float()
    assert float((got[:, 0] - want[:, -1]).abs().max()) < 0.03 * float(want.abs().max())


def test_yarn_warms_scores_up() -> None:
    plain = ModelConfig.from_fields(**SIZES)
    assert softmax_scale(plain) == pytest.approx(12**-0.5)
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}
    warm = softmax_scale(ModelConfig.from_fields(**SIZES, rope_scaling=yarn))
    assert warm == pytest.approx(12**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert (
        softmax_scale(ModelConfig.from_fields(**SIZES, rope_scaling=yarn, softmax_scale=0.5)) == 0.5
    )


@pytest.mark.peers
def test_yarn_is_megatrons() -> None:
    rotary = pytest.importorskip("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}
    scale = softmax_scale(ModelConfig.from_fields(**SIZES, rope_scaling=yarn))
    assert scale == pytest.approx(rotary._yarn_get_mscale(40.0, 0.7) ** 2 / math.sqrt(12))


def test_heads_that_do_not_divide_are_refused() -> None:
    groups = ProcessGroups(parallel=ProcessGroups.alone().parallel, tp=Group(ranks=(0, 1, 2)))
    with pytest.raises(LayoutError, match="4 heads cannot be split over tp=3"):
        LatentAttention(config_of("latent"), 0, groups)
