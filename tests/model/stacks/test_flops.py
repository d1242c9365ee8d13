"""Operations are those that torch counts in a forward pass, but for masked attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from megtool.model.batch import Batch
from megtool.model.stacks.flops import training_flops
from megtool.spec.model_config import ModelConfig
from tests.support.models.tiny_decoder import SIZES, make_decoder, random_batch

LENGTH = 16
aten = torch.ops.aten
MLA: dict[str, Any] = dict(
    kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
)
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_token=2, moe_ffn_hidden_size=16, shared_ffn_hidden_size=8
)


def grouped_flop(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """Of products of rows with one of several weights each."""
    return 2 * int(rows[0]) * int(weights[-2]) * int(weights[-1])


def counted(config: ModelConfig) -> float:
    """What torch counts of products in a forward pass of a row, logits included."""
    decoder = make_decoder(config)

    def attention_flop(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        """Of attention on a CPU, without what values are filled up with there."""
        size = config.attention.v_head_dim if config.latent.kv_lora_rank else value[-1]
        return int(sdpa_flop_count(query, key, (*value[:-1], size)))

    further: Any = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flop,
        aten._grouped_mm: grouped_flop,
    }
    with FlopCounterMode(display=False, custom_mapping=further) as counter, torch.no_grad():
        decoder(Batch(tokens_BS=random_batch(1, LENGTH)))
    return float(counter.get_total_flops())


@pytest.mark.parametrize(
    "more",
    [{}, {"tied_embeddings": True}, {"gated": False}, EXPERTS, MLA, {**MLA, **EXPERTS}],
    ids=["grouped", "tied", "plain MLP", "experts", "latent", "latent and experts"],
)
def test_products_are_those_that_torch_counts(more: dict[str, Any]) -> None:
    config = ModelConfig.from_fields(**SIZES | more)
    flops = training_flops(config, LENGTH)
    assert flops is not None
    width = sum(MLA[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    pair = (
        2
        * config.attention.num_heads
        * (width if more.get("kv_lora_rank") else 2 * config.attention.head_dim)
    )
    masked = config.num_layers * pair * LENGTH * (LENGTH - 1) / 2  # which torch computes, too
    assert flops / 3 + masked == counted(config)


@pytest.mark.parametrize(("window", "pairs"), [(0, 136), (4, 58), (16, 136), (1, 16)])
def test_attention_counts_the_keys_of_each_token(window: int, pairs: int) -> None:
    """Of a row of 16: 1 + 2 + ... + 16 pairs, or 1 + 2 + 3 and then four each."""
    config = ModelConfig.from_fields(**SIZES)
    without = training_flops(config.with_fields(num_heads=4, num_layers=4), LENGTH)
    flops = training_flops(config.with_fields(window_size=window), LENGTH)
    assert flops is not None
    assert without is not None
    each = 3 * config.num_layers * 2 * config.attention.num_heads * 2 * config.attention.head_dim
    assert flops - without == (pairs - 136) * each


def test_a_model_of_an_encoder_and_a_decoder_is_not_counted() -> None:
    assert training_flops(ModelConfig.from_fields(**SIZES, num_decoder_layers=2), LENGTH) is None
