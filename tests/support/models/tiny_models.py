"""Models of a few thousand numbers whose sizes divide by every group size that recipes use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megtool.quant.recipes.modules import ModuleInfo, list_modules
from megtool.source.open import open_source
from tests.support.folders import write_folder
from tests.support.models import tiny_llama

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def llama(folder: Path, **more: object) -> Path:
    """A dense model of four layers."""
    sizes: dict[str, object] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    }
    return tiny_llama.save(folder, **(sizes | more))


def moe(folder: Path) -> Path:
    """A model whose first layer is dense and whose other three have four experts each."""
    import torch

    h, f, v = MOE["hidden_size"], MOE["intermediate_size"], MOE["vocab_size"]
    shapes = {"model.embed_tokens.weight": (v, h), "lm_head.weight": (v, h)}
    shapes["model.norm.weight"] = (h,)
    for layer in range(4):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (h,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (h,)
        for name, shape in {"q": (256, h), "k": (128, h), "v": (128, h), "o": (h, 256)}.items():
            shapes[f"{at}.self_attn.{name}_proj.weight"] = shape
        for name in ("q", "k"):
            shapes[f"{at}.self_attn.{name}_norm.weight"] = (64,)
        mlps = {f"{at}.mlp": f}
        if layer:
            shapes[f"{at}.mlp.gate.weight"] = (4, h)
            mlps = {f"{at}.mlp.experts.{e}": 128 for e in range(4)}
        for mlp, size in mlps.items():
            shapes[f"{mlp}.gate_proj.weight"] = shapes[f"{mlp}.up_proj.weight"] = (size, h)
            shapes[f"{mlp}.down_proj.weight"] = (h, size)
    tensors = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items()}
    return write_folder(folder, MOE, tensors)


def sparse(folder: Path, **more: Any) -> Any:
    """A Qwen3 whose first layer is dense, and whose others have six experts each: transformers'
    model, which is saved in the folder.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "vocab_size": 50,
        "initializer_range": 0.3,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | more))).eval()
    model.save_pretrained(folder)
    return model


def modules(path: Path) -> tuple[ModuleInfo, ...]:
    """The modules of a checkpoint."""
    return list_modules(open_source(path).view).modules
