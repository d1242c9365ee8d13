"""Registration orders: total, the same whatever order names come in, and the likely one first."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megtool.convert.language.binding import Binding
from megtool.convert.language.canonical import CanonicalModel
from megtool.convert.megatron.names import PER_LAYER, STACKED
from megtool.convert.megatron.rank_parameters import rank_parameters
from megtool.dtypes import dtype
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from megtool.tensors.registration_order import ORDERS, Order, likely_orders, registered
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints.trained import canonical_tensors, config
from tests.support.errors import raises
from tests.support.models.parameter_models import MODELS


def keys_of(name: str) -> list[tuple[str, int]]:
    """Keys of all parameters of a model, with their experts."""
    model = config(**MODELS[name])
    canonical = {
        n: GlobalTensor(name=n, shape=s, dtype=dtype("bfloat16"))
        for n, s in canonical_tensors(model).items()
    }
    table = STACKED if layer_sets.is_homogeneous(model) else PER_LAYER
    stored = Binding(table, CanonicalModel(model)).write(canonical).tensors
    (found,) = rank_parameters(stored, model, ParallelConfig()).values()
    return [(p.module_key, p.expert) for p in found]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
def test_an_order_is_total_and_does_not_depend_on_the_input(
    name: str, order: Order, data: st.DataObject
) -> None:
    keys = keys_of(name)
    assert len(set(keys)) == len(keys)
    places = [order.position(*k) for k in keys]
    assert len(set(places)) == len(keys)
    mixed = data.draw(st.permutations(keys))
    assert [mixed[i] for i in registered(mixed, order)] == [
        keys[i] for i in registered(keys, order)
    ]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_all_orders_have_in_common(name: str, order: Order) -> None:
    keys = keys_of(name)
    found = [keys[i] for i in registered(keys, order)]
    assert found[0][0].startswith("embedding.")
    assert found[-1][0] == "output_layer.weight"
    layers = [int(k.split(".")[2]) for k, _ in found if k.startswith("decoder.layers.")]
    assert layers == sorted(layers)
    at = {k: i for i, k in enumerate(found)}
    for key, expert in found:
        if key.endswith(".bias") and (key[:-4] + "weight", expert) in at:
            assert at[key, expert] == at[key[:-4] + "weight", expert] + 1 or ".experts." in key


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_where_the_orders_differ(order: Order) -> None:
    keys = keys_of("experts")
    found = [keys[i] for i in registered(keys, order)]
    layer = "decoder.layers.1."
    norm = found.index((layer + "self_attention.linear_qkv.layer_norm_weight", 0))
    proj = found.index((layer + "self_attention.linear_proj.weight", 0))
    assert (proj < norm) == order.fused_norms
    experts = [(k.rpartition("linear_")[2], e) for k, e in found if k.startswith(layer + "mlp.exp")]
    if order.grouped_experts:
        assert experts == sorted(experts)
    else:
        assert experts == sorted(experts, key=lambda x: (x[1], x[0]))


@given(
    implementation=st.sampled_from([None, "local", "transformer_engine", "inference_optimized", 3]),
    grouped=st.sampled_from([None, True, False, "what"]),
)
def test_all_orders_are_tried_likely_ones_first(implementation: Any, grouped: Any) -> None:
    orders = likely_orders(implementation, grouped)
    assert sorted(map(str, orders)) == sorted(map(str, ORDERS))
    assert orders[0].fused_norms == (implementation != "local")
    assert orders[0].grouped_experts == (grouped is not False)


@pytest.mark.parametrize(
    "key",
    [
        "decoder.layers.0.mixer.B_log",
        "decoder.layers.x.mlp.linear_fc1.weight",
        "something",
        "mtp.layers.0.what.weight",
        "decoder.layers.0.cross_attention.linear_qk.weight",
    ],
)
def test_unknown_parameters_have_no_place(key: str) -> None:
    for order in ORDERS:
        with raises(MappingError, match="not known", tensor=key, hint="--optimizer-format none"):
            order.position(key)


def test_heads_of_bert_follow_its_encoder() -> None:
    """As megatron-core's BertModel makes its modules."""
    layer = "encoder.layers.1."
    keys = [
        "embedding.tokentype_embeddings.weight",
        "encoder.layers.0.mlp.linear_fc2.bias",
        layer + "mlp.linear_fc1.layer_norm_weight",
        layer + "mlp.linear_fc2.weight",
        "encoder.final_layernorm.bias",
        "lm_head.dense.weight",
        "lm_head.layer_norm.bias",
        "output_layer.bias",
        "binary_head.weight",
        "pooler.dense.weight",
    ]
    for order in ORDERS:
        at = [order.position(key) for key in keys]
        assert at == sorted(at)


def test_multi_token_prediction_follows_the_decoder() -> None:
    keys = [
        "decoder.final_layernorm.weight",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight",
        "mtp.layers.0.final_layernorm.weight",
        "mtp.layers.1.enorm.weight",
        "output_layer.weight",
    ]
    for order in ORDERS:
        places = [order.position(k) for k in keys]
        assert all(a < b for a, b in pairwise(places))


def test_where_a_mixers_convolution_is_registered() -> None:
    """megatron-core 0.19 registers it first, earlier ones after the input projection."""
    names = (
        "conv1d.weight",
        "dt_bias",
        "in_proj.layer_norm_weight",
        "in_proj.weight",
        "norm.weight",
    )
    keys = [(f"decoder.layers.0.mixer.{n}", 0) for n in names]
    orders = {o.conv_first: registered(keys, o) for o in ORDERS if o.fused_norms}
    assert orders == {True: [0, 1, 2, 3, 4], False: [1, 2, 3, 0, 4]}


def test_where_the_norm_before_a_mixer_is_registered() -> None:
    """Megatron's own layers have it as a module: behind a Mamba-2 mixer, before a delta net."""
    mixer, delta = "decoder.layers.0.mixer.", "decoder.layers.1.self_attention."
    mamba = [mixer + n for n in ("in_proj.layer_norm_weight", "in_proj.weight", "out_proj.weight")]
    net = [delta + n for n in ("in_proj.layer_norm_weight", "dt_bias", "in_proj.weight")]
    for order in ORDERS:
        found = registered([(key, 0) for key in mamba], order)
        assert found == ([0, 1, 2] if order.fused_norms else [1, 2, 0])
        found = registered([(key, 0) for key in net], order)
        assert found == ([1, 0, 2] if order.fused_norms else [0, 1, 2])
