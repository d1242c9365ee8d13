"""Positions in Megatron's args, both ways: kinds, and scalings of rotary embedding.

Sources: megatron-core 0.16.1 (`GPTModel`, `MambaModel`, `RotaryEmbedding`, `YarnRotaryEmbedding`,
`MultiLatentAttention`) and 0.19.2, whose parser says YaRN's factor and temperatures of a GPT model
without a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megtool.convert.config.keys import num_layers
from megtool.convert.megatron.hybrid_pattern import PATTERN, pattern_of
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

POSITION_TYPES = {
    "learned": "learned_absolute",
    "rope": "rope",
    "relative": "relative",
    "alibi": "alibi",  # as Megatron-DeepSpeed has it
    "none": "none",
}
INTERPOLATION = ("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor")
"""The arg of Megatron-LM, and the name that Megatron-Bridge and GPTModel have for it."""

# Llama 3's numbers, which Megatron fixes in code.
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Keys of a rotary scaling of type `yarn`, as Megatron's args call them with latent attention and
# without, and what Megatron takes where nothing is said.
YARN = (
    ("factor", "rotary_scaling_factor", 1.0),
    ("original_max_position_embeddings", "original_max_position_embeddings", 4096),
    ("beta_fast", "beta_fast", 32.0),
    ("beta_slow", "beta_slow", 1.0),
    ("mscale", "mscale", 1.0),
    ("mscale_all_dim", "mscale_all_dim", 0.0),
)
ROUND = ("truncate", "yarn_correction_range_round_to_int")
_WITHOUT_PREFIX = ("rotary_scaling_factor", "mscale", "mscale_all_dim")


def position_kind(args: Mapping[str, Any]) -> str:
    """Return `position_embedding` for args, which latent attention does without.

    Args older than the choice have a flag for learned positions.
    """
    declared = args.get("position_embedding_type")
    if declared is None:
        is_learned = args.get("add_position_embedding") and not args.get(
            "use_rotary_position_embeddings"
        )
        declared = "learned_absolute" if is_learned else "rope"
    if args.get("multi_latent_attention"):
        return "rope"
    if declared in ("yarn", "mrope"):
        return "rope" if _rotates(declared, args) else "none"
    return next((ours for ours, name in POSITION_TYPES.items() if name == declared), str(declared))


def _rotates(kind: str, args: Mapping[str, Any]) -> bool:
    """Return whether the class has this kind of rotation, and not none: HybridModel knows no
    `mrope`, and MambaModel, as it was called under the older names of a pattern, no YaRN either."""
    return pattern_of(args) is None or (kind == "yarn" and bool(args.get(PATTERN)))


def rotary_fields(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary embedding that args say.

    Megatron's classes look at some args alone: YaRN turns whole heads and knows no interpolation,
    `mrope` and hybrid models know no scaling of Llama 3's, and Megatron-LM builds the latter
    without interpolation (Megatron-Bridge, which has another name for it, with).
    """
    out: dict[str, Any] = {
        "rotary_percent": float(_known(args, "rotary_percent", 1.0)),
        "rope_base": float(_known(args, "rotary_base", 10000)),
        "rope_interleaved": bool(_known(args, "rotary_interleaved", False)),
        "rope_scaling": None,
        "no_rope_layers": _no_rope(args),
    }
    kind = args.get("position_embedding_type")
    if args.get("multi_latent_attention"):
        return out | _latent_rotation(args) | {"no_rope_layers": None}
    if kind == "yarn":
        return out | {"rotary_percent": 1.0, "rope_scaling": _yarn(args, "yarn_")}
    is_hybrid = pattern_of(args) is not None
    factor = interpolation({**args, INTERPOLATION[0]: None} if is_hybrid else args)
    if is_llama3(args) and kind != "mrope" and not is_hybrid:
        scale = float(_known(args, "rope_scaling_factor", 8.0))
        out["rope_scaling"] = {"rope_type": "llama3", "factor": scale, **LLAMA3}
    elif factor is not None:
        out["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return out


def is_llama3(args: Mapping[str, Any]) -> bool:
    """Return whether args ask for Llama 3's scaling."""
    return bool(args.get("use_rope_scaling"))


def interpolation(args: Mapping[str, Any]) -> float | None:
    """Return the factor that positions are divided by; None where they are not."""
    value = next((args[name] for name in INTERPOLATION if args.get(name) is not None), None)
    return None if value is None or value == 1 else float(value)


def rotary_args(config: ModelConfig) -> dict[str, Any]:
    """Return the args of positions, all but those of latent attention's own rotation."""
    positions = config.positions
    scaling = positions.rope_scaling or {}
    kind = scaling.get("rope_type")
    linear = float(scaling["factor"]) if kind == "linear" and scaling.get("factor") else None
    out: dict[str, Any] = {
        "position_embedding_type": POSITION_TYPES[positions.position_embedding],
        "add_position_embedding": positions.position_embedding == "learned",
        "use_rotary_position_embeddings": positions.position_embedding == "rope",
        "rotary_base": _whole(positions.rope_base),
        "rotary_percent": positions.rotary_percent,
        "rotary_interleaved": positions.rope_interleaved,
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": scaling.get("factor", 8.0) if kind == "llama3" else 8.0,
        **dict.fromkeys(INTERPOLATION, linear),
        "no_rope_freq": list(positions.no_rope_layers) if positions.no_rope_layers else None,
    }
    if positions.position_embedding == "alibi":  # an arg of our own, which Megatron has none for
        out["alibi_bias_max"] = positions.alibi_bias_max
    return out


def yarn_args(config: ModelConfig) -> dict[str, Any]:
    """Return the args of YaRN; none for other scalings."""
    scaling = config.positions.rope_scaling
    if scaling is None or not is_yarn(config):
        return {}
    is_latent = bool(config.latent.kv_lora_rank)
    prefix = "" if is_latent else "yarn_"
    out = {prefix + name: scaling.get(ours, default) for ours, name, default in YARN}
    if not is_latent:
        absent = {f"yarn_{k}": None for k in ("mscale", "mscale_all_dim") if k not in scaling}
        out |= absent | {
            "position_embedding_type": "yarn",
            ROUND[1]: scaling.get(ROUND[0], True),
            "rotary_scaling_factor": out["yarn_rotary_scaling_factor"],
        }
        out |= {k: scaling[k] for k in ("mscale", "mscale_all_dim") if k in scaling}
    return out


def is_yarn(config: ModelConfig) -> bool:
    """Return whether the rotary scaling is YaRN's, which Megatron's args can express."""
    scaling = config.positions.rope_scaling
    return scaling is not None and scaling.get("rope_type") == "yarn"


def lost_scaling(config: ModelConfig) -> str | None:
    """Return what Megatron's args cannot say of the rotary scaling, as a sentence."""
    scaling = config.positions.rope_scaling
    if scaling is None:
        return None
    kind = scaling.get("rope_type")
    if kind == "llama3":
        other = {k: scaling[k] for k, v in LLAMA3.items() if scaling.get(k, v) != v}
        if other:
            numbers = ", ".join(f"{k}={v}" for k, v in other.items())
            return f"rotary scaling of type 'llama3' with {numbers}: Megatron fixes these numbers"
        return None
    if kind == "linear" and layer_sets.mamba_layers(config):
        return "rotary scaling of type 'linear': Megatron-LM builds hybrid models without it"
    if kind in ("yarn", "linear"):
        return None
    return f"rotary scaling of type {kind!r} has to be set by hand in Megatron"


def _latent_rotation(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotation of latent attention, which has args of its own."""
    out: dict[str, Any] = {"rope_interleaved": bool(_known(args, "rotary_interleaved", False))}
    factor = float(_known(args, "rotary_scaling_factor", 1.0))
    if _known(args, "rope_type", "yarn") == "yarn":
        return out | {
            "rotary_percent": 1.0,
            "rope_scaling": _yarn(args, "") if factor != 1 else None,
        }
    weight = float(_known(args, "mscale_all_dim", 0.0))
    if factor > 1 and weight:  # scores have YaRN's temperature without its rotation
        size = int(_known(args, "qk_head_dim", 128)) + int(_known(args, "qk_pos_emb_head_dim", 64))
        out["softmax_scale"] = _temperature(factor, weight) ** 2 / math.sqrt(size)
    return out


def _yarn(args: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return a scaling by transformers' names; what is not said has Megatron's default."""
    out: dict[str, Any] = {"rope_type": "yarn"}
    for ours, name, default in YARN:
        value = args.get(prefix + name)
        if value is None and prefix and name in _WITHOUT_PREFIX and prefix + name not in args:
            value = args.get(name)
        if value is None and ours not in ("mscale", "mscale_all_dim"):
            value = default
        if value is not None:
            out[ours] = value
    if args.get(ROUND[1]) is not None:
        out[ROUND[0]] = args[ROUND[1]]
    weights = (out.get("mscale"), out.get("mscale_all_dim"))
    if None not in weights and not all(weights):  # transformers then ignores the other one
        first, second = (_temperature(out["factor"], float(w or 0)) for w in weights)
        if not math.isclose(first / second, _temperature(out["factor"], 1.0)):
            out["attention_factor"] = first / second
    return out


def _temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _no_rope(args: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return one flag per layer; n means that every n-th layer has no rotary embedding."""
    freq = args.get("no_rope_freq")
    if not freq:
        return None
    if isinstance(freq, int):
        return tuple(int((i + 1) % freq == 0) for i in range(num_layers(args)))
    return tuple(int(f) for f in freq)


def _known(args: Mapping[str, Any], name: str, default: Any) -> Any:
    value = args.get(name)
    return default if value is None else value


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value
