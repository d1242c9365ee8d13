"""The activation that Megatron computes by its args.

The formulas themselves are compared with megatron-core in tests/fidelity.
"""

from __future__ import annotations

from typing import Any

import pytest

from megtool.convert.megatron.activation_args import (
    activation_args,
    activation_fields,
    lost_activation,
    other_function,
)
from tests.support.checkpoints.canonical_views import config

TANH = "gelu_pytorch_tanh"


@pytest.mark.parametrize(
    ("args", "activation", "gated"),
    [
        ({"swiglu": True, "bias_gelu_fusion": True}, "silu", True),
        ({"bias_gelu_fusion": True}, TANH, False),
        ({"bias_gelu_fusion": True, "add_bias_linear": False}, "gelu", False),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu", False),
        (
            {"bias_gelu_fusion": False, "openai_gelu": True, "use_legacy_models": True},
            TANH,
            False,
        ),
        ({"bias_gelu_fusion": False, "gated_linear_unit": True}, "gelu", True),
        ({"bias_activation_fusion": True, "gated_linear_unit": True}, TANH, True),
        ({"openai_gelu": True}, TANH, False),
        ({}, "gelu", False),
        ({"quick_geglu": True}, "quick_gelu", True),
        ({"squared_relu": True, "gated_linear_unit": True}, "relu2", True),
        ({"activation_func": "torch._C._nn.gelu", "bias_gelu_fusion": True}, TANH, False),
        ({"activation_func": "megatron.core.activations.squared_relu"}, "relu2", False),
        ({"activation_func": "relu", "gated_linear_unit": True}, "relu", True),
    ],
)
def test_chosen_activation(args: dict[str, Any], activation: str, gated: bool) -> None:
    assert activation_fields(args) == {"activation": activation, "gated": gated}


def test_contradictions_and_unknown_functions() -> None:
    assert other_function({"swiglu": True, "activation_func": "gelu"})
    assert other_function({"activation_func": "mish"})
    assert not other_function({"swiglu": True, "activation_func": "silu"})
    assert not other_function({"swiglu": True})


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["silu", "gelu", TANH, "gelu_new", "quick_gelu", "relu2", "relu"])
def test_written_args_say_the_same_unless_they_are_told(kind: str, gated: bool) -> None:
    model = config(activation=kind, gated=gated, mlp_bias=True)
    found = activation_fields(activation_args(model) | {"add_bias_linear": True})
    same = {"gelu_new": TANH}.get(kind, kind)
    is_lost = (found["activation"], found["gated"]) != (same, gated)
    assert is_lost == (lost_activation(model) is not None)


def test_tanh_without_biases_is_told() -> None:
    assert "exact form" in (lost_activation(config(activation=TANH, gated=False)) or "")
