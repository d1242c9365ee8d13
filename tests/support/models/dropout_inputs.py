"""Inputs and a model for tests of dropout."""

from __future__ import annotations

import torch

from megtool.model.batch import Batch
from megtool.spec.model_config import ModelConfig

PLAIN = ModelConfig.from_fields(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=96,
)

TOKENS = torch.arange(2 * 16).view(2, 16) * 7 % 96

BATCH, LABELS = Batch(tokens_BS=TOKENS), TOKENS.roll(-1, 1)
