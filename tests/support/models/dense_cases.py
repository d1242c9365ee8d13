"""Dense families as transformers saves them, with the features that their configurations switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.openelm_model import LAYERS
from tests.support.models.tiny_model import BIASED, TIED, UNTIED, Case
from tests.support.models.unequal_layers import BLOCKS, block

transformers = pytest.importorskip("transformers")


NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
PADDED = {"pad_token_id": 1}
LOCAL = PADDED | {"cls_token_id": 0, "sep_token_id": 0, "local_attention": 6}
WITH_BIASES = {"norm_bias": True, "mlp_bias": True, "classifier_bias": True}

WINDOWED = {"use_sliding_window": True, "sliding_window": 16}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

NEO = {"attention_types": [[["global", "local"], 1]], "window_size": 5}

MIXED = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 4}

FULL = ["full_attention"]

CONV = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_multiple_of": 8,
}

SWASH = {
    "num_hidden_layers": 4,
    "sliding_window": 5,
    "layer_rope_theta": [0, 10000.0, 10000.0, 0],
}
TWO_BASES = {
    "sliding_window": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "layer_rope_theta": [500000.0, 10000.0],
}

GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "final_logit_softcapping": 30.0,
}

GEMMA4_SMALL = GEMMA4 | {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 101,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}

DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

CASES = [
    Case("qwen2", UNTIED),
    Case("qwen2", TIED | WINDOWED | {"max_window_layers": 1, "num_key_value_heads": 4}),
    Case("qwen3", UNTIED | {"head_dim": 16}),
    Case("qwen3", TIED | BIASED | {"head_dim": 8, "rope_parameters": LLAMA3}),
    Case("qwen3_5_text", UNTIED | DELTA),
    Case(
        "qwen3_5_text",
        TIED | DELTA | {"layer_types": ["full_attention", *["linear_attention"] * 3]},
    ),
    Case("gemma", TIED | {"head_dim": 16}),
    Case("gemma", UNTIED | BIASED | {"head_dim": 8, "num_key_value_heads": 1}),
    Case("gemma2", TIED | {"head_dim": 16, "sliding_window": 32, "num_hidden_layers": 4}),
    Case("gemma2", UNTIED | BIASED | {"head_dim": 8, "final_logit_softcapping": None}),
    Case("gemma3", TIED | {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 16}),
    Case("gemma3", UNTIED | {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
    Case("phi3", UNTIED),
    Case("phi3", TIED | {"sliding_window": 16, "num_key_value_heads": 4}),
    Case("gpt2", TIED),
    Case("gpt2", UNTIED | {"activation_function": "gelu"}),
    Case("gpt_neox", UNTIED),
    Case("gpt_neox", TIED | {"attention_bias": False, "use_parallel_residual": False}),
    Case("bert", TIED),
    Case("bert", UNTIED | {"type_vocab_size": 3}),
    Case("bert", TIED, model_class="MegatronBertForPreTraining"),
    Case("granite", UNTIED | {"embedding_multiplier": 12.0}),
    Case("granite", TIED | BIASED | {"mlp_bias": True}),
    Case("bamba", UNTIED | MIXED | {"attn_layer_indices": [0]}),
    Case("bamba", TIED | BIASED | MIXED | {"mlp_bias": True}),
    Case("falcon_h1", UNTIED | MIXED | {"mamba_d_ssm": 48}),
    Case("falcon_h1", TIED | BIASED | MIXED | {"mamba_d_ssm": 64, "mamba_rms_norm": True}),
    Case("smollm3", TIED | {"num_hidden_layers": 4}),
    Case("starcoder2", TIED),
    Case("starcoder2", UNTIED | {"use_bias": False, "sliding_window": 32}),
    Case("nemotron", UNTIED | {"head_dim": 8}),
    Case("nemotron", TIED | BIASED | {"mlp_bias": True, "head_dim": 8}),
    Case("mistral", {"sliding_window": 32, "head_dim": 8}),
    Case(
        "ministral3",
        UNTIED
        | {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    Case("seed_oss", UNTIED | {"head_dim": 16}),
    Case("seed_oss", TIED | {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True}),
    Case("ernie4_5", TIED | {"head_dim": 16}),
    Case("ernie4_5", UNTIED | {"head_dim": 8, "use_bias": True}),
    Case("glm4", UNTIED | {"head_dim": 8}),
    Case("glm4", TIED | {"head_dim": 16, "attention_bias": False}),
    Case("olmo2", UNTIED),
    Case("olmo2", TIED | BIASED | {"num_key_value_heads": 4}),
    Case("olmo3", UNTIED | {"num_hidden_layers": 4, "sliding_window": 16}),
    Case("olmo3", TIED | BIASED | {"layer_types": ["full_attention"] * 2}),
    Case("exaone4", UNTIED | {"num_hidden_layers": 4, "sliding_window": 16}),
    Case("exaone4", TIED | {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    Case("cohere", TIED),
    Case("cohere", UNTIED | BIASED | {"use_qk_norm": True, "logit_scale": 0.5}),
    Case("cohere2", TIED | {"num_hidden_layers": 4, "sliding_window": 16}),
    Case("cohere2", UNTIED | BIASED | {"layer_types": ["full_attention"] * 2}),
    Case("bert_post_norm", TIED, model_class="BertForPreTraining"),
    Case("bert_post_norm", UNTIED),
    Case("roberta", TIED | PADDED),
    Case("roberta", UNTIED | PADDED | {"type_vocab_size": 1}),
    Case("modernbert", TIED | LOCAL),
    Case("modernbert", UNTIED | BIASED | WITH_BIASES | LOCAL),
    Case("nemotron_nas", UNTIED | {"num_hidden_layers": 4, "block_configs": BLOCKS}),
    Case("nemotron_nas", TIED | {"block_configs": [block(4, 1.0), block(None, None)]}),
    Case("gemma4", TIED | GEMMA4 | {"num_hidden_layers": 4}),
    Case(
        "gemma4",
        UNTIED | BIASED | GEMMA4 | {"attention_k_eq_v": False, "layer_types": FULL * 2},
    ),
    Case("gemma4", TIED | GEMMA4_SMALL, "gemma4-small"),
    Case("arcee", UNTIED | BIASED | {"mlp_bias": True}, "arcee"),
    Case("helium", TIED | {"head_dim": 8}, "helium"),
]

ALPHA = {
    "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "alpha": 50.0,
        "factor": 1.0,
    }
}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}

MORE = [
    Case("hunyuan_v1_dense", UNTIED | ALPHA | {"head_dim": 8}, "hunyuan"),
    Case("hunyuan_v1_dense", TIED | BIASED | {"head_dim": 16}),
    Case("stablelm", UNTIED, "stablelm"),
    Case("stablelm", TIED | {"use_qkv_bias": True, "use_parallel_residual": True}),
    Case("apertus", UNTIED, "apertus"),
    Case("apertus", TIED | BIASED | {"rope_parameters": LLAMA3}),
    Case("openelm", TIED | LAYERS, "openelm"),
    Case("glm", UNTIED | {"head_dim": 8}, "glm"),
    Case("cwm", UNTIED | {"head_dim": 8, "sliding_window": 16, "num_hidden_layers": 4}, "cwm"),
    Case("ministral", TIED | {"head_dim": 16, "sliding_window": 16}, "ministral"),
    Case("phi", UNTIED, "phi"),
    Case("hyperclovax", UNTIED | {"logits_scaling": 0.5, "residual_multiplier": 0.3}, "clova"),
    Case("hyperclovax", TIED | BIASED | {"use_post_norm": False, "mlp_bias": True}),
    Case("vaultgemma", TIED | {"head_dim": 16, "sliding_window": 32}, "vaultgemma"),
    Case("youtu", TIED | LATENT, "youtu"),
    Case("olmo", UNTIED, "olmo"),
    Case("nanochat", UNTIED, "nanochat"),
    Case(
        "stablelm",
        UNTIED | {"qk_layernorm": True, "use_parallel_residual": True},
        "stablelm-qk-norms",
    ),
    Case("phi", UNTIED | {"qk_layernorm": True}, "phi-qk-norms"),
    Case("falcon", TIED | {"num_kv_heads": 4}, "falcon-7b"),
    Case("falcon", UNTIED | NEW_FALCON, "falcon-40b"),
    Case("falcon", UNTIED | NEW_FALCON | {"num_ln_in_parallel_attn": 1}, "falcon-11b"),
    Case("falcon", TIED | {"parallel_attn": False, "multi_query": False, "bias": True}),
    Case("persimmon", UNTIED, "persimmon"),
    Case("gptj", UNTIED | {"rotary_dim": 4}, "gptj"),
    Case("bloom", TIED, "bloom"),
    Case("bloom", UNTIED | {"n_head": 2}),
    Case("mpt", TIED, "mpt"),
    Case("mpt", UNTIED | {"attn_config": {"alibi_bias_max": 16}}, "mpt-16"),
    Case("opt", TIED, "opt"),
    Case("opt", UNTIED | {"enable_bias": False, "activation_function": "gelu"}),
    Case("codegen", UNTIED | {"rotary_dim": 4}, "codegen"),
    Case("gpt_bigcode", TIED, "gpt_bigcode"),
    Case("gpt_bigcode", UNTIED | {"multi_query": False}),
    Case("gpt_neo", TIED | NEO, "gpt_neo"),
    Case("gpt_neo", UNTIED | {"attention_types": [[["global"], 2]]}),
    Case("jais2", UNTIED, "jais2"),
    Case("jais2", TIED | {"attention_bias": False, "mlp_bias": False}),
    Case("openelm", UNTIED | LAYERS | {"normalize_qk_projections": False}),
    Case("granite_swa", TIED | SWASH),
    Case("lfm2", TIED | CONV),
    Case("lfm2", UNTIED | CONV | {"conv_bias": True, "block_auto_adjust_ff_dim": False}),
    Case("granite_swa", UNTIED | BIASED | TWO_BASES),
]
"""Cases of the slow tests, of which the fast ones read the configuration alone."""


def fill_uniform(model: Any) -> None:
    """Every parameter between 0 and 1; the norms that Megatron stores less 1 near 1."""
    for name, parameter in model.named_parameters():
        values = torch.rand(parameter.shape)
        parameter.copy_(values / 4 + 0.75 if name.endswith("linear_attn.norm.weight") else values)


def save(case: Case, folder: Path) -> Any:
    """A random model of a case, saved by transformers; norms and biases are random too."""
    return case.build(folder, dtype="bfloat16", fill=fill_uniform)
