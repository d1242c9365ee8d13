"""Numbers and lists of a configuration that no forward pass can use are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

SIZES: dict[str, Any] = dict(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=101,
)
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(({"window_skip_freq": v}, "window_skip_freq is") for v in (0, -2, True, (1, 0), "2")),
        *(({"no_rope_layers": v}, "no_rope_layers is") for v in ((), (1, 0), (0, 1, 2), 3)),
        *(({"softmax_scale": v}, "softmax_scale is") for v in (math.nan, 0, -0.1, math.inf, "1")),
        ({"attn_softcap": -1.0}, "attn_softcap is -1.0"),
        ({"logit_softcap": math.nan}, "logit_softcap is nan"),
        ({"activation_limit": -7.0}, "activation_limit is -7.0"),
        ({"rope_local_base": 0.0}, "rope_local_base is 0.0"),
        ({"residual_scale": math.inf}, "residual_scale is inf"),
        ({"embedding_scale": None}, "embedding_scale is None"),
        *(
            ({"rope_scaling": {"rope_type": "linear", "factor": v}}, "has the factor")
            for v in (0, -4.0, "8", math.nan)
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 3}}, "long_factor .* has 3 numbers"),
        ({"rope_scaling": LONG | {"short_factor": [1.0, 1.0, 1.0, 0]}}, "short_factor of"),
        ({"rope_scaling": LONG, "rotary_percent": 0.5}, "short_factor .* has 4 numbers"),
    ],
)
def test_what_is_impossible_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(MappingError, match=said):
        ModelConfig.from_fields(**SIZES, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"window_size": 4, "window_skip_freq": 1},
        {"window_size": 4, "window_skip_freq": (0, 1, 1)},
        {"window_size": 4, "window_skip_freq": (0, 1, 1, 1), "num_mtp_layers": 1},
        {"no_rope_layers": (0, 0, 1)},
        {"softmax_scale": 0.1, "attn_softcap": 50, "logit_softcap": 0, "rope_local_base": 1e4},
        {"rope_scaling": {"rope_type": "yarn", "factor": None}},
        {"rope_scaling": LONG},
        {"rope_scaling": {}},
    ],
)
def test_what_is_possible_passes(fields: dict[str, Any]) -> None:
    assert ModelConfig.from_fields(**SIZES, **fields).num_layers == 3
