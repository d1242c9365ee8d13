"""Patterns of hybrid models that Megatron computes from shares of the layers."""

from __future__ import annotations

import pytest

from megtool.convert.megatron.hybrid_pattern import allocate_layers, pattern_of


@pytest.mark.parametrize(
    ("layers", "attention", "mlp", "symbols"),
    [  # what megatron-core 0.16.1's allocate_layers returns
        (3, 0.0, 0.0, "MMM"),
        (8, 0.125, 0.5, "M-M-*-M-"),
        (12, 0.08, 0.5, "M-M-M-*-M-M-"),
        (24, 0.2, 0.25, "MM-*MM-*MM-*MMM-*MM-*MM-"),
    ],
)
def test_layers_by_their_shares(layers: int, attention: float, mlp: float, symbols: str) -> None:
    assert allocate_layers(layers, attention, mlp) == symbols


def test_shares_in_args() -> None:
    args = {"num_layers": 8, "hybrid_attention_ratio": 0.125, "hybrid_mlp_ratio": 0.5}
    pattern = pattern_of(args | {"hybrid_override_pattern": None})
    assert pattern is not None
    assert pattern.symbols == "M-M-*-M-"
    none = {"hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0, "num_layers": 3}
    assert pattern_of(none) is None
    pure = pattern_of(none | {"is_hybrid_model": True})
    assert pure is not None
    assert pure.symbols == "MMM"
