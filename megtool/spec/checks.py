"""Checks of a model's configuration: numbers, sizes by layer, rotary scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megtool.errors import MappingError

if TYPE_CHECKING:
    from megtool.spec.model_config import ModelConfig

OVERLAP_RATIO = 4
"""Of layers whose compressed keys overlap, and are chosen by an indexer."""

VARYING = ("num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size")
"""Fields that `layer_sizes` may have."""

_POSITIVE_OR_NONE = ("softmax_scale", "rope_local_base")  # or None
_NOT_NEGATIVE = ("attn_softcap", "logit_softcap", "activation_limit", "router_jitter")
_FINITE = (
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "router_scaling",
    "glu_offset",
    "attn_temperature_scale",
    "attn_value_scale",
    "mamba_out_scale",
    "attn_in_scale",
    "attn_out_scale",
    "mlp_gate_scale",
    "mlp_out_scale",
)


_POSITIVE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
)
_NATURAL = (
    "window_size",
    "num_token_types",
    "num_labels",
    "position_offset",
    "num_decoder_layers",
    "relative_num_buckets",
    "relative_max_distance",
    "num_experts",
    "num_experts_per_token",
    "moe_ffn_hidden_size",
    "shared_ffn_hidden_size",
    "moe_latent_size",
    "layer_input_size",
    "router_num_groups",
    "router_topk_groups",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_num_heads",
    "index_head_dim",
    "index_topk",
    "out_groups",
    "out_lora_rank",
    "hyper_streams",
    "hyper_iterations",
    "num_hash_layers",
    "num_mtp_layers",
    "mamba_num_heads",
    "mamba_head_dim",
    "mamba_state_dim",
    "mamba_num_groups",
    "mamba_conv_kernel",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel",
    "short_conv_taps",
    "attn_chunk_size",
    "attn_temperature_floor",
    "router_group_best",
)
_FLAGS = (
    "tied_embeddings",
    "gated",
    "qkv_bias",
    "attn_out_bias",
    "mlp_bias",
    "qk_norm",
    "qk_norm_rotated",
    "relative_per_layer",
    "attn_output_gate",
    "router_pre_softmax",
    "router_bias",
    "router_expert_bias",
    "shared_expert_gate",
    "attn_sinks",
    "window_sinks",
    "mtp_window",
    "value_norm",
    "layer_scalar",
    "expert_norms",
    "router_norm",
    "rope_interleaved",
    "rope_reversed",
    "index_interleaved",
    "zero_centered_norm",
    "bidirectional",
    "embedding_norm",
    "first_attn_norm",
    "final_norm",
    "norms_after_add",
    "masked_head",
    "head_dense_bias",
    "head_bias",
    "score_dense",
    "score_bias",
    "norm_bias",
    "norm_weight",
    "pre_norms",
    "shared_norm",
    "mtp_hidden_first",
    "parallel_residual",
    "qk_l2_norm",
    "post_norms",
    "attn_temperature_rotated",
    "mamba_norm",
    "mamba_norm_first",
    "short_conv_bias",
    "router_scales_input",
    "router_fp32",
)


def check_fields(config: ModelConfig) -> None:
    """Refuse numbers that are none, or too small, and flags that are no bools.

    Raises:
        MappingError: the message names the field.
    """
    for name in _POSITIVE:
        check_int(name, getattr(config, name), 1)
    for name in _NATURAL:
        check_int(name, getattr(config, name), 0)
    for name in _FLAGS:
        if not isinstance(getattr(config, name), bool):
            raise MappingError(f"{name} is {getattr(config, name)!r}", hint="true or false")


def check_int(name: str, value: object, least: int) -> None:
    """Refuse what is no integer, or a smaller one.

    Raises:
        MappingError: the message names the field.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MappingError(f"{name} is {value!r}", hint=f"an integer of at least {least}")


