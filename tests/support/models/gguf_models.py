"""Models of every architecture that is exported to GGUF, a few thousand numbers each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models import byte_level, openelm_model
from tests.support.models.mtp_models import rename_as_ling
from tests.support.models.tiny_model import CLASSES, class_of, fill_tables, tiny_model
from tests.support.models.unequal_layers import block

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.125,
    "logits_scaling": 2.0,
}
SWASH = {"num_hidden_layers": 4, "sliding_window": 9}
SIGMOID = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 16,
}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rms_norm_eps": 1e-6,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
MISTRAL_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LFM2 = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
KIMI = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "rms_norm_eps": 1e-6,  # of latents, too, for which transformers has this one always
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "pad_token_id": 0,
}
MIMO = {
    "num_hidden_layers": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
AFMOE = {
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "sliding_window": 16,
    "mup_enabled": True,
}
V4 = {
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 16,
    "layer_types": [
        *("sliding_attention", "compressed_sparse_attention"),
        *("heavily_compressed_attention", "compressed_sparse_attention"),
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 64,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "hc_mult": 4,
}
V4_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
HUNYUAN = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 3.0, "factor": 1.0},
}
YOUTU = {k: v for k, v in LATENT.items() if "exp" not in k and "moe" not in k and "group" not in k}
SPARSE = {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 16}
GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
GEMMA4_EXPERTS = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
GEMMA4_SMALL = {
    **GEMMA4,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2}
GRANITE4 = {
    **GRANITE,
    **MAMBA,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_intermediate_size": 96,
}
NEMOTRON_H = {
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
DELTA_EXPERTS = {
    **DELTA,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
BLOCKS = [block(2, 24.0), block(None, 1.0), block(None, None), block(1, 12.0)]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "seed_oss": ("seed_oss", {"head_dim": 32, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 32}),
    "cohere": ("cohere", {"tie_word_embeddings": True, "logit_scale": 0.25}),
    "gemma": ("gemma", {"head_dim": 256, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**GEMMA, "sliding_window": 32}),
    "gemma3": ("gemma3", {**GEMMA, "num_hidden_layers": 6, "sliding_window": 32}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "cohere2": (
        "cohere2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "tie_word_embeddings": True,
            "logit_scale": 0.25,
        },
    ),
    "granite": ("granite", GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": ("granitemoe", GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": (
        "olmoe",
        {
            "num_key_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "starcoder2": ("starcoder2", {"use_bias": True}),
    "arcee": ("arcee", {}),
    "dots1": ("dots1", SIGMOID | {"num_key_value_heads": 4}),
    "glm4-moe": ("glm4_moe", SIGMOID | {"attention_bias": True, "use_qk_norm": True}),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 64,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
    "nemotron": ("nemotron", {"attention_bias": False}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 768,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
    ),
}


COMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "granite_swa": ("granite_swa", GRANITE | SWASH | {"attention_bias": True, "mlp_bias": True}),
    "granite_swa-turns": ("granite_swa", GRANITE | SWASH | {"layer_rope_theta": [1e4, 0, 1e4, 0]}),
    "granitemoe_swa": (
        "granitemoe_swa",
        GRANITE | SWASH | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granitemoe_swa-shared": (
        "granitemoe_swa",
        GRANITE
        | SWASH
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 16}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "llama4": (
        "llama4",
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
        },
    ),
    "nemotron_nas": (
        "nemotron_nas",
        {"num_hidden_layers": 4, "num_key_value_heads": None, "block_configs": BLOCKS},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gemma4": ("gemma4", GEMMA4),
    "gemma4-experts": ("gemma4", GEMMA4_EXPERTS),
    "gemma4-small": ("gemma4", GEMMA4_SMALL),
    "mistral4": ("mistral4", LATENT | {"n_group": 1, "rope_parameters": MISTRAL_YARN}),
    "deepseek_v32": ("deepseek_v32", LATENT | SPARSE),
    "glm_moe_dsa": ("glm_moe_dsa", LATENT | SPARSE | {"n_group": 1}),
    "deepseek_v2": ("deepseek_v2", LATENT | {"topk_method": "greedy"}),
    "deepseek_v2-lite": (
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "topk_method": "greedy", "num_hidden_layers": 27},
    ),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3-yarn": ("deepseek_v3", LATENT | {"rope_parameters": YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT | {"n_group": 1}),
    "granitemoehybrid": ("granitemoehybrid", GRANITE4 | {"num_local_experts": 0}),
    "granitemoehybrid-experts": (
        "granitemoehybrid",
        GRANITE4 | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granitemoehybrid-attention": (
        "granitemoehybrid",
        GRANITE4
        | {"num_local_experts": 0, "layer_types": ["full_attention"] * 2}
        | {"position_embedding_type": "rope"},
    ),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1], "partial_rotary_factor": 0.5}),
    "falcon_h1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 128, "head_dim": 16}),
    "nemotron_h": (
        "nemotron_h",
        NEMOTRON_H | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        NEMOTRON_H | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    "nemotron_h-latent": (
        "nemotron_h",
        NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
        | {"moe_latent_size": 32},
    ),
    "apertus": ("apertus", {}),
    "cwm": ("cwm", {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 16}),
    "ministral": (
        "ministral",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "falcon-7b": ("falcon", {"tie_word_embeddings": True}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "hy_v3": (
        "hy_v3",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
        },
    ),
    "glm": ("glm", {"head_dim": 16}),
    "bloom": ("bloom", {"tie_word_embeddings": True}),
    "bloom-6": ("bloom", {"n_head": 6, "hidden_size": 96}),
    "mpt": ("mpt", {"tie_word_embeddings": True}),
    "gpt_bigcode": ("gpt_bigcode", {"tie_word_embeddings": True}),
    "jais2": ("jais2", {}),
    "afmoe": ("afmoe", AFMOE),
    "kimi_linear": ("kimi_linear", KIMI),
    "mimo_v2_flash": ("mimo_v2_flash", MIMO),
    "lfm2": ("lfm2", LFM2 | {"tie_word_embeddings": True}),
    "lfm2_moe": (
        "lfm2_moe",
        LFM2
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"num_dense_layers": 1},
    ),
    "helium": ("helium", {"head_dim": 16}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", HUNYUAN),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", HUNYUAN | {"num_experts": 4, "moe_topk": 2}),
    "olmo": ("olmo", {"tie_word_embeddings": True}),
    "openelm": ("openelm", {"tie_word_embeddings": True} | openelm_model.LAYERS),
    "phi": ("phi", {"hidden_act": "gelu_new"}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "stablelm-12b": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "cohere-plus": (
        "cohere",
        {"num_hidden_layers": 64, "use_qk_norm": True, "tie_word_embeddings": True},
    ),
    "granitemoeshared": (
        "granitemoeshared",
        GRANITE
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    "solar_open": ("solar_open", SIGMOID | {"first_k_dense_replace": 0}),
    "exaone_moe": (
        "exaone_moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "sliding_window": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "ling": ("glm4_moe", SIGMOID | {"use_qk_norm": True, "rope_parameters": HALF}),
    "youtu": ("youtu", YOUTU),
    "deepseek_v4": ("deepseek_v4", V4),
    "deepseek_v4-yarn": ("deepseek_v4", V4 | {"rope_parameters": V4_YARN}),
    "qwen3_next": ("qwen3_next", DELTA_EXPERTS),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5-moe": ("qwen3_5_moe_text", DELTA_EXPERTS),
}
"""Models whose tensors are cut, sorted or changed, and those that are like one of them."""


SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 3, 2]}
INTERLEAVED = SECTIONS | {"mrope_interleaved": True}
PARTIAL = {"layer_types": "absent", "rope_parameters": INTERLEAVED | {"partial_rotary_factor": 0.5}}
TEXTS_BESIDE_TOWERS: dict[str, dict[str, Any]] = {
    "gemma3_multimodal": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        "sliding_window": 32,
    },
    "gemma4_multimodal": GEMMA4,
    "gemma4_unified": GEMMA4,
    "kimi_k25": LATENT,
    "llama4_multimodal": {
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "head_dim": 16,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    "mistral3": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {"head_dim": 16, "rope_parameters": INTERLEAVED},
    "qwen3_vl_moe": {"head_dim": 16, "rope_parameters": INTERLEAVED},
    "qwen3_5": DELTA | PARTIAL,
    "qwen3_5_moe": DELTA_EXPERTS | PARTIAL,
}
"""Keys of text models in addition to `SIZES`, by the family of the model with a tower."""


def save_with_tower(folder: Path, family: str, *, dtype: str = "float32", **more: Any) -> Any:
    """A random model with a tower, and the byte-level tokenizer; transformers' model."""
    from tests.support.models import nested_cases

    case = next(c for c in nested_cases.CASES if c.family == family)
    not_text = ("tie_word_embeddings", "hidden_size", "intermediate_size")
    sizes = {k: v for k, v in SIZES.items() if k not in not_text} | {"pad_token_id": 0}
    model = case.build(folder, dtype=dtype, **(sizes | TEXTS_BESIDE_TOWERS[family] | more))
    byte_level.save(folder, int(SIZES["vocab_size"]) - 20)
    return type(model).from_pretrained(folder, dtype="float32")


def fill_noise(model: Any) -> None:
    """Add noise to every parameter, norms and biases among them."""
    import torch

    for tensor in model.parameters():
        tensor.add_(torch.randn_like(tensor) * 0.05)
    fill_tables(model)


def save(folder: Path, name: str, *, dtype: str = "float32", **more: Any) -> Path:
    """A model of random numbers, norms and biases among them, with a byte-level tokenizer."""
    family, keys = (MODELS | COMPUTED)[name]
    tiny_model(family, folder, sizes=SIZES, seed=7, dtype=dtype, fill=fill_noise, **(keys | more))
    if name == "ling":
        rename_as_ling(folder)
    byte_level.save(folder, int(SIZES["vocab_size"]) - 20)
    return folder


def load(folder: Path, name: str) -> Any:
    """The saved model of this name, as transformers computes it in float32; of a family that it
    does not know, the one that computes the same."""
    import torch

    family, keys = (MODELS | COMPUTED)[name]
    if name == "ling":
        return tiny_model(family, sizes=SIZES, seed=7, fill=fill_noise, **keys)
    return class_of(CLASSES[family][0]).from_pretrained(folder, dtype=torch.float32)
