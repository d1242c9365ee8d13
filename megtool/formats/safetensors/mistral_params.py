"""Mistral's own params.json (Mistral Large 3) as the config.json that transformers has for it.

Such folders hold no config.json, and tensors under Mistral's names (`consolidated-*.safetensors`).
The text model is transformers' Mistral 4: the mapping is that of vLLM's adapter of such files.
Sections that the text model does not need (`vision_encoder`) stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megtool.errors import MappingError

PARAMS = "params.json"

_KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_EXPERT_KEYS = {
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "routed_scale": "routed_scaling_factor",
}
_LAYOUT_KEYS = ("expert_parallel", "expert_model_parallel")
_YARN_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "route_every_n": (1, None),
    "renorm_strategy": ("WEIGHTS", None),
    "use_load_balancing_bias": (False, None),
}
"""Keys of `moe` for which one value is known; None is an absent key."""

_RENAMED = ("head_dim", "yarn", "llama_4_scaling", "moe", "rope_theta", "sliding_window")


def config_from_params(params: Mapping[str, Any], file: Path) -> dict[str, Any] | None:
    """The keys of a config.json; None for a model without latent attention and experts.

    Raises:
        MappingError: the model has an option that no config.json of the family says.
    """
    experts = params.get("moe")
    if not isinstance(experts, Mapping) or not params.get("kv_lora_rank"):
        return None
    experts = dict(experts)
    for key, known in _ONLY.items():
        if (value := experts.pop(key, None)) not in known:
            raise _unknown(f"moe.{key}", value, file)
    for key in _LAYOUT_KEYS:
        experts.pop(key, None)
    for key in experts.keys() - _EXPERT_KEYS.keys():
        raise _unknown(f"moe.{key}", experts[key], file)
    if params.get("sliding_window"):
        raise _unknown("sliding_window", params["sliding_window"], file)
    rest = {k: v for k, v in params.items() if k not in (*_KEYS, *_RENAMED)}
    if quantization := rest.pop("quantization", None):
        if not isinstance(quantization, Mapping) or "quant_method" not in quantization:
            raise _unknown("quantization", quantization, file)  # scales of Mistral's own
        rest["quantization_config"] = quantization
    return {
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        # Absent there, they are none; transformers has others where a config.json lacks them.
        "q_lora_rank": None,
        "n_shared_experts": None,
        **rest,
        **{_KEYS[k]: params[k] for k in _KEYS if k in params},
        **{_EXPERT_KEYS[k]: value for k, value in experts.items()},
        "rope_parameters": _rotary(params, file),
    }


def _rotary(params: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """YaRN without a temperature of attention, unless `apply_scale` asks for it."""
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": params.get("rope_theta", 10000.0)}
    if isinstance(yarn := params.get("yarn"), Mapping):
        out["rope_type"] = "yarn"
        out |= {_YARN_KEYS[k]: value for k, value in yarn.items() if k in _YARN_KEYS}
        if yarn.get("apply_scale", True):
            out |= {"mscale": 1.0, "mscale_all_dim": 1.0}
        else:
            out["attention_factor"] = 1.0
    scaled, length = params.get("llama_4_scaling"), "original_max_position_embeddings"
    if isinstance(scaled, Mapping):
        if out.setdefault(length, scaled.get(length)) != scaled.get(length):
            raise _unknown(f"llama_4_scaling.{length}", scaled.get(length), file)
        out["llama_4_scaling_beta"] = scaled.get("beta")
    return out


def _unknown(key: str, value: object, file: Path) -> MappingError:
    return MappingError(
        f"{key} is {str(value)[:80]}, which is not known of Mistral's own files",
        file=file,
        hint="a folder with a config.json (transformers' names) may say it",
        error_id="unsupported-model",
    )
