"""On a GPU: Llamas of random weights, ours and transformers', and rivals timed in turns."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megtool.convert.families.detection import family
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.process_groups import ProcessGroups

# Layers, hidden, ffn, heads, key-value heads, vocabulary.
SHAPES = {
    "tiny": (2, 64, 128, 4, 2, 256),
    "S": (12, 512, 1408, 8, 8, 32000),
    "M": (22, 2048, 5632, 32, 4, 32000),
    "L": (32, 4096, 14336, 32, 8, 128256),
}


def config_of(name: str) -> dict[str, Any]:
    """transformers' words for a Llama of a shape."""
    layers, hidden, ffn, heads, key_heads, vocabulary = SHAPES[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
    }


def fill(module: nn.Module) -> None:
    """Small random weights, norms of one."""
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(1.0) if p.dim() == 1 else p.normal_(0.0, 0.02)


def decoder(name: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Ours on the GPU."""
    made = Decoder(
        family("llama").read_config(config_of(name)),
        ProcessGroups.alone("cuda"),
        dtype=dtype,
        device="cuda",
    )
    fill(made)
    return made


def theirs(name: str) -> nn.Module:
    """transformers' on the GPU, attention by SDPA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made: nn.Module = LlamaForCausalLM(LlamaConfig(**config_of(name)))
    made = made.to("cuda", torch.bfloat16)
    fill(made)
    return made


def tokens_of(name: str, rows: int, length: int) -> Tensor:
    """Random tokens [rows, length] on the GPU."""
    return torch.randint(0, SHAPES[name][-1], (rows, length), device="cuda")


def seconds(work: Callable[[], object], calls: int) -> float:
    """How long a call takes, of several in a row: launches are part of it."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    for _ in range(calls):
        work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3 / calls


def race(works: dict[str, Callable[[], object]], given: argparse.Namespace) -> dict[str, float]:
    """The median of each, in turn; the first calls compile, capture and warm up."""
    for work in works.values():
        seconds(work, 3)
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(given.rounds):
        for name, work in works.items():
            taken[name].append(seconds(work, given.calls))
    return {name: statistics.median(values) for name, values in taken.items()}