def check_numbers(config: ModelConfig) -> None:
    """Refuse scales, caps and limits that no forward pass can use; `config` is a ModelConfig.

    Raises:
        MappingError: the message names the field.
    """
    for name in _POSITIVE_OR_NONE:
        value = getattr(config, name)
        if value is not None and not (_is_number(value) and value > 0):
            raise MappingError(f"{name} is {value!r}", hint="a positive number, or nothing")
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if not (_is_number(value) and value >= 0):
            raise MappingError(f"{name} is {value!r}", hint="a positive number, or 0 for none")
    for name in _FINITE:
        if not _is_number(value := getattr(config, name)):
            raise MappingError(f"{name} is {value!r}", hint="a finite number")
    parts = config.mamba_in_scales
    if parts is not None and (len(parts) != 5 or not all(map(_is_number, parts))):
        raise MappingError(
            f"mamba_in_scales is {str(parts)[:80]}", hint="a finite number for z, x, B, C and dt"
        )
    limit = config.mamba_step_limit
    if limit is not None and not (len(limit) == 2 and 0 <= limit[0] < limit[1]):
        raise MappingError(
            f"mamba_step_limit is {str(limit)[:80]}", hint="the least step and a larger one"
        )


def check_alibi(config: ModelConfig) -> None:
    """Refuse slopes of scores beside what no model has with them.

    Raises:
        MappingError: the message names the field.
    """
    if config.position_embedding != "alibi":
        return
    others = ("kv_lora_rank", "attn_sinks", "attn_softcap", "compress_ratios", "bidirectional")
    for name in others:
        if value := getattr(config, name):
            raise MappingError(
                f"{name} is {value!r} in a model whose scores have a slope (alibi)",
                hint="such slopes are added to plain scores of tokens before",
                error_id="unsupported-model",
            )


def check_sizes(config: ModelConfig) -> None:
    """Refuse sizes by layer that are not one positive number for each, or that do not fit.

    Raises:
        MappingError: the message names the field.
    """
    if (sizes := config.layer_sizes) is None:
        return
    if not isinstance(sizes, Mapping) or set(sizes) - set(VARYING):
        raise MappingError(
            f"layer_sizes is {str(sizes)[:80]}",
            hint=f"numbers by layer, of {', '.join(VARYING)}",
        )
    if (config.num_mtp_layers and not config.mtp_window) or config.kv_lora_rank:
        raise MappingError(
            "sizes vary by layer in a model with latent attention or multi-token prediction",
            hint="layers of multi-token prediction may have those of layers with a window",
            error_id="unsupported-model",
        )
    for name, numbers in sizes.items():
        if not isinstance(numbers, tuple) or len(numbers) != config.num_layers:
            raise MappingError(
                f"{name} of layer_sizes is {str(numbers)[:80]}",
                hint=f"one number for each of {config.num_layers} layers",
            )
        for number in numbers:
            check_int(f"{name} of a layer", number, 1)
        if max(numbers) > getattr(config, name):
            raise MappingError(f"a layer has {name}={max(numbers)}, and the model says less")


def check_indexer(config: ModelConfig, counts: tuple[int, ...]) -> None:
    """Refuse indexers without sizes, and layers that share a choice which nobody has made.

    Raises:
        MappingError: the message names the field.
    """
    shared = config.shared_index_layers
    if shared is not None and (not are_flags(shared, counts) or shared[0]):
        raise MappingError(
            f"shared_index_layers is {str(shared)[:80]}",
            hint=f"one 0 or 1 for each of {config.num_layers} layers, and 0 for the first",
        )
    if not config.index_num_heads:
        return
    needed = ("q_lora_rank", "index_topk")
    for name in needed if config.is_compressed else ("kv_lora_rank", *needed):
        if not getattr(config, name):
            raise MappingError(
                f"{name} is 0, but there are {config.index_num_heads} heads of an indexer",
                hint="an indexer reads the compressed queries of latent attention",
            )
    turning = config.qk_rope_head_dim
    if config.is_compressed:
        turning = int(config.head_dim * config.rotary_percent)
    if config.index_head_dim < turning:
        raise MappingError(
            f"index_head_dim is {config.index_head_dim}, less than the {turning} elements "
            "that turn",
            hint="at least qk_rope_head_dim",
        )


