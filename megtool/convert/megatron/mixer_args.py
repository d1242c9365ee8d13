"""Kinds of layers in Megatron's args, both ways: a GPT model's gated delta nets, and HybridModel.

HybridModel counts every branch as a layer, by a pattern of symbols; a GPT model says by
`linear_attention_freq` which of its layers have a gated delta net instead of attention. Sources:
megatron-core 0.19.2, transformer/transformer_config.py and models/hybrid; Megatron-LM's
training/arguments.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.convert.config.blocks import BLOCKS, block_args, block_fields
from megtool.convert.config.compressed import (
    COMPRESSED_ATTENTION,
    compressed_args,
    compressed_fields,
)
from megtool.convert.config.global_heads import GLOBAL_SIZE, global_args, global_fields
from megtool.convert.config.hybrid import moe_flags
from megtool.convert.config.indexer import SPARSE_ATTENTION, indexer_args, indexer_fields
from megtool.convert.config.keys import num_layers
from megtool.convert.config.scaled_layers import SIZES, scaled_args, scaled_fields
from megtool.convert.config.window_heads import (
    WINDOW_GROUPS,
    window_heads_args,
    window_heads_fields,
)
from megtool.convert.config.windows import skip_freq
from megtool.convert.megatron.hybrid_pattern import (
    OLD_PATTERN,
    PATTERN,
    attention_symbol,
    pattern_of,
    pattern_text,
)
from megtool.errors import MappingError
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from megtool.spec.layer_symbols import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    KIMI_DELTA,
    MAMBA,
    MLP,
    SHORT_CONV,
)
from megtool.spec.model_config import ModelConfig

_VARIANT = "experimental_attention_variant"
# The last is no variant of Megatron's, which refuses it; the second one of its development branch.
_MIXERS = {"gated_delta_net": DELTA_NET, "kda": KIMI_DELTA, "gated_short_conv": SHORT_CONV}
_FREQ = "linear_attention_freq"
# Megatron-Bridge's share of the layers with Mamba-2 and attention side by side.
_ALL_PARALLEL = "falconh1_ratio"
_FEEDS = (MLP, EXPERTS)
# Fields as Megatron's args call them, and Megatron's defaults.
_MAMBA_SIZES = (
    ("mamba_num_heads", "mamba_num_heads", 0),
    ("mamba_head_dim", "mamba_head_dim", 64),
    ("mamba_state_dim", "mamba_state_dim", 128),
    ("mamba_num_groups", "mamba_num_groups", 8),
)
# Of the norm in a mixer, whatever the args say of the other norms (ssm/mamba_mixer.py).
_MAMBA_EPS = 1e-5
_DELTA_SIZES = (
    ("linear_num_key_heads", "linear_num_key_heads", 16),
    ("linear_num_value_heads", "linear_num_value_heads", 32),
    ("linear_key_head_dim", "linear_key_head_dim", 128),
    ("linear_value_head_dim", "linear_value_head_dim", 128),
    ("linear_conv_kernel", "linear_conv_kernel_dim", 4),
)
_GATES = "kda_two_stage_gates"
_CONV_SIZE, _CONV_BIAS = "short_conv_kernel_dim", "short_conv_bias"


def mixer_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig that say the kinds of layers, from args; none for a plain GPT model.

    Raises:
        MappingError: a pattern that is malformed, or another variant of attention.
    """
    if args.get(BLOCKS):
        return block_fields(args)
    if args.get(WINDOW_GROUPS):
        return window_heads_fields(args)
    if args.get(GLOBAL_SIZE):
        return global_fields(args)
    if args.get(SIZES):
        return scaled_fields(args)
    pattern, out = pattern_of(args), indexer_fields(args) | compressed_fields(args)
    is_parallel = pattern is None and args.get(_ALL_PARALLEL) == 1
    if args.get("moe_latent_size"):
        out["moe_latent_size"] = int(args["moe_latent_size"])
    if pattern is not None:
        out |= {
            "num_layers": len(pattern.symbols),
            "layer_kinds": tuple(pattern.symbols),
            "moe_layer_freq": 1,
            "num_mtp_layers": pattern.depths,
        }
        if args.get("position_embedding_type") is None:
            out["position_embedding"] = "none"
        if pattern.depths:
            out["mtp_kind"] = pattern.mtp
        kinds = set(pattern.symbols + pattern.mtp)
    else:
        symbols = _linear_layers(args)
        if is_parallel:
            symbols = [MAMBA + ATTENTION] * num_layers(args)
        if symbols is None:
            return out
        moe = moe_flags(args, len(symbols))
        out["layer_kinds"] = tuple(
            s + (EXPERTS if m else MLP) for s, m in zip(symbols, moe, strict=True)
        )
        kinds = set("".join(symbols))
    if MAMBA in kinds:
        out["mamba_norm"] = args.get("rmsnorm") is not False
        out["mamba_norm_eps"] = _MAMBA_EPS
        out |= {f: int(args.get(name) or default) for f, name, default in _MAMBA_SIZES}
        if not out["mamba_num_heads"]:  # as Megatron computes it
            out["mamba_num_heads"] = 2 * int(args["hidden_size"]) // out["mamba_head_dim"]
    if KIMI_DELTA in kinds:
        if args.get("position_embedding_type") == "none":
            out["position_embedding"] = "none"  # also of the layers with latent attention
        _check_gates(args)
    if DELTA_NET in kinds or KIMI_DELTA in kinds:
        out |= {f: int(args.get(name) or default) for f, name, default in _DELTA_SIZES}
    if SHORT_CONV in kinds:
        out |= {
            "short_conv_taps": int(args.get(_CONV_SIZE) or 3),
            "short_conv_bias": bool(args.get(_CONV_BIAS)),
        }
    return out


