"""Settings of routers: sums that shares are divided by, and numbers that must stay small."""

from __future__ import annotations

import pytest

from megtool.convert.config.keys import Default
from megtool.convert.config.moe import Noted, Nullable, ScoreNorm, UpTo
from megtool.convert.families.detection import family
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig

SIZES = dict(
    num_layers=2, hidden_size=32, ffn_hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=8
)


@pytest.mark.parametrize(
    ("stored", "chosen", "field"),
    [
        ({}, 2, None),
        ({"norm_topk_prob": True}, 2, None),
        ({"norm_topk_prob": False}, 2, False),
        ({"norm_topk_prob": None}, 2, False),
        ({"norm_topk_prob": True}, 1, True),
        ({"norm_topk_prob": False}, 1, None),
    ],
)
def test_scores_are_divided_by_their_sum_or_not(
    stored: dict[str, bool | None], chosen: int, field: bool | None
) -> None:
    """None is what Megatron does: dividing where there are several."""
    into = {"num_experts_per_token": chosen}
    ScoreNorm().read(stored, into)
    assert into["router_normalized"] == field
    config = ModelConfig.from_fields(
        **SIZES, vocab_size=64, num_experts_per_token=chosen, router_normalized=field
    )
    written: dict[str, bool] = {}
    ScoreNorm().write(config, written)
    assert written == {"norm_topk_prob": bool(stored.get("norm_topk_prob", True))}


def test_a_family_without_the_key_always_divides() -> None:
    config = ModelConfig.from_fields(
        **SIZES, vocab_size=64, num_experts=2, num_experts_per_token=2, router_normalized=False
    )
    with pytest.raises(MappingError, match="router_normalized"):
        ScoreNorm(None).write(config, {})


def test_a_number_that_would_count_is_refused() -> None:
    setting = UpTo("moe_norm_min", "num_experts_per_token / num_experts", "changes shares")
    fields = {"num_experts_per_token": 2, "num_experts": 8}
    assert setting.read({"moe_norm_min": 0.25}, fields) == ()
    with pytest.raises(MappingError, match="changes shares") as caught:
        setting.read({"moe_norm_min": 0.3}, fields)
    assert caught.value.error_id == "unsupported-setting"
    assert "--drop-setting moe_norm_min" in (caught.value.hint or "")


@pytest.mark.parametrize(("groups", "best"), [(0, 0), (4, 1)])
def test_one_group_is_chosen_where_there_are_groups(groups: int, best: int) -> None:
    into = {"router_num_groups": groups}
    Nullable("topk_group", "router_topk_groups", absent=1, needs="router_num_groups").read({}, into)
    assert into["router_topk_groups"] == best


def test_experts_have_a_width() -> None:
    keys = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 8, "vocab_size": 8}
    keys |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 2}
    with pytest.raises(MappingError, match="2 experts"):
        family("qwen3_moe").read_config(keys | {"moe_intermediate_size": 0})


def test_a_multiplier_is_written_as_the_float_that_gives_the_field() -> None:
    """Classes of transformers that check types refuse whole numbers there."""
    setting = Noted(
        "key_multiplier", "softmax_scale", Default("head_dim ** -0.5"), "x * head_dim ** -0.5"
    )
    for scale in (2 * 8**-0.5, 0.1):
        written: dict[str, float] = {}
        setting.write(ModelConfig.from_fields(**SIZES, vocab_size=64, softmax_scale=scale), written)
        assert written["key_multiplier"] == pytest.approx(scale * 8**0.5)
        assert type(written["key_multiplier"]) is float
