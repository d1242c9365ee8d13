"""No kind of attention makes a tensor of all queries times all keys, forward or backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megtool.kernels.attention import dot_product
from megtool.kernels.attention import tiles as attention_tiles
from megtool.model.attention import indexer
from megtool.model.batch import Batch
from megtool.model.layers.dropout import Dropout
from megtool.model.stacks.pipeline import build_stages
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.worlds.context_layouts import DENSE, MODELS

LENGTH = 256
T5: dict[str, Any] = DENSE | dict(
    position_embedding="relative",
    num_decoder_layers=2,
    num_kv_heads=DENSE["num_heads"],
    relative_num_buckets=8,
    relative_max_distance=20,
)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.name = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            # Views and copies of one number are none: what is stored counts.
            if isinstance(value, Tensor) and not value.is_meta:
                size = value.untyped_storage().nbytes() // value.element_size()
                if size > self.elements:
                    self.elements, self.name = size, str(func)
        return out


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Largest]:
    """The block's operations, those inside attention's own included."""
    mode, run = Largest(), attention_tiles.forward

    def forward(*given: Any) -> Any:
        with mode:
            return run(*given)

    monkeypatch.setattr(attention_tiles, "forward", forward)
    with mode:
        yield mode


@pytest.mark.parametrize(
    ("name", "attention_dropout"),
    [
        *((n, 0.0) for n in ("grouped", "windows and sinks", "softcap", "chunks", "slopes")),
        *((n, 0.0) for n in ("latent", "sparse", "T5")),
        ("grouped", 0.1),
        ("softcap", 0.1),
    ],
)
def test_training_makes_no_square(
    name: str, attention_dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dot_product, "NUM_PAIRS", 0)
    monkeypatch.setattr(attention_tiles, "NUM_SCORES", 1 << 13)
    monkeypatch.setattr(attention_tiles, "_LEAST_SIDE", 16)
    monkeypatch.setattr(indexer, "_SCORES", 1 << 13)
    settings = T5 if name == "T5" else MODELS[name]
    config = ModelConfig.from_fields(**settings | {"max_positions": LENGTH})
    (decoder,) = build_stages(config, ProcessGroups.alone(), device="cpu", vocab_multiple=64)
    for p in decoder.parameters():
        torch.nn.init.normal_(p, std=0.1)
    decoder.dropout = Dropout(attention=attention_dropout)
    tokens = torch.randint(0, 61, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    documents = None if name == "T5" else (torch.arange(LENGTH)[None] > 100).long()
    source = {"source_BE": tokens} if name == "T5" else {}
    batch = Batch(tokens_BS=tokens, documents_BS=documents, **source)
    with watched(monkeypatch) as largest:
        loss, _ = decoder.loss(batch, tokens)
        loss.backward()
    assert largest.elements < LENGTH * LENGTH // 2, largest.name
