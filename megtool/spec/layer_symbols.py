"""Symbols of the branches of a layer."""

from __future__ import annotations

ATTENTION, MAMBA, DELTA_NET, KIMI_DELTA, MLP, EXPERTS = HYBRID_SYMBOLS = (
    *("*", "M", "G", "K"),
    *("-", "E"),
)
"""Branches of a layer, as Megatron's HybridModel calls them."""
SHORT_CONV = "c"
"""A gated short convolution, which Megatron does not have."""
LAYER_SYMBOLS = (*HYBRID_SYMBOLS, SHORT_CONV)
MIXERS = ATTENTION + MAMBA + DELTA_NET + KIMI_DELTA + SHORT_CONV
