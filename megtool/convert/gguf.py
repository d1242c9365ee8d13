"""GGUF metadata as a model's configuration, with the same keys for every architecture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.convert.families.family import Family
from megtool.errors import MappingError
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor

ROPE_SCALING = "megtool.rope_scaling"
"""A key of our own: `rope_scaling` as config.json has it (JSON). GGUF's keys and factor tensors say
what llama.cpp computes, and not all that it came of."""

_TOKEN_IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


def config_from_gguf(
    metadata: Mapping[str, Any],
    family: Family,
    tensors: Sequence[GlobalTensor] = (),
    factors: Mapping[str, Floats] | None = None,
) -> ModelConfig:
    """The configuration in a GGUF file's key-value metadata.

    `tensors` settle what metadata may leave out: the vocabulary's size, and whether embeddings
    are tied (no output matrix). `factors` are the values of those that scale rotary embedding
    (`factors_read`). `extra` holds token ids as config.json calls them, so that the
    family's `write_config` makes a complete one.

    Raises:
        MappingError: a key is missing, or rotary embedding is scaled by factors that no
            configuration says.
    """
    arch = metadata.get("general.architecture")
    shapes = {t.name: t.shape for t in tensors}

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise MappingError(f"GGUF metadata lacks '{arch}.{key}'")
        return value

    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    embedding = shapes.get("token_embd.weight", (0,))
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    values: dict[str, Any] = {
        "num_layers": int(get("block_count")),
        "hidden_size": hidden,
        "ffn_hidden_size": int(get("feed_forward_length")),
        "num_heads": heads,
        "num_kv_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "vocab_size": embedding[0] or int(get("vocab_size", len(tokens) or None)),
        "max_positions": int(get("context_length")),
        "norm_eps": _shortest(
            get("attention.layer_norm_rms_epsilon", get("attention.layer_norm_epsilon", 1e-5))
        ),
        "rope_base": _shortest(get("rope.freq_base", 10000.0)),
        "rotary_percent": int(get("rope.dimension_count", head_dim)) / head_dim,
        "window_size": int(get("attention.sliding_window", 0)),
        "tied_embeddings": bool(tensors) and "output.weight" not in shapes,
        "rope_scaling": _scaling(metadata, f"{arch}.rope.scaling."),
    }
    if f"{arch}.logit_scale" in metadata:
        values["logit_scale"] = _shortest(get("logit_scale"))
    if names := factors_read(metadata, tensors):
        values["rope_scaling"] = _by_factors(names, factors or {}, values, get)
    if experts := int(get("expert_count", 0)):
        values |= {
            "num_experts": experts,
            "num_experts_per_token": int(get("expert_used_count")),
            "moe_ffn_hidden_size": int(
                get("expert_feed_forward_length", values["ffn_hidden_size"])
            ),
            "shared_ffn_hidden_size": int(get("expert_shared_feed_forward_length", 0)),
            # What llama.cpp computes for each architecture; no key says it.
            "router_pre_softmax": arch == "qwen2moe",
        }
    ids = {to: int(metadata[key]) for key, to in _TOKEN_IDS.items() if key in metadata}
    return ModelConfig.from_fields(**{**family.traits, **values}, extra=ids)


def factors_read(metadata: Mapping[str, Any], tensors: Sequence[GlobalTensor]) -> tuple[str, ...]:
    """Tensors of rotary factors whose values the configuration depends on."""
    if metadata.get(ROPE_SCALING) is not None:
        return ()
    return tuple(t.name for t in tensors if t.name in TENSORS)


def _by_factors(
    names: Sequence[str],
    factors: Mapping[str, Floats],
    values: Mapping[str, Any],
    get: Callable[[str, Any], Any],
) -> dict[str, Any] | None:
    """The rotary scaling that the tensors `names` describe.

    Raises:
        MappingError: none does, or not all is there.
    """
    if not all(n in factors for n in names) or (LLAMA3 not in names and len(names) < 2):
        raise MappingError(
            f"rotary embedding is scaled by factors, {', '.join(names)}, which are not known",
            hint="--like HF_FOLDER takes rope_scaling from its config.json",
        )
    if LLAMA3 in names:
        return llama3_scaling(factors[LLAMA3], values["rope_base"])
    temperature = get("rope.scaling.attn_factor", 0.0)
    most = values["max_positions"]
    return longrope_scaling(
        factors[LONG],
        factors[SHORT],
        length=int(get("rope.scaling.original_context_length", most)),
        most=most,
        temperature=temperature or None,
    )


def _scaling(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    if (text := metadata.get(ROPE_SCALING)) is not None:
        try:
            scaling = json.loads(text)
        except (TypeError, ValueError, RecursionError) as e:
            raise MappingError(f"GGUF metadata {ROPE_SCALING!r} is no JSON") from e
        if isinstance(scaling, dict):
            return scaling
    kind = metadata.get(prefix + "type")
    if kind is None or kind == "none":
        return None
    out: dict[str, Any] = {"rope_type": kind}
    if prefix + "factor" in metadata:
        out["factor"] = _shortest(metadata[prefix + "factor"])
    if original := metadata.get(prefix + "original_context_length"):
        out["original_max_position_embeddings"] = int(original)
    return out


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF keeps 1e-05 as 9.99999974e-06."""
    return float(str(np.float32(value)))


Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

