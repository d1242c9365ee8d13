"""Taps: what goes through them is multiplied, and what comes out of them takes its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.errors import MappingError
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import places
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from tests.support.quant.recording import points_of
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.moe_layouts import MODELS, config_of, rank_part, whole_model


def batch(length: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(5)
    return Batch(tokens_BS=torch.randint(0, 61, (2, length), generator=generator))


def changed(decoder: Decoder, point: str, factor: float) -> None:
    """Multiply an input."""
    for place in places(decoder, point):
        if place.attribute == "cache_tap":
            place.set(lambda k, v: (k * factor, v * factor))
        elif place.expert is not None:
            place.set(lambda x, counts: x * factor)
        else:
            place.set(lambda x: x * factor)


def names(decoder: Decoder) -> list[str]:
    """All points of a decoder, of experts those of the first."""
    every = [p.name for p in points_of(decoder.config)]
    return [n for n in every if ".experts." not in n or ".experts.0." in n]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_tap_is_on_the_way(name: str) -> None:
    decoder = whole_model(name)
    want = decoder(batch())
    for point in names(decoder):
        changed(decoder, point, 1.0)
        assert torch.equal(decoder(batch()), want), point
        changed(decoder, point, 1.5)
        assert not torch.equal(decoder(batch()), want), point
        for place in places(decoder, point):
            place.set(None)
    assert torch.equal(decoder(batch()), want)


@torch.no_grad()
def test_what_is_tapped_is_what_is_multiplied() -> None:
    decoder = whole_model("shared and gated")
    for point in ("layers.0.attn.qkv", "layers.1.attn.o", "layers.1.mlp.shared.fc1"):
        (place,) = places(decoder, point)
        seen: list[Tensor] = []
        place.set(lambda x, seen=seen: seen.append(x) or x)
        outs: list[Tensor] = []
        hook = place.module.register_forward_hook(lambda m, i, o, outs=outs: outs.append(o))
        decoder(batch())
        hook.remove()
        place.set(None)
        bias = getattr(place.module, "bias", None)
        weight = place.module.get_parameter("weight")
        assert torch.equal(F.linear(seen[0], weight, bias), outs[0])


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("shared and gated", "attn.kv"),
        ("shared and gated", "attn.o"),
        ("latent", "attn.kv"),
        ("latent", "attn.kv_up"),
        ("latent", "attn.q_up"),
    ],
)
@torch.no_grad()
def test_tapped_alike_with_a_cache_and_without(name: str, point: str) -> None:
    decoder, b = whole_model(name), batch(8)
    changed(decoder, f"layers.0.{point}", 1.25)
    want = decoder(b)
    cache = ContiguousCache(decoder.config, num_rows=2, max_tokens=8)
    parts = [
        decoder(Batch(tokens_BS=b.tokens_BS[:, i:j]), cache) for i, j in ((0, 4), (4, 7), (7, 8))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_head_is_tapped_however_it_is_used() -> None:
    decoder, b = whole_model("biases"), batch()
    labels = b.tokens_BS.roll(-1, 1)
    logits, loss = decoder(b), decoder.loss(b, labels)[0]
    decoder.head_tap = lambda x: x * 2
    torch.testing.assert_close(decoder(b), 2 * logits)
    assert not torch.equal(decoder.loss(b, labels)[0], loss)


@torch.no_grad()
def test_gradients_flow_through_a_tap() -> None:
    decoder = whole_model("biases")
    with torch.enable_grad():
        changed(decoder, "layers.0.attn.qkv", 1.0)
        decoder.loss(batch(), batch().tokens_BS)[0].backward()
    weight = decoder.get_parameter("decoder.layers.0.self_attention.linear_qkv.weight")
    assert weight.grad is not None
    assert weight.grad.any()


@pytest.mark.parametrize(
    ("layout", "sequence_parallel"), [({"tp": 2}, True), ({"tp": 2, "ep": 2, "etp": 1}, False)]
)
@pytest.mark.parametrize("name", ["latent", "shared and gated"])
def test_taps_on_ranks(name: str, layout: dict[str, int], sequence_parallel: bool) -> None:
    decoder = whole_model(name)
    for point in names(decoder):
        changed(decoder, point, 1.1)
    with torch.no_grad():
        want = decoder(batch(8))
    for got in run_world(on_rank, 2, name, layout, sequence_parallel):
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=1e-4, atol=1e-5)


def on_rank(rank: int, size: int, name: str, layout: dict[str, int], split: bool) -> Any:
    groups = ProcessGroups.start(ParallelConfig(**layout))
    config = config_of(name)
    made = Decoder(config, groups, device="cpu", vocab_multiple=32, sequence_parallel=split)
    state = whole_model(name).state_dict()
    made.load_state_dict({n: rank_part(n, p, config, groups).clone() for n, p in state.items()})
    for point in names(made):
        changed(made, point, 1.1)
    with torch.no_grad():
        return made(batch(8)).numpy()


def test_points_that_are_not_there() -> None:
    decoder = whole_model("biases")
    for point in ("layers.0.attn.down", "layers.7.attn.qkv", "layers.0.mlp.fc1", "embed", "norm"):
        with pytest.raises(MappingError):
            places(decoder, point)