def _check_gates(args: Mapping[str, Any]) -> None:
    """Refuse gates of Kimi delta attention that are projected at once, or bounded."""
    if args.get(_GATES) is False or args.get("kda_safe_gate"):
        raise MappingError(
            f"{_GATES} is {args.get(_GATES)!r}, kda_safe_gate {args.get('kda_safe_gate')!r}",
            hint="Kimi Linear's gates are projected in two stages, and have no bound",
            error_id="unsupported-model",
        )


def _linear_layers(args: Mapping[str, Any]) -> list[str] | None:
    """The mixer of every layer of a GPT model; None where all are attention."""
    variant = args.get(_VARIANT)
    if variant in (None, SPARSE_ATTENTION, COMPRESSED_ATTENTION):
        return None
    if (linear := _MIXERS.get(variant)) is None:
        raise MappingError(
            f"{_VARIANT} is {variant!r}",
            hint=f"known: {', '.join((*_MIXERS, SPARSE_ATTENTION, COMPRESSED_ATTENTION))}",
            error_id="unsupported-model",
        )
    layers, freq = num_layers(args), args.get(_FREQ)
    if isinstance(freq, int) and freq > 0:
        return [linear if (i + 1) % freq else ATTENTION for i in range(layers)]
    if not isinstance(freq, list | tuple) or len(freq) != layers or set(freq) - {0, 1}:
        raise MappingError(
            f"{_FREQ} is {freq!r:.60}", hint=f"a positive int, or a 0 or 1 for {layers} layers"
        )
    return [linear if f else ATTENTION for f in freq]


def mixer_args(
    config: ModelConfig, parallel: ParallelConfig, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Args from the fields that `mixer_fields` reads.

    `known` are the args that the checkpoint already had; an old name of the pattern in it is kept.
    """
    kinds = config.layer_kinds
    if own := window_heads_args(config):
        return own
    if config.layer_sizes is not None:
        if kinds is not None:
            return block_args(config, known)
        return global_args(config) or scaled_args(config)
    out = indexer_args(config) | compressed_args(config)
    if config.moe.moe_latent_size:
        out["moe_latent_size"] = config.moe.moe_latent_size
    if kinds is None:
        gone = [k for k in (PATTERN, OLD_PATTERN, _VARIANT, _FREQ) if known.get(k)]
        return dict.fromkeys(gone) | out
    joined = "".join(kinds)
    if MAMBA in joined:
        out |= {name: config.get(f) for f, name, _ in _MAMBA_SIZES}
        if not config.mamba.mamba_norm:
            out["rmsnorm"] = False
    if all(kind[:2] == MAMBA + ATTENTION and kind[2:] in _FEEDS for kind in kinds):
        out[_ALL_PARALLEL] = 1.0
    if KIMI_DELTA in joined:
        out[_GATES] = True
    if DELTA_NET in joined or KIMI_DELTA in joined:
        out |= {name: config.get(f) for f, name, _ in _DELTA_SIZES}
    if SHORT_CONV in joined:
        out |= {
            _CONV_SIZE: config.short_conv.short_conv_taps,
            _CONV_BIAS: config.short_conv.short_conv_bias,
        }
    if all(len(kind) == 1 for kind in kinds):
        has_old = bool(known.get(OLD_PATTERN)) or (OLD_PATTERN in known and PATTERN not in known)
        is_old = has_old and not known.get(PATTERN)
        name = OLD_PATTERN if is_old else PATTERN
        depths = config.mtp.num_mtp_layers
        layout = ParallelConfig() if name == OLD_PATTERN else parallel
        attention = attention_symbol(config)
        symbols = [kind.replace(ATTENTION, attention) for kind in kinds]
        further = layer_sets.mtp_branches(config).replace(ATTENTION, attention)
        out[name] = pattern_text(symbols, further, depths, layout)
        if known.get("is_hybrid_model") is not None or name == OLD_PATTERN:
            out["is_hybrid_model"] = True
        out["moe_layer_freq"] = 1
        return dict.fromkeys(k for k in (_VARIANT, _FREQ) if known.get(k)) | out
    for variant, linear in _MIXERS.items():
        if linear not in joined:
            continue
        flags = tuple(int(linear in kind) for kind in kinds)
        freq = skip_freq(flags)
        out |= {_VARIANT: variant, _FREQ: freq if isinstance(freq, int) else list(flags)}
        moe = [int(EXPERTS in kind) for kind in kinds]
        out["moe_layer_freq"] = moe if any(moe) and not all(moe) else 1
    return out | {k: None for k in (PATTERN, OLD_PATTERN) if known.get(k)}
