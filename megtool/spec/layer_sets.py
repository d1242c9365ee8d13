"""Which layers of a model have which branches, those of multi-token prediction among them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from megtool.spec.layer_symbols import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    KIMI_DELTA,
    MAMBA,
    MIXERS,
    MLP,
    SHORT_CONV,
)
from megtool.spec.model_config import PART_OF, ModelConfig
from megtool.spec.sparse_attention import OVERLAP_RATIO


def attn_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers that have attention."""
    return _layers_with(ATTENTION, config)


def mamba_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers that have a Mamba-2 mixer."""
    return _layers_with(MAMBA, config)


def delta_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers that have a gated delta net."""
    return _layers_with(DELTA_NET, config)


def kda_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers that have Kimi delta attention."""
    return _layers_with(KIMI_DELTA, config)


def conv_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers that have a gated short convolution."""
    return _layers_with(SHORT_CONV, config)


def mixer_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers whose first branch mixes tokens: attention, Mamba-2, a delta
    rule, a short convolution."""
    return _layers_with(MIXERS, config)


def moe_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers whose MLP is a mixture of experts."""
    if not config.moe.num_experts:
        return frozenset()
    if config.layer_kinds is not None:
        return _layers_with(EXPERTS, config)
    freq = config.moe.moe_layer_freq
    if isinstance(freq, int):
        return frozenset(range(0, config.num_layers, freq))
    return frozenset(i for i, is_moe in enumerate(freq) if is_moe)


def dense_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers that have an MLP."""
    if config.layer_kinds is None:
        having_experts = moe_layers(config)
        everywhere = _find_layers(None, config.num_layers, ATTENTION)
        return everywhere - having_experts if having_experts else everywhere
    return _layers_with(MLP, config)


def hash_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers in which a table chooses the experts."""
    return frozenset(range(config.router.num_hash_layers))


def parallel_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers that mix tokens in several branches, side by side."""
    return _find_parallel(config.layer_kinds)


def sink_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers whose attention may have sinks."""
    having = attn_layers(config)
    if not config.window.window_sinks:
        return having
    return frozenset(i for i in having if config.window.has_window(i))


def tied_value_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers whose values are their keys."""
    return frozenset(i for i, is_tied in enumerate(config.attention.tied_values or ()) if is_tied)


def shared_kv_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers that attend to keys and values of an earlier one."""
    return frozenset(i for i, is_shared in enumerate(config.attention.shared_kv or ()) if is_shared)


def index_layers(config: ModelConfig) -> frozenset[int]:
    """Return the indices of the layers with an indexer of the tokens that attention is limited
    to."""
    compression = config.compression
    if not config.indexer.index_num_heads:
        return frozenset()
    if compression.compress_ratios is not None:
        return frozenset(i for i, r in enumerate(compression.compress_ratios) if r == OVERLAP_RATIO)
    shared = config.indexer.shared_index_layers or ()
    return attn_layers(config) - {i for i, is_shared in enumerate(shared) if is_shared}


def index_source(config: ModelConfig, layer: int) -> int:
    """Return the layer whose indexer chooses the tokens that a layer attends to."""
    return max(i for i in index_layers(config) if i <= layer)


def has_side_inputs(config: ModelConfig) -> bool:
    """Return whether layers read what earlier parts of a pass have left beside the residual: keys
    and values of another layer, or vectors from an embedding of their own."""
    return bool(shared_kv_layers(config) or config.residual.layer_input_size)


def is_homogeneous(config: ModelConfig) -> bool:
    """Return whether Megatron stacks the layers on one axis.

    They hold the same tensors then, and no list says so layer by layer (with a list, even of equal
    entries, Megatron writes one key per layer).
    """
    if config.layer_kinds is not None or config.layer_sizes is not None:
        return False
    if not config.norms.first_attn_norm or shared_kv_layers(config):
        return False
    if config.compression.is_compressed or config.router.num_hash_layers:
        return False
    listed = isinstance(config.moe.moe_layer_freq, tuple) and bool(config.moe.num_experts)
    return not listed and len(moe_layers(config)) in (0, config.num_layers)


def mtp_size_layer(config: ModelConfig) -> int:
    """Return the layer whose sizes those of multi-token prediction have, where they vary."""
    if not config.mtp.mtp_window:
        return config.num_layers - 1
    windowed = (i for i in range(config.num_layers) if config.window.has_window(i))
    return next(windowed, config.num_layers - 1)


