"""Canonical views of tensors by name and shape alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from megtool.convert.dialects import CanonicalView
from megtool.convert.language.canonical import VOCABULARY, CanonicalModel
from megtool.dtypes import dtype
from megtool.spec.model_config import ModelConfig
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor

F32, BF16 = dtype("float32"), dtype("bfloat16")


def config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 12,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 100,
    }
    return ModelConfig.from_fields(**{**sizes, **changes})


def canonical_side(cfg: ModelConfig, states: tuple[str, ...] = ("",)) -> tuple[CanonicalView, Any]:
    """A source that is canonical already, with random values."""
    model, rng = CanonicalModel(cfg), np.random.default_rng(0)
    tensors = []
    for state in states:
        for pattern, entry in VOCABULARY.items():
            if entry.flag and not cfg.get(entry.flag):
                continue
            for n in model.names(pattern):
                name = f"{state}:{n}" if state else n
                tensors.append(GlobalTensor(name=name, shape=model.shape(pattern), dtype=F32))
    side = CanonicalView(
        dialect="hf",
        tensors=tuple(tensors),
        placements={t.name: Placement.identity(t.name, t.shape) for t in tensors},
        canonical={t.name: t for t in tensors},
        config=cfg,
    )
    return side, {t.name: rng.random(t.shape).astype(np.float32) for t in tensors}


def stored(arrays: dict[str, np.ndarray]) -> list[GlobalTensor]:
    return [GlobalTensor(name=n, shape=a.shape, dtype=F32) for n, a in arrays.items()]
