"""Tiny models of every family with experts, by transformers and by us, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megtool.convert.dialects import read_side, write_side
from megtool.convert.families.detection import family
from megtool.dtypes import dtype
from megtool.model.stacks.decoder import Decoder
from megtool.spec.model_config import ModelConfig
from megtool.tensors.sharded import GlobalTensor
from tests.support.models import moe_cases
from tests.support.models.dense_cases import ALPHA
from tests.support.models.moe_cases import GEMMA4_EXPERTS, MISTRAL4
from tests.support.models.tiny_model import fill_tables, tiny_model

Array = np.ndarray[Any, Any]
Carry = Callable[..., dict[str, Array]]

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,  # DeepSeek's inner norms have this one whatever the others have
}
EIGHT = {"intermediate_size": 24, "num_local_experts": 8}
QWEN = {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 8}
DEEPSEEK = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
}
MISTRAL4_KEYS = {k: MISTRAL4[k] for k in ("n_group", "topk_group", "rope_parameters")}
LITE = {k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"}
GLM = {k: v for k, v in DEEPSEEK.items() if k not in ("q_lora_rank", "kv_lora_rank")} | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_nextn_predict_layers": 0,
    "attention_bias": True,
}
ERNIE = {
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "moe_num_experts": 8,
    "moe_k": 2,
    "tie_word_embeddings": False,
}
DELTA = QWEN | {
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 16,
    "norm_topk_prob": True,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
DELTA_ALONE = {k: v for k, v in DELTA.items() if k not in ("intermediate_size", "norm_topk_prob")}
DELTA_ALONE["rms_norm_eps"] = 1e-3  # a norm of what is almost 0 makes much of rounding
HYBRID = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "n_routed_experts": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7}
V4 = {k: v for k, v in moe_cases.V4.items() if k not in ("layer_types", "mlp_layer_types")} | {
    "layer_types": moe_cases.V4["layer_types"][:3],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "n_routed_experts": 8,
    "index_n_heads": 8,  # few scores are equal
    "num_nextn_predict_layers": 0,
}
LLAMA4 = EIGHT | {"intermediate_size_mlp": 40, "head_dim": 8, "num_hidden_layers": 4}

# A name, the family, transformers' name of it, and the configuration.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("mixtral", "Mixtral", EIGHT),
    "mixtral-window": ("mixtral", "Mixtral", EIGHT | {"sliding_window": 5}),
    "qwen2_moe": ("qwen2_moe", "Qwen2Moe", QWEN | {"shared_expert_intermediate_size": 48}),
    "qwen2_moe-normalized": (
        "qwen2_moe",
        "Qwen2Moe",
        QWEN
        | {"shared_expert_intermediate_size": 16, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe", QWEN | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-sparse": (
        "qwen3_moe",
        "Qwen3Moe",
        QWEN | {"head_dim": 8, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek_v2-groups": (
        "deepseek_v2",
        "DeepseekV2",
        DEEPSEEK | GROUPS | {"rope_parameters": YARN, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", DEEPSEEK | GROUPS),
    "mistral4": ("mistral4", "Mistral4", DEEPSEEK | MISTRAL4_KEYS),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        "DeepseekV3",
        DEEPSEEK
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": YARN}
        | {"kv_lora_rank": 64},
    ),
    "gpt_oss": ("gpt_oss", "GptOss", EIGHT | {"head_dim": 8, "sliding_window": 6}),
    "gpt_oss-yarn": (
        "gpt_oss",
        "GptOss",
        EIGHT
        | {"head_dim": 16, "swiglu_limit": 0.5, "sliding_window": 4}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "llama4": (
        "llama4",
        "Llama4",
        LLAMA4
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": 8}
        | {"floor_scale": 4, "attn_scale": 0.5},
    ),
    "llama4-plain": (
        "llama4",
        "Llama4",
        LLAMA4
        | {"attn_temperature_tuning": False, "use_qk_norm": False, "num_experts_per_tok": 1}
        | {"attention_chunk_size": 6, "no_rope_layers": [0, 1, 1, 0]},
    ),
}


CASES |= {
    "olmoe": ("olmoe", "Olmoe", {"intermediate_size": 24, "num_experts": 8}),
    "dots1": (
        "dots1",
        "Dots1",
        GLM | GROUPS | {"norm_topk_prob": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "glm4_moe": ("glm4_moe", "Glm4Moe", GLM | GROUPS | {"use_qk_norm": True}),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_Moe", ERNIE),
    "qwen3_next": ("qwen3_next", "Qwen3Next", DELTA | {"mlp_only_layers": [0]}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", "Qwen3_5Moe", DELTA_ALONE),
    "nemotron_h": ("nemotron_h", "NemotronH", HYBRID),
    "nemotron_h-latent": (
        "nemotron_h",
        "NemotronH",
        HYBRID
        | {"layers_block_type": ["moe", "linear_attention", "linear_attention", "full_attention"]}
        | {"moe_latent_size": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    ),
    "minimax_m2": ("minimax_m2", "MiniMaxM2", EIGHT | {"head_dim": 8, "rotary_dim": 4}),
    "granitemoe": (
        "granitemoe",
        "GraniteMoe",
        EIGHT
        | {"embedding_multiplier": 6.0, "attention_multiplier": 0.2}
        | {"residual_multiplier": 0.3, "logits_scaling": 5.0},
    ),
}


CASES |= {
    "deepseek_v4": ("deepseek_v4", "DeepseekV4", V4),
    "deepseek_v4-yarn": (
        "deepseek_v4",
        "DeepseekV4",
        V4
        | {"layer_types": list(reversed(V4["layer_types"])), "swiglu_limit": 0.3}
        | {"mlp_layer_types": ["hash_moe"] * 2 + ["moe"], "hc_mult": 3}
        | {"rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}},
    ),
}


SPARSE = DEEPSEEK | {"index_n_heads": 8, "index_head_dim": 8, "index_topk": 4}
CASES |= {
    "deepseek_v32": ("deepseek_v32", "DeepseekV32", SPARSE | {"n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        "GlmMoeDsa",
        SPARSE | {"indexer_types": ["full", "shared", "full"], "n_group": 1, "topk_group": 1},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite", LITE | {"n_group": 1, "topk_group": 1}),
}

CASES["gemma4-experts"] = (
    "gemma4",
    "Gemma4",
    GEMMA4_EXPERTS
    | {"num_experts": 8, "tie_word_embeddings": False}
    | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
)

CASES["granitemoehybrid"] = (
    "granitemoehybrid",
    "GraniteMoeHybrid",
    CASES["granitemoe"][2]
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"shared_intermediate_size": 40, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2}
    | {"mamba_chunk_size": 8},
)


MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phimoe": (
        "phimoe",
        "Phimoe",
        moe_cases.PHIMOE | {"router_jitter_noise": 0.3, "num_key_value_heads": 2},
    ),
    "phimoe-plain": ("phimoe", "Phimoe", EIGHT | {"sliding_window": 5}),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        "HunYuanMoEV1",
        moe_cases.HUNYUAN
        | {"num_experts": 8, "num_experts_per_tok": 3, "attention_bias": True}
        | ALPHA,
    ),
    "granitemoeshared": (
        "granitemoeshared",
        "GraniteMoeShared",
        CASES["granitemoe"][2] | {"shared_intermediate_size": 40},
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        "GraniteMoeSWA",
        CASES["granitemoe"][2] | {"shared_intermediate_size": 40, "sliding_window": 5},
    ),
    "solar_open": ("solar_open", "SolarOpen", moe_cases.SOLAR | GROUPS | {"n_routed_experts": 8}),
    "exaone_moe": (
        "exaone_moe",
        "ExaoneMoe",
        moe_cases.EXAONE
        | GROUPS
        | {"num_experts": 8, "sliding_window_pattern": 2, "num_attention_heads": 4},
    ),
    "hy_v3": ("hy_v3", "HYV3", moe_cases.HY3 | {"num_experts": 8, "num_experts_per_tok": 3}),
    "afmoe": ("afmoe", "Afmoe", moe_cases.AFMOE | {"num_experts": 8, "route_scale": 1.5}),
    "flex_olmo": ("flex_olmo", "FlexOlmo", moe_cases.FLEX | {"num_experts": 8}),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        "MiMoV2Flash",
        moe_cases.MIMO
        | {"n_routed_experts": 8, "num_hidden_layers": 4}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "kimi_linear": (
        "kimi_linear",
        "KimiLinear",
        moe_cases.KIMI
        | {"num_local_experts": 8, "num_hidden_layers": 4}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        "Lfm2Moe",
        moe_cases.LFM2
        | {"num_experts": 8, "routed_scaling_factor": 1.5, "tie_word_embeddings": False}
        | {"layer_types": ["conv", "full_attention", "conv"]},
    ),
}
"""Cases of the slow tests, of which the fast ones compute the logits alone."""

CASES |= MORE


def fill_routed(model: Any, seed: int = 0) -> None:
    """Norms that scale by about 1; routers far from ties, which rounding might decide."""
    generator = torch.Generator().manual_seed(seed)
    is_centered = model.config.model_type in ("qwen3_next", "qwen3_5_moe_text")
    fill_tables(model)
    for key, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        is_norm = ("norm" in key or key.endswith(("scale", "scalar"))) and tensor.ndim == 1
        is_wide = any(part in key for part in ("gate.weight", "router.weight", "conv1d"))
        spread = 1.0 if is_wide else 0.15
        center = 0 if is_centered and "linear_attn" not in key else 1
        tensor.copy_(center + 0.2 * noise if is_norm else noise * spread)


def transformers_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random model of transformers' own class, in fp32 on the CPU, eager attention."""
    family, _, keys = CASES[name]
    return tiny_model(
        family,
        sizes=SIZES,
        seed=seed,
        fill=partial(fill_routed, seed=seed),
        attn_implementation="eager",
        **(keys | changes),
    ).eval()


