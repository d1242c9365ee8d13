"""Positions by Megatron's args, against megatron-core's defaults and formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megtool.convert.megatron.rotary_args import (
    lost_scaling,
    position_kind,
    rotary_args,
    rotary_fields,
    yarn_args,
)
from tests.support.checkpoints.canonical_views import config

LATENT = {"multi_latent_attention": True, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8}


def scaling(**args: Any) -> Any:
    return rotary_fields({"num_layers": 2, **args})["rope_scaling"]


def test_the_parser_says_no_original_length_and_megatron_takes_4096() -> None:
    found = scaling(**LATENT, rotary_scaling_factor=40.0, mscale=1.0, mscale_all_dim=0.0)
    assert found["original_max_position_embeddings"] == 4096
    assert (found["beta_fast"], found["beta_slow"]) == (32.0, 1.0)
    assert "attention_factor" not in found


def test_temperatures_that_transformers_would_ignore_are_written_out() -> None:
    found = scaling(**LATENT, rotary_scaling_factor=40.0, mscale=0.5, mscale_all_dim=0.0)
    assert found["attention_factor"] == pytest.approx(0.05 * math.log(40) + 1)


def test_latent_attention_without_yarn_has_its_temperature_of_scores() -> None:
    args = {**LATENT, "rope_type": "rope", "rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0}
    found = rotary_fields({"num_layers": 2, **args})
    assert found["rope_scaling"] is None
    assert found["softmax_scale"] == pytest.approx((0.1 * math.log(40) + 1) ** 2 / 4)


def test_interpolation_is_linear_scaling() -> None:
    for name in ("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor"):
        assert scaling(**{name: 4}) == {"rope_type": "linear", "factor": 4.0}
    assert scaling(rotary_seq_len_interpolation_factor=1) is None
    assert scaling(position_embedding_type="yarn", seq_len_interpolation_factor=4)["factor"] == 1.0


def test_yarn_of_a_gpt_model_with_and_without_prefix() -> None:
    prefixed = {"yarn_rotary_scaling_factor": 8.0, "yarn_mscale": None, "rotary_percent": 0.5}
    found = rotary_fields({"num_layers": 2, "position_embedding_type": "yarn", **prefixed})
    assert found["rope_scaling"]["factor"] == 8.0
    assert found["rotary_percent"] == 1.0  # YarnRotaryEmbedding turns whole heads
    bare = {"rotary_scaling_factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    assert scaling(position_embedding_type="yarn", **bare)["factor"] == 16.0


def test_classes_that_know_no_scaling_of_llama_3() -> None:
    args = {"use_rope_scaling": True, "rope_scaling_factor": 32.0}
    assert scaling(**args)["factor"] == 32.0
    assert scaling(**args, position_embedding_type="mrope") is None
    assert scaling(**args, hybrid_layer_pattern="M*", position_embedding_type="rope") is None


def test_latent_attention_turns_whatever_the_embedding() -> None:
    assert position_kind({"position_embedding_type": "none", **LATENT}) == "rope"
    assert position_kind({"position_embedding_type": "none"}) == "none"
    assert position_kind({"add_position_embedding": True}) == "learned"


@pytest.mark.parametrize(
    "table",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ],
)
def test_written_scaling_is_read_back(table: dict[str, Any]) -> None:
    model = config(rope_scaling=table)
    assert lost_scaling(model) is None
    assert scaling(**rotary_args(model) | yarn_args(model)) == table


def test_scaling_that_megatron_cannot_say_is_told() -> None:
    other = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0}
    assert "low_freq_factor=2.0" in (lost_scaling(config(rope_scaling=other)) or "")
    dynamic = config(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert "'dynamic'" in (lost_scaling(dynamic) or "")
