"""Llama-Nemotron of transformers' own Llama layers, trimmed as a list of blocks says.

The published models bring code of their own; transformers has no class for them.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

Block = dict[str, dict[str, Any]]


def block(share: int | None, factor: float | None) -> Block:
    """A layer whose query heads share a key `share` by `share`, and with an MLP `factor` wide.

    None is a layer without the branch.
    """
    return {
        "attention": {
            "n_heads_in_group": share,
            "no_op": share is None,
            "replace_with_linear": False,
        },
        "ffn": {"ffn_mult": factor, "no_op": factor is None, "replace_with_linear": False},
    }


BLOCKS = [block(2, 24.0), block(None, 1.0), block(4, None), block(1, 12.0)]
"""Of a hidden size of 32: MLPs of 512 and 256; a layer without attention, one without an MLP."""


def width(factor: float, hidden_size: int) -> int:
    """How wide the MLP is, as the published code computes it."""
    size = int(2 * factor * hidden_size / 3)
    return size if size % 256 == 0 else size + 256 - size % 256


class DeciLMConfig(transformers.LlamaConfig):  # type: ignore[misc]
    """Llama's configuration with a list of blocks."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: list[Block] | None = None, **keys: Any) -> None:
        super().__init__(**keys)
        self.block_configs = block_configs


class NoAttention(nn.Module):
    """Adds nothing."""

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
        """Zeros."""
        return torch.zeros_like(hidden_states), None


class NoMlp(nn.Module):
    """Adds nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros."""
        return torch.zeros_like(x)


class DeciLMForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A Llama whose layers are made as their blocks say."""

    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__(config)
        for number, (layer, of) in enumerate(
            zip(self.model.layers, config.block_configs or [], strict=True)
        ):
            own = copy(config)
            attention, ffn = of["attention"], of["ffn"]
            if attention["no_op"]:
                layer.self_attn, layer.input_layernorm = NoAttention(), nn.Identity()
            else:
                own.num_key_value_heads = own.num_attention_heads // attention["n_heads_in_group"]
                layer.self_attn = LlamaAttention(own, number)
            if ffn["no_op"]:
                layer.mlp, layer.post_attention_layernorm = NoMlp(), nn.Identity()
            else:
                own.intermediate_size = width(ffn["ffn_mult"], config.hidden_size)
                layer.mlp = LlamaMLP(own)
        self.post_init()
