"""Changes of a config.json: for each key one to three other values, null and absence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

NULL, ABSENT = "null", "absent"

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu")
KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv")

HEAD = 8
"""Size of a head of the tiny models, unless they say another."""

LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}

ROPES: Mapping[str, dict[str, Any] | None] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "base": {"rope_type": "default", "rope_theta": 300.0},
    "without base": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn without length": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "yarn by mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn by factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.4,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
"""Rotary embeddings by what is special."""

VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "activation_function": ACTIVATIONS,
    "mamba_hidden_act": ("gelu",),
    "mlp_hidden_act": ACTIVATIONS,
    "feed_forward_proj": ("gelu", "gated-gelu", "gated-silu", "relu", "gated-relu"),
    "scoring_func": ("softmax", "sigmoid"),
    "score_func": ("softmax", "sigmoid"),
    "score_function": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "position_embedding_type": ("rope", "nope", "absolute", "relative_key", "alibi"),
    "head_dim": (16, 12),
    "sliding_window": (4, 16),
    "local_attention": (4, 16),
    "sliding_window_pattern": (2, 3),
    "max_window_layers": (0, 1, 3),
    "layer_types": (),
    "mlp_layer_types": (),
    "q_lora_rank": (8,),
    "norm_eps": (0.1,),
    "clip_qkv": (0.5,),
    "n_group": (1, 2, 4),
    "topk_group": (1, 2),
    "final_logit_softcapping": (1.0,),
    "attn_logit_softcapping": (0.5,),
    "partial_rotary_factor": (0.5,),
    "logits_scaling": (3.0,),
    "attn_config": ({"alibi": False}, {"clip_qkv": 0.5}, {"softmax_scale": 0.2}, {"qk_ln": True}),
    "num_nextn_predict_layers": (0,),
    "original_max_position_embeddings": (16, 128),
    "attention_types": ([[["global"], 4]], [[["local", "global"], 2]], [[["local"], 4]]),
    "global_attn_every_n_layers": (1, 2, 3),
    "num_kv_shared_layers": (0, 2),
    "per_layer_config": (),
    "layer_rope_theta": ([0, 10000.0, 10000.0, 0], [300.0] * 4),
    "compress_rates": (),
    "full_attention_interval": (1, 2),
    "rope_theta": (300.0,),
    "no_rope_layers": ([1, 1, 1, 1], [0, 0, 1, 0], []),
    "indexer_types": (["full"] * 4, ["full", "shared"] * 2),
    "index_topk": (4, 64),
    "alibi": (True,),
    "per_layer_input": (),
}
"""Values of keys whose type does not say enough."""

PROBES: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (True,),
    "attn_logit_softcapping": (0.5,),
    "clip_qkv": (0.5,),
    "embedding_multiplier": (3.0,),
    "final_logit_softcapping": (1.0,),
    "head_dim": (16,),
    "layer_types": (),
    "logit_scale": (0.3,),
    "max_window_layers": (1,),
    "mlp_bias": (True,),
    "norm_topk_prob": (True, False),
    "no_rope_layers": ([1, 0, 1, 1],),
    "original_max_position_embeddings": (16,),
    "partial_rotary_factor": (0.5,),
    "qk_layernorm": (True,),
    "query_pre_attn_scalar": (3.0,),
    "residual_multiplier": (0.3,),
    "rope_interleave": (True, False),
    "rope_local_base_freq": (300.0,),
    "rope_scaling": ({"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 3.0}),
    "rope_theta": (300.0,),
    "routed_scaling_factor": (2.5,),
    "scoring_func": ("softmax", "sigmoid"),
    "sliding_window": (8,),
    "softmax_scale": (0.2,),
    "swiglu_limit": (0.5,),
    "tie_word_embeddings": (True, False),
    "use_sliding_window": (True, False),
    "use_qk_norm": (True, False),
    "zero_centered_norm": (True,),
}
"""Values of keys that a class may not have; where it ignores one, so do we."""

WITHOUT_CHANGE = frozenset(
    {
        *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype"),
        *("_name_or_path", "auto_map", "id2label", "label2id", "return_dict", "problem_type"),
        *("output_hidden_states", "output_attentions", "is_encoder_decoder", "sub_configs"),
    }
)
"""Keys that say which class it is, or what it returns."""


class Change(NamedTuple):
    """A configuration that differs from another in one thing."""

    key: str
    what: str
    stored: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.key}={self.what}"


def list_changes(stored: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the changes of a configuration, as transformers writes it."""
    keys = [k for k in stored if k not in WITHOUT_CHANGE and not k.endswith("token_id")]
    for key in keys:
        value = stored[key]
        rest = {k: v for k, v in stored.items() if k != key}
        for other in _values(key, value, stored):
            if other != value or type(other) is not type(value):
                yield Change(key, str(other), deepcopy({**rest, key: other}))
        if value is not None:
            yield Change(key, NULL, deepcopy({**rest, key: None}))
        yield Change(key, ABSENT, deepcopy(rest))
    for key, values in PROBES.items():
        for value in values if key not in stored else ():
            yield Change(f"{key} (not declared)", str(value), deepcopy({**stored, key: value}))
    yield from _pairs(stored)