def check_shared_kv(config: ModelConfig, counts: tuple[int, ...]) -> None:
    """Refuse layers that share keys and values which no earlier layer has.

    Raises:
        MappingError: the message names the field.
    """
    shared = config.shared_kv
    if shared is None:
        return
    if not are_flags(shared, counts) or shared[0]:
        raise MappingError(
            f"shared_kv is {str(shared)[:80]}",
            hint=f"one 0 or 1 for each of {config.num_layers} layers, and 0 for the first",
        )
    if any(shared) and (config.kv_lora_rank or config.num_mtp_layers or config.attn_output_gate):
        raise MappingError(
            "layers share keys and values in a model with latent or gated attention, or with "
            "multi-token prediction",
            hint="such a model has none of these",
            error_id="unsupported-model",
        )


def check_compressed(config: ModelConfig) -> None:
    """Refuse compressed keys, residuals side by side, and tables of experts that cannot be.

    Raises:
        MappingError: the message names the field.
    """
    if not _is_number(config.hyper_eps) or config.hyper_eps < 0:
        raise MappingError(f"hyper_eps is {config.hyper_eps!r}", hint="a small positive number")
    if config.num_hash_layers > (config.num_layers if config.num_experts else 0):
        raise MappingError(
            f"num_hash_layers is {config.num_hash_layers}, of {config.num_layers} layers",
            hint="a table of experts is for layers with experts",
        )
    if config.hyper_streams and not config.hyper_iterations:
        raise MappingError("hyper_iterations is 0", hint="a positive integer")
    ratios = config.compress_ratios
    if ratios is None:
        return
    if not _is_list(ratios) or len(ratios) != config.num_layers:
        raise MappingError(
            f"compress_ratios is {str(ratios)[:80]}",
            hint=f"one number for each of {config.num_layers} layers",
        )
    for ratio in ratios:
        check_int("compress_ratios of a layer", ratio, 0)
    if len(heavy := sorted({r for r in ratios if r not in (0, OVERLAP_RATIO)})) > 1:
        raise MappingError(
            f"compress_ratios has {heavy}",
            hint=f"0, {OVERLAP_RATIO}, and one other number",
            error_id="unsupported-model",
        )
    for name in ("q_lora_rank", "out_groups", "out_lora_rank", "window_size"):
        if not getattr(config, name):
            raise MappingError(f"{name} is 0, but there are compress_ratios", hint="more than 0")
    if OVERLAP_RATIO in ratios and not config.index_num_heads:
        raise MappingError(
            f"index_num_heads is 0, but layers compress every {OVERLAP_RATIO} tokens",
            hint="such layers choose by an indexer among what they attend to",
        )
    if config.num_kv_heads != 1 or config.num_heads % config.out_groups:
        raise MappingError(
            f"num_kv_heads is {config.num_kv_heads}, out_groups {config.out_groups} of "
            f"{config.num_heads} heads",
            hint="one head of keys and values, and equal groups",
        )
    if not _is_number(config.compress_rope_base) or config.compress_rope_base <= 0:
        raise MappingError(
            f"compress_rope_base is {config.compress_rope_base!r}", hint="a positive number"
        )


