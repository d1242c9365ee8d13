"""How many floating-point operations a model needs, from its shapes alone."""

from __future__ import annotations

from torch import nn

from megtool.model.layers.linear import VocabEmbedding
from megtool.model.moe.experts import ExpertLinear
from megtool.model.stacks.pipeline import build_stages
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


def training_flops(config: ModelConfig, seq_length: int) -> float | None:
    """Operations of the forward and backward passes of a row, without recomputation.

    A multiplication and an addition count as two. Products with weights count each weight once a
    token, of experts those that a token goes to; attention counts the keys that a token attends to
    (half of a causal row), and the recurrences of Mamba-2 and the delta net their states. The
    backward pass takes twice the forward pass. None for a model of an encoder and a decoder, where
    it follows from the lengths of both, and for one that compresses its keys.

    Source: Chowdhery et al., PaLM (2022), appendix B; Megatron-LM's
    `num_floating_point_operations`.
    """
    if config.num_decoder_layers or config.compression.is_compressed:
        return None
    return 3.0 * seq_length * (_products(config) + _mixers(config, seq_length))


def _products(config: ModelConfig) -> float:
    """Operations with weights, per token."""
    flops = 0.0
    (decoder,) = build_stages(config, ProcessGroups.alone("meta"))
    for module in decoder.modules():
        if isinstance(module, ExpertLinear):
            used = config.moe.num_experts_per_token / config.moe.num_experts
            flops += 2 * module.weight.numel() * used
        elif not isinstance(module, VocabEmbedding | nn.Embedding):
            own = module.parameters(recurse=False)
            flops += sum(2 * p.numel() for p in own if p.ndim > 1 and p.is_floating_point())
    if config.embedding.tied_embeddings:
        flops += 2 * decoder.output_weight.numel()
    return flops


def _mixers(config: ModelConfig, seq_length: int) -> float:
    """Operations between tokens, per token."""
    flops = 0.0
    for layer in range(config.num_layers):
        c = config.at_layer(layer)
        if layer in layer_sets.attn_layers(config):
            keys = _mean_keys(config, layer, seq_length)
            if layer in layer_sets.index_layers(config):
                if layer_sets.index_source(config, layer) == layer:
                    flops += 2 * c.indexer.index_num_heads * c.indexer.index_head_dim * keys
                keys = min(keys, c.indexer.index_topk)
            flops += 2 * c.attention.num_heads * _head_width(c) * keys
        if layer in layer_sets.mamba_layers(config):  # decay, outer product, and the product with C
            flops += 5 * c.mamba.mamba_num_heads * c.mamba.mamba_head_dim * c.mamba.mamba_state_dim
        # Decay, products with key and query, outer product.
        if layer in layer_sets.delta_layers(config) | layer_sets.kda_layers(config):
            state = c.delta.linear_key_head_dim * c.delta.linear_value_head_dim
            flops += 7 * c.delta.linear_num_value_heads * state
    return flops


def _head_width(config: ModelConfig) -> int:
    """Numbers of a key and of a value together, of one head."""
    latent = config.latent
    attention = config.attention
    if latent.kv_lora_rank:
        return latent.qk_nope_head_dim + latent.qk_rope_head_dim + attention.v_head_dim
    return attention.head_dim + attention.value_size


def _mean_keys(config: ModelConfig, layer: int, seq_length: int) -> float:
    """How many keys a token attends to, on average over a row."""
    s = seq_length
    w = config.window.window_size if config.window.has_window(layer) else 0
    if config.bidirectional:
        return min(s, 2 * w - 1) if w else s
    if not w or w >= s:
        return (s + 1) / 2
    return w - w * (w - 1) / (2 * s)