def _values(key: str, value: Any, stored: Mapping[str, Any]) -> Iterator[Any]:
    if key == "rope_parameters":
        yield from _rope_values(value, stored)
    elif key in ("layer_types", "mlp_layer_types", "layers_block_type") and value:
        yield value[1:] + value[:1]
        yield value[::-1]
        for kind in dict.fromkeys(value):
            yield [kind] * len(value)
    elif key in VALUES and (VALUES[key] or value is None):
        yield from VALUES[key]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value * 2, max(value // 2, 1), 0)
    elif isinstance(value, float):
        yield from (0.1, 0.7) if value < 1e-2 else (value * 1.7, value / 3)
    elif isinstance(value, list) and value and all(isinstance(x, int | float) for x in value):
        yield [x * 2 for x in value]
        yield value[::-1]
    elif value is None and key in PROBES:
        yield from PROBES[key]
    elif value is None:
        yield from (1, 2, 0.5, True)


def _rope_values(value: Any, stored: Mapping[str, Any]) -> Iterator[Any]:
    part = (value or {}).get("partial_rotary_factor", 1.0) if isinstance(value, Mapping) else 1.0
    by_kind = isinstance(value, Mapping) and {
        k: v for k, v in value.items() if isinstance(v, Mapping)
    }
    heads = stored.get("num_attention_heads") or stored.get("n_head") or 4
    size = stored.get("qk_rope_head_dim") or stored.get("head_dim")
    size = size or (stored.get("hidden_size") or 32) // heads
    pairs = int((part if isinstance(part, float) else 1.0) * size) // 2
    factors = {
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + 0.3 * i for i in range(pairs)],
    }
    ropes = [dict(r or {}) for r in ROPES.values()]
    ropes += [LONG | factors, {k: v for k, v in LONG.items() if k != "factor"} | factors]
    ropes += [LONG | factors | {"original_max_position_embeddings": 256}]
    ropes += [LONG | factors | {"short_mscale": 1.2, "long_mscale": 1.5}]
    ropes += [LONG | factors | {"attention_factor": 1.7}]
    for rope in ropes:
        if part != 1.0 and "partial_rotary_factor" not in rope and isinstance(part, float):
            rope = rope | {"partial_rotary_factor": part}
        if by_kind:
            for kind in by_kind:
                yield {**value, kind: {**rope}}
        else:
            yield rope


def _pairs(stored: Mapping[str, Any]) -> Iterator[Change]:
    """Changes of two keys at once, which decide together."""
    older = {k: v for k, v in stored.items() if k not in ("rope_parameters", "rope_theta")}
    if "rope_parameters" in stored:
        for name in ("linear", "yarn", "llama3"):
            rope = dict(ROPES[name] or {})
            base = rope.pop("rope_theta")
            keys = {"rope_theta": base, "rope_scaling": rope}
            yield Change("rope_scaling (older form)", name, deepcopy(older | keys))
            rope["type"] = rope.pop("rope_type")
            yield Change("rope_scaling (oldest form)", name, deepcopy(older | keys))
        keys = {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}
        yield Change("rope_scaling beside rope_parameters", "linear", deepcopy({**stored, **keys}))
        keys = {"rope_theta": 300.0, "rope_scaling": None}
        yield Change("rope_theta (older form)", "300", deepcopy(older | keys))
        yield Change("rope_theta beside rope_parameters", "300", deepcopy({**stored, **keys}))
    kinds = "layer_types"
    if kinds in stored:
        rest = {k: v for k, v in stored.items() if k != kinds}
        for key in (
            *("sliding_window", "max_window_layers", "use_sliding_window", "no_rope_layers"),
            *("sliding_window_pattern", "no_rope_layer_interval", "full_attention_interval"),
        ):
            if key in stored:
                for other in _values(key, stored[key], stored):
                    what = f"{key} without layer_types"
                    yield Change(what, str(other), deepcopy({**rest, key: other}))
                for word, changed in (
                    (NULL, {**rest, key: None}),
                    (ABSENT, {k: v for k, v in rest.items() if k != key}),
                ):
                    yield Change(f"{key} without layer_types", word, deepcopy(changed))