def check_rope_scaling(scaling: Mapping[str, Any] | None, rotary_size: int) -> None:
    """Refuse factors that are no positive numbers, or not one for each of `rotary_size / 2` pairs.

    A factor of None is left to be worked out from the numbers of positions.

    Raises:
        MappingError: the message names the field and the key in it.
    """
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        raise MappingError(f"rope_scaling is {scaling!r}", hint="a table of a kind and its numbers")
    factor = scaling.get("factor")
    if factor is not None and not (_is_number(factor) and factor > 0):
        raise MappingError(f"rope_scaling has the factor {factor!r}", hint="a positive number")
    for name in ("short_factor", "long_factor"):
        factors = scaling.get(name)
        if factors is None:
            continue
        if not _is_list(factors) or not all(_is_number(f) and f > 0 for f in factors):
            raise MappingError(
                f"{name} of rope_scaling is {str(factors)[:80]}", hint="a list of positive numbers"
            )
        if len(factors) != rotary_size // 2:
            raise MappingError(
                f"{name} of rope_scaling has {len(factors)} numbers",
                hint=f"{rotary_size // 2}: one for each pair of the {rotary_size} elements of a "
                "head that turn",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def are_flags(value: object, counts: tuple[int, ...]) -> bool:
    """Zeros and ones (or false and true), as many as one of `counts`."""
    return isinstance(value, Sequence) and len(value) in counts and all(v in (0, 1) for v in value)


def check_layers(config: ModelConfig) -> None:
    """Refuse lists that are not one flag for each layer, and layers counted in steps of none.

    Layers of multi-token prediction may have flags, too.

    Raises:
        MappingError: the message names the field.
    """
    counts = (config.num_layers, config.num_layers + config.num_mtp_layers)
    skip, without = config.window_skip_freq, config.no_rope_layers
    flags = f"one 0 or 1 for each of {config.num_layers} layers"
    is_step = isinstance(skip, int) and not isinstance(skip, bool) and skip > 0
    if skip is not None and not is_step and not are_flags(skip, counts):
        raise MappingError(f"window_skip_freq is {skip!r}", hint=f"a positive int, or {flags}")
    if without is not None and not are_flags(without, counts):
        raise MappingError(f"no_rope_layers is {without!r}", hint=flags)
    if config.tied_values is not None and not are_flags(config.tied_values, counts):
        raise MappingError(f"tied_values is {config.tied_values!r}", hint=flags)
    check_shared_kv(config, counts)
    check_sizes(config)
    check_indexer(config, counts)


def check_kinds(
    config: ModelConfig, symbols: Sequence[str], sizes_of: Mapping[str, Sequence[str]]
) -> None:
    """Refuse kinds of layers that are unknown, not one for each, or lack their sizes.

    Raises:
        MappingError: the message names the field.
    """
    kinds, mtp = config.layer_kinds, config.mtp_kind
    if not isinstance(mtp, str) or set(mtp) - set(symbols):
        known = " ".join(symbols)
        raise MappingError(f"mtp_kind is {mtp!r:.40}", hint=f"branches in order, of {known}")
    if kinds is None:
        return
    known = " ".join(symbols)
    if len(kinds) != config.num_layers or not all(
        isinstance(k, str) and (k or config.layer_sizes is not None) and set(k) <= set(symbols)
        for k in kinds
    ):
        raise MappingError(
            f"layer_kinds is {str(kinds)[:80]}",
            hint=f"the branches of each of {config.num_layers} layers, of {known}",
        )
    joined = "".join(kinds)
    if {"G", "K"} <= set(joined + mtp):
        raise MappingError(
            "layers have gated delta nets and Kimi delta attention, whose sizes are one set",
            hint="a model has one of the two",
            error_id="unsupported-model",
        )
    heads = (config.linear_num_key_heads, config.linear_num_value_heads)
    if "K" in joined + mtp and heads[0] != heads[1]:
        raise MappingError(
            f"Kimi delta attention has {heads[0]} heads of keys and {heads[1]} of values",
            hint="as many of both",
            error_id="unsupported-model",
        )
    for symbol, names in sizes_of.items():
        lacking = [n for n in names if not getattr(config, n)]
        if symbol in joined and lacking:
            raise MappingError(
                f"{lacking[0]} is 0, but layers of the kind {symbol!r} need it",
                hint="layer_kinds and the sizes of its layers belong together",
            )
