"""A Llama of a few thousand parameters, real enough for transformers, and what folders hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.folders import write_folder

TOKENIZER = b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'


def config(**more: Any) -> dict[str, Any]:
    """A config.json; `more` replaces or adds keys."""
    known = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 101,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    return known | more


def shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of such a configuration."""
    h, f, v, d = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    rows = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
    mlp = {"gate": (f, h), "up": (f, h), "down": (h, f)}
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h)}
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        out[f"{at}.input_layernorm.weight"] = (h,)
        out[f"{at}.post_attention_layernorm.weight"] = (h,)
        for kind, names in (("self_attn", rows), ("mlp", mlp)):
            biases = c["attention_bias"] if kind == "self_attn" else c["mlp_bias"]
            for name, shape in names.items():
                out[f"{at}.{kind}.{name}_proj.weight"] = shape
                if biases:
                    out[f"{at}.{kind}.{name}_proj.bias"] = shape[:1]
    out["model.norm.weight"] = (h,)
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, h)
    return out


def save(
    folder: Path, *, seed: int = 0, dtype: str = "bfloat16", parts: int = 1, **more: Any
) -> Path:
    """Make a Hugging Face folder of random weights in `parts` files."""
    import torch

    c = config(torch_dtype=dtype, **more)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator).mul(0.1).to(getattr(torch, dtype))
        for name, shape in shapes(c).items()
    }
    write_folder(folder, c, tensors, parts=parts)
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    return folder
