"""Names and row orders of Megatron before its core."""

from __future__ import annotations

import pytest
import torch

from megtool.convert.megatron.pre_core import core_names, order_qkv_rows

HEADS, DIM = 3, 4


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3])
def test_rows_are_those_of_megatrons_own_reordering(version: float) -> None:
    # `fix_query_key_value_ordering` turns what an old file has into [heads, 3, head_dim].
    core = torch.arange(2 * HEADS * 3 * DIM)  # of two ranks
    mine = core[HEADS * 3 * DIM :]
    stored = mine.reshape(HEADS, 3, DIM)
    if version < 1:
        stored = stored.transpose(0, 1)
    elif version < 2:
        stored = stored.transpose(1, 2)
    boxes = order_qkv_rows((((HEADS * 3 * DIM,), (2 * HEADS * 3 * DIM,)),), version, DIM)
    read = torch.cat([core[low:high] for (low,), (high,) in boxes])
    assert torch.equal(read, stored.reshape(-1))


def test_rows_of_no_whole_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="10 rows"):
        order_qkv_rows((((0, 0), (10, 8)),), 0, DIM)


def test_names_of_nested_modules() -> None:
    names = {
        "language_model.embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
        "language_model.encoder.layers.1.attention.query_key_value.bias": (
            "decoder.layers.1.self_attention.linear_qkv.bias"
        ),
        "language_model.transformer.final_layernorm.weight": "decoder.final_layernorm.weight",
        "word_embeddings_for_head.weight": "output_layer.weight",
    }
    assert core_names(names) == names
