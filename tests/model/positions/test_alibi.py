"""Slopes of scores: those of BLOOM's and MPT's code, cut over ranks, and refused beside others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megtool.convert.megatron.args import args_from_config, config_from_args, megatron_limits
from megtool.errors import MappingError
from megtool.kernels.attention.mask import Slopes
from megtool.model.batch import Batch
from megtool.model.cache.key_span import KeySpan
from megtool.model.positions.alibi import slopes, slopes_of
from megtool.parallel.process_groups import ALONE, Group
from megtool.spec.model_config import ModelConfig
from tests.support.errors import raises

SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 24,
    "ffn_hidden_size": 8,
    "num_heads": 6,
    "num_kv_heads": 6,
    "head_dim": 4,
    "vocab_size": 5,
    "position_embedding": "alibi",
}


def test_slopes_of_eight_heads_are_those_of_the_paper() -> None:
    assert slopes(8, 8.0).tolist() == [2.0**-n for n in range(1, 9)]
    assert slopes(8, 16.0).tolist() == [4.0**-n for n in range(1, 9)]


@pytest.mark.parametrize("heads", range(1, 21))
def test_slopes_are_those_of_transformers(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    own = slopes(heads, 8.0)
    theirs = bloom._get_alibi_slopes(heads, torch.device("cpu"))
    assert float((own - theirs).abs().max()) < 1e-6
    theirs = mpt.build_mpt_alibi_tensor(heads, 2, alibi_bias_max=16)
    assert float((slopes(heads, 16.0) + theirs.view(heads, 2)[:, 0]).abs().max()) < 1e-6


def test_ranks_have_the_slopes_of_their_heads() -> None:
    config = ModelConfig.from_fields(**SIZES)
    whole = slopes_of(config, ALONE, "cpu")
    parts = [slopes_of(config, Group(ranks=(0, 1, 2), rank=r), "cpu") for r in range(3)]
    assert whole is not None
    assert torch.cat([p for p in parts if p is not None]).equal(whole)
    assert (
        slopes_of(ModelConfig.from_fields(**SIZES | {"position_embedding": "none"}), ALONE, "cpu")
        is None
    )


def test_biases_grow_with_the_distance_between_places() -> None:
    """Padding takes no place, and keys before a query have less."""
    valid = torch.tensor([[False, True, True, True]])
    span = KeySpan.fresh(Batch(tokens_BS=torch.zeros(1, 4, dtype=torch.int64), valid_BS=valid))
    bias = Slopes(torch.tensor([0.5]), span.positions_BS, span.key_positions_BL)
    found = bias.part(slice(0, 4), slice(0, 4))[0, 0]
    assert found[3].tolist() == [-1.0, -1.0, -0.5, 0.0]


@pytest.mark.parametrize(
    "other",
    [{"attn_softcap": 5.0}, {"attn_sinks": True}, {"bidirectional": True}],
    ids=str,
)
def test_what_no_model_has_beside_slopes_is_refused(other: dict[str, Any]) -> None:
    with raises(MappingError, next(iter(other)), "alibi"):
        ModelConfig.from_fields(**SIZES | other)
    with raises(MappingError, "alibi_bias_max", "positive"):
        ModelConfig.from_fields(**SIZES | {"alibi_bias_max": 0})


def test_args_of_megatron_hold_them_and_megatron_lacks_them() -> None:
    config = ModelConfig.from_fields(**SIZES | {"alibi_bias_max": 16.0})
    said = config_from_args(args_from_config(config))
    assert (said.positions.position_embedding, said.positions.alibi_bias_max) == ("alibi", 16.0)
    assert any("ALiBi" in text for text in megatron_limits(config))
    plain = args_from_config(ModelConfig.from_fields(**SIZES | {"position_embedding": "rope"}))
    assert "alibi_bias_max" not in plain
