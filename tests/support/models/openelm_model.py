"""OpenELM written anew from its published description: transformers has no class for it.

A layer's queries, keys and values are one projection, as are both halves of its gated MLP, and its
numbers of heads and the width of its MLP are its own.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

LAYERS: dict[str, Any] = {
    "num_query_heads": [4, 6],
    "num_kv_heads": [2, 2],
    "ffn_multipliers": [1.0, 2.5],
    "ffn_dim_divisor": 16,
    "head_dim": 8,
}
"""Sizes of two layers of a model that is 32 wide: MLPs of 32 and 80."""

_NAMES = {
    "hidden_size": "model_dim",
    "num_hidden_layers": "num_transformer_layers",
    "max_position_embeddings": "max_context_length",
}


class OpenELMConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    """The keys of the published files; sizes may come under Llama's names."""

    model_type = "openelm"
    attribute_map = _NAMES

    def __init__(self, **keys: Any) -> None:
        for old, new in _NAMES.items():
            if old in keys:
                keys[new] = keys.pop(old)
        for unused in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
            keys.pop(unused, None)
        self.normalize_qk_projections = keys.pop("normalize_qk_projections", True)
        self.rope_freq_constant = keys.pop("rope_freq_constant", 10000)
        self.share_input_output_layers = keys.pop("tie_word_embeddings", True)
        super().__init__(tie_word_embeddings=self.share_input_output_layers, **keys)


class OpenELMAttention(nn.Module):
    """Attention of one layer with its own numbers of heads."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer, size = layer, config.head_dim
        self.heads, self.groups = config.num_query_heads[layer], config.num_kv_heads[layer]
        total = self.heads + 2 * self.groups
        self.qkv_proj = nn.Linear(config.model_dim, total * size, bias=False)
        self.has_norms = config.normalize_qk_projections
        if self.has_norms:
            self.q_norm, self.k_norm = LlamaRMSNorm(size, 1e-6), LlamaRMSNorm(size, 1e-6)
        self.out_proj = nn.Linear(self.heads * size, config.model_dim, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
        """What is added to the residual."""
        rows, tokens, _ = x.shape
        parts = self.qkv_proj(x).view(rows, tokens, self.heads + 2 * self.groups, -1)
        q, k, v = parts.transpose(1, 2).split((self.heads, self.groups, self.groups), 1)
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, *turn)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        each = self.heads // self.groups
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        added: Tensor = self.out_proj(out.transpose(1, 2).reshape(rows, tokens, -1))
        return added


class OpenELMFeedForward(nn.Module):
    """The gated MLP of one layer with its own width."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        divisor = config.ffn_dim_divisor
        want = config.ffn_multipliers[layer] * config.model_dim
        width = max(divisor, int(want + divisor / 2) // divisor * divisor)
        width += divisor if width < 0.9 * want else 0
        self.proj_1 = nn.Linear(config.model_dim, 2 * width, bias=False)
        self.proj_2 = nn.Linear(width, config.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the residual."""
        gate, up = self.proj_1(x).chunk(2, -1)
        added: Tensor = self.proj_2(functional.silu(gate) * up)
        return added


class OpenELMLayer(nn.Module):
    """Attention and MLP, each after its norm."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.attn, self.ffn = OpenELMAttention(config, layer), OpenELMFeedForward(config, layer)
        self.attn_norm = LlamaRMSNorm(config.model_dim, 1e-6)
        self.ffn_norm = LlamaRMSNorm(config.model_dim, 1e-6)

    def forward(self, x: Tensor, *how: Any) -> Tensor:
        """The residual behind the layer."""
        x = x + self.attn(self.attn_norm(x), *how)
        added: Tensor = self.ffn(self.ffn_norm(x))
        return x + added


class OpenELMModel(nn.Module):
    """The model without its output layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.token_embeddings = nn.Embedding(config.vocab_size, config.model_dim)
        layers = (OpenELMLayer(config, n) for n in range(config.num_transformer_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = LlamaRMSNorm(config.model_dim, 1e-6)


class OpenELMForCausalLM(transformers.PreTrainedModel):  # type: ignore[misc]
    """The model under the names of the published files."""

    config_class = OpenELMConfig
    base_model_prefix = "transformer"
    _tied_weights_keys = {"lm_head.weight": "transformer.token_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: OpenELMConfig) -> None:
        super().__init__(config)
        self.transformer = OpenELMModel(config)
        self.lm_head = nn.Linear(config.model_dim, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of words."""
        return self.transformer.token_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = False,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of all tokens."""
        rows, tokens = input_ids.shape
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        whole = before + tokens
        if position_ids is None:
            position_ids = torch.arange(before, whole)[None].expand(rows, -1)
        mask = torch.ones(whole, whole, dtype=torch.bool).tril()[before:][None, None]
        if attention_mask is not None:
            own = torch.eye(whole, dtype=torch.bool)[before:][None, None]
            mask = mask & attention_mask[:, None, None].bool() | own
        size = self.config.head_dim
        powers = torch.arange(0, size, 2).float() / size
        angles = position_ids[..., None].float() / self.config.rope_freq_constant**powers
        angles = torch.cat((angles, angles), -1)
        x = self.transformer.token_embeddings(input_ids)
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.transformer.layers:
            x = layer(x, turn, mask, past_key_values)
        logits = self.lm_head(self.transformer.norm(x))
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
