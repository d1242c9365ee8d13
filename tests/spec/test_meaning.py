"""Two configurations are the same model where words differ and the arithmetic does not."""

from __future__ import annotations

from typing import Any

import pytest

from megtool.spec.meaning import compare_functions, rope_meaning
from megtool.spec.model_config import ModelConfig
from tests.support.models.small_configs import EXPERTS, SIZES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**fields: Any) -> ModelConfig:
    return ModelConfig.from_fields(**SIZES | fields)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"window_skip_freq": 2}, {}),
        (
            {"window_size": 8, "window_skip_freq": 2},
            {"window_size": 8, "window_skip_freq": (1, 0, 1, 0)},
        ),
        ({"window_size": 8, "window_skip_freq": (0, 0, 0, 0)}, {}),
        ({"softmax_scale": 8**-0.5}, {}),
        ({"no_rope_layers": (0, 0, 0, 0)}, {}),
        ({"no_rope_layers": (1, 1, 1, 1)}, {"position_embedding": "none", "rope_base": 5.0}),
        ({"rope_local_base": 10000.0, "window_size": 4}, {"window_size": 4}),
        ({"router_score": "sigmoid", "router_scaling": 2.5}, {}),
        ({**EXPERTS, "moe_layer_freq": (1, 1, 1, 1)}, {**EXPERTS, "ffn_hidden_size": 7}),
        ({**EXPERTS, "router_num_groups": 1, "router_topk_groups": 1}, EXPERTS),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1.0}}, {}),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4}},
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
        ),
        ({"rope_scaling": YARN}, {"rope_scaling": {**YARN, "beta_fast": 32}}),
        ({"activation": "swish"}, {"activation": "silu"}),
        ({"activation": "gelu_new"}, {"activation": "gelu_pytorch_tanh"}),
        ({"tied_values": (0, 0, 0, 0)}, {}),
        ({"norm_bias": False}, {}),
        ({"max_positions": 77}, {}),
        # Scores of labels come instead of the output layer, and of what it is.
        (
            {"num_labels": 3, "head_bias": True, "tied_embeddings": True},
            {"num_labels": 3, "head_bias": False, "tied_embeddings": False},
        ),
        ({"layer_kinds": ("*-",) * 4}, {}),
        ({"norm_eps": 1e-5}, {"norm_eps": 9.999999999e-6}),
    ],
)
def test_other_words(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert compare_functions(config(**a), config(**b)) == {}
    assert compare_functions(config(**b), config(**a)) == {}


@pytest.mark.parametrize(
    ("field", "a", "b"),
    [
        ("softmax_scale", {"softmax_scale": 0.25}, {}),
        ("window_size", {"window_size": 8}, {}),
        ("window_skip_freq", {"window_size": 8, "window_skip_freq": 2}, {"window_size": 8}),
        ("no_rope_layers", {"no_rope_layers": (0, 1, 0, 0)}, {}),
        ("position_embedding", {"position_embedding": "none"}, {}),
        ("rope_scaling", {"rope_scaling": LLAMA3}, {"rope_scaling": {**LLAMA3, "factor": 4.0}}),
        (
            "rope_scaling",
            {"rope_scaling": YARN},
            {"rope_scaling": {**YARN, "mscale": 2.0, "mscale_all_dim": 1.0}},
        ),
        ("rope_scaling", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}),
        ("activation", {"activation": "gelu"}, {"activation": "gelu_new"}),
        ("router_score", {**EXPERTS, "router_score": "sigmoid"}, EXPERTS),
        ("moe_layer_freq", {**EXPERTS, "moe_layer_freq": 2}, EXPERTS),
        ("zero_centered_norm", {"zero_centered_norm": True}, {}),
        ("norm_eps", {"norm_eps": 1e-6}, {}),
        ("tied_embeddings", {"tied_embeddings": True}, {}),
        ("head_bias", {"head_bias": True}, {}),
    ],
)
def test_other_functions(field: str, a: dict[str, Any], b: dict[str, Any]) -> None:
    one, other = config(**a), config(**b)
    assert field in compare_functions(one, other)
    usual = 8**-0.5 if field == "softmax_scale" else other.get(field)
    assert compare_functions(one, other)[field] == (one.get(field), usual)


def test_yarn_is_measured_by_its_temperature() -> None:
    # 0.1 ln 4 + 1, as transformers has it where no attention_factor is given.
    told = {**YARN, "attention_factor": 1.138629436111989}
    assert compare_functions(config(rope_scaling=YARN), config(rope_scaling=told)) == {}
    assert rope_meaning(config(rope_scaling=YARN))[6] == pytest.approx(1.1386294361)  # type: ignore[index]