LLAMA3 = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (LLAMA3, LONG, SHORT)
"""Tensors that hold factors."""

_LOW, _HIGH = 1.0, 4.0
"""Of all published models; factors say no more of them than their ratios to the length."""

_LENGTH = 8192
_NEAR = 1e-5  # converters compute in float32


def llama3_factors(
    base: float, half: int, *, factor: float, low: float, high: float, length: float
) -> Floats:
    """Llama 3's factors of `half` frequencies, by its published formula.

    Wavelengths beyond the original `length` (over `low`) are stretched by `factor`, short ones
    kept, and those between interpolated.
    """
    ramp = ((length * _turns(base, half) - low) / (high - low)).clip(0, 1)
    return np.asarray(1 / ((1 - ramp) / factor + ramp), np.float32)


def _turns(base: float, half: int) -> Doubles:
    """Turns of each frequency a position."""
    return np.asarray(1 / base ** (np.arange(half) / half) / (2 * math.pi), np.float64)


def llama3_scaling(factors: Floats, base: float) -> dict[str, Any] | None:
    """The rope_scaling that yields these factors; None if all are one.

    Raises:
        MappingError: none was found that does.
    """
    expected = np.asarray(factors, np.float64).reshape(-1)
    if np.allclose(expected, 1, rtol=_NEAR):
        return None
    factor, half = float(expected.max()), len(expected)
    for low, high, length in _ramps(expected, _turns(base, half)):
        computed = llama3_factors(base, half, factor=factor, low=low, high=high, length=length)
        if np.allclose(computed, expected, rtol=_NEAR):
            return {
                "rope_type": "llama3",
                "factor": float(str(np.float32(factor))),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    raise MappingError(
        f"no llama3 scaling of rotary embedding gives the factors in {LLAMA3!r}",
        tensor=LLAMA3,
        hint="--like HF_FOLDER takes rope_scaling from its config.json",
    )


def _ramps(expected: Doubles, turns: Doubles) -> Iterator[tuple[float, float, int]]:
    """Candidates for low_freq_factor, high_freq_factor and the original length, the likeliest
    first.

    Between them the share of a frequency that is kept grows in proportion to its turns.
    """
    yield _LOW, _HIGH, _LENGTH
    factor = expected.max()
    is_between = (expected > 1 + _NEAR) & (expected < factor * (1 - _NEAR))
    if not is_between.any():  # any length that puts the ramp between two frequencies does
        unscaled = turns[expected <= 1 + _NEAR]
        if len(unscaled):
            yield _LOW, _HIGH, math.ceil(_HIGH / unscaled.min())
        return
    share = (1 / expected[is_between] - 1 / factor) / (1 - 1 / factor)
    yield _LOW, _HIGH, round(np.median((share * (_HIGH - _LOW) + _LOW) / turns[is_between]))
    if is_between.sum() > 1:
        slope, start = np.polyfit(turns[is_between], share, 1)
        width = _LENGTH / float(slope)
        yield -float(start) * width, (1 - float(start)) * width, _LENGTH


def longrope_scaling(
    long: Floats, short: Floats, *, length: int, most: int, temperature: float | None
) -> dict[str, Any]:
    """Phi-3's rope_scaling, of a model for `most` positions trained for `length` before.

    `temperature` is what attention is scaled by, if a file says it; it is kept where it is not the
    usual one.
    """
    out: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [float(str(x)) for x in np.asarray(long, np.float32).reshape(-1)],
        "short_factor": [float(str(x)) for x in np.asarray(short, np.float32).reshape(-1)],
        "original_max_position_embeddings": length,
    }
    usual = longrope_temperature(most, length)
    if temperature is not None and not math.isclose(temperature, usual, rel_tol=1e-5):
        out["attention_factor"] = float(str(np.float32(temperature)))
    return out


def longrope_temperature(most: int, length: int) -> float:
    """The default attention scale of LongRoPE."""
    factor = most / length
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