def mtp_branches(config: ModelConfig) -> str:
    """Return the branches of a layer of multi-token prediction, as in `layer_kinds`."""
    if config.mtp.mtp_kind:
        return config.mtp.mtp_kind
    if config.layer_kinds is not None:
        return config.layer_kinds[-1]
    return ATTENTION + (EXPERTS if config.num_layers - 1 in moe_layers(config) else MLP)


def num_mtp_branches(config: ModelConfig) -> int:
    """Return how many branches a layer of multi-token prediction has."""
    return len(mtp_branches(config))


def has_mtp_attn(config: ModelConfig) -> bool:
    """Return whether layers of multi-token prediction have attention."""
    return _mtp_has(ATTENTION, config)


def _mtp_has(symbols: str, config: ModelConfig) -> bool:
    return bool(set(_mtp_layer(config)) & set(symbols))


def _mtp_layer(config: ModelConfig) -> str:
    """The branches of a layer of multi-token prediction without numbered layers inside."""
    return "" if config.mtp.num_mtp_inner else mtp_branches(config)


def _mtp_attn_if(
    holds: Callable[[ModelConfig], object],
) -> Callable[[ModelConfig], bool]:
    return lambda config: has_mtp_attn(config) and bool(holds(config))


def _layers_with(symbols: str, config: ModelConfig) -> frozenset[int]:
    return _find_layers(config.layer_kinds, config.num_layers, symbols)


@lru_cache(maxsize=64)
def _find_layers(kinds: tuple[str, ...] | None, num_layers: int, symbols: str) -> frozenset[int]:
    """The layers that have a branch of one of the symbols; without kinds all have attention."""
    if kinds is None:
        return frozenset(range(num_layers) if ATTENTION in symbols else ())
    return frozenset(i for i, kind in enumerate(kinds) if set(kind) & set(symbols))


@lru_cache(maxsize=64)
def _find_parallel(kinds: tuple[str, ...] | None) -> frozenset[int]:
    """The layers that have more than one branch which mixes tokens."""
    return frozenset(i for i, kind in enumerate(kinds or ()) if len(set(kind) & set(MIXERS)) > 1)


_SETS: tuple[Callable[[ModelConfig], Any], ...] = (
    *(attn_layers, mamba_layers, delta_layers, kda_layers, conv_layers, mixer_layers),
    *(moe_layers, dense_layers, hash_layers, parallel_layers, sink_layers),
    *(tied_value_layers, shared_kv_layers, index_layers, has_side_inputs, is_homogeneous),
    *(mtp_size_layer, mtp_branches, num_mtp_branches, has_mtp_attn),
)
DERIVED: dict[str, Callable[[ModelConfig], Any]] = {
    **{function.__name__: function for function in _SETS},
    "has_mtp_sink": _mtp_attn_if(lambda c: c.mtp.mtp_window or not c.window.window_sinks),
    "has_mtp_index": _mtp_attn_if(
        lambda c: c.indexer.index_num_heads and not c.compression.is_compressed
    ),
    "has_mtp_tied_value": _mtp_attn_if(lambda c: c.num_layers - 1 in tied_value_layers(c)),
    "has_mtp_shared_kv": _mtp_attn_if(lambda c: c.num_layers - 1 in shared_kv_layers(c)),
    "has_mtp_heavy": lambda _: False,  # such layers compress no keys
    "has_mtp_hash": lambda _: False,  # and no table chooses their experts
    "has_mtp_mamba": partial(_mtp_has, MAMBA),
    "has_mtp_delta": partial(_mtp_has, DELTA_NET),
    "has_mtp_kda": partial(_mtp_has, KIMI_DELTA),
    "has_mtp_conv": partial(_mtp_has, SHORT_CONV),
    "has_mtp_mixer": partial(_mtp_has, MIXERS),
    "has_mtp_parallel": lambda c: bool(_find_parallel((_mtp_layer(c),))),
    "has_mtp_dense": partial(_mtp_has, MLP),
    "has_mtp_moe": lambda c: _mtp_has(EXPERTS, c) and bool(c.moe.num_experts),
}
"""What can be said of a configuration by name, beside its fields (`has_mtp_X` says of the layers of
multi-token prediction what `X_layers` says of the others)."""


def knows(name: str) -> bool:
    """Return whether there is a field, or something derived of fields, of this name."""
    return name in PART_OF or name in DERIVED


def value_of(config: ModelConfig, name: str) -> Any:
    """Return the value of a field, or what is derived of fields, by name.

    Raises:
        KeyError: there is neither.
    """
    return config.get(name) if name in PART_OF else DERIVED[name](config)
