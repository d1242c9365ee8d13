"""Families with experts as transformers saves them, with the features that they switch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.folders import Stored, read_config
from tests.support.folders import stored_tensors as stored
from tests.support.models.dense_cases import GEMMA4
from tests.support.models.tiny_model import fill_tables, tiny_config, tiny_model

transformers = pytest.importorskip("transformers")


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}

EIGHT = {"intermediate_size": 24, "num_local_experts": 8}

QWEN = {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 4}

DEEPSEEK = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

LITE = {k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"}

SPARSE = DEEPSEEK | {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 6}

GLM = {k: v for k, v in DEEPSEEK.items() if k not in ("q_lora_rank", "kv_lora_rank")} | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_nextn_predict_layers": 0,
}

ERNIE = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "moe_num_experts": 4,
    "moe_k": 2,
}

DELTA = QWEN | {
    "head_dim": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

MAMBA_LAYER, EXPERT_LAYER, ATTENTION_LAYER, MLP_LAYER = (
    "linear_attention",
    "moe",
    "full_attention",
    "mlp",
)

HYBRID = {
    "layers_block_type": [MAMBA_LAYER, EXPERT_LAYER, ATTENTION_LAYER, MLP_LAYER],
    "head_dim": 16,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "n_routed_experts": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "pad_token_id": 0,
}

MIXED = {
    "num_hidden_layers": 2,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}
GRANITE4 = (
    EIGHT
    | MIXED
    | {
        "shared_intermediate_size": 40,
        "rms_norm_eps": 1e-5,  # as Megatron has it in every mixer
        "layer_types": [MAMBA_LAYER, ATTENTION_LAYER],
    }
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

MISTRAL4 = DEEPSEEK | {
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    },
}

GEMMA4_EXPERTS = GEMMA4 | {
    "intermediate_size": 40,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}

V4 = {
    "num_key_value_heads": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 6,
    "sliding_window": 5,
    "layer_types": [
        *("sliding_attention", "compressed_sparse_attention"),
        *("heavily_compressed_attention", "compressed_sparse_attention"),
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 3,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "hc_mult": 2,
}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mixtral", "Mixtral", EIGHT),
    ("mixtral", "Mixtral", EIGHT | {"tie_word_embeddings": True, "sliding_window": 16}),
    ("qwen2_moe", "Qwen2Moe", QWEN | {"shared_expert_intermediate_size": 48}),
    (
        "qwen2_moe",
        "Qwen2Moe",
        QWEN
        | {"shared_expert_intermediate_size": 16, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    ("qwen3_moe", "Qwen3Moe", QWEN | {"head_dim": 16}),
    (
        "qwen3_moe",
        "Qwen3Moe",
        QWEN | {"head_dim": 8, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    ("deepseek_v2", "DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    (
        "deepseek_v2",
        "DeepseekV2",
        DEEPSEEK | {"rope_parameters": YARN, "topk_method": "group_limited_greedy"},
    ),
    ("deepseek_v2", "DeepseekV2", DEEPSEEK | {"first_k_dense_replace": 0}),
    ("deepseek_v3", "DeepseekV3", DEEPSEEK),
    ("deepseek_v3", "DeepseekV3", DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 3}),
    (
        "llama4",
        "Llama4",
        EIGHT | {"intermediate_size_mlp": 40, "head_dim": 8, "interleave_moe_layer_step": 2},
    ),
    (
        "llama4",
        "Llama4",
        EIGHT | {"intermediate_size_mlp": 40, "head_dim": 8, "interleave_moe_layer_step": 1},
    ),
    ("gpt_oss", "GptOss", EIGHT | {"head_dim": 8}),
    ("qwen3_next", "Qwen3Next", DELTA),
    (
        "qwen3_next",
        "Qwen3Next",
        DELTA
        | {
            "layer_types": [ATTENTION_LAYER, *[MAMBA_LAYER] * 2, ATTENTION_LAYER],
            "mlp_only_layers": [1],
        },
    ),
    (
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        {k: v for k, v in DELTA.items() if k != "intermediate_size"},
    ),
    ("nemotron_h", "NemotronH", HYBRID),
    (
        "nemotron_h",
        "NemotronH",
        HYBRID
        | {
            "layers_block_type": [
                *(MAMBA_LAYER, EXPERT_LAYER, MAMBA_LAYER),
                *(MAMBA_LAYER, EXPERT_LAYER, ATTENTION_LAYER),
            ],
            "moe_latent_size": 16,
        },
    ),
    ("olmoe", "Olmoe", {"intermediate_size": 24, "num_experts": 4}),
    (
        "olmoe",
        "Olmoe",
        {"intermediate_size": 24, "num_experts": 4, "norm_topk_prob": True, "attention_bias": True},
    ),
    ("glm4_moe", "Glm4Moe", GLM | {"use_qk_norm": True}),
    ("glm4_moe", "Glm4Moe", GLM | {"attention_bias": True, "tie_word_embeddings": True}),
    ("glm4_moe_lite", "Glm4MoeLite", LITE),
    ("deepseek_v32", "DeepseekV32", SPARSE),
    (
        "deepseek_v32",
        "DeepseekV32",
        SPARSE | {"rope_parameters": YARN, "mlp_layer_types": ["sparse"] * 4},
    ),
    ("glm_moe_dsa", "GlmMoeDsa", SPARSE),
    (
        "glm_moe_dsa",
        "GlmMoeDsa",
        SPARSE | {"indexer_types": ["full", "shared", "shared", "full"], "n_group": 1},
    ),
    ("ernie4_5_moe", "Ernie4_5_Moe", ERNIE),
    (
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        ERNIE | {"moe_layer_interval": 2, "tie_word_embeddings": False},
    ),
    ("minimax_m2", "MiniMaxM2", EIGHT | {"head_dim": 8}),
    ("minimax_m2", "MiniMaxM2", EIGHT | {"head_dim": 16, "rotary_dim": 8}),
    ("granitemoe", "GraniteMoe", EIGHT),
    ("granitemoe", "GraniteMoe", EIGHT | {"logits_scaling": 4.0, "attention_bias": True}),
    ("granitemoehybrid", "GraniteMoeHybrid", GRANITE4),
    (
        "granitemoehybrid",
        "GraniteMoeHybrid",
        GRANITE4
        | {"position_embedding_type": "rope", "attention_bias": True, "tie_word_embeddings": True},
    ),
    (
        "granitemoehybrid",
        "GraniteMoeHybrid",
        GRANITE4 | {"layer_types": [ATTENTION_LAYER] * 2, "logits_scaling": 4.0},
    ),
    ("mistral4", "Mistral4", MISTRAL4),
    ("mistral4", "Mistral4", MISTRAL4 | {"q_lora_rank": None, "first_k_dense_replace": 0}),
    ("dots1", "Dots1", GLM | {"norm_topk_prob": True}),
    ("gemma4", "Gemma4", GEMMA4_EXPERTS),
    ("gemma4", "Gemma4", GEMMA4_EXPERTS | {"attention_k_eq_v": False}),
    ("deepseek_v4", "DeepseekV4", V4),
    (
        "deepseek_v4",
        "DeepseekV4",
        V4
        | {
            "layer_types": ["compressed_sparse_attention", "sliding_attention"] * 2,
            "compress_rates": None,
            "mlp_layer_types": ["moe"] * 4,
            "rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k},
            "num_nextn_predict_layers": 0,
        },
    ),
]

PHIMOE = EIGHT | {
    "attention_bias": True,
    "lm_head_bias": True,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "short_mscale": 1.2,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 32,
    },
}

HUNYUAN = {"intermediate_size": 24, "num_experts": 4, "head_dim": 8}

SOLAR = {k: v for k, v in GLM.items() if k != "num_nextn_predict_layers"}
SOLAR = {k: v for k, v in SOLAR.items() if k not in ("intermediate_size", "first_k_dense_replace")}

EXAONE = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_shared_experts": 2,
    "sliding_window": 5,
}

HY3 = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "head_dim": 8,
}

AFMOE = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "head_dim": 8,
    "mup_enabled": True,
    "global_attn_every_n_layers": 2,
    "sliding_window": 5,
}

LFM2 = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}

MIMO = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "v_head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}

KIMI = {
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}

FLEX = {"intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}

MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("phimoe", "Phimoe", EIGHT | {"tie_word_embeddings": True, "sliding_window": 16}),
    ("phimoe", "Phimoe", PHIMOE),
    ("hunyuan_v1_moe", "HunYuanMoEV1", HUNYUAN),
    (
        "hunyuan_v1_moe",
        "HunYuanMoEV1",
        HUNYUAN | {"attention_bias": True, "num_experts_per_tok": [2] * 4},
    ),
    ("solar_open", "SolarOpen", SOLAR),
    ("granitemoeshared", "GraniteMoeShared", EIGHT | {"shared_intermediate_size": 40}),
    ("granitemoeshared", "GraniteMoeShared", EIGHT | {"attention_bias": True}),
    (
        "granitemoe_swa",
        "GraniteMoeSWA",
        EIGHT | {"shared_intermediate_size": 40, "sliding_window": 5},
    ),
    ("exaone_moe", "ExaoneMoe", EXAONE),
    (
        "exaone_moe",
        "ExaoneMoe",
        EXAONE | {"mlp_layer_types": ["sparse"] * 4, "n_group": 2, "topk_group": 1},
    ),
    ("hy_v3", "HYV3", HY3),
    ("afmoe", "Afmoe", AFMOE),
    ("afmoe", "Afmoe", AFMOE | {"mup_enabled": False, "num_dense_layers": 0}),
    ("flex_olmo", "FlexOlmo", FLEX),
    ("lfm2_moe", "Lfm2Moe", LFM2),
    (
        "lfm2_moe",
        "Lfm2Moe",
        LFM2 | {"conv_bias": True, "use_expert_bias": False, "tie_word_embeddings": False},
    ),
    ("mimo_v2_flash", "MiMoV2Flash", MIMO),
    (
        "mimo_v2_flash",
        "MiMoV2Flash",
        MIMO
        | {"attention_bias": True, "attention_value_scale": None, "routed_scaling_factor": 2.5}
        | {"n_group": 2, "topk_group": 1, "mlp_layer_types": ["sparse", "dense"] * 2},
    ),
    ("kimi_linear", "KimiLinear", KIMI),
    (
        "kimi_linear",
        "KimiLinear",
        KIMI
        | {"q_lora_rank": 12, "linear_conv_kernel_dim": 3}
        | {"n_group": 2, "topk_group": 1, "mlp_layer_types": ["sparse", "dense"] * 2},
    ),
    ("flex_olmo", "FlexOlmo", FLEX | {"norm_topk_prob": True, "attention_bias": True}),
]
"""Cases of the slow tests."""

FIRST = {name: (name, model, keys) for name, model, keys in reversed([*CASES, *MORE])}

Case = tuple[str, str, dict[str, Any]]


def case_config(case: Case) -> Any:
    """The transformers configuration of a case."""
    return tiny_config(case[0], sizes=SIZES, **case[2])


def fill_shifted(model: Any) -> None:
    """Every tensor around 0.2; the norms that Megatron stores less 1 around 1."""
    fill_tables(model)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        around = 1.0 if name.endswith("linear_attn.norm.weight") else 0.2
        tensor.copy_(torch.randn(tensor.shape) * 0.1 + around)


def save(case: Case, folder: Path, **how: Any) -> Any:
    """A random model saved by transformers, with random norms and biases too."""
    model = tiny_model(case[0], sizes=SIZES, dtype="bfloat16", fill=fill_shifted, **case[2])
    model.save_pretrained(folder, **how)
    if case[0] in PUBLISHED and not how:
        publish(case[0], folder)
    return model


PUBLISHED = {
    "deepseek_v4": {
        "model.": "",
        "embed_tokens.": "embed.",
        "hc_head.hc_": "hc_head_",
        ".attn.norm.": ".attn.kv_norm.",
    },
    # transformers 5.23 renames MLPs of layers without experts, too.
    "kimi_linear": {
        f".block_sparse_moe.{x}_proj": f".mlp.{x}_proj" for x in ("gate", "up", "down")
    },
}
"""Names that transformers saves, and what they are called in published files."""


def publish(family: str, folder: Path) -> None:
    """Give what transformers has saved the names of published files."""
    from safetensors.torch import load_file, save_file

    published = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in PUBLISHED[family].items():
            name = name.replace(old, new)
        published[name] = tensor
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **keys: Any) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | keys))


def with_mtp(folder: Path, layers: int = 2) -> Stored:
    """A DeepSeek-V3 as published: layers after the last one, each with copies of both ends."""
    from safetensors.torch import load_file, save_file

    save(FIRST["deepseek_v3"], folder)
    held = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [n for n in held if n.startswith("model.layers.3.")]:
        for m in range(layers):
            new = name.replace("layers.3.", f"layers.{4 + m}.")
            held[new] = torch.randn(held[name].shape, generator=generator).to(held[name].dtype)
            if new.endswith("e_score_correction_bias"):
                held[new] = held[new].float()
    for m in range(layers):
        at = f"model.layers.{4 + m}."
        for part in ("enorm", "hnorm", "shared_head.norm"):
            held[f"{at}{part}.weight"] = torch.randn(32, generator=generator).bfloat16()
        held[f"{at}eh_proj.weight"] = torch.randn(32, 64, generator=generator).bfloat16()
        held[f"{at}embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
        held[f"{at}shared_head.head.weight"] = held["lm_head.weight"].clone()
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, num_nextn_predict_layers=layers)
    return stored(folder)