def config_of(name: str, model: Any) -> ModelConfig:
    """Our configuration, of what transformers would save."""
    return family(CASES[name][0]).read_config(model.config.to_dict())


def carried(
    name: str, config: ModelConfig, arrays: dict[str, Array], carry: Carry
) -> tuple[dict[str, Tensor], ModelConfig]:
    """Tensors under transformers' names as Megatron's, one key per layer; and what they tell."""
    if CASES[name][0] == "nemotron_h":
        arrays = dict(_nemotron_names(arrays))
    tensors = [
        GlobalTensor(
            name=n, shape=a.shape, dtype=dtype("int64" if a.dtype.kind == "i" else "float32")
        )
        for n, a in arrays.items()
    ]
    side = read_side(tensors, family=family(CASES[name][0]), config=config)
    assert side.dropped == []
    target = write_side(side, dialect="megatron", per_layer=True)
    moved = carry(side, arrays, target)
    assert side.config is not None
    return {n: torch.from_numpy(a) for n, a in moved.items()}, side.config


def _nemotron_names(arrays: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """Tensors as they are saved: under another name, and each expert's own."""
    for name, array in arrays.items():
        stored = name.replace("model.", "backbone.", 1)
        if array.ndim == 3 and ".experts." in stored:
            before, _, part = stored.rpartition(".")
            yield from ((f"{before}.{e}.{part}.weight", array[e]) for e in range(len(array)))
        else:
            yield stored, array


def ours(name: str, model: Any, carry: Carry) -> Decoder:
    """The decoder with a model's weights."""
    arrays = {n: t.numpy() for n, t in model.state_dict().items()}
    weights, config = carried(name, config_of(name, model), arrays, carry)
    decoder = Decoder(config, dtype=torch.float32, device="cpu")
    decoder.load_state_dict(weights, strict=True)
    return decoder.eval()


def tokens(rows: int, length: int, *, seed: int = 0) -> Tensor:
    """Random tokens, [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SIZES["vocab_size"], (rows, length), generator=generator)
