"""Megatron's names of experts, latent attention and multi-token prediction, for any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool.convert.dialects import TargetView, read_side, write_side
from megtool.convert.megatron.args import args_from_config, config_from_args
from megtool.convert.megatron.sharding import shard
from megtool.dtypes import dtype
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.tensors.box import cover_fault
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints.canonical_views import canonical_side, config, stored

LATENT = {
    "num_kv_heads": 4,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
    "head_dim": 5,
}


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Decoders with any of the features that Megatron combines."""
    layers, flag = draw(st.integers(1, 4)), st.booleans()
    freq = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
    keys: dict[str, Any] = {
        "num_layers": layers,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_ffn_hidden_size": draw(st.sampled_from([4, 6])),
        "moe_layer_freq": draw(st.sampled_from([1, 2, tuple(freq)])),
        "gated": draw(flag),
        "qk_norm": draw(flag),
        "tied_embeddings": draw(flag),
        "num_mtp_layers": draw(st.integers(0, 2)),
    }
    if keys["gated"] is False:
        keys["activation"] = "gelu"
    if draw(flag):
        keys |= LATENT | {"q_lora_rank": draw(st.sampled_from([0, 6]))}
    else:
        biased = draw(flag)
        keys |= dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), biased)
        keys["attn_sinks"] = draw(flag)
    if any(c := layer_sets.moe_layers(config().with_fields(**keys))):
        assert c <= set(range(layers))
        keys["router_expert_bias"] = draw(flag)
        if draw(flag):
            keys |= {"shared_ffn_hidden_size": 8, "shared_expert_gate": draw(flag)}
    return config(**keys)


LAYOUTS = [
    {"tp": 1},
    {"tp": 2},
    {"tp": 1, "ep": 2},
    {"tp": 2, "ep": 4, "etp": 1},
    {"ep": 2, "etp": 2},
]


@given(models(), st.sampled_from(LAYOUTS), st.booleans())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_model_comes_back_from_megatron(
    carry: Callable[..., dict[str, np.ndarray]],
    cfg: ModelConfig,
    layout: dict[str, int],
    per_layer: bool,
) -> None:
    side, arrays = canonical_side(cfg, ("", "exp_avg"))
    parallel = ParallelConfig(**layout)
    per_layer = per_layer or not layer_sets.is_homogeneous(cfg)
    there = write_side(side, dialect="megatron", parallel=parallel, per_layer=per_layer)
    megatron = carry(side, arrays, there)
    assert there.shards is not None
    for i, t in enumerate(there.tensors):
        boxes, n = there.shards.boxes[there.shards.of(i)], len(t.shape)
        cut = type(boxes)(boxes.lo[:, :n], boxes.hi[:, :n])
        assert cover_fault(cut, np.array([t.shape], np.int64)) is None, t.name
    said = config_from_args(args_from_config(cfg, parallel))
    back = read_side(stored(megatron), config=said)
    assert back.canonical == side.canonical
    assert back.config == cfg
    canonical = TargetView(
        tensors=list(side.tensors), placements=side.placements, shards=None, fills=[], dropped=[]
    )
    again = carry(back, megatron, canonical)
    assert all((again[n] == a).all() for n, a in arrays.items())


def test_casts_leave_expert_bias_alone() -> None:
    side, _ = canonical_side(
        config(num_experts=2, moe_ffn_hidden_size=4, router_expert_bias=True, num_mtp_layers=1)
    )
    made = write_side(side, dialect="megatron", dtype=dtype("bfloat16"))
    kept = {t.name for t in made.tensors if t.dtype.name == "float32"}
    bias = "mlp.router.expert_bias"
    assert kept == {f"decoder.layers.{bias}", f"mtp.layers.0.transformer_layer.{bias}"}


def test_a_list_of_layers_is_written_one_key_per_layer() -> None:
    """As Megatron does it, even where the list says the same of every layer."""
    side, _ = canonical_side(config(num_experts=2, moe_ffn_hidden_size=4, moe_layer_freq=(1, 1)))
    names = {t.name for t in write_side(side, dialect="megatron").tensors}
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in names
    with pytest.raises(MappingError, match="cannot be stacked"):
        write_side(side, dialect="megatron", per_layer=False)


@pytest.mark.parametrize(
    ("name", "shape", "cut"),
    [
        ("decoder.layers.3.mlp.experts.linear_fc1.weight2", (16, 8), [4, 8]),
        ("decoder.layers.3.mlp.experts.linear_fc2.weight2", (8, 8), [8, 4]),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight2_w", (8, 8), [4, 8]),
        ("decoder.layers.3.mlp.experts.experts.2.linear_fc1.weight_v", (8, 8), [4, 8]),
        ("decoder.layers.3.mlp.experts.local_experts.2.linear_fc2.weight", (8, 8), [8, 4]),
        ("decoder.layers.3.self_attention.linear_q_up_proj.weight", (16, 4), [8, 4]),
        ("decoder.layers.3.self_attention.linear_q_up_proj.layer_norm_weight", (4,), [4]),
        ("decoder.layers.3.self_attention.linear_kv_down_proj.weight", (6, 8), [6, 8]),
        ("decoder.layers.3.self_attention.core_attention.softmax_offset", (4,), [2]),
        ("decoder.layers.3.mlp.shared_experts.gate_weight", (1, 8), [1, 8]),
        ("decoder.layers.3.mlp.router.expert_bias", (4,), [4]),
        ("mtp.layers.0.eh_proj.weight", (8, 16), [4, 16]),
    ],
)
def test_each_spelling_is_cut_as_megatron_cuts_it(
    name: str, shape: tuple[int, ...], cut: list[int]
) -> None:
    tensors = [GlobalTensor(name=name, shape=shape, dtype=dtype("bfloat16"))]
    if "fc1.weight2" in name and not name.endswith("_w"):
        pair = GlobalTensor(name=name.replace("fc1", "fc2"), shape=(8, 8), dtype=dtype("bfloat16"))
        tensors.append(pair)
    if "experts" in name and "shared" not in name:
        other = "decoder.layers.3.mlp.experts.linear_fc2.weight3"
        tensors.append(GlobalTensor(name=other, shape=(8, 8), dtype=dtype("bfloat16")))
    shards = shard(tensors, ParallelConfig(tp=2, etp=2))
    assert shards.boxes.shape[shards.of(0)][0, : len(shape)].tolist() == cut
