"""Small decoders that teach and are taught, with numbers that do not depend on their layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megtool.model.stacks.decoder import Decoder
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.spec.model_config import ModelConfig

V = 200  # padded to 256
SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "max_positions": 32,
    "tied_embeddings": False,
}
STUDENT = ModelConfig.from_fields(**SIZES)
TEACHER = ModelConfig.from_fields(**SIZES | {"num_layers": 2, "num_heads": 2, "head_dim": 16})
DEEP = ModelConfig.from_fields(**SIZES | {"num_layers": 4})
TOKENS = torch.randint(0, V, (4, 6), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.roll(-1, 1).masked_fill(TOKENS % 3 == 0, -100)


def build(config: ModelConfig, groups: ProcessGroups, seed: int, sp: bool = False) -> Decoder:
    """A model whose numbers do not depend on the layout."""
    decoder = Decoder(config, groups, device="cpu", sequence_parallel=sp)
    alone = Decoder(config, device="cpu")
    torch.manual_seed(seed)
    whole = {n: torch.randn(p.shape) * 0.2 for n, p in alone.named_parameters()}
    if groups.tp.size == 1:
        decoder.load_state_dict(whole)
        return decoder
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            source = whole[name]
            for dim in range(source.ndim):
                if source.shape[dim] != p.shape[dim]:
                    source = _cut(source, dim, name, groups.tp)
            p.copy_(source)
    return decoder


def _cut(source: Tensor, dim: int, name: str, tp: Group) -> Tensor:
    if "linear_fc1" in name:  # gate and up are cut each
        return torch.cat([half.chunk(tp.size, dim)[tp.rank] for half in source.chunk(2, dim)], dim)
    return source.chunk(tp.size, dim)[tp.rank]
