"""The families that legacy TensorRT-LLM has models for: their names, and the keys of their configs.

Keys are those of TensorRT-LLM's `GPTConfig`, `FalconConfig` and `DeepSeekV2Config`
(tensorrt_llm/models/{gpt,falcon,deepseek_v2}/config.py at 6b25e1e0, 8f91cff2 and 5573a380), with
the values that its `from_hugging_face` gives them. Releases have no DeepSeek-V3; the repository's
branch `deepseek` does, and its keys are those of 130232d9 there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

LATENT = ("deepseek_v2", "deepseek_v3")
"""Families of latent attention."""

_RENORMALIZED, _DEVICE_LIMITED, _DEVICE_LIMITED_RENORMALIZED = 1, 3, 4
"""`MoeConfig.ExpertScaleNormalizationMode` (tensorrt_llm/layers/moe.py at c388fec7)."""
_NO_AUX_TC = 2
"""`MoeConfig.TopKMethod` of the branch `deepseek`."""

ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python", "gelu_accurate"), "gelu"),
    **{name: name for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")},
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "relu2": "squared-relu",
}
"""By the name of a configuration, that of `ACT2FN` in tensorrt_llm/functional.py (0.16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyFamily:
    """What a family is called, and what its model can compute.

    `label` is for messages, `architectures` are names of config.json that TensorRT-LLM looks up,
    the first being the one of a source without a name. `activation` replaces the source's name for
    it. `scalings` are the kinds of rotary scaling the model computes. With `has_one_bias` one flag
    says which linear layers have biases. `keys` makes the keys of config.json that only this family
    has. `note` is told with every export.
    """

    label: str
    architectures: tuple[str, ...]
    decoder: str
    activation: str | None = None
    scalings: tuple[str, ...] = ("linear", "llama3")
    has_one_bias: bool = False
    keys: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    note: str = ""


def _qwen_keys(name: str) -> Callable[[ModelConfig], dict[str, Any]]:
    return lambda config: {"qwen_type": name}


def _gpt_keys(variant: str) -> Callable[[ModelConfig], dict[str, Any]]:
    return lambda config: {
        "gpt_variant": variant,
        "q_scaling": 1,
        "embedding_scale": None,
        "apply_query_key_layer_scaling": False,
        "inner_layernorm": False,
        "norm_before_bmm1": False,
    }


def _falcon_keys(config: ModelConfig) -> dict[str, Any]:
    """Flags of the block: two norms side by side are what Falcon calls its new architecture."""
    has_two_norms = config.residual.parallel_residual and not config.norms.shared_norm
    return {
        "parallel_attention": config.residual.parallel_residual,
        "new_decoder_architecture": has_two_norms,
        "num_ln_in_parallel_attn": 2 if has_two_norms else None,
    }


def _yarn(config: ModelConfig) -> dict[str, Any]:
    """YaRN's numbers; those that a config.json leaves out are DeepSeek's own defaults."""
    scaling = config.positions.rope_scaling or {}
    return {
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
        "factor": scaling.get("factor"),
        "mscale": scaling.get("mscale", 1.0),
        "mscale_all_dim": scaling.get("mscale_all_dim", 0.0),
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings")
        or config.positions.max_positions,
        "type": "yarn",
    }


def _deepseek_keys(config: ModelConfig) -> dict[str, Any]:
    """Latent attention, and dense layers before mixtures, in either release of DeepSeek."""
    method, renormalizes = "greedy", not config.router.router_pre_softmax
    mode = _RENORMALIZED if renormalizes and config.moe.num_experts_per_token > 1 else 0
    if config.router.router_score == "sigmoid":
        method, mode = "noaux_tc", _DEVICE_LIMITED
    elif config.router.router_num_groups:
        method = "group_limited_greedy"
        mode = _DEVICE_LIMITED_RENORMALIZED if mode else _DEVICE_LIMITED
    moe: dict[str, Any] = {
        "num_experts": config.moe.num_experts,
        "shared_expert_intermediate_size": config.moe.shared_ffn_hidden_size,
        "top_k": config.moe.num_experts_per_token,
        "normalization_mode": mode,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
        "device_limited_n_group": config.router.router_num_groups or 1,
        "device_limited_topk_group": config.router.router_topk_groups or 1,
        "device_limited_routed_scaling_factor": config.router.router_scaling,
    }
    if method == "noaux_tc":
        moe["topk_method"] = _NO_AUX_TC
    return {
        "intermediate_size": config.mlp.ffn_hidden_size,
        "moe_inter_size": config.moe.moe_ffn_hidden_size,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": config.positions.rope_base,
        "rotary_scaling": _yarn(config),
        "kv_lora_rank": config.latent.kv_lora_rank,
        "q_lora_rank": config.latent.q_lora_rank or None,
        "qk_nope_head_dim": config.latent.qk_nope_head_dim,
        "qk_rope_head_dim": config.latent.qk_rope_head_dim,
        "v_head_dim": config.attention.v_head_dim,
        "topk_method": method,
        "first_k_dense_replace": min(layer_sets.moe_layers(config)),
        "moe_layer_freq": 1,
        "scoring_func": config.router.router_score,
        "moe": moe,
    }


def _deepseek_v3_keys(config: ModelConfig) -> dict[str, Any]:
    """The branch counts one head of keys, as wide as what the cache holds of a token."""
    return _deepseek_keys(config) | {
        "num_key_value_heads": 1,
        "head_size": config.latent.kv_lora_rank + config.latent.qk_rope_head_dim,
        "fp8_format": False,
    }


FAMILIES: Mapping[str, LegacyFamily] = {
    "llama": LegacyFamily(
        label="Llama",
        architectures=("LlamaForCausalLM", "MistralForCausalLM"),
        decoder="llama",
    ),
    "gpt2": LegacyFamily(
        label="GPT (GPT-2)", architectures=("GPT2LMHeadModel",), decoder="gpt", has_one_bias=True
    ),
    "qwen2": LegacyFamily(
        label="Qwen (2 and 3, dense)",
        architectures=("Qwen2ForCausalLM",),
        decoder="qwen",
        keys=_qwen_keys("qwen2"),
    ),
    "qwen3": LegacyFamily(
        label="Qwen (2 and 3, dense)",
        architectures=("Qwen3ForCausalLM",),
        decoder="qwen",
        keys=_qwen_keys("qwen3"),
    ),
    "mixtral": LegacyFamily(
        label="Mixtral", architectures=("MixtralForCausalLM",), decoder="llama"
    ),
    "gemma": LegacyFamily(label="Gemma", architectures=("GemmaForCausalLM",), decoder="gemma"),
    "falcon": LegacyFamily(
        label="Falcon",
        architectures=("FalconForCausalLM",),
        decoder="falcon",
        activation="gelu",
        scalings=(),
        has_one_bias=True,
        keys=_falcon_keys,
    ),
    "starcoder2": LegacyFamily(
        label="StarCoder2",
        architectures=("Starcoder2ForCausalLM",),
        decoder="gpt",
        activation="gelu",
        has_one_bias=True,
        keys=_gpt_keys("starcoder2"),
    ),
    "nemotron": LegacyFamily(
        label="Nemotron (dense, Minitron)",
        architectures=("NemotronForCausalLM",),
        decoder="gpt",
        activation="squared-relu",
        has_one_bias=True,
        keys=_gpt_keys("nemotron"),
    ),
    "deepseek_v2": LegacyFamily(
        label="DeepSeek (V2 and V3)",
        architectures=("DeepseekV2ForCausalLM",),
        decoder="deepseek",
        scalings=("yarn",),
        keys=_deepseek_keys,
    ),
    "deepseek_v3": LegacyFamily(
        label="DeepSeek (V2 and V3)",
        architectures=("DeepseekV3ForCausalLM",),
        decoder="deepseek",
        scalings=("yarn",),
        keys=_deepseek_v3_keys,
        note="releases of TensorRT-LLM have no such engine for DeepSeek-V3: the branch `deepseek` "
        "of its repository builds one of this folder, and --to trtllm is for releases",
    ),
}
"""Families that are written, by the names of their files in converters/."""
