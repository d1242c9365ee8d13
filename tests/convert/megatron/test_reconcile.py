"""Args and a config.json that describe one model differently."""

from __future__ import annotations

import pytest

from megtool.convert.megatron.args import args_from_config
from megtool.convert.megatron.reconcile import reconcile
from megtool.convert.megatron.settings import plain_args
from megtool.spec.model_config import ModelConfig
from tests.support.checkpoints.canonical_views import config

MODEL = config(rope_base=10000.0, norm_eps=1e-5)


def test_args_are_followed() -> None:
    args = args_from_config(MODEL) | {"rotary_base": 1000000, "norm_epsilon": 1e-3}
    read, found = reconcile(MODEL, plain_args(args))
    assert (read.positions.rope_base, read.norms.norm_eps) == (1000000.0, 1e-3)
    assert sorted(c.field for c in found) == ["norm_eps", "rope_base"]
    assert "rotary_base (rope_base) is 1000000.0, not 10000.0" in map(str, found)


def test_a_new_name_alone_is_no_completion_by_an_old_one() -> None:
    args = args_from_config(MODEL)
    del args["norm_epsilon"]
    args["layernorm_epsilon"] = 1e-2
    assert reconcile(MODEL, args)[0].norms.norm_eps == 1e-2


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        config(activation="gelu_pytorch_tanh", gated=False, mlp_bias=False),
        config(activation="relu", gated=False),
        config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        config(softmax_scale=0.3, embedding_scale=4.0, attn_softcap=30.0),
        config(zero_centered_norm=True, qk_norm=True, post_norms=True),
    ],
)
def test_what_args_cannot_say_is_no_contradiction(model: ModelConfig) -> None:
    args = args_from_config(model)
    assert reconcile(model, plain_args(args)) == (model, [])
    few = {k: args[k] for k in ("num_layers", "hidden_size", "num_attention_heads")}
    assert reconcile(model, few) == (model, [])


def test_args_of_another_model_are_not_followed() -> None:
    args = args_from_config(MODEL) | {"num_layers": 7, "rotary_base": 5}
    assert reconcile(MODEL, plain_args(args)) == (MODEL, [])
