"""A Llama of a few thousand parameters, real enough for transformers, and what folders hold."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save_file

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
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(c, indent=2))
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    names = list(tensors)
    cut = [names[i::parts] for i in range(parts)]
    if parts == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = [f"model-{i + 1:05d}-of-{parts:05d}.safetensors" for i in range(parts)]
    for file, some in zip(files, cut, strict=True):
        save_file({n: tensors[n] for n in some}, folder / file, metadata={"format": "pt"})
    weight_map = {n: f for f, some in zip(files, cut, strict=True) for n in some}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor in a folder of safetensors, or in one file."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {
        name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
        for file in files
        for name, t in safetensors.deserialize(file.read_bytes())
    }


def contents(folder: Path) -> dict[str, bytes] | None:
    """Contents of all files below a folder (of the file itself); None where there is nothing."""
    if not folder.exists():
        return None
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def state(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Contents, mode and time of change of all files: what a source must keep."""
    return {
        os.fspath(p.relative_to(folder)): (p.read_bytes(), s.st_mode, s.st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file() and (s := p.stat())
    }


def left_overs(folder: Path) -> Iterable[str]:
    """Names of staging folders in `folder`."""
    return sorted(p.name for p in folder.glob(".*.megtool"))
