"""Points: every one is one input, fed to what multiplies it, and to be found in the decoder."""

from __future__ import annotations

import pytest

from megtool.convert.dialects import read_side
from megtool.dtypes import dtype
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import places
from megtool.quant.recipes.modules import list_modules
from megtool.quant.statistics.activation_sites import ActivationSite, list_activation_sites
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor
from tests.support.worlds.moe_layouts import MODELS, SIZES

DIRECT = MODELS["latent"] | {"q_lora_rank": 0}
CASES = MODELS | {
    "direct queries": DIRECT,
    "gates": dict(attn_output_gate=True, num_experts=0, num_experts_per_token=0),
    "one norm": dict(
        norm="layernorm",
        norm_bias=False,
        shared_norm=True,
        parallel_residual=True,
        qk_norm=True,
        qk_norm_of="each",
        num_experts=0,
        num_experts_per_token=0,
    ),
    "no norms before": dict(
        pre_norms=False,
        qk_norm=True,
        qk_norm_of="all",
        num_experts=0,
        num_experts_per_token=0,
    ),
}


def points_and_decoder(name: str) -> tuple[tuple[ActivationSite, ...], Decoder]:
    config = ModelConfig.from_fields(**SIZES | CASES[name])
    decoder = Decoder(config)
    tensors = [
        GlobalTensor(name=n, shape=tuple(t.shape), dtype=dtype("float32"))
        for n, t in decoder.state_dict().items()
    ]
    side = read_side(tensors, config=config)
    return list_activation_sites(list_modules(side).modules, config), decoder


@pytest.mark.parametrize("name", CASES)
def test_every_point_is_in_the_decoder_and_as_wide(name: str) -> None:
    points, decoder = points_and_decoder(name)
    assert len({p.name for p in points}) == len(points)
    fed = [m for p in points for m in p.modules]
    assert len(set(fed)) == len(fed)
    norms = [p.norm for p in points if p.norm]
    assert len(set(norms)) == len(norms)
    for point in points:
        for place in places(decoder, point.name):
            weight = getattr(place.module, "weight", None)
            if weight is not None:
                assert weight.shape[-1] == point.width, point.name
            assert hasattr(place.module, place.attribute)
            assert place.is_here


def test_latent_attention_reads_one_input() -> None:
    for name, first in (("latent", "q_down"), ("direct queries", "q")):
        points = {p.name: p for p in points_and_decoder(name)[0]}
        down = points["layers.1.attn.down"]
        assert [m.rpartition(".")[2] for m in down.modules] == [first, "kv_down"]
        assert down.norm == "layers.1.attn_norm"
        assert "layers.1.attn.qkv" not in points
        assert points["layers.1.attn.kv"].width == 14
        assert points["layers.1.attn.kv_up"].norm == "layers.1.attn.kv_down_norm"


def test_caches_say_which_columns_are_keys() -> None:
    cut = {}
    for name in ("shared and gated", "wide keys", "latent"):
        site = {p.name: p for p in points_and_decoder(name)[0]}["layers.1.attn.kv"]
        numbers = range(site.width)
        cut[name] = tuple(len(numbers[columns]) for columns in site.keys_and_values)
    assert cut == {"shared and gated": (8, 8), "wide keys": (8, 4), "latent": (14, 14)}


def test_gates_of_attention_read_what_queries_do() -> None:
    points = {p.name: p for p in points_and_decoder("gates")[0]}
    last = [m.rpartition(".")[2] for m in points["layers.0.attn.qkv"].modules]
    assert sorted(last) == ["gate", "k", "q", "v"]


@pytest.mark.parametrize("name", ["one norm", "no norms before"])
def test_scales_are_not_folded_into_a_norm_that_feeds_two_or_is_not_there(name: str) -> None:
    points = {p.name: p for p in points_and_decoder(name)[0]}
    assert {points[f"layers.0.{x}"].norm for x in ("attn.qkv", "mlp.fc1")} == {""}
    assert points["head"].norm == "norm"
    assert not any("norms" in p for p in points)


def test_of_a_mixture() -> None:
    points = {p.name: p for p in points_and_decoder("shared and gated")[0]}
    assert points["layers.1.mlp.experts.5.fc1"].expert == 5
    assert points["layers.1.mlp.experts.5.fc1"].modules == (
        "layers.1.mlp.experts.5.gate",
        "layers.1.mlp.experts.5.up",
    )
    assert points["layers.1.mlp.experts.5.fc1"].norm == ""
    assert points["layers.1.mlp.shared.fc1"].norm == ""
    assert points["layers.0.mlp.fc1"].norm == "layers.0.mlp_norm"
    assert points["head"].norm == "norm"
    assert "layers.1.mlp.router" in points


def test_norms_without_weights_take_no_scales() -> None:
    """Those of OLMo and nanochat: `int8_sq` has nothing to fold its scales into."""
    config = ModelConfig.from_fields(
        **SIZES | {"num_experts": 0, "num_experts_per_token": 0, "norm_weight": False}
    )
    tensors = [
        GlobalTensor(name=n, shape=tuple(t.shape), dtype=dtype("float32"))
        for n, t in Decoder(config).state_dict().items()
    ]
    side = read_side(tensors, config=config)
    sites = list_activation_sites(list_modules(side).modules, config)
    assert sites
    assert not any(site.norm for site in sites)
