"""A tiny decoder with random weights, and text for it."""

from __future__ import annotations

from typing import Any

import torch

from megtool.model.stacks.decoder import Decoder
from megtool.spec.model_config import ModelConfig

SIZES: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=101,
    max_positions=32,
)


def make_decoder(config: ModelConfig, **more: Any) -> Decoder:
    decoder = Decoder(config, device="cpu", **more)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            seed = sum(name.encode()) + p.numel()  # a tensor's values do not depend on its stage
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
    return decoder.requires_grad_(False)


def random_batch(rows: int, length: int) -> Any:
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(1))
